"""The specification: the sweeps for one instance, short and slow. The fast kernels are tested against it, and against
enumeration where it is silent: the mode, and the gradient of log_prob.

Arguments: ``theta`` (n,) already divided by gamma, ``weights`` (n,) non-negative integers, ``capacity`` an integer,
    ``regularizer`` a class of :mod:`knapgrad.regularizers`, and ``exactly``: False for a knapsack (total weight at
    most the capacity), True for top-k (all weights 1, the capacity used up). Rows run over c = 0..capacity; an item
    of weight 0 can be picked even at c = 0.

Tags such as [V] name the equations in docs/math.md; the kernels carry the same tags.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad.regularizers import Hard, Regularizer

Array = np.ndarray
Choice = type[Regularizer]

INFEASIBLE = -1e300  # finite, so that differences of infeasible values are numbers; any theta vanishes beside it


def _up(row: Array, w: int, fill: float) -> Array:
    """``row[c - w]`` for every c, and ``fill`` where c < w."""
    return np.concatenate([np.full(min(w, len(row)), fill), row[: max(len(row) - w, 0)]])


def _down(row: Array, w: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return np.concatenate([row[w:], np.zeros(min(w, len(row)))])


def tables(theta: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> tuple[Array, Array]:
    """V (n + 1, capacity + 1), the smoothed optimum of the first i items at capacity c, and Q, the chance to pick i."""
    n = len(theta)
    theta = np.where(theta == -np.inf, INFEASIBLE, theta)
    V = np.zeros((n + 1, capacity + 1))
    Q = np.zeros((n + 1, capacity + 1))
    if exactly:
        V[0, 1:] = INFEASIBLE
    for i in range(1, n + 1):
        skip = V[i - 1]
        pick = _up(V[i - 1], weights[i - 1], INFEASIBLE) + theta[i - 1]
        delta = pick - skip
        fits = np.arange(capacity + 1) >= weights[i - 1]
        V[i] = np.where(fits, np.where(delta > 0, pick, skip) + regularizer.value(delta), skip)  # [V]
        Q[i] = np.where(fits, regularizer.prob(delta), 0)  # [Q]
    return V, Q


def operator(theta: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> tuple[float, Array]:
    """The smoothed optimum, and its gradient: the relaxed selection (n,)."""
    V, Q = tables(theta, weights, capacity, regularizer, exactly)
    y = np.zeros(len(theta))
    E = np.zeros(capacity + 1)
    E[capacity] = 1
    for i in range(len(theta), 0, -1):
        picked = E * Q[i]
        y[i - 1] = picked.sum()  # [y]
        E = E - picked + _down(picked, weights[i - 1])  # [E]
    return V[-1, capacity], y


def vjp(theta: Array, z: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> Array:
    """The Jacobian of the relaxed selection times z; it is symmetric, so this is both the VJP and the JVP."""
    _, Q = tables(theta, weights, capacity, regularizer, exactly)
    return _tangent(Q, Q * np.append(0, z)[:, None], np.append(0, z)[:, None], weights, capacity, regularizer)[1]


def entropy(theta: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> tuple[float, Array]:
    """The Shannon entropy of the distribution over selections, and its gradient (n,)."""
    _, Q = tables(theta, weights, capacity, regularizer, exactly)
    inside = np.where((Q > 0) & (Q < 1), Q, 0.5)
    added = np.where(inside == Q, -Q * np.log(inside) - (1 - Q) * np.log(1 - inside), 0)
    slope = np.where(inside == Q, np.log(1 - inside) - np.log(inside), 0)
    return _tangent(Q, added, slope, weights, capacity, regularizer)


def _tangent(
    Q: Array, added: Array, slope: Array, weights: Array, capacity: int, regularizer: Choice
) -> tuple[float, Array]:
    """Follows what every decision adds to a sum along the path, and differentiates the expected sum.

    ``added`` (as large as Q) is what the decision at (i, c) adds on average, ``slope`` its derivative by Q[i, c].
    """
    n = len(Q) - 1
    T = np.zeros(capacity + 1)
    R = np.zeros_like(Q)
    for i in range(1, n + 1):
        change = _up(T, weights[i - 1], 0) - T
        R[i] = regularizer.dprob(Q[i]) * (change + slope[i])  # [Q']
        T = T + Q[i] * change + added[i]  # [V']
    product = np.zeros(n)
    E, D = np.zeros(capacity + 1), np.zeros(capacity + 1)
    E[capacity] = 1
    for i in range(n, 0, -1):
        picked, change = E * Q[i], D * Q[i] + E * R[i]
        product[i - 1] = change.sum()  # [Hz]
        E = E - picked + _down(picked, weights[i - 1])  # [E]
        D = D - change + _down(change, weights[i - 1])  # [E']
    return T[capacity], product


def sample(theta: Array, uniforms: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> Array:
    """A selection (n,) from uniform numbers (n,) in [0, 1), by ancestral sampling from the last item to the first."""
    _, Q = tables(theta, weights, capacity, regularizer, exactly)
    y, c = np.zeros(len(theta)), capacity
    for i in range(len(theta), 0, -1):
        y[i - 1] = uniforms[i - 1] < Q[i, c]  # [sample]
        c -= int(y[i - 1]) * weights[i - 1]
    return y


def solve(theta: Array, weights: Array, capacity: int, exactly: bool) -> Array:
    """The best selection (n,)."""
    return sample(theta, np.full(len(theta), 0.5), weights, capacity, Hard, exactly)


def log_prob(theta: Array, y: Array, weights: Array, capacity: int, regularizer: Choice, exactly: bool) -> Any:
    """The log-probability of a selection y (n,); -inf if it is infeasible or never drawn."""
    _, Q = tables(theta, weights, capacity, regularizer, exactly)
    probability, c = 1.0, capacity
    for i in range(len(theta), 0, -1):
        if c < 0:
            return -np.inf
        probability *= Q[i, c] if y[i - 1] else 1 - Q[i, c]  # [log-prob]
        c -= int(y[i - 1]) * weights[i - 1]
    with np.errstate(divide="ignore"):
        return np.log(probability)
