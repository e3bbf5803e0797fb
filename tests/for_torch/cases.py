"""What tests of torch share: problems of every kind with small scores, and small constraints on four numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knapgrad as kg
from boxes import Boxes
from choices import Choices
from instances import Problem

WEIGHTS = np.array([[2, 1, 3], [0, 4, 1], [1, 2, 2]])


def _scores(*shape: int, seed: int = 0, scale: float = 0.6) -> np.ndarray:
    """Scores without ties, where the sparse regularizers have no kinks, and keep most selections."""
    return np.random.default_rng(seed).normal(scale=scale, size=shape)


def _choices(*shape: int, seed: int, capacity: Any = 6, weights: Any = WEIGHTS, **limits: Any) -> Choices:
    return Choices(_scores(*shape, seed=seed, scale=0.4), weights, capacity, **limits)


PROBLEMS: dict[str, Problem] = {
    "top-k": Problem(_scores(3, 4), None, 2),
    "k for each instance": Problem(_scores(3, 4, seed=1), None, np.array([0, 3, 1])),
    "knapsack": Problem(_scores(2, 5, seed=2), [2, 3, 1, 2, 1], 5),
    "weights of 0 and above the capacity": Problem(_scores(2, 5, seed=3), [0, 2, 9, 1, 3], 4),
    "weights and capacity for each instance": Problem(
        _scores(2, 1, 4, seed=4), np.array([[[2, 0, 3, 1]], [[1, 7, 2, 2]]]), np.array([[4], [3]])
    ),
    "no batch": Problem(_scores(5, seed=5), [1, 2, 2, 1, 3], 6),
    "at least": Problem(_scores(2, 5, seed=6), [2, 3, 1, 2, 1], 6, at_least=4),
    "choices": _choices(2, 3, 3, seed=0),
    "optional choices": _choices(2, 3, 3, seed=1, capacity=5, optional=True),
    "choices, at least": _choices(2, 3, 3, seed=2, capacity=7, at_least=5),
    "optional choices, exactly": _choices(2, 3, 3, seed=3, capacity=5, at_least=5, optional=True),
    "choices, all for each instance": _choices(
        2, 1, 3, 3, seed=4, weights=np.stack([WEIGHTS, 4 - WEIGHTS])[:, None], capacity=np.array([[6], [7]])
    ),
    "choices, no batch": _choices(2, 5, seed=5, weights=[3, 0, 2, 9, 1], capacity=4),
    "budgets": Boxes(_scores(2, 4, seed=7), [[1, 1, 1, 1], [2, 1, 3, 1]], [2, 4]),
}

#: kind -> a constraint on four items, or on two groups of two
LIMITS: dict[str, Callable[[], Any]] = {
    "top-k": lambda: kg.TopK(2),
    "knapsack": lambda: kg.Knapsack([2, 1, 0, 2], 4),
    "at least": lambda: kg.Knapsack([2, 1, 0, 2], 4, at_least=2),
    "choices": lambda: kg.MultipleChoice([[1, 2], [2, 0]], 3),
    "optional choices": lambda: kg.MultipleChoice([[1, 2], [2, 0]], 3, optional=True),
    "budgets": lambda: kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 0, 2]], [2, 4]),
}
#: another of the same shapes
OTHERS: dict[str, Any] = {
    "top-k": kg.TopK(3),
    "knapsack": kg.Knapsack([1, 1, 2, 1], 2),
    "at least": kg.Knapsack([1, 1, 2, 1], 3, at_least=3),
    "choices": kg.MultipleChoice([[2, 1], [2, 3]], 4, at_least=4),
    "optional choices": kg.MultipleChoice([[2, 1], [2, 3]], 2, optional=True),
    "budgets": kg.MultiKnapsack([[1, 1, 1, 1], [1, 2, 3, 1]], [3, 3]),
}
BUFFERS = {
    "top-k": {"k"},
    "knapsack": {"weights", "capacity", "at_least"},
    "budgets": {"weights", "capacities"},
}
for _kind in ("at least", "choices", "optional choices"):
    BUFFERS[_kind] = BUFFERS["knapsack"]


def event_of(kind: str) -> tuple[int, ...]:
    """The shape of an instance under those limits."""
    return (2, 2) if "choices" in kind else (4,)


def leaf(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, requires_grad=True)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
