"""Differentiable knapsack and top-k selection, by smoothed dynamic programming.

A constraint, a regularizer and an operation::

    kg.relax(theta, kg.Knapsack(weights, capacity), kg.Gini(0.5))

NumPy arrays and torch tensors go in and come out. Layers, losses and a distribution for torch are in
:mod:`knapgrad.torch`.
"""

from importlib import import_module
from types import ModuleType

from knapgrad.constraints import Knapsack, TopK
from knapgrad.ops import divergence, entropy, fenchel_young_loss, log_prob, relax, sample, solve, value
from knapgrad.regularizers import Gini, Shannon, Tsallis

__version__ = "0.1.0"
__all__ = [
    "Gini",
    "Knapsack",
    "Shannon",
    "TopK",
    "Tsallis",
    "divergence",
    "entropy",
    "fenchel_young_loss",
    "log_prob",
    "relax",
    "sample",
    "solve",
    "value",
]


def __getattr__(name: str) -> ModuleType:
    """``kg.torch`` without an import of its own, and without importing torch until it is asked for."""
    if name == "torch":
        return import_module("knapgrad.torch")
    raise AttributeError(f"module 'knapgrad' has no attribute {name!r}")
