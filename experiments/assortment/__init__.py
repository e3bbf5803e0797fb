"""The paper's second experiment: which items of a store to display, so that customers spend the most.

python -m experiments.assortment --help
"""
