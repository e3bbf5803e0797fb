"""Small random problems for hypothesis, with their truth, and the cases at the edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import knapgrad as kg
from knapgrad.lattice import Lattice, lattice_of
from oracles import Limits, Subset, Truth, feasible, optimum, subsets, truth

CONSTRAINTS = ("knapsack", "top-k", "at least")


def lattice(weights: Any, limits: Limits) -> Lattice:
    """Of one instance, for knapgrad.reference."""
    slack = np.asarray(limits.capacity - limits.at_least) if limits.at_least else None
    return lattice_of(np.asarray(weights), np.asarray(limits.capacity), slack, None)


@dataclass(frozen=True)
class Problem:
    """A batch of instances as a user would write it: weights, limits and gamma shared or one for each instance."""

    theta: np.ndarray  # (*batch, n)
    weights: Any  # None for top-k
    capacity: Any  # k for top-k
    gamma: Any = 1.0
    at_least: Any = None  # None for 0, or for k

    @property
    def is_top_k(self) -> bool:
        return self.weights is None

    @property
    def n(self) -> int:
        return self.theta.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        return self.theta.shape[:-1]

    @property
    def size(self) -> int:
        return int(np.prod(self.batch))

    def flat(self, array: np.ndarray) -> np.ndarray:
        """(*batch, n) as one row per instance."""
        return array.reshape(self.size, self.n)

    @property
    def constraint(self) -> Any:
        if self.is_top_k:
            return kg.TopK(self.capacity, at_least=self.at_least)
        return kg.Knapsack(self.weights, self.capacity, at_least=0 if self.at_least is None else self.at_least)

    def regularizer(self, name: str) -> Any:
        return getattr(kg, name.capitalize())(self.gamma)

    def rows(self) -> list[tuple[np.ndarray, np.ndarray, Limits, float]]:
        """theta, weights, limits and gamma of each instance, in order of the flattened batch."""
        size = self.size
        weights = np.ones(self.n, dtype=int) if self.is_top_k else np.asarray(self.weights, dtype=int)
        default = self.capacity if self.is_top_k else 0
        limits = (default if self.at_least is None else self.at_least), self.capacity
        at_least, capacity = (np.broadcast_to(np.asarray(x), self.batch).reshape(size).tolist() for x in limits)
        return list(
            zip(
                self.theta.reshape(size, self.n),
                np.broadcast_to(weights, self.theta.shape).reshape(size, self.n),
                map(Limits, at_least, capacity),
                np.broadcast_to(np.asarray(self.gamma, dtype=float), self.batch).reshape(size),
            )
        )

    def truths(self, regularizer: str) -> list[Truth]:
        return [truth(theta, w, limits, regularizer, g) for theta, w, limits, g in self.rows()]

    def optima(self) -> list[tuple[float, list[Subset]]]:
        """The best score of each instance, and all selections that have it."""
        return [optimum(theta, w, limits) for theta, w, limits, _ in self.rows()]

    def batched(self, values: list[Any], *shape: int) -> np.ndarray:
        return np.array(values, dtype=np.float64).reshape((*self.batch, *shape))

    def scale(self) -> np.ndarray:
        """What a relative error of the value is relative to, besides the value: the scores and gamma."""
        finite = np.where(np.isinf(self.theta), 0.0, np.abs(self.theta))
        largest = finite.max(axis=-1, initial=0.0)
        return np.maximum(largest, np.broadcast_to(np.asarray(self.gamma, dtype=float), self.batch))

    def allows(self, y: np.ndarray) -> bool:
        """Whether all selections of shape (..., *batch, n) are 0/1, feasible and free of masked items."""
        samples = y.reshape(int(np.prod(y.shape[: y.ndim - self.theta.ndim])), self.size, self.n)
        if not np.isin(samples, (0.0, 1.0)).all():
            return False
        return all(
            feasible(sample[b], w, limits) and not (sample[b][np.isneginf(theta)]).any()
            for sample in samples
            for b, (theta, w, limits, _) in enumerate(self.rows())
        )

    def selections(self) -> np.ndarray:
        """Every 0/1 vector, feasible or not, for each instance: (2^n, *batch, n)."""
        every = np.array(subsets(self.n), dtype=np.float64).reshape(2**self.n, *(1,) * len(self.batch), self.n)
        return np.broadcast_to(every, (2**self.n, *self.batch, self.n)).copy()

    def rounded(self, dtype: str) -> Problem:
        """The problem as it is after theta was rounded to a dtype."""
        if dtype == "bfloat16":
            import torch

            return replace(self, theta=torch.from_numpy(self.theta).bfloat16().double().numpy())
        return replace(self, theta=self.theta.astype(dtype).astype(np.float64))


def scores(masked: bool = True) -> st.SearchStrategy[float]:
    """Scores with exact ties and exact thresholds among them, and (sometimes) a mask."""
    kinds = [st.integers(-24, 24).map(lambda x: x / 8), st.floats(-3, 3, width=32)]
    return st.one_of(*kinds, st.just(-np.inf)) if masked else st.one_of(*kinds)


GAMMAS = st.sampled_from([0.125, 0.5, 0.7, 1.0, 3.0])


@st.composite
def problems(draw: st.DrawFn, constraint: str, max_n: int = 6, masked: bool = True, one_shape: bool = False) -> Problem:
    """One shape is for JAX, which compiles for each."""
    if one_shape:
        return draw(_problems_of_one_shape(constraint, masked))
    if constraint == "at least":
        return draw(_with_a_least_weight(max_n, masked))
    n = draw(st.integers(0 if constraint == "knapsack" else 1, max_n))
    batch = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    size = int(np.prod(batch))
    flat = draw(st.lists(scores(masked), min_size=size * n, max_size=size * n))
    theta = np.array(flat, dtype=np.float64).reshape(*batch, n)
    gamma: Any = draw(GAMMAS)
    if batch and draw(st.booleans()):
        gamma = np.array([draw(GAMMAS) for _ in range(size)])
    one_each = bool(batch) and draw(st.booleans())
    if constraint == "top-k":
        least = int((~np.isneginf(theta)).sum(axis=-1).min(initial=n))
        ks = st.integers(0, least)
        return Problem(theta, None, np.array([draw(ks) for _ in range(size)]) if one_each else draw(ks), gamma)
    items = st.lists(st.integers(0, 5), min_size=n, max_size=n)
    weights = np.array([draw(items) for _ in range(size)], dtype=int).reshape(size, n) if one_each else draw(items)
    capacities = st.integers(0, 14)
    own_capacity = bool(batch) and draw(st.booleans())
    capacity = np.array([draw(capacities) for _ in range(size)]) if own_capacity else draw(capacities)
    return Problem(theta, weights, capacity, gamma)


@st.composite
def _problems_of_one_shape(draw: st.DrawFn, constraint: str, masked: bool) -> Problem:
    """Everything for each instance; the first has what fixes the width of the table."""
    size, n = 3, 4
    if constraint == "at least":
        problem = draw(_problems_of_one_shape("knapsack", masked))
        return replace(problem, at_least=_reachable(draw, problem))
    theta = np.array(draw(st.lists(scores(masked), min_size=size * n, max_size=size * n))).reshape(size, n)
    gamma = np.array([draw(GAMMAS) for _ in range(size)])
    if constraint == "top-k":
        theta[0][np.isneginf(theta[0])] = 0.25
        least = (~np.isneginf(theta)).sum(axis=-1)
        return Problem(theta, None, np.array([3, *(draw(st.integers(0, min(int(k), 3))) for k in least[1:])]), gamma)
    weights = np.array(draw(st.lists(st.integers(0, 5), min_size=size * n, max_size=size * n))).reshape(size, n)
    weights[0, 0] = 12
    return Problem(theta, weights, np.array([12, *(draw(st.integers(0, 12)) for _ in range(size - 1))]), gamma)


@st.composite
def _with_a_least_weight(draw: st.DrawFn, max_n: int, masked: bool) -> Problem:
    """A knapsack, or top-k, with a least weight or number that some selection of each instance has."""
    problem = draw(problems(draw(st.sampled_from(["knapsack", "knapsack", "top-k"])), max_n, masked))
    least = _reachable(draw, problem)
    same = problem.size and draw(st.booleans())
    return replace(problem, at_least=np.full_like(least, least.min()) if same else least)


def _reachable(draw: st.DrawFn, problem: Problem) -> np.ndarray:
    """(*batch,): the weight of some feasible selection without masked items."""
    least = []
    for theta, weights, limits, _ in problem.rows():
        items = weights[~np.isneginf(theta)]
        weight = 0
        for w in items.tolist():
            if weight + w <= limits.capacity and draw(st.booleans()):
                weight += w
        least.append(limits.capacity if problem.is_top_k and draw(st.booleans()) else weight)
    return np.array(least, dtype=int).reshape(problem.batch)


INF = np.inf
_THETA = np.array([0.75, -0.5, 1.5, 0.25])
_BATCH = np.array([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25], [0.0, 0.0, -0.25, 3.0]])

#: The cases that broke one implementation or another; the name says what is special.
EDGES: dict[str, Problem] = {
    "no items": Problem(np.zeros((2, 0)), [], 3),
    "no items, no batch": Problem(np.zeros(0), [], 0),
    "no items, top 0": Problem(np.zeros((2, 0)), None, 0),
    "one item": Problem(np.array([0.3]), [2], 2),
    "one item too heavy": Problem(np.array([0.3]), [3], 2),
    "top 0": Problem(_BATCH, None, 0),
    "top n": Problem(_BATCH, None, 4),
    "capacity 0": Problem(_BATCH, [2, 1, 3, 1], 0),
    "capacity 0, some weigh nothing": Problem(_BATCH, [2, 0, 3, 0], 0),
    "capacity 0, all weigh nothing": Problem(_BATCH, [0, 0, 0, 0], 0),
    "weight 0 in the paper's first figure": Problem(np.array([0.4, -0.2, 0.5, 1.0]), [2, 0, 1, 1], 2),
    "weight 0 first": Problem(_BATCH, [0, 2, 1, 3], 3),
    "weight 0 last": Problem(_BATCH, [2, 1, 3, 0], 3),
    "all weigh nothing": Problem(_BATCH, [0, 0, 0, 0], 3),
    "weights above the capacity": Problem(_BATCH, [9, 1, 5, 2], 4),
    "all weights above the capacity": Problem(_BATCH, [9, 8, 7, 6], 4),
    "weights far above the capacity": Problem(_BATCH, [2**40, 1, 2**59, 2], 4),
    "capacity above the total weight": Problem(_BATCH, [2, 1, 3, 1], 100),
    "capacity far above the total weight": Problem(_BATCH, [2, 1, 3, 1], 2**59),
    "weights for each instance": Problem(_BATCH, np.array([[2, 1, 3, 1], [1, 1, 1, 1], [0, 4, 2, 5]]), 4),
    "weights for each instance, one batch of them": Problem(_BATCH, np.array([[2, 1, 3, 1]]), 4),
    "capacity for each instance": Problem(_BATCH, [2, 1, 3, 1], np.array([0, 3, 100])),
    "weights and capacity for each instance": Problem(
        _BATCH, np.array([[2, 1, 3, 1], [1, 1, 1, 1], [0, 4, 2, 5]]), np.array([5, 2, 4])
    ),
    "k for each instance": Problem(_BATCH, None, np.array([0, 2, 4])),
    "gamma for each instance": Problem(_BATCH, [2, 1, 3, 1], 4, np.array([0.2, 1.0, 5.0])),
    "gamma for each instance, top-k": Problem(_BATCH, None, 2, np.array([0.2, 1.0, 5.0])),
    "everything for each instance": Problem(
        _BATCH.reshape(3, 1, 4) + np.array([[0.0], [0.5]]),
        np.array([[[2, 1, 3, 1]], [[1, 0, 1, 1]], [[0, 4, 2, 5]]]),
        np.array([[3, 4], [1, 2], [6, 0]]),
        np.array([[0.5], [1.0], [2.0]]),
    ),
    "capacity along one axis of the batch": Problem(
        _BATCH.reshape(3, 1, 4) + np.array([[0.0], [0.5]]), [2, 1, 3, 1], np.array([[2], [3], [4]])
    ),
    "masked": Problem(np.array([[0.75, -INF, 1.5, 0.25], [-INF, 2.0, -INF, 1.25]]), [2, 1, 3, 1], 4),
    "masked, top-k": Problem(np.array([[0.75, -INF, 1.5, 0.25], [-INF, 2.0, -INF, 1.25]]), None, 2),
    "masked to exactly k": Problem(np.array([-INF, 2.0, -INF, 1.25]), None, 2),
    "masked, weight 0": Problem(np.array([0.75, -INF, 1.5, -INF]), [0, 0, 2, 1], 2),
    "all masked": Problem(np.full((2, 4), -INF), [2, 1, 3, 1], 4),
    "all masked, top 0": Problem(np.full((2, 4), -INF), None, 0),
    "exact ties": Problem(np.ones((2, 4)), None, 2),
    "all zero": Problem(np.zeros((2, 4)), [2, 1, 3, 1], 4),
    "on the thresholds": Problem(np.array([[-1.0, -2.0, 1.0, 2.0], [1.0, 0.0, 2.0, 0.0]]), [1, 1, 1, 1], 4),
    "batch of rank 2": Problem(np.stack([_BATCH, _BATCH[::-1] - 0.25]), [2, 1, 3, 1], 4),
    "batch of rank 3": Problem(np.stack([_BATCH, _BATCH[::-1] - 0.25])[:, None], None, 2),
    "a least weight": Problem(_BATCH, [2, 1, 3, 1], 5, at_least=3),
    "a least weight of every instance": Problem(_BATCH, [2, 1, 3, 1], 5, at_least=np.array([0, 4, 5])),
    "a least weight, all of it": Problem(_BATCH, [2, 1, 3, 1], 5, at_least=5),
    "a least weight, capacity above the total": Problem(_BATCH, [2, 1, 3, 1], 100, at_least=6),
    "a least weight, only all items have it": Problem(_BATCH, [2, 1, 3, 1], 100, at_least=7),
    "a least weight, some weigh nothing": Problem(_BATCH, [0, 2, 0, 3], 4, at_least=3),
    "a least weight, masked": Problem(
        np.array([[0.75, -INF, 1.5, 0.25], [-INF, 2.0, -INF, 1.25]]), [2, 1, 3, 1], 4, at_least=2
    ),
    "a least weight, everything for each instance": Problem(
        _BATCH,
        np.array([[2, 1, 3, 1], [1, 1, 1, 1], [0, 4, 2, 5]]),
        np.array([5, 2, 9]),
        np.array([0.2, 1.0, 5.0]),
        np.array([4, 0, 6]),
    ),
    "from 1 to 3": Problem(_BATCH, None, 3, at_least=1),
    "at most 2": Problem(_BATCH, None, 2, at_least=0),
    "from and to of every instance": Problem(_BATCH, None, np.array([2, 4, 3]), at_least=np.array([0, 3, 3])),
    "no batch": Problem(_THETA, [2, 1, 3, 1], 4),
    "no batch, top-k": Problem(_THETA, None, 2),
    "empty batch": Problem(np.zeros((0, 4)), [2, 1, 3, 1], 4),
    "empty batch, top-k": Problem(np.zeros((0, 4)), None, 2),
    "empty batch of rank 2": Problem(np.zeros((3, 0, 4)), [2, 1, 3, 1], 4),
    "empty batch, per-instance everything": Problem(
        np.zeros((0, 4)), np.zeros((0, 4), dtype=int), np.zeros(0, dtype=int), np.ones(0)
    ),
}
