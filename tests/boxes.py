"""Problems of items with several budgets, see instances.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import knapgrad as kg
from instances import GAMMAS, INF, Problem, scores
from oracles import BoxTruth, Limits, truth


@dataclass(frozen=True)
class Boxes(Problem):
    """Weights and capacity have one entry per budget."""

    @property
    def constraint(self) -> kg.MultiKnapsack:
        return kg.MultiKnapsack(self.weights, self.capacity)

    def rows(self) -> list[tuple[np.ndarray, Any, Limits, float]]:
        """Weights are (n, budgets)."""
        loads = np.stack([self.flat(np.broadcast_to(np.asarray(w, dtype=int), self.theta.shape)) for w in self.weights])
        weights = [tuple(map(tuple, own.tolist())) for own in np.moveaxis(loads, 0, -1)]
        limits = [Limits(0, each) for each in zip(*(self.each(c).tolist() for c in self.capacity))]
        return list(zip(self.flat(self.theta), weights, limits, self.each(self.gamma).astype(float)))

    def one(self, b: int) -> Boxes:
        theta, weights, limits, gamma = self.rows()[b]
        return Boxes(theta.copy(), list(zip(*weights)), list(limits.capacity), float(gamma))

    @property
    def capacities(self) -> list[Any]:
        return self.capacity

    def at_capacity(self, *capacity: int) -> Boxes:
        return replace(self, capacity=list(capacity))

    def truths(self, regularizer: str) -> list[BoxTruth]:  # type: ignore[override]
        return [truth(theta, w, limits, regularizer, g, BoxTruth) for theta, w, limits, g in self.rows()]

    def moved(self, order: Any) -> Boxes:
        weights = [np.broadcast_to(np.asarray(w), self.theta.shape)[order] for w in self.weights]
        return replace(self, theta=self.theta[order], weights=weights)


@st.composite
def box_problems(draw: st.DrawFn, max_n: int = 6, masked: bool = True, one_shape: bool = False) -> Boxes:
    budgets = 2 if one_shape else draw(st.integers(1, 3))
    batch = (3,) if one_shape else draw(st.sampled_from([(), (1,), (2,), (3,)]))
    size, n = int(np.prod(batch)), 4 if one_shape else draw(st.integers(1, min(max_n, 6)))
    theta = np.array(draw(st.lists(scores(masked), min_size=size * n, max_size=size * n))).reshape(*batch, n)
    gamma: Any = draw(GAMMAS)
    if one_shape or (batch and draw(st.booleans())):
        gamma = np.array([draw(GAMMAS) for _ in range(size)])
    weights, capacities = [], []
    for _ in range(budgets):
        own = one_shape or (bool(batch) and draw(st.booleans()))
        count = size * n if own else n
        heaviest = draw(st.sampled_from([1, 5]))  # a number of items, or weights
        w = np.array(draw(st.lists(st.integers(0, heaviest), min_size=count, max_size=count)), dtype=int)
        w = w.reshape(*batch, n) if own else w
        limits = st.integers(0, 9)
        c: Any = np.array([draw(limits) for _ in range(size)]).reshape(batch) if own else draw(limits)
        if one_shape:  # the first instance has what fixes the size of the box
            w[0, 0], c[0] = 9, 9
        weights.append(w)
        capacities.append(c)
    return Boxes(theta, weights, capacities, gamma)


_BATCH = np.array([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25], [0.0, 0.0, -0.25, 3.0]])
_ONES, _WEIGHTS, _OWN = [1, 1, 1, 1], [2, 1, 3, 1], np.array([[2, 1, 3, 1], [1, 1, 1, 1], [0, 4, 2, 5]])
_MASKED = np.array([[0.75, -INF, 1.5, 0.25], [-INF, 2.0, -INF, 1.25]])
_MANY = np.cos(np.arange(19 * 5)).reshape(19, 5)

#: The name says what is special.
EDGES: dict[str, Boxes] = {
    "at most k items": Boxes(_BATCH, [_ONES, _WEIGHTS], [2, 4]),
    "at most k items, last": Boxes(_BATCH, [_WEIGHTS, _ONES], [4, 2]),
    "no batch": Boxes(_BATCH[0], [_ONES, _WEIGHTS], [2, 4]),
    "one budget": Boxes(_BATCH, [_WEIGHTS], [4]),
    "three budgets": Boxes(_BATCH, [_ONES, _WEIGHTS, [0, 3, 1, 2]], [3, 5, 4]),
    "the same budget twice": Boxes(_BATCH, [_WEIGHTS, _WEIGHTS], [4, 4]),
    "capacity 0": Boxes(_BATCH, [_ONES, _WEIGHTS], [0, 4]),
    "capacity 0 last": Boxes(_BATCH, [_ONES, [0, 1, 0, 2]], [3, 0]),
    "all capacities 0": Boxes(_BATCH, [[0, 1, 0, 0], [0, 0, 2, 0]], [0, 0]),
    "all weigh nothing": Boxes(_BATCH, [[0, 0, 0, 0], [0, 0, 0, 0]], [3, 3]),
    "too heavy for one budget": Boxes(_BATCH, [[9, 1, 1, 1], [1, 1, 9, 1]], [4, 5]),
    "all too heavy": Boxes(_BATCH, [_ONES, [9, 9, 9, 9]], [4, 5]),
    "far too heavy": Boxes(_BATCH, [[2**59, 1, 1, 1], _WEIGHTS], [3, 5]),
    "capacities above the totals": Boxes(_BATCH, [_ONES, _WEIGHTS], [2**59, 100]),
    "one capacity above its total": Boxes(_BATCH, [_ONES, _WEIGHTS], [2, 100]),
    "weights for each instance": Boxes(_BATCH, [_OWN, _ONES], [4, 2]),
    "capacities for each instance": Boxes(_BATCH, [_ONES, _WEIGHTS], [np.array([0, 2, 4]), np.array([3, 5, 100])]),
    "everything for each instance": Boxes(
        _BATCH, [_OWN, _OWN[::-1]], [np.array([3, 5, 9]), np.array([4, 0, 7])], np.array([0.2, 1.0, 5.0])
    ),
    "batch of rank 2": Boxes(
        np.stack([_BATCH, _BATCH[::-1] - 0.25]), [_ONES, _WEIGHTS], [np.array([[1], [3]]), np.array([2, 4, 6])]
    ),
    "masked": Boxes(_MASKED, [_ONES, _WEIGHTS], [2, 4]),
    "all masked": Boxes(np.full((2, 4), -INF), [_ONES, _WEIGHTS], [2, 4]),
    "exact ties": Boxes(np.ones((2, 4)), [_ONES, _WEIGHTS], [2, 4]),
    "more instances than lanes": Boxes(_MANY, [[1, 1, 1, 1, 1], [3, 0, 2, 4, 1]], [3, 6]),
    "long lines": Boxes(_MANY[:2], [[1, 0, 1, 2, 1], [7, 11, 20, 3, 5]], [3, 33]),
    "long lines first": Boxes(_MANY[:2], [[7, 11, 20, 3, 5], [1, 0, 1, 2, 1]], [33, 3]),
    "no items": Boxes(np.zeros((2, 0)), [np.zeros(0, int), np.zeros(0, int)], [3, 4]),
    "empty batch": Boxes(np.zeros((0, 4)), [_ONES, _WEIGHTS], [2, 4]),
}
