"""The paper's third experiment: an autoencoder whose hidden layer selects which 3 of 10 digits are in an image.

python -m experiments.dvae --help
"""
