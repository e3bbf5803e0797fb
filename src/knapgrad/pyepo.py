"""Knapsacks for `PyEPO <https://github.com/khalil-research/PyEPO>`_: exact models without a solver, and our losses.

>>> import numpy as np, torch
>>> model = knapsackModel(weights=[[2.5, 1.5, 1.0]], capacity=[4.0])
>>> model.setObj([3.0, 2.0, 2.5])
>>> model.solve()
(array([1., 0., 1.]), 5.5)
>>> loss = regularizedKnapsackFenchelYoung(model, gamma=1.0, regularizer="gini")
>>> loss(torch.tensor([[3.0, 2.0, 2.5]]), torch.tensor([[1.0, 0.0, 1.0]])).shape
torch.Size([])

Names follow PyEPO's: classes in camelCase, with acronyms for short.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

import knapgrad as kg
from knapgrad.constraints import Constraint
from knapgrad.constraints.multi_knapsack import MOST_BUDGETS
from knapgrad.regularizers import REGULARIZERS, Regularizer

try:
    import torch
    from pyepo.func._common import is_minimize
    from pyepo.func.abcmodule import optModule
    from pyepo.model.bases import knapsackBase
    from pyepo.model.opt import optModel

    from knapgrad.torch.private import base_of
except ImportError as error:
    raise ImportError(
        f"knapgrad.pyepo needs PyEPO and PyTorch; install them with: pip install 'knapgrad[pyepo]' ({error})"
    ) from error

LARGEST_CAPACITY = 1_000_000  # after scaling; a table has one column for each unit
LARGEST_BOX = 10_000_000  # states of several budgets, after scaling
_ROUNDING = 1e-9  # of a capacity or a least weight that was computed
_AHEAD = 1024  # rows of a matrix that are solved at a time


class knapsackModel(knapsackBase):
    """The 0/1 knapsack, solved exactly by dynamic programming: no solver, no licence.

    PyEPO asks for one solution at a time. This model notices that the costs are rows of one matrix, solves the rows
    that follow in the same call, and answers from memory as long as the costs have not changed. So with
    ``processes=1`` PyEPO's losses, ``optDataset`` and ``regret`` run batched without a change. Functions that add
    constraints (``unambRegret``) need PyEPO's own models.

    Args:
        weights: (n,), or (constraints, n) with up to 3 constraints; not negative, decimal numbers: 3.57 and 2.1 become
            17 and 10 units of 0.21, exactly.
        capacity: a number, or one per constraint.
        at_least: the least total weight, a number; for one constraint only.
        resolution: None for exactly these numbers. Otherwise into how many units each capacity is cut at most; weights
            are rounded up, so that selections remain feasible. What that costs is the difference to the optimum of
            ``model.constraint.optimistic``.

    Raises:
        ValueError: if the capacity, in such units, exceeds a million; or for several, if all combinations of capacities
            are more than ten million.

    >>> model = knapsackModel(weights=[[1, 1, 1], [2.5, 1.5, 1.0]], capacity=[2, 4.0])
    >>> model.setObj([3.0, 2.0, 2.5])
    >>> model.solve()
    (array([1., 0., 1.]), 5.5)
    """

    def __init__(self, weights: Any, capacity: Any, at_least: Any = 0, resolution: Any = None) -> None:
        shaped = np.atleast_2d(np.asarray(weights))
        limits = np.atleast_1d(np.asarray(capacity))
        if limits.shape != shaped.shape[:1]:
            raise ValueError(
                f"capacity must have an entry per constraint: weights have shape {shaped.shape}, it has {limits.shape}"
            )
        # PyEPO makes copies from the attributes that are named like the arguments
        self.at_least, self.resolution = at_least, resolution
        self.constraint = _integers(shaped, limits, at_least, resolution)
        self._rows = _Rows(self.constraint)
        super().__init__(shaped, limits)

    def _getModel(self) -> tuple[None, list[int]]:
        return None, self.items

    def setObj(self, c: Any) -> None:
        """Sets the values of the items, (n,)."""
        if tuple(np.shape(c)) != (len(self.items),):
            raise ValueError(f"c must have one value for each of the {len(self.items)} items, got shape {np.shape(c)}")
        self._solution, self._objective = self._rows.solve(_as_numpy(c), is_minimize(self.modelSense))

    def solve(self) -> tuple[np.ndarray, float]:
        """The best selection (n,), in zeros and ones, and its objective."""
        if not hasattr(self, "_solution"):
            raise RuntimeError("no objective yet: call setObj(c) before solve()")
        return self._solution.copy(), self._objective

    def addConstr(self, coefs: Any, rhs: float) -> Any:
        raise NotImplementedError(
            "a dynamic program takes knapsack constraints with the model only: knapsackModel(weights, capacity); for "
            "constraints that are added later, such as those of unambRegret, use pyepo.model.ort.knapsackModel"
        )


class _Rows:
    """Solves costs that are rows of a matrix together with the rows that follow, and remembers. An answer from memory
    is for the same costs, number by number. Rows that nobody asks for make it look less far ahead."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint, self.ahead, self.used, self.minimize = constraint, _AHEAD, 0, False
        self.costs = self.selections = self.objectives = np.empty((0, 0))

    def solve(self, row: np.ndarray, minimize: bool) -> tuple[np.ndarray, float]:
        at = self.used
        if at >= len(self.costs) or minimize != self.minimize or not np.array_equal(row, self.costs[at]):
            grown = 2 * self.ahead if at == len(self.costs) else at
            self.ahead = min(max(grown, 1), _AHEAD)
            self.costs, at = _rows_from(row, self.ahead), 0
            self.minimize = minimize
            self.selections = kg.solve(-self.costs if minimize else self.costs, self.constraint)
            self.objectives = np.einsum("bi,bi->b", self.costs, self.selections, dtype=np.float64)
        self.used = at + 1
        return self.selections[at], float(self.objectives[at])


def _as_numpy(cost: Any) -> np.ndarray:
    """A vector of floats; a row of a matrix remains one, also of a tensor."""
    if isinstance(cost, torch.Tensor):
        matrix, cost = base_of(cost), cost.detach()
        if matrix is not None and matrix.ndim == 2 and matrix.device.type == "cpu" and matrix.is_contiguous():
            row, rest = divmod(cost.storage_offset() - matrix.storage_offset(), matrix.shape[1])
            if cost.is_contiguous() and rest == 0 and cost.shape == matrix.shape[1:] and cost.dtype == matrix.dtype:
                return _floats(matrix.detach().numpy()[row])
        cost = cost.cpu().numpy()
    return _floats(np.asarray(cost))


def _floats(x: np.ndarray) -> np.ndarray:
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float64)


def _rows_from(row: np.ndarray, count: int) -> np.ndarray:
    """A copy of this row and up to so many of those that follow it in its matrix."""
    matrix = row.base
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not matrix.flags.c_contiguous:
        return row[None].copy()
    offset = row.__array_interface__["data"][0] - matrix.__array_interface__["data"][0]
    size = matrix.shape[1] * matrix.itemsize
    if matrix.dtype != row.dtype or matrix.shape[1:] != row.shape or row.strides != (row.itemsize,) or offset % size:
        return row[None].copy()
    return matrix[offset // size :][:count].copy()


def integer_knapsack(weights: Any, capacity: Any, at_least: Any = 0) -> kg.Knapsack:
    """The same constraint in integers, in units of the largest number that divides every weight. A capacity that is
    at most a billionth below a whole number of units is rounded up to it, since it is often a sum with rounding errors.
    A least weight that is at most a billionth above one is rounded down to it.

    >>> integer_knapsack([3.57, 2.1], 5.0).weights, integer_knapsack([3.57, 2.1], 5.0).capacity
    (array([17, 10]), array(23))
    """
    constraint = _in_units(weights, capacity, at_least)
    if not constraint.exact:
        raise ValueError(
            f"capacity must be at most {LARGEST_CAPACITY:,} units of which all weights are multiples, got {capacity}, "
            "which is more; round the weights: np.ceil(weights * 100) / 100 keeps selections feasible"
        )
    return constraint


def _in_units(weights: Any, capacity: Any, at_least: Any = 0) -> kg.Knapsack:
    limit, least = (float(str(np.asarray(x)[()])) for x in (capacity, at_least))  # 0.1 in float32 is 0.1 too
    return kg.Knapsack.from_real(
        weights, limit * (1 + _ROUNDING), at_least=least * (1 - _ROUNDING), resolution=LARGEST_CAPACITY
    )


def integer_box(weights: Any, capacity: Any) -> kg.MultiKnapsack:
    """The same for several constraints, weights (constraints, n).

    >>> integer_box([[3.57, 2.1], [1, 1]], [5.0, 1]).capacities
    array([23,  1])
    """
    each = [_in_units(*x) for x in zip(weights, capacity)]
    _check_box(each)
    return kg.MultiKnapsack([x.weights for x in each], [x.capacity for x in each])


def _check_box(each: list[kg.Knapsack], resolution: Any = None) -> None:
    """Of constraints that are exact, unless they may be rounded."""
    is_exact = resolution is not None or all(x.exact for x in each)
    sides = [1 + min(int(x.capacity), int(x.weights.sum())) for x in each]
    if is_exact and prod(sides) <= LARGEST_BOX:
        return
    got = " x ".join(f"{side:,}" for side in sides) if is_exact else "no common unit"
    remedy = (
        "Give resolution=..., which rounds the weights up to that many units per capacity, so that selections remain "
        "feasible"
        if resolution is None
        else f"Give a smaller resolution than {resolution}"
    )
    raise ValueError(
        "the capacities of several constraints, in units of which all weights are multiples, must have at most "
        f"{LARGEST_BOX:,} combinations, got {got}. {remedy}, or use pyepo.model.ort.knapsackModel, which needs a solver"
    )


def _integers(weights: np.ndarray, capacity: np.ndarray, at_least: Any = 0, resolution: Any = None) -> Constraint:
    if len(weights) == 1:
        if resolution is None:
            return integer_knapsack(weights[0], capacity[0], at_least)
        return kg.Knapsack.from_real(weights[0], float(capacity[0]), at_least=at_least, resolution=resolution)
    if len(weights) > MOST_BUDGETS:
        raise ValueError(
            f"weights must be of at most {MOST_BUDGETS} constraints, got {len(weights)}: a table has a column for "
            "every combination of capacities; use pyepo.model.ort.knapsackModel, which needs a solver"
        )
    if np.any(np.asarray(at_least) != 0):
        raise ValueError(f"at_least must be 0 for several constraints, got {at_least}")
    if resolution is None:
        return integer_box(weights, capacity)
    box = kg.MultiKnapsack.from_real(list(weights), capacity.astype(float).tolist(), resolution=resolution)
    _check_box([kg.Knapsack(*x) for x in zip(box.weights, box.capacities)], resolution)
    return box


class regularizedKnapsackOpt(optModule):
    """The relaxed selection as a solution operator: each item's probability, with exact gradients.

    Returns a solution, not a loss: pair it with a loss of the task, or use :class:`regularizedKnapsackFenchelYoung`.

    Args:
        optmodel: a :class:`knapsackModel`, or another knapsack of PyEPO's.
        gamma: strength of the regularizer, in the units of the costs; a number or a tensor, also one to learn.
        regularizer: "shannon", "gini" or "tsallis".
        processes: ignored, for compatibility with PyEPO. The work uses torch's threads, or the GPU.
    """

    def __init__(self, optmodel: optModel, gamma: Any = 1.0, regularizer: str = "shannon", processes: int = 1) -> None:
        self._set_up(optmodel, gamma, regularizer, "mean")

    def _set_up(self, optmodel: optModel, gamma: Any, regularizer: str, reduction: Any) -> None:
        super().__init__(optmodel, reduction=reduction)
        if regularizer not in REGULARIZERS:
            raise ValueError(f"regularizer must be one of {', '.join(REGULARIZERS)}, got {regularizer!r}")
        REGULARIZERS[regularizer](gamma)  # checks gamma
        self.gamma, self.regularizer, self.constraint = gamma, regularizer, _constraint_of(optmodel)

    @property
    def smoothing(self) -> Regularizer:
        return REGULARIZERS[self.regularizer](self.gamma)

    def _theta(self, pred_cost: torch.Tensor) -> torch.Tensor:
        """What is maximised."""
        full = self.optmodel._fullCost(pred_cost)
        return -full if is_minimize(self.optmodel.modelSense) else full

    def forward(self, pred_cost: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return kg.relax(self._theta(pred_cost), self.constraint, self.smoothing)


class regularizedKnapsackFenchelYoung(regularizedKnapsackOpt):
    """The Fenchel-Young loss of a regularized knapsack: exact where the perturbed one is estimated by sampling.

    ``loss(pred_cost, true_sol)`` is convex in the predicted costs; its gradient is the relaxed selection minus the
    true one (for a model that minimises, the reverse). It needs decisions only, no true costs.

    Args:
        optmodel: a :class:`knapsackModel`, or another knapsack of PyEPO's.
        gamma: strength of the regularizer, in the units of the costs.
        regularizer: "shannon", "gini" or "tsallis".
        processes: ignored, for compatibility with PyEPO, see :class:`regularizedKnapsackOpt`.
        reduction: "mean", "sum" or "none".
    """

    def __init__(
        self,
        optmodel: optModel,
        gamma: Any = 1.0,
        regularizer: str = "shannon",
        processes: int = 1,
        reduction: str = "mean",
    ) -> None:
        self._set_up(optmodel, gamma, regularizer, reduction)

    def forward(self, pred_cost: torch.Tensor, true_sol: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss = kg.fenchel_young_loss(self._theta(pred_cost), true_sol, self.constraint, self.smoothing)
        return self._reduce(loss)


def _constraint_of(optmodel: optModel) -> Constraint:
    if isinstance(optmodel, knapsackModel):
        return optmodel.constraint
    if not isinstance(optmodel, knapsackBase) or optmodel._extra_constrs:
        raise TypeError(
            f"optmodel must be a knapsack without further constraints, got {optmodel!r}; "
            "for example knapgrad.pyepo.knapsackModel(weights, capacity)"
        )
    return _integers(np.atleast_2d(optmodel.weights), np.atleast_1d(optmodel.capacity))


RKO = regularizedKnapsackOpt
RKFY = regularizedKnapsackFenchelYoung
