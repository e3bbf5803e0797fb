"""The specification: the sweeps for one instance, short and slow. The fast kernels are tested against it. What it
does not have, the mode and the gradient of log_prob, is tested against enumeration.

Arguments: ``theta`` (n,) already divided by gamma, ``lattice`` a :class:`knapgrad.lattice.Lattice` of one instance
    (weights (n,), capacity and slack numbers), ``regularizer`` a class of :mod:`knapgrad.regularizers`. Rows run over
    c = 0..capacity; an item of weight 0 can be picked even at c = 0.

Everything is written for choices among options. An item is a choice between two: to skip it, of score 0 and weight 0,
and to pick it. Tags such as [V] name the equations in docs/math.md; the kernels carry the same tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from knapgrad.lattice import INFEASIBLE, LARGEST, Lattice, fits, tournament
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


def _options(x: Array, lattice: Lattice) -> Array:
    """Numbers per item as (choices, options); to skip an item has 0."""
    if lattice.options:
        return x.reshape(-1, lattice.options)
    return np.stack([np.zeros_like(x), x], axis=1)


def _items(x: Array, lattice: Lattice) -> Array:
    """The reverse."""
    return x.reshape(-1) if lattice.options else x[:, 1]


def tables(theta: Array, lattice: Lattice, regularizer: Choice) -> tuple[Array, Array]:
    """V (choices + 1, capacity + 1), the smoothed optimum of the first k choices at capacity c; P (choices, options,
    capacity + 1), the probability of each option of choice k there. All NaN if a score is NaN or +inf."""
    c = np.arange(lattice.capacity + 1)
    scores = _options(np.where(theta == -np.inf, INFEASIBLE, theta), lattice)
    weights = _options(lattice.weights, lattice)
    V, P = np.zeros((len(scores) + 1, len(c))), np.ones((*scores.shape, len(c)))
    if not (scores <= LARGEST).all():
        return V * np.nan, P * np.nan
    V[0] = 0 if lattice.slack is None else np.where(c <= lattice.slack, 0, INFEASIBLE)
    for k in range(len(scores)):
        nodes = np.array([_up(V[k], w, INFEASIBLE) + score for w, score in zip(weights[k], scores[k])])
        nodes[~fits(c, weights[k][:, None], lattice.box)] = INFEASIBLE
        for low, middle, high in tournament(len(nodes)):
            skip, pick = nodes[low], nodes[middle]
            delta = pick - skip
            q = regularizer.prob(delta)  # [Q]
            nodes[low] = np.where(delta > 0, pick, skip) + regularizer.value(delta)  # [V]
            P[k, low:middle] *= 1 - q  # [P]
            P[k, middle:high] *= q
        V[k + 1] = np.maximum(nodes[0], INFEASIBLE)
    return V, P


def operator(theta: Array, lattice: Lattice, regularizer: Choice) -> tuple[float, Array]:
    """The smoothed optimum, and its gradient: the relaxed selection (n,)."""
    V, P = tables(theta, lattice, regularizer)
    start = np.zeros(lattice.capacity + 1)
    start[lattice.capacity] = 1
    return V[-1, lattice.capacity], _collect(start, P, lattice)


def frontier(theta: Array, lattice: Lattice, regularizer: Choice) -> Array:
    """The smoothed optimum at every capacity, 0..capacity."""
    return tables(theta, lattice, regularizer)[0][-1]


def frontier_vjp(theta: Array, cotangent: Array, lattice: Lattice, regularizer: Choice) -> Array:
    """The gradient (n,) of the sum of those optima weighted by a cotangent (capacity + 1,)."""
    return _collect(cotangent, tables(theta, lattice, regularizer)[1], lattice)


def _collect(E: Array, P: Array, lattice: Lattice) -> Array:
    """The expected number of times that a path, which starts at c as often as E says, comes through each item."""
    y, weights = np.zeros(P.shape[:2]), _options(lattice.weights, lattice)
    for k in reversed(range(len(P))):
        picked = E * P[k]
        y[k] = picked.sum(-1)  # [y]
        E = np.sum([_down(row, w) for row, w in zip(picked, weights[k])], axis=0)  # [E]
    return _items(y, lattice)


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
    _, P = tables(theta, lattice, regularizer)
    weights, z = _options(lattice.weights, lattice), _options(z, lattice)
    T, R = np.zeros(lattice.capacity + 1), np.zeros_like(P)
    for k in range(len(P)):
        nodes = np.array([_up(T, w, 0) + z_o for w, z_o in zip(weights[k], z[k])])
        for low, middle, high in tournament(len(nodes)):
            mass = P[k, low:high].sum(0)
            with np.errstate(invalid="ignore"):
                q = np.where(mass > 0, P[k, middle:high].sum(0) / mass, 0 * mass)  # [Q]
            added, slope = source(q, 0.0)
            change = nodes[middle] - nodes[low]
            r = regularizer.dprob(q) * (change + slope)  # [Q']
            nodes[low] += q * change + added  # [V']
            skipped, picked = P[k, low:middle].sum(0), P[k, middle:high].sum(0)
            R[k, low:middle] -= mass * r * _shares(P[k, low:middle], skipped)  # [P']
            R[k, middle:high] += mass * r * _shares(P[k, middle:high], picked)
        T = nodes[0]
    product, E, D = np.zeros(P.shape[:2]), *np.zeros((2, lattice.capacity + 1))
    E[lattice.capacity] = 1
    for k in reversed(range(len(P))):
        picked, change = E * P[k], D * P[k] + E * R[k]
        product[k] = change.sum(-1)  # [Hz]
        E = np.sum([_down(row, w) for row, w in zip(picked, weights[k])], axis=0)  # [E]
        D = np.sum([_down(row, w) for row, w in zip(change, weights[k])], axis=0)  # [E']
    return T[lattice.capacity], _items(product, lattice)


def _shares(part: Array, whole: Array) -> Array:
    """Of a branch, the probability of each option once the branch is taken; anything where it never is."""
    return part / np.where(whole > 0, whole, 1)


def without_a_table(theta: Array, k: int, at_least: int, z: Array, L: float = 30.0) -> tuple[float, Array, Array]:
    """Under Shannon, for at_least to k items: value, relaxed selection and H z, by nodes of a circle. All scores are
    finite, and 0 < k, at_least < n."""
    n, lam = len(theta), _tilt(theta, k, at_least)
    p, q = 1 / (1 + np.exp(lam - theta)), 1 / (1 + np.exp(theta - lam))
    mean, s2 = p.sum(), (p * q).sum()
    r = L / 3 + np.sqrt(L * L / 9 + 2 * L * s2)
    counts = np.arange(at_least, k + 1)
    counts, end = counts[abs(counts - mean) <= max(r, abs(mean - k), abs(mean - at_least))], k if lam >= 0 else at_least
    M = int(min(np.ceil(r + abs(counts - mean).max()), n + 1)) | 1  # [nodes] odd, so that no u is 0
    t = 2 * np.pi * np.arange((M + 1) // 2) / M
    t = t[s2 * (1 - np.cos(t)) <= L + 3][:, None]
    d = np.exp(1j * t) - 1  # [node]
    u = 1 + p * d
    c = np.where(t == 0, 1, 2) * u.prod(1, keepdims=True)  # nodes t and -t are conjugate
    c = c * (np.exp(lam * (counts - end)) * np.exp(-1j * t * counts)).sum(1, keepdims=True)
    window, c, v = c.real.sum() / M, c / c.real.sum(), 1 / u
    y = p + p * q * (c * d * v).real.sum(0)  # [relax]
    z = z - ((z * p * q).sum() / s2 if at_least == k else 0)
    A = d * (v * z * p * q).sum(1, keepdims=True)  # [A]
    A = A - (c * A).real.sum()
    product = p * q * (c * (z * (1 + d) * v**2 + d * v * A)).real.sum(0)  # [Hz]
    return lam * end + np.logaddexp(0, theta - lam).sum() + np.log(window), y, product  # [value]


def _tilt(theta: Array, k: int, at_least: int) -> float:
    """[tilt] The one with the mean k or at_least; 0 if the mean without a tilt is between them."""
    mean = (1 / (1 + np.exp(-theta))).sum()
    goal, low, high = min(max(mean, at_least), k), theta.min() - 40 - np.log(len(theta)), theta.max() + 40
    high += np.log(len(theta))
    while goal != mean and high - low > 1e-9:
        lam = (low + high) / 2
        low, high = (lam, high) if (1 / (1 + np.exp(lam - theta))).sum() > goal else (low, lam)
    return 0.0 if goal == mean else (low + high) / 2


def sample(theta: Array, uniforms: Array, lattice: Lattice, regularizer: Choice) -> Array:
    """A selection (n,) from uniform numbers (n,) in [0, 1), by ancestral sampling from the last choice to the first.
    Only the first number of each choice is used."""
    _, P = tables(theta, lattice, regularizer)
    weights, uniforms = _options(lattice.weights, lattice), uniforms[:: lattice.options or 1]
    y, c = np.zeros(P.shape[:2]), int(lattice.capacity)
    for k in reversed(range(len(P))):
        reached = np.cumsum(P[k, ::-1, c])[::-1]  # of this option and those after it
        last = np.flatnonzero(uniforms[k] < reached)
        picked = last[-1] if len(last) else np.flatnonzero(P[k, :, c])[0]  # [sample]
        y[k, picked] = 1
        c -= weights[k, picked]
    return _items(y, lattice) + 0 * P.sum()  # NaN stays NaN


def solve(theta: Array, lattice: Lattice) -> Array:
    """The best selection (n,); of ties, the one that skips the later item or takes the earlier option."""
    return sample(theta, np.full(len(theta), 0.5), lattice, Hard)


def log_prob(theta: Array, y: Array, lattice: Lattice, regularizer: Choice) -> Any:
    """The log-probability of a selection y (n,); -inf if it is infeasible or never drawn."""
    _, P = tables(theta, lattice, regularizer)
    weights, taken = _options(lattice.weights, lattice), _options(y, lattice) != 0
    if not lattice.options:
        taken[:, 0] = ~taken[:, 1]
    if np.isnan(P).any():
        return np.nan
    if (taken.sum(1) != 1).any():
        return -np.inf
    probability, c = 1.0, int(lattice.capacity)
    for k in reversed(range(len(P))):
        if c < 0:
            return -np.inf
        probability *= P[k, taken[k], c][0]  # [log-prob]
        c -= weights[k, taken[k]][0]
    with np.errstate(divide="ignore"):
        return np.log(probability)
