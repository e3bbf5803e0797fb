"""Choices among so many options that a tree unrolled for them would take minutes to compile: the same in loops.

Nodes of the tree are in memory, [M, BLOCK]: node [low, high) at low. The probability of its decision waits at its
middle in the table, where that of an option will be. BLOCK is the number of threads, so each reads what it wrote.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.memory import load_once
from knapgrad.kernels.triton.registers import total_of
from knapgrad.kernels.triton.steps import INFEASIBLE, score_of, weight_of


@triton.jit
def depth_of(M: tl.constexpr):
    """The depth of the tree."""
    depth = 0
    for level in tl.static_range(20):
        if 1 << level < M:
            depth += 1
    return depth


@triton.jit
def span_of(j, depth, M: tl.constexpr):
    """Node number j at a depth, as (low, middle, high)."""
    low, high = 0 * j, 0 * j + M
    for level in range(depth):
        middle = low + (high - low) // 2
        picked = (j >> (depth - 1 - level)) & 1 == 1
        low, high = tl.where(picked, middle, low), tl.where(picked, high, middle)
    return low, low + (high - low) // 2, high


@triton.jit
def heaviest_at(weights, k, C, M: tl.constexpr):
    """The heaviest weight among the options of choice k."""
    heaviest = weight_of(weights, k * M, C)
    for o in range(1, M):
        heaviest = tl.maximum(heaviest, weight_of(weights, k * M + o, C))
    return heaviest


@triton.jit
def fill_in_loops(
    V, new_V, T, new_T, P, R, V_nodes, T_nodes, theta, z, weights, k, C, scale, old_top, first, top, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    STORED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = P.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    for start in range(first, top + 1, BLOCK):
        c = start + lanes
        within = c < width
        for o in range(M):
            below = c - weight_of(weights, k * M + o, C)
            fits = below >= 0
            if SLACK:
                fits = fits & (below <= old_top)
            else:
                below = tl.minimum(below, old_top)
            value = tl.load(V + below, fits, INFEASIBLE) + score_of(theta, k * M + o, scale)
            tl.store(V_nodes + o * BLOCK + lanes, value)
            if SOURCE is not None:
                tl.store(T_nodes + o * BLOCK + lanes, tl.load(T + below, fits, 0.0) + tl.load(z + k * M + o))
        depth = depth_of(M)
        for level in range(depth):
            for j in range(1 << (depth - 1 - level)):
                low, middle, high = span_of(j, depth - 1 - level, M)
                if high - low > 1:
                    at, other = low * BLOCK + lanes, middle * BLOCK + lanes
                    skip, pick = tl.load(V_nodes + at), tl.load(V_nodes + other)
                    advantage = pick - skip
                    delta = advantage.to(dtype)
                    q = PROB(delta)  # [Q]
                    tl.store(V_nodes + at, tl.where(advantage > 0.0, pick, skip) + VALUE(delta).to(tl.float64))  # [V]
                    if STORED:
                        tl.store(P + middle * width + c, q, mask=within)
                    if SOURCE is not None:
                        skip_t = tl.load(T_nodes + at)
                        added, slope = SOURCE(q, 0.0)
                        change = tl.load(T_nodes + other) - skip_t
                        tl.store(T_nodes + at, skip_t + q * change + added)  # [V']
                        if STORED:
                            tl.store(R + middle * width + c, DPROB(q) * (change + slope), mask=within)  # [Q']
        value = tl.load(V_nodes + lanes)
        tl.store(new_V + c, tl.where(value < INFEASIBLE, INFEASIBLE, value), mask=within)
        if SOURCE is not None:
            tl.store(new_T + c, tl.load(T_nodes + lanes), mask=within)
        if STORED:
            tl.store(P + c, tl.full([BLOCK], 1.0, dtype), mask=within)
            if SOURCE is not None:
                tl.store(R + c, tl.zeros([BLOCK], dtype), mask=within)
            for level in range(depth):
                for j in range(1 << level):
                    low, middle, high = span_of(j, level, M)
                    if high - low > 1:
                        at, other = low * width + c, middle * width + c
                        mass, q = tl.load(P + at, within, 0.0), tl.load(P + other, within, 0.0)
                        tl.store(P + at, mass * (1.0 - q), mask=within)  # [P]
                        tl.store(P + other, mass * q, mask=within)
                        if SOURCE is not None:
                            change, r = tl.load(R + at, within, 0.0), tl.load(R + other, within, 0.0)
                            tl.store(R + at, change * (1.0 - q) - mass * r, mask=within)  # [P']
                            tl.store(R + other, change * q + mass * r, mask=within)


@triton.jit
def collect_in_loops(
    E, new_E, D, new_D, P, R, above_e, above_d, y, weights, k, C, low, top, first, new_top, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, CUT: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores [y] or [Hz]; returns what is above the band after this step."""
    lanes = tl.arange(0, BLOCK)
    new_above_e, new_above_d = above_e, above_d
    for o in range(M):
        w = weight_of(weights, k * M + o, C)
        result = above_e
        if not SLACK:
            result = above_e * tl.load(P + o * width + top)
            if SOURCE is not None:
                result = above_d * tl.load(P + o * width + top) + above_e * tl.load(R + o * width + top)
        for start in range(first, top + 1, BLOCK):
            c = start + lanes
            up = c + w
            here, within = (up >= low) & (up <= top), c < width
            p, e_up = load_once(P + o * width + up, here), tl.load(E + up, here, 0.0)
            change = e_up * p
            tl.store(new_E + c, tl.load(new_E + c, within & (o > 0), 0.0) + change, mask=within)  # [E]
            if not SLACK:
                new_above_e += tl.where(c > new_top, change, 0.0)
            if SOURCE is not None:
                change = tl.load(D + up, here, 0.0) * p + e_up * load_once(R + o * width + up, here)
                tl.store(new_D + c, tl.load(new_D + c, within & (o > 0), 0.0) + change, mask=within)  # [E']
                if not SLACK:
                    new_above_d += tl.where(c > new_top, change, 0.0)
            result += change
        total = total_of(result, 0, SOURCE) if CUT else tl.sum(result)
        if ADD:
            total += tl.load(y + k * M + o)
            tl.debug_barrier()
        tl.store(y + k * M + o, total)
    return new_above_e, new_above_d
