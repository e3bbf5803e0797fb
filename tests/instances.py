"""Small random problems for hypothesis, with their truth, and the cases at the edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

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
    """A batch of instances as a user would write it: weights, limits and gamma shared or one for each instance.

    This one is of items. Other kinds of constraint override what is different (choices.py, boxes.py), and kinds.py
    lists all of them.
    """

    theta: np.ndarray  # (*batch, *event)
    weights: Any  # None for top-k
    capacity: Any  # k for top-k
    gamma: Any = 1.0
    at_least: Any = None  # None for 0, or for k

    event_dims: ClassVar[int] = 1

    @property
    def is_top_k(self) -> bool:
        return self.weights is None

    @property
    def event(self) -> tuple[int, ...]:
        return self.theta.shape[self.theta.ndim - self.event_dims :]

    @property
    def n(self) -> int:
        return int(np.prod(self.event))

    @property
    def batch(self) -> tuple[int, ...]:
        return self.theta.shape[: self.theta.ndim - self.event_dims]

    @property
    def size(self) -> int:
        return int(np.prod(self.batch))

    @property
    def decisions(self) -> int:
        """The most that are smoothed on a way to a selection."""
        return self.n

    def flat(self, array: np.ndarray) -> np.ndarray:
        """(*batch, *event) as one row per instance."""
        return array.reshape(self.size, self.n)

    def each(self, x: Any) -> np.ndarray:
        """What is shared or of each instance, as one entry per instance."""
        return np.broadcast_to(np.asarray(x), self.batch).reshape(self.size)

    def beside(self, x: Any) -> np.ndarray:
        """What is shared or of each instance, of a shape that goes with theta."""
        return np.broadcast_to(np.asarray(x, dtype=float), self.batch).reshape(*self.batch, *[1] * self.event_dims)

    @property
    def constraint(self) -> Any:
        if self.is_top_k:
            return kg.TopK(self.capacity, at_least=self.at_least)
        return kg.Knapsack(self.weights, self.capacity, at_least=0 if self.at_least is None else self.at_least)

    def regularizer(self, name: str) -> Any:
        return getattr(kg, name.capitalize())(self.gamma)

    def rows(self) -> list[tuple[np.ndarray, Any, Limits, float]]:
        """theta, weights, limits and gamma of each instance, flat, in order of the flattened batch."""
        weights = np.ones(self.event, int) if self.is_top_k else np.asarray(self.weights, dtype=int)
        default = self.capacity if self.is_top_k else 0
        limits = (default if self.at_least is None else self.at_least), self.capacity
        weights = self.flat(np.broadcast_to(weights, self.theta.shape))
        gammas = self.each(self.gamma).astype(float)
        return list(zip(self.flat(self.theta), weights, map(Limits, *(self.each(x).tolist() for x in limits)), gammas))

    def one(self, b: int) -> Problem:
        """An instance, without a batch."""
        theta, weights, limits, gamma = self.rows()[b]
        own = None if self.is_top_k else weights.reshape(self.event)
        changed = {"weights": own, "capacity": limits.capacity, "at_least": limits.at_least, "gamma": float(gamma)}
        return replace(self, theta=theta.reshape(self.event).copy(), **changed)

    def truths(self, regularizer: str) -> list[Truth]:
        return [truth(theta, w, limits, regularizer, g) for theta, w, limits, g in self.rows()]

    @property
    def capacities(self) -> list[Any]:
        """One entry per budget."""
        return [self.capacity]

    def at_capacity(self, *capacity: int) -> Problem:
        """With another capacity; exactly that if exactly the present one, or k items, is what is selected."""
        is_exact = self.is_top_k if self.at_least is None else bool(np.any(self.at_least))
        return replace(self, capacity=capacity[0], at_least=capacity[0] if is_exact else 0)

    def frontier(self, regularizer: str | None) -> np.ndarray:
        """(*batch, C + 1), with an axis for each budget: the value, or for None the optimum, at each."""
        sizes = [int(np.max(c, initial=0)) + 1 for c in self.capacities]
        here = [self.at_capacity(*c) for c in np.ndindex(*sizes)]
        if regularizer is None:
            entries = [[best for best, _ in one.optima()] for one in here]
        else:
            entries = [[truth.value for truth in one.truths(regularizer)] for one in here]
        return np.array(entries).T.reshape(*self.batch, *sizes)

    def has_form(self, y: np.ndarray) -> bool:
        """Whether a flat selection is one, whatever it weighs."""
        return bool(np.isin(y, (0, 1)).all())

    def possible(self) -> list[Subset]:
        """All flat selections that have the form."""
        return subsets(self.n)

    def feasible(self, b: int) -> list[Subset]:
        """Those that instance b allows, with or without masked entries."""
        _, weights, limits, _ = self.rows()[b]
        return [y for y in self.possible() if feasible(y, weights, limits)]

    def optima(self) -> list[tuple[float, list[Subset]]]:
        """The best score of each instance, and all selections that have it."""
        among = tuple(self.possible())
        return [_optimum(tuple(theta), tuple(map(_hashable, w)), limits, among) for theta, w, limits, _ in self.rows()]

    def batched(self, values: list[Any], *shape: int) -> np.ndarray:
        """One number per instance, or as many as theta has."""
        return np.array(values, dtype=np.float64).reshape((*self.batch, *(self.event if shape else ())))

    def scale(self) -> np.ndarray:
        """What a relative error of the value is relative to, besides the value: the scores and gamma."""
        finite = np.where(np.isinf(self.theta), 0.0, np.abs(self.theta))
        largest = finite.reshape(*self.batch, self.n).max(axis=-1, initial=0.0)
        return np.maximum(largest, np.broadcast_to(np.asarray(self.gamma, dtype=float), self.batch))

    def contains(self, y: np.ndarray) -> np.ndarray:
        """Whether selections (..., *batch, *event) are feasible."""
        front = y.shape[: y.ndim - self.theta.ndim]
        found = [
            [self.has_form(one) and feasible(one, w, limits) for one, (_, w, limits, _) in zip(sample, self.rows())]
            for sample in y.reshape(int(np.prod(front)), self.size, self.n)
        ]
        return np.array(found, dtype=bool).reshape((*front, *self.batch))

    def allows(self, y: np.ndarray) -> bool:
        """Whether all selections (..., *batch, *event) are feasible and free of masked entries."""
        return bool(self.contains(y).all()) and not (y * np.isneginf(self.theta)).any()

    def selections(self) -> np.ndarray:
        """Selections (count, *batch, *event), all that are feasible among them, and others."""
        return self.repeated(np.array(subsets(self.n), dtype=np.float64))

    def repeated(self, every: np.ndarray) -> np.ndarray:
        """Selections (count, n), the same for each instance."""
        each = every.reshape(len(every), *[1] * len(self.batch), *self.event)
        return np.broadcast_to(each, (len(every), *self.theta.shape)).copy()

    def columns(self, x: np.ndarray) -> np.ndarray:
        """Scores (*batch, *event) as kernels see them, one row per instance."""
        return self.flat(x)

    def order(self, draw: st.DrawFn) -> Any:
        """A place for each entry: an index of theta."""
        return ..., np.array(draw(st.permutations(range(self.n))), dtype=int)

    def moved(self, order: Any) -> Problem:
        weights = None if self.is_top_k else np.broadcast_to(np.asarray(self.weights), self.theta.shape)[order]
        return replace(self, theta=self.theta[order], weights=weights)

    def rounded(self, dtype: str) -> Problem:
        """The problem as it is after theta was rounded to a dtype."""
        if dtype == "bfloat16":
            import torch

            return replace(self, theta=torch.from_numpy(self.theta).bfloat16().double().numpy())
        return replace(self, theta=self.theta.astype(dtype).astype(np.float64))


def _hashable(weight: Any) -> Any:
    return weight if isinstance(weight, tuple) else int(weight)


@lru_cache(maxsize=4096)
def _optimum(theta: Any, weights: Any, limits: Limits, among: tuple[Subset, ...]) -> tuple[float, list[Subset]]:
    return optimum(theta, weights, limits, among)


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
