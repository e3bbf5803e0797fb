"""Differentiable knapsack and top-k selection, by smoothed dynamic programming.

A constraint, a regularizer and an operation::

    kg.relax(theta, kg.Knapsack(weights, capacity), kg.Gini(0.5))

NumPy arrays, torch tensors and JAX arrays go in and come out. Layers, losses and a distribution for torch are in
:mod:`knapgrad.torch`.
"""

from types import ModuleType

from knapgrad.constraints import Knapsack, MultiKnapsack, MultipleChoice, TopK
from knapgrad.forks import imported
from knapgrad.frontiers import frontier
from knapgrad.ops import divergence, entropy, fenchel_young_loss, log_prob, relax, sample, solve, value
from knapgrad.regularizers import Gini, Shannon, Tsallis
from knapgrad.warming import warmup

__version__ = "0.1.0"
__all__ = [
    "Gini",
    "Knapsack",
    "MultiKnapsack",
    "MultipleChoice",
    "Shannon",
    "TopK",
    "Tsallis",
    "divergence",
    "entropy",
    "fenchel_young_loss",
    "frontier",
    "log_prob",
    "relax",
    "sample",
    "solve",
    "value",
    "warmup",
]


def __getattr__(name: str) -> ModuleType:
    """``kg.torch`` and ``kg.jax`` without an import of their own, and without importing them until they are used."""
    if name in ("torch", "jax"):
        return imported(f"knapgrad.{name}")
    raise AttributeError(f"module 'knapgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "jax", "torch"])
