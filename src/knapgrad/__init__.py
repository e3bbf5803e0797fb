"""Differentiable knapsack and top-k selection, by smoothed dynamic programming.

A constraint, a regularizer and an operation::

    kg.relax(theta, kg.Knapsack(weights, capacity), kg.Gini(0.5))

NumPy arrays and torch tensors go in and come out. Layers, losses and a distribution for torch are in
:mod:`knapgrad.torch`.
"""

from importlib import import_module
from types import ModuleType

from knapgrad.constraints import Knapsack as Knapsack
from knapgrad.constraints import TopK as TopK
from knapgrad.ops import divergence as divergence
from knapgrad.ops import entropy as entropy
from knapgrad.ops import fenchel_young_loss as fenchel_young_loss
from knapgrad.ops import log_prob as log_prob
from knapgrad.ops import relax as relax
from knapgrad.ops import sample as sample
from knapgrad.ops import solve as solve
from knapgrad.ops import value as value
from knapgrad.regularizers import Gini as Gini
from knapgrad.regularizers import Shannon as Shannon
from knapgrad.regularizers import Tsallis as Tsallis

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """``kg.torch`` without an import of its own, and without importing torch until it is asked for."""
    if name == "torch":
        return import_module("knapgrad.torch")
    raise AttributeError(f"module 'knapgrad' has no attribute {name!r}")
