"""Rows in registers: up to 128 capacities, 512 in small batches, shifted by a gather among threads."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.steps import INFEASIBLE, can_pick, decide, follow, score_of, weight_of


@triton.jit
def fill_registers(
    theta, z, weights, scale, C, slack, sides, n, Q, R,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = Q.dtype.element_ty
    c = tl.arange(0, BLOCK)
    V = tl.zeros([BLOCK], tl.float64)
    if SLACK:
        V = tl.where(c <= slack, V, INFEASIBLE)
    T = tl.zeros([BLOCK], dtype)
    w, score = weight_of(weights, 0, C), score_of(theta, 0, scale)
    for i in range(n):
        later = tl.minimum(i + 1, n - 1)
        next_w, next_score = weight_of(weights, later, C), score_of(theta, later, scale)
        fits, below = can_pick(c, w, sides), tl.maximum(c - w, 0)
        V, q = decide(V, tl.gather(V, below, 0) + score, fits, VALUE, PROB, dtype)
        tl.store(Q + c, q)
        if SOURCE is not None:
            T, r = follow(T, tl.gather(T, below, 0), q, tl.load(z + i), fits, DPROB, SOURCE)
            tl.store(R + c, r)
        w, score = next_w, next_score
        Q += BLOCK
        R += BLOCK
    return V, T


@triton.jit
def collect_registers(weights, y, C, n, Q, R, SOURCE: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    E = (c == C).to(Q.dtype.element_ty)
    D = tl.zeros_like(E)
    w = weight_of(weights, n - 1, C)
    # Three rows ahead: loads take longer than a step.
    q1, q2, q3 = tl.load(Q + c), tl.load(Q + c - (n > 1) * BLOCK), tl.load(Q + c - tl.minimum(n - 1, 2) * BLOCK)
    if SOURCE is not None:
        r1, r2, r3 = tl.load(R + c), tl.load(R + c - (n > 1) * BLOCK), tl.load(R + c - tl.minimum(n - 1, 2) * BLOCK)
    for j in range(n):
        i = n - 1 - j
        next_w = weight_of(weights, tl.maximum(i - 1, 0), C)
        ahead = tl.minimum(i, 3) * BLOCK
        q, q1, q2, q3 = q1, q2, q3, tl.load(Q + c - ahead)
        up, inside = tl.minimum(c + w, BLOCK - 1), c + w < BLOCK
        picked = E * q
        if SOURCE is not None:
            r, r1, r2, r3 = r1, r2, r3, tl.load(R + c - ahead)
            change = D * q + E * r
            D = D - change + tl.where(inside, tl.gather(change, up, 0), 0.0)  # [E']
        else:
            change = picked
        if LATER:
            tl.store(Q + c, change)
        else:
            tl.store(y + i, total_of(change, 0, SOURCE))
        E = E - picked + tl.where(inside, tl.gather(picked, up, 0), 0.0)  # [E]
        w = next_w
        Q -= BLOCK
        R -= BLOCK
    if LATER:
        add_up(y, n, Q + BLOCK, BLOCK, SOURCE, BLOCK)


@triton.jit
def total_of(x, axis: tl.constexpr, SOURCE: tl.constexpr):
    """[y], which rounding must not carry beyond 1, or [Hz]."""
    total = tl.sum(x, axis=axis)
    if SOURCE is None:
        total = tl.where(total > 1.0, 1.0, total)
    return total


@triton.jit
def add_up(y, n, parts, width, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the threads of several warps are expensive, so they are done together at the end, from terms that were
    left in rows of Q that are no longer needed."""
    tl.debug_barrier()
    for start in range(0, n, 16):
        i = start + tl.arange(0, 16)
        at = i[:, None] * width + tl.arange(0, BLOCK)[None, :]
        tl.store(y + i, total_of(tl.load(parts + at, (i < n)[:, None], 0.0), 1, SOURCE), mask=i < n)
    tl.debug_barrier()
