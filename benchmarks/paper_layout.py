"""Baseline (a): the paper's Algorithms 1 to 4 as they are printed, in Numba.

Float64 tables V, Q and E of shape (batch, n + 1, C + 1) are kept from the forward to the backward pass, the batch runs
in parallel, exp, log and pow are libm's. It departs from the print in two places, to be right: loops start at c = 0
(items of weight 0 can be picked there), and a branch is tested for -inf before anything is subtracted from it.
The tables are allocated once and warm when the clock runs: this is the layout at its best.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

INFEASIBLE = -math.inf


# Per regularizer: the smoothed maximum, the probability of picking and its derivative, by the paper's table, gamma = 1.
@njit
def shannon_max(pick, skip):
    return max(pick, skip) + math.log(1.0 + math.exp(-abs(pick - skip)))


@njit
def shannon_prob(pick, skip):
    return 1.0 / (1.0 + math.exp(skip - pick))


@njit
def shannon_dprob(q):
    return q * (1.0 - q)


@njit
def gini_max(pick, skip):
    q = gini_prob(pick, skip)
    return skip + (pick - skip) * q + q * (1.0 - q)


@njit
def gini_prob(pick, skip):
    return min(1.0, max(0.0, 0.5 * (pick - skip + 1.0)))


@njit
def gini_dprob(q):
    return 0.5 if 0.0 < q < 1.0 else 0.0


@njit
def tsallis_max(pick, skip):
    q = tsallis_prob(pick, skip)
    return skip + (pick - skip) * q + 4.0 / 3.0 * (1.0 - q**1.5 - (1.0 - q) ** 1.5)


@njit
def tsallis_prob(pick, skip):
    half = min(1.0, max(-1.0, 0.5 * (pick - skip)))
    return 0.5 * (1.0 + half * math.sqrt(2.0 - half * half))


@njit
def tsallis_dprob(q):
    return 1.0 / (1.0 / math.sqrt(q) + 1.0 / math.sqrt(1.0 - q)) if 0.0 < q < 1.0 else 0.0


SCALARS = {
    "shannon": (shannon_max, shannon_prob, shannon_dprob),
    "gini": (gini_max, gini_prob, gini_dprob),
    "tsallis": (tsallis_max, tsallis_prob, tsallis_dprob),
}


@njit(parallel=True)
def value_sweep(theta, weights, capacity, exactly, smooth_max, prob, V, Q):
    """Algorithm 1."""
    batch, n = theta.shape
    for b in prange(batch):
        for c in range(capacity + 1):
            V[b, 0, c] = INFEASIBLE if exactly and c > 0 else 0.0
        for i in range(1, n + 1):
            w = weights[i - 1]
            for c in range(capacity + 1):
                skip = V[b, i - 1, c]
                pick = theta[b, i - 1] + V[b, i - 1, c - w] if c >= w else INFEASIBLE
                if pick == INFEASIBLE:
                    V[b, i, c] = skip
                    Q[b, i, c] = 0.0
                elif skip == INFEASIBLE:
                    V[b, i, c] = pick
                    Q[b, i, c] = 1.0
                else:
                    V[b, i, c] = smooth_max(pick, skip)
                    Q[b, i, c] = prob(pick, skip)


@njit(parallel=True)
def layer_sweep(weights, capacity, Q, E, y):
    """Algorithm 2."""
    batch, n = y.shape
    for b in prange(batch):
        for c in range(capacity + 1):
            E[b, n, c] = 0.0
        E[b, n, capacity] = 1.0
        for i in range(n - 1, 0, -1):
            w = weights[i]
            for c in range(capacity + 1):
                e = E[b, i + 1, c] * (1.0 - Q[b, i + 1, c])
                if c + w <= capacity:
                    e += E[b, i + 1, c + w] * Q[b, i + 1, c + w]
                E[b, i, c] = e
        for i in range(1, n + 1):
            total = 0.0
            for c in range(capacity + 1):
                total += E[b, i, c] * Q[b, i, c]
            y[b, i - 1] = total


@njit(parallel=True)
def vjp_sweep(z, weights, capacity, dprob, Q, E, V_dot, E_dot, out):
    """Algorithm 4. It is printed with each cell's second-order term three times; here that is computed once."""
    batch, n = z.shape
    for b in prange(batch):
        for c in range(capacity + 1):
            V_dot[b, 0, c] = 0.0
        for i in range(1, n + 1):
            w = weights[i - 1]
            for c in range(capacity + 1):
                v = V_dot[b, i - 1, c] * (1.0 - Q[b, i, c])
                if c >= w:
                    v += (V_dot[b, i - 1, c - w] + z[b, i - 1]) * Q[b, i, c]
                V_dot[b, i, c] = v
        for i in range(n + 1):
            for c in range(capacity + 1):
                E_dot[b, i, c] = 0.0
        for i in range(n, 0, -1):
            w = weights[i - 1]
            total = 0.0
            for c in range(capacity + 1):
                E_dot[b, i - 1, c] += E_dot[b, i, c] * (1.0 - Q[b, i, c])
                if c >= w:
                    slope = V_dot[b, i - 1, c - w] - V_dot[b, i - 1, c] + z[b, i - 1]
                    bend = E[b, i, c] * slope * dprob(Q[b, i, c])
                    total += E_dot[b, i, c] * Q[b, i, c] + bend
                    E_dot[b, i - 1, c] -= bend
                    E_dot[b, i - 1, c - w] += E_dot[b, i, c] * Q[b, i, c] + bend
            out[b, i - 1] = total


@njit(parallel=True)
def sample_sweep(uniforms, weights, capacity, Q, out):
    """Algorithm 3, for every instance and every sample."""
    samples, batch, n = uniforms.shape
    for b in prange(batch):
        for s in range(samples):
            c = capacity
            for i in range(n - 1, -1, -1):
                picked = uniforms[s, b, i] < Q[b, i + 1, c]
                out[s, b, i] = 1.0 if picked else 0.0
                if picked:
                    c -= weights[i]


class PaperLayout:
    """The five tables of one shape, and the sweeps on them."""

    def __init__(self, batch: int, items: int, capacity: int, exactly: bool, regularizer: str) -> None:
        table = (batch, items + 1, capacity + 1)
        self.V, self.Q, self.E, self.V_dot, self.E_dot = (np.zeros(table) for _ in range(5))
        self.y, self.product = np.zeros((batch, items)), np.zeros((batch, items))
        self.capacity, self.exactly = capacity, exactly
        self.smooth_max, self.prob, self.dprob = SCALARS[regularizer]

    def forward(self, theta: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Smoothed value and relaxed selection of float64 ``theta (batch, n)`` with shared ``weights (n,)``."""
        value_sweep(theta, weights, self.capacity, self.exactly, self.smooth_max, self.prob, self.V, self.Q)
        layer_sweep(weights, self.capacity, self.Q, self.E, self.y)
        return self.V[:, -1, self.capacity], self.y

    def vjp(self, z: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The Jacobian applied to ``z``; needs the tables of a forward pass."""
        vjp_sweep(z, weights, self.capacity, self.dprob, self.Q, self.E, self.V_dot, self.E_dot, self.product)
        return self.product

    def sample(self, theta: np.ndarray, uniforms: np.ndarray, weights: np.ndarray, out: np.ndarray) -> np.ndarray:
        """0/1 selections ``(samples, batch, n)``, one for each row of ``uniforms``."""
        value_sweep(theta, weights, self.capacity, self.exactly, self.smooth_max, self.prob, self.V, self.Q)
        sample_sweep(uniforms, weights, self.capacity, self.Q, out)
        return out

    @property
    def kept_bytes(self) -> int:
        """What has to live from the forward to the backward pass."""
        return self.V.nbytes + self.Q.nbytes + self.E.nbytes
