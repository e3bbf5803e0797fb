"""Truth for the tests, independent of the library.

Small instances (n <= 8 or so) are enumerated in 40-digit arithmetic: every subset, and every path of pick and skip
decisions, or of choices among options, with its local probabilities. Large ones get a table in long double. Nothing
comes from ``knapgrad``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import mpmath
import numpy as np
from scipy import stats

REGULARIZERS = ("shannon", "gini", "tsallis")

#: An item is never picked in a state where skipping is better by this many gammas.
THRESHOLD = {"shannon": float("inf"), "gini": 1.0, "tsallis": 2.0}

#: The largest value of ``-Omega`` on the simplex, at unit gamma.
LARGEST_ENTROPY = {"shannon": np.log(2.0), "gini": 0.25, "tsallis": 4.0 / 3.0 * (1.0 - 2.0**-0.5)}

#: How many times the shares of equal options may be apart, whatever their number.
APART = {"shannon": 1.0, "gini": 1.21, "tsallis": 1.15}

mp = mpmath.MPContext()
mp.dps = 40

Subset = tuple[int, ...]


def subsets(n: int) -> list[Subset]:
    return list(itertools.product((0, 1), repeat=n))


class Limits(NamedTuple):
    """The least and the largest total weight; or, without a least one, the capacity of every budget."""

    at_least: int
    capacity: Any  # int, or a tuple of them


def feasible(y: Sequence[int], weights: Sequence[Any], limits: Limits) -> bool:
    """Of several budgets, weights are (n, budgets)."""
    if isinstance(limits.capacity, tuple):
        return all(feasible(y, own, Limits(0, c)) for own, c in zip(zip(*weights), limits.capacity))
    return limits.at_least <= sum(int(w) for picked, w in zip(y, weights) if picked) <= limits.capacity


class Decision(NamedTuple):
    """The smoothed choice between two branches: its value and the probability of each."""

    value: Any
    pick: Any
    skip: Any


def decide(pick: Any, skip: Any, regularizer: str, gamma: Any) -> Decision:
    """``max_q q pick + (1 - q) skip - gamma Omega(q)`` by the paper's closed forms of q and definitions of Omega."""
    if pick == -mp.inf:
        return Decision(skip, mp.mpf(0), mp.mpf(1))
    if skip == -mp.inf:
        return Decision(pick, mp.mpf(1), mp.mpf(0))
    t = (pick - skip) / gamma
    if regularizer == "shannon":
        q, p = 1 / (1 + mp.exp(-t)), 1 / (1 + mp.exp(t))
        omega = sum(x * mp.log(x) for x in (q, p))
    elif regularizer == "gini":
        q = min(max((t + 1) / 2, mp.mpf(0)), mp.mpf(1))
        p = 1 - q
        omega = (q * q + p * p - 1) / 2
    elif regularizer == "tsallis":
        clipped = min(max(t / 2, mp.mpf(-1)), mp.mpf(1))
        q = (1 + clipped * mp.sqrt(2 - clipped * clipped)) / 2
        p = 1 - q
        omega = mp.mpf(4) / 3 * (q * mp.sqrt(q) + p * mp.sqrt(p) - 1)
    else:
        raise ValueError(regularizer)
    skipped = p * skip if p else 0
    return Decision(q * pick + skipped - gamma * omega, q, p)


class Truth:
    """One instance, by recursion over (items left, capacity left) and by enumeration of the paths."""

    def __init__(self, theta, weights, limits: Limits, regularizer: str, gamma=1.0) -> None:
        self.theta = [mp.mpf(x) for x in theta]
        self.weights = [int(w) for w in weights]
        self.limits, self.capacity = limits, int(limits.capacity)
        self.regularizer = regularizer
        self.gamma = mp.mpf(gamma)
        self.n = len(self.theta)
        self._states: dict[tuple[int, int], Any] = {}

    @cached_property
    def log_probs(self) -> dict[Subset, Any]:
        return dict(self._paths(self.steps, self.capacity))

    @property
    def steps(self) -> int:
        return self.n

    def of(self, theta: Sequence[Any]) -> Truth:
        """The same instance with other scores."""
        return type(self)(theta, self.weights, self.limits, self.regularizer, self.gamma)

    def state(self, i: int, c: int) -> Any:
        """The decision on item ``i`` (from 1) with capacity ``c`` left for items 1..i; its value is V[i, c]."""
        if (i, c) not in self._states:
            self._states[i, c] = self._decide(i, c)
        return self._states[i, c]

    def _decide(self, i: int, c: int) -> Decision:
        if i == 0:
            reached = self.capacity - c >= self.limits.at_least  # what was used
            return Decision(mp.mpf(0) if reached else -mp.inf, mp.mpf(0), mp.mpf(1))
        skip, left = self.state(i - 1, c).value, self._left(i, c)
        if left is None:
            return Decision(skip, mp.mpf(0), mp.mpf(1))
        pick = self.theta[i - 1] + self.state(i - 1, left).value
        return decide(pick, skip, self.regularizer, self.gamma)

    def _left(self, i: int, c: Any) -> Any:
        """The capacity that is left once item ``i`` is picked; None if it does not fit."""
        return c - self.weights[i - 1] if self.weights[i - 1] <= c else None

    def _paths(self, i: int, c: int) -> Iterator[tuple[Subset, Any]]:
        if self.state(i, c).value == -mp.inf:
            return
        if i == 0:
            yield (), mp.mpf(0)
            return
        here = self.state(i, c)
        if here.skip > 0:
            for y, log_prob in self._paths(i - 1, c):
                yield y + (0,), log_prob + mp.log(here.skip)
        if here.pick > 0:
            for y, log_prob in self._paths(i - 1, self._left(i, c)):
                yield y + (1,), log_prob + mp.log(here.pick)

    @property
    def value(self) -> float:
        return float(self.state(self.steps, self.capacity).value)

    @property
    def probabilities(self) -> dict[Subset, Any]:
        return {y: mp.exp(log_prob) for y, log_prob in self.log_probs.items()}

    def mean(self) -> list[Any]:
        mean = [mp.mpf(0)] * self.n
        for y, p in self.probabilities.items():
            for i in range(self.n):
                mean[i] += p * y[i]
        return mean

    @property
    def relax(self) -> np.ndarray:
        return np.array([float(x) for x in self.mean()])

    @property
    def entropy(self) -> float:
        return float(-sum((mp.exp(lp) * lp for lp in self.log_probs.values()), mp.mpf(0)))

    def log_prob(self, y: Sequence[float]) -> float:
        return float(self.log_probs.get(tuple(int(x) for x in y), -mp.inf))

    def score(self, y: Sequence[float]) -> float:
        """``<theta, y>``, where an item that is not picked counts nothing, even at -inf."""
        return float(sum((t * mp.mpf(float(p)) for t, p in zip(self.theta, y) if p), mp.mpf(0)))

    def fenchel_young_loss(self, target: Sequence[float]) -> float:
        return self.value - self.score(target)

    def divergence(self, prior: Sequence[float]) -> float:
        """``value(prior) + Omega(y) - <prior, y>`` at the mean y; ``Omega(y) = <theta, y> - value(theta)``."""
        other, mean = self.of(prior), self.mean()
        inner = sum((y * (t - p) for y, t, p in zip(mean, self.theta, other.theta) if y), mp.mpf(0))
        return float(other.state(self.steps, self.capacity).value - self.state(self.steps, self.capacity).value + inner)

    def vjp(self, z: Sequence[float]) -> np.ndarray:
        """``H z`` by central differences of the mean: the Jacobian is a Hessian, hence symmetric."""
        step = mp.mpf(10) ** -14 * self.gamma

        def shifted(sign: int) -> list[Any]:
            return self.of([t + sign * step * mp.mpf(float(x)) for t, x in zip(self.theta, z)]).mean()

        return np.array([float((up - down) / (2 * step)) for up, down in zip(shifted(1), shifted(-1))])


class BoxTruth(Truth):
    """One instance with several budgets: weights (n, budgets), and a capacity for each; a state is a tuple."""

    def __init__(self, theta, weights, limits: Limits, regularizer: str, gamma=1.0) -> None:
        super().__init__(theta, [0] * len(theta), Limits(0, 0), regularizer, gamma)
        self.limits, self.capacity, self.weights = limits, limits.capacity, list(weights)

    def _decide(self, i: int, c: Any) -> Decision:
        return Decision(mp.mpf(0), mp.mpf(0), mp.mpf(1)) if i == 0 else super()._decide(i, c)

    def _left(self, i: int, c: Any) -> Any:
        left = tuple(own - used for own, used in zip(c, self.weights[i - 1]))
        return left if min(left) >= 0 else None


class Shares(NamedTuple):
    """The smoothed choice of a group: its value and the probability of each leaf."""

    value: Any
    shares: tuple[Any, ...]


class ChoiceTruth(Truth):
    """One instance of groups of so many options each, by recursion over (groups left, capacity left).

    Scores, weights and selections are flat, group by group. The leaves of a group are its options, and before them "no
    pick" if it is optional.
    """

    def __init__(self, theta, weights, limits: Limits, regularizer: str, gamma, options: int, optional: bool) -> None:
        self.options, self.optional = options, optional
        super().__init__(theta, weights, limits, regularizer, gamma)

    @property
    def steps(self) -> int:
        return self.n // self.options

    def of(self, theta: Sequence[Any]) -> ChoiceTruth:
        limits = self.limits, self.regularizer, self.gamma
        return ChoiceTruth(theta, self.weights, *limits, self.options, self.optional)

    def _leaves(self, k: int) -> list[tuple[Subset, Any, int]]:
        """Of group ``k`` (from 1): what is picked, its score, its weight."""
        none = [((0,) * self.options, mp.mpf(0), 0)] if self.optional else []
        first = (k - 1) * self.options
        return none + [
            (_only(o, self.options), self.theta[first + o], self.weights[first + o]) for o in range(self.options)
        ]

    def _decide(self, i: int, c: int) -> Shares:
        if i == 0:
            return Shares(super()._decide(0, c).value, ())
        values = [
            score + self.state(i - 1, c - weight).value if weight <= c else -mp.inf
            for _, score, weight in self._leaves(i)
        ]
        return self._tree(values, 0, len(values))

    def _tree(self, values: list[Any], low: int, high: int) -> Shares:
        """The second half of the leaves low..high-1 against the first."""
        if high - low == 1:
            return Shares(values[low], (mp.mpf(1),))
        middle = low + (high - low) // 2
        skipped, picked = self._tree(values, low, middle), self._tree(values, middle, high)
        here = decide(picked.value, skipped.value, self.regularizer, self.gamma)
        return Shares(here.value, (*(here.skip * x for x in skipped.shares), *(here.pick * x for x in picked.shares)))

    def _paths(self, i: int, c: int) -> Iterator[tuple[Subset, Any]]:
        here = self.state(i, c)
        if here.value == -mp.inf:
            return
        if i == 0:
            yield (), mp.mpf(0)
            return
        for (picked, _, weight), share in zip(self._leaves(i), here.shares):
            if share > 0:
                for y, log_prob in self._paths(i - 1, c - weight):
                    yield y + picked, log_prob + mp.log(share)


def _only(o: int, options: int) -> Subset:
    return tuple(int(j == o) for j in range(options))


def choices(groups: int, options: int, optional: bool) -> list[Subset]:
    """All selections, flat: one option of each group, or at most one."""
    picks = ([(0,) * options] if optional else []) + [_only(o, options) for o in range(options)]
    return [sum(y, ()) for y in itertools.product(picks, repeat=groups)]


@lru_cache(maxsize=4096)
def remembered(kind: type[Truth], *arguments: Any) -> Any:
    """The truth about one instance, worked out once; the arguments are tuples and numbers."""
    return kind(*arguments)


def truth(theta, weights, limits: Limits, regularizer: str, gamma=1.0, kind: type[Truth] = Truth, *more: Any) -> Any:
    """The (remembered) truth about one instance; theta and gamma are taken at face value, without rounding."""
    return remembered(kind, tuple(map(float, theta)), tuple(weights), limits, regularizer, float(gamma), *more)


def optimum(theta, weights, limits: Limits, among: Iterable[Subset] | None = None) -> tuple[float, list[Subset]]:
    """The largest ``<theta, y>`` over the feasible subsets, -inf if there is none, and all subsets that reach it (exact
    ties)."""
    scores = {}
    for y in subsets(len(theta)) if among is None else among:
        masked = any(p and t == -np.inf for p, t in zip(y, theta))
        if feasible(y, weights, limits) and not masked:
            scores[y] = sum((mp.mpf(float(t)) for p, t in zip(y, theta) if p), mp.mpf(0))
    best = max(scores.values(), default=-mp.inf)
    return float(best), [y for y, score in scores.items() if score == best]


def gibbs(
    theta, weights, limits: Limits, gamma=1.0, among: Iterable[Subset] | None = None
) -> tuple[float, dict[Subset, Any]]:
    """``gamma log sum_y exp(<theta, y>/gamma)`` over the feasible subsets, and the softmax distribution on them."""
    mass = {}
    for y in subsets(len(theta)) if among is None else among:
        if feasible(y, weights, limits):
            score = sum((mp.mpf(float(t)) for p, t in zip(y, theta) if p), mp.mpf(0))
            mass[y] = mp.exp(score / mp.mpf(gamma))
    total = sum(mass.values(), mp.mpf(0))
    return float(mp.mpf(gamma) * mp.log(total)), {y: m / total for y, m in mass.items()}


LONG = np.longdouble

#: Without an extended type (Windows, some ARM) the tables below are no better than the code under test.
LONG_IS_LONGER = np.finfo(LONG).eps < np.finfo(np.float64).eps


def _long_shannon(delta):
    small = np.exp(-np.abs(delta))
    return np.log1p(small), np.where(delta > 0, 1 / (1 + small), small / (1 + small))


def _long_gini(delta):
    q = np.clip((delta + 1) / 2, 0, 1)
    return np.minimum(q, 1 - q) ** 2, q


def _long_tsallis(delta):
    half = np.clip(delta / 2, -1, 1)
    q = (1 + half * np.sqrt(2 - half * half)) / 2
    smaller = np.minimum(q, 1 - q)
    omega = LONG(4) / 3 * (q * np.sqrt(q) + (1 - q) * np.sqrt(1 - q) - 1)
    return -omega - np.abs(delta) * np.where(np.abs(delta) < 2, smaller, 0), q


_LONG: dict[str, Callable] = {"shannon": _long_shannon, "gini": _long_gini, "tsallis": _long_tsallis}


def long_table(theta, weights, limits: Limits, regularizer: str, gamma=1.0) -> tuple[np.longdouble, np.ndarray]:
    """Value and relax in long double: whole tables, no bands, one capacity per element of a row."""
    theta = np.asarray(theta).astype(LONG) / LONG(gamma)
    n, capacity, width = len(theta), int(limits.capacity), int(limits.capacity) + 1
    row = np.where(np.arange(width) <= capacity - limits.at_least, 0.0, -np.inf).astype(LONG)
    table = np.zeros((n, width), dtype=LONG)
    for i in range(n):
        w = int(weights[i])
        if w >= width or theta[i] == -np.inf:
            continue
        skip = row[w:]
        pick = theta[i] + row[: width - w]
        impossible, forced = np.isneginf(pick), np.isneginf(skip)
        with np.errstate(invalid="ignore"):
            delta = pick - skip
        delta[impossible], delta[forced & ~impossible] = -np.inf, np.inf
        safe = np.where(np.isinf(delta), np.sign(delta) * 1e30, delta)
        added, q = _LONG[regularizer](safe)
        row = np.concatenate([row[:w], np.maximum(pick, skip) + np.where(np.isinf(delta), 0, added)])
        table[i, w:] = q
    arrived = np.zeros(width, dtype=LONG)
    arrived[capacity] = 1
    y = np.zeros(n, dtype=LONG)
    for i in reversed(range(n)):
        w = int(weights[i])
        if w >= width:
            continue
        picked = arrived * table[i]
        y[i] = picked.sum()
        arrived = arrived - picked
        arrived[: width - w] += picked[w:]
    return row[capacity] * LONG(gamma), y


def long_vjp(theta, z, weights, limits: Limits, regularizer: str, step: float = 1e-8) -> np.ndarray:
    """``H z`` at unit gamma by central differences of :func:`long_table`."""
    theta, z = np.asarray(theta).astype(LONG), np.asarray(z).astype(LONG)
    up = long_table(theta + LONG(step) * z, weights, limits, regularizer)[1]
    down = long_table(theta - LONG(step) * z, weights, limits, regularizer)[1]
    return ((up - down) / (2 * LONG(step))).astype(np.float64)


def chi_square_p_value(counts: dict[Subset, int], probabilities: dict[Subset, Any]) -> float:
    """The p-value of counts under a distribution, 0 outside of its support; cells expected below 5 are merged."""
    if any(probabilities.get(y, 0) == 0 for y in counts):
        return 0.0
    total = sum(counts.values())
    cells, rest_seen, rest_expected = [], 0, 0.0
    for y, p in probabilities.items():
        expected = total * float(p)
        if expected < 5:
            rest_seen, rest_expected = rest_seen + counts.get(y, 0), rest_expected + expected
        else:
            cells.append((counts.get(y, 0), expected))
    if rest_expected >= 5:
        cells.append((rest_seen, rest_expected))
    elif rest_seen > 25:
        return 0.0
    if len(cells) < 2:
        return 1.0
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))
