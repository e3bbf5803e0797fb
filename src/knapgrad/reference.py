"""The specification: the sweeps for one instance, short and slow. The fast kernels are tested against it. What it
does not have, the mode and the gradient of log_prob, is tested against enumeration.

Arguments: ``theta`` (n,) already divided by gamma, ``lattice`` a :class:`knapgrad.lattice.Lattice` of one instance
    (weights (n,), capacity and slack numbers), ``regularizer`` a class of :mod:`knapgrad.regularizers`. Rows run over
    c = 0..capacity; an item of weight 0 can be picked even at c = 0.

Tags such as [V] name the equations in docs/math.md; the kernels carry the same tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from knapgrad.lattice import INFEASIBLE, Lattice
from knapgrad.regularizers import Hard, Regularizer, linear
from knapgrad.regularizers import entropy as entropy_added

Array = np.ndarray
Choice = type[Regularizer]


def _up(row: Array, w: int, fill: float) -> Array:
    """``row[c - w]`` for every c, and ``fill`` where c < w."""
    return np.concatenate([np.full(min(w, len(row)), fill), row[: max(len(row) - w, 0)]])


def _down(row: Array, w: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return np.concatenate([row[w:], np.zeros(min(w, len(row)))])


def tables(theta: Array, lattice: Lattice, regularizer: Choice) -> tuple[Array, Array]:
    """V (n + 1, capacity + 1), the smoothed optimum of the first i items at capacity c; Q, the probability of i."""
    n, c = len(theta), np.arange(lattice.capacity + 1)
    theta = np.where(theta == -np.inf, INFEASIBLE, theta)
    V, Q = np.zeros((2, n + 1, len(c)))
    V[0] = 0 if lattice.slack is None else np.where(c <= lattice.slack, 0, INFEASIBLE)
    for i in range(1, n + 1):
        skip = V[i - 1]
        pick = _up(V[i - 1], lattice.weights[i - 1], INFEASIBLE) + theta[i - 1]
        delta = pick - skip
        fits = c >= lattice.weights[i - 1]
        V[i] = np.where(fits, np.where(delta > 0, pick, skip) + regularizer.value(delta), skip)  # [V]
        Q[i] = np.where(fits, regularizer.prob(delta), 0)  # [Q]
    return V, Q


def operator(theta: Array, lattice: Lattice, regularizer: Choice) -> tuple[float, Array]:
    """The smoothed optimum, and its gradient: the relaxed selection (n,)."""
    V, Q = tables(theta, lattice, regularizer)
    y = np.zeros(len(theta))
    E = np.zeros(lattice.capacity + 1)
    E[lattice.capacity] = 1
    for i in range(len(theta), 0, -1):
        picked = E * Q[i]
        y[i - 1] = picked.sum()  # [y]
        E = E - picked + _down(picked, lattice.weights[i - 1])  # [E]
    return V[-1, lattice.capacity], y


def vjp(theta: Array, z: Array, lattice: Lattice, regularizer: Choice) -> Array:
    """The Jacobian of the relaxed selection times z; it is symmetric, so this is both the VJP and the JVP."""
    return _tangent(theta, linear, z, lattice, regularizer)[1]


def entropy(theta: Array, lattice: Lattice, regularizer: Choice) -> tuple[float, Array]:
    """The Shannon entropy of the distribution over selections, and its gradient (n,)."""
    return _tangent(theta, entropy_added, np.zeros(len(theta)), lattice, regularizer)


def _tangent(
    theta: Array, source: Callable[..., Any], z: Array, lattice: Lattice, regularizer: Choice
) -> tuple[float, Array]:
    """The expected sum of what the decisions along a path add, and its gradient."""
    _, Q = tables(theta, lattice, regularizer)
    n, weights = len(theta), lattice.weights
    T = np.zeros(lattice.capacity + 1)
    R = np.zeros_like(Q)
    for i in range(1, n + 1):
        added, slope = source(Q[i], z[i - 1])
        change = _up(T, weights[i - 1], 0) - T
        R[i] = regularizer.dprob(Q[i]) * (change + slope)  # [Q']
        T = T + Q[i] * change + added  # [V']
    product = np.zeros(n)
    E, D = np.zeros((2, lattice.capacity + 1))
    E[lattice.capacity] = 1
    for i in range(n, 0, -1):
        picked, change = E * Q[i], D * Q[i] + E * R[i]
        product[i - 1] = change.sum()  # [Hz]
        E = E - picked + _down(picked, weights[i - 1])  # [E]
        D = D - change + _down(change, weights[i - 1])  # [E']
    return T[lattice.capacity], product


def sample(theta: Array, uniforms: Array, lattice: Lattice, regularizer: Choice) -> Array:
    """A selection (n,) from uniform numbers (n,) in [0, 1), by ancestral sampling from the last item to the first."""
    _, Q = tables(theta, lattice, regularizer)
    y, c = np.zeros(len(theta)), int(lattice.capacity)
    for i in range(len(theta), 0, -1):
        y[i - 1] = uniforms[i - 1] < Q[i, c]  # [sample]
        c -= int(y[i - 1]) * lattice.weights[i - 1]
    return y


def solve(theta: Array, lattice: Lattice) -> Array:
    """The best selection (n,)."""
    return sample(theta, np.full(len(theta), 0.5), lattice, Hard)


def log_prob(theta: Array, y: Array, lattice: Lattice, regularizer: Choice) -> Any:
    """The log-probability of a selection y (n,); -inf if it is infeasible or never drawn."""
    _, Q = tables(theta, lattice, regularizer)
    probability, c = 1.0, int(lattice.capacity)
    for i in range(len(theta), 0, -1):
        if c < 0:
            return -np.inf
        probability *= Q[i, c] if y[i - 1] else 1 - Q[i, c]  # [log-prob]
        c -= int(y[i - 1]) * lattice.weights[i - 1]
    with np.errstate(divide="ignore"):
        return np.log(probability)
