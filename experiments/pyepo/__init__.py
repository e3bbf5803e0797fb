"""The paper's first experiment: predict item values from features, so that the best selection is the right one.

python -m experiments.pyepo --help
"""
