"""The truth, in long double, for a batch of instances. It shares no code with the library.

Every constraint is a row of groups with exactly one option picked in each; an item is a group of two, to skip it and to
pick it. Options are compared two by two, in a balanced tree. Few groups are enumerated as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

LONG = np.longdouble
Array = np.ndarray


def _omega(name: str, q: Array) -> Array:
    """The regularizer of a decision, from its definition; 0 where it is certain."""
    p = 1 - q
    if name == "shannon":
        return np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0) + np.where(
            p > 0, p * np.log(np.where(p > 0, p, 1)), 0
        )
    if name == "gini":
        return (q * q + p * p - 1) / 2
    return LONG(4) / 3 * (q * np.sqrt(q) + p * np.sqrt(p) - 1)


def decide(name: str, pick: Array, skip: Array) -> tuple[Array, Array]:
    """max over q of q pick + (1 - q) skip - Omega(q), and that q."""
    either = np.isinf(pick) | np.isinf(skip)
    delta = np.where(either, 0, np.where(either, 0, pick) - np.where(either, 0, skip))
    if name == "hard":
        q = (delta > 0).astype(LONG)
    elif name == "shannon":
        q = 1 / (1 + np.exp(-np.clip(delta, -11000, 11000)))
    elif name == "gini":
        q = np.clip((1 + delta) / 2, 0, 1)
    else:
        s = np.clip(delta / 2, -1, 1)
        q = np.clip((1 + s * np.sqrt(2 - s * s)) / 2, 0, 1)
    if name == "hard":
        gain = np.maximum(delta, 0)
    elif name == "shannon":  # the same as with Omega, without the cancellation
        gain = np.maximum(delta, 0) + np.log1p(np.exp(-np.abs(delta)))
    else:
        gain = q * delta - _omega(name, q)
    value = np.where(np.isinf(pick), skip, np.where(np.isinf(skip), pick, skip + gain))
    return value, np.where(np.isinf(pick), 0, np.where(np.isinf(skip), 1, q))


@dataclass
class Truth:
    """Of scores (batch, groups, options) in units of gamma, weights of that shape, and limits (batch,)."""

    scores: Array
    weights: Array
    low: Array
    high: Array
    name: str
    slack: str = "limits"  # or "all" and "none" of the capacity may stay unused
    sides: tuple[tuple[int, int, int], ...] = ()  # of several budgets, as digits of a state: base, place, and debt

    @cached_property
    def tables(self) -> tuple[Array, list[Array]]:
        """The last row of values (batch, C + 1), and the probability of each option in every state."""
        batch, groups, options = self.scores.shape
        c = np.arange(self.sides[0][0] * self.sides[0][1] if self.sides else int(self.high.max(initial=0)) + 1)
        unused = {
            "limits": self.high - self.low,
            "all": self.high.max(initial=0) + 0 * self.high,
            "none": 0 * self.high,
        }
        V = np.where(c <= unused[self.slack][:, None], LONG(0), -np.inf)
        if self.sides:
            V = np.where(self.within(c), LONG(0), -np.inf) + np.zeros((batch, 1), LONG)
        shares = []
        for k in range(groups):
            leaves = [self._moved(V, k, o) + self.scores[:, k, o, None] for o in range(options)]
            share = np.ones((options, batch, len(c)), LONG)
            V = self._join(leaves, share, 0, options)
            shares.append(share)
        return V, shares

    def within(self, left: Array) -> Array:
        """Whether what is left of the capacity is what may be left. Budgets may be overdrawn on the way, by no more
        than all weights together; at the end none of them is."""
        if self.sides:
            return np.logical_and.reduce([left // place % base >= debt for base, place, debt in self.sides])
        return (left >= 0) & (left <= self.high - self.low)

    def _join(self, leaves: list[Array], share: Array, low: int, high: int) -> Array:
        """The value of options low..high-1; their shares are multiplied by what the decisions say."""
        if high - low == 1:
            return leaves[low]
        middle = low + (high - low) // 2
        skip, pick = self._join(leaves, share, low, middle), self._join(leaves, share, middle, high)
        value, q = decide(self.name, pick, skip)
        share[low:middle] *= 1 - q
        share[middle:high] *= q
        return value

    def _moved(self, row: Array, k: int, o: int) -> Array:
        """row[c - w], -inf where there is none."""
        at = np.arange(row.shape[1]) - self.weights[:, k, o, None]
        return np.where(at >= 0, np.take_along_axis(row, np.maximum(at, 0), 1), -np.inf)

    @cached_property
    def row(self) -> Array:
        return self.tables[0]

    @property
    def frontier(self) -> Array:
        """(batch, C + 1), or with several budgets (batch, C1 + 1, C2 + 1)."""
        if not self.sides:
            return self.row
        state: Any = 0
        for base, place, debt in self.sides:
            state = np.asarray(state)[..., None] + np.arange(debt, base) * place
        return self.row[:, state]

    @cached_property
    def value(self) -> Array:
        return np.take_along_axis(self.row, self.high[:, None], 1)[:, 0]

    @cached_property
    def visits(self) -> list[Array]:
        """How likely each state is before each group, on the way back from the capacity."""
        _, groups, options = self.scores.shape
        E = (np.arange(self.row.shape[1]) == self.high[:, None]).astype(LONG)
        found = []
        for k in reversed(range(groups)):
            found.append(E)
            moved = np.zeros_like(E)
            for o in range(options):
                at = np.arange(E.shape[1]) + self.weights[:, k, o, None]
                flow = E * self.tables[1][k][o]
                moved += np.where(at < E.shape[1], np.take_along_axis(flow, np.minimum(at, E.shape[1] - 1), 1), 0)
            E = moved
        return found[::-1]

    @cached_property
    def marginals(self) -> Array:
        """(batch, groups, options)"""
        found = np.zeros(self.scores.shape, LONG)
        for k, E in enumerate(self.visits):
            found[:, k] = (E * self.tables[1][k]).sum(-1).T
        return found

    @cached_property
    def entropy(self) -> Array:
        found = np.zeros(len(self.scores), LONG)
        for E, share in zip(self.visits, self.tables[1]):
            found -= (E * np.where(share > 0, share * np.log(np.where(share > 0, share, 1)), 0).sum(0)).sum(-1)
        return found

    def log_prob(self, picked: Array) -> tuple[Array, Array]:
        """Of options (..., batch, groups) as numbers: log-probability, -inf if it is never drawn, and the least likely
        decision on the way."""
        c = np.broadcast_to(self.high, picked.shape[:-1]).copy()
        total, least = np.zeros(c.shape, LONG), np.ones(c.shape, LONG)
        index = np.arange(len(self.scores))
        for k in reversed(range(self.scores.shape[1])):
            o = picked[..., k]
            chance = np.where(c >= 0, self.tables[1][k][o, index, np.maximum(c, 0)], 0)
            total = total + np.where(chance > 0, np.log(np.where(chance > 0, chance, 1)), -np.inf)
            least = np.minimum(least, chance)
            c = c - self.weights[index, k, o]
        return np.where(self.within(c), total, -np.inf), least

    @property
    def selections(self) -> Array:
        """All of them, as numbers of options (count, 1, groups)."""
        _, groups, options = self.scores.shape
        return np.array(list(product(range(options), repeat=groups)), int).reshape(options**groups, 1, groups)

    def total(self, picked: Array, of: Array) -> Array:
        """The sum over groups of what the picked options have, (count, batch)."""
        index = np.arange(len(self.scores))
        parts = [of[index, k, picked[..., k]] for k in range(of.shape[1])]
        return sum(parts, np.zeros(np.broadcast_shapes(picked.shape[:-1], index.shape), of.dtype))

    def enumerated(self) -> dict[str, Any]:
        """Scores of all selections (count, batch), -inf where they are infeasible, and what follows for Shannon."""
        picked = self.selections
        used = self.total(picked, self.weights)
        scores = np.where(self.within(self.high - used), self.total(picked, self.scores), -np.inf)
        best = scores.max(0)
        p = np.exp(scores - best)
        return {"scores": scores, "best": best, "value": best + np.log(p.sum(0)), "p": p / p.sum(0), "picked": picked}
