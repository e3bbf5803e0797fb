"""Small random problems with several budgets for hypothesis, with their truth, and the cases at the edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import knapgrad as kg
from instances import GAMMAS, INF, Problem, scores
from oracles import BoxTruth, Subset, box_truth, mp, subsets


@dataclass(frozen=True)
class Boxes(Problem):
    """A batch of instances as a user would write it; weights and capacity have one entry per budget."""

    @property
    def constraint(self) -> kg.MultiKnapsack:
        return kg.MultiKnapsack(self.weights, self.capacity)

    def rows(self) -> list[tuple[Any, Any, Any, float]]:
        """theta, weights (n, budgets), capacities and gamma of each instance."""
        weights = [np.broadcast_to(np.asarray(w, dtype=int), self.theta.shape) for w in self.weights]
        limits = [np.broadcast_to(np.asarray(c), self.batch).reshape(self.size) for c in self.capacity]
        gammas = np.broadcast_to(np.asarray(self.gamma, dtype=float), self.batch).reshape(self.size)
        loads = np.stack([self.flat(w) for w in weights], -1)
        return [
            (theta, tuple(map(tuple, own.tolist())), tuple(int(c[b]) for c in limits), float(gammas[b]))
            for b, (theta, own) in enumerate(zip(self.flat(self.theta), loads))
        ]

    def truths(self, regularizer: str) -> list[BoxTruth]:  # type: ignore[override]
        return [box_truth(tuple(theta.tolist()), w, c, regularizer, g) for theta, w, c, g in self.rows()]

    def keeps(self, y: Any, weights: Any, capacities: Any) -> bool:
        loads = np.array(weights, dtype=object).reshape(len(y), len(capacities)).T
        return all(np.dot(y, w) <= c for w, c in zip(loads, capacities))

    def optima(self) -> list[tuple[float, list[Subset]]]:
        found = []
        for theta, weights, capacities, _ in self.rows():
            possible = {
                y: sum((mp.mpf(float(t)) for p, t in zip(y, theta) if p), mp.mpf(0))
                for y in subsets(len(theta))
                if self.keeps(y, weights, capacities) and not any(p and t == -INF for p, t in zip(y, theta))
            }
            best = max(possible.values())
            found.append((float(best), [y for y, score in possible.items() if score == best]))
        return found

    def contains(self, y: np.ndarray) -> np.ndarray:
        """Whether selections (..., *batch, n) are feasible."""
        samples = y.reshape(int(np.prod(y.shape[: y.ndim - self.theta.ndim])), self.size, self.n)
        found = [
            [bool(np.isin(row, (0, 1)).all()) and self.keeps(row, w, c) for row, (_, w, c, _) in zip(each, self.rows())]
            for each in samples
        ]
        return np.array(found, dtype=bool).reshape(y.shape[:-1])

    def allows(self, y: np.ndarray) -> bool:
        return bool(self.contains(y).all()) and not (y * np.isneginf(self.theta)).any()


@st.composite
def box_problems(draw: st.DrawFn, one_shape: bool = False, masked: bool = True) -> Boxes:
    """One shape is for JAX, which compiles for each."""
    budgets = 2 if one_shape else draw(st.integers(1, 3))
    batch = (3,) if one_shape else draw(st.sampled_from([(), (1,), (2,), (3,)]))
    size, n = int(np.prod(batch)), 4 if one_shape else draw(st.integers(1, 6))
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
