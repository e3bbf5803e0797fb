"""Rows in memory, two of each kind in turn, worked on in tiles of BLOCK capacities with one barrier per item.

Only the live band is touched (:func:`knapgrad.kernels.triton.steps.band_of`): its lower part, up to the knee, and its
upper one, from the slack to the top. Reads from the constant part between them are turned to the knee.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.registers import add_up, total_of
from knapgrad.kernels.triton.steps import (
    INFEASIBLE,
    band_of,
    decide,
    follow,
    is_live,
    score_of,
    settled,
    weight_of,
)  # fmt: skip


@triton.jit
def line_of(c):
    """Tiles start with a line of memory: stores of whole lines are cheaper, even with cells that nobody will read."""
    return c // 32 * 32


@triton.jit
def tiles_of(first, knee, top, slack, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles from ``first`` on are in the lower part of a band, where the upper part starts, and how many tiles
    both have."""
    lower = tl.maximum(knee - first + BLOCK, 0) // BLOCK
    if SLACK:
        upper = tl.maximum(line_of(slack + 1), first + lower * BLOCK)
        return lower, upper, lower + tl.maximum(top - upper + BLOCK, 0) // BLOCK
    else:
        return lower, first, lower


@triton.jit
def tile_of(t, first, lower, upper, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """Where a tile begins."""
    if SLACK:
        return tl.where(t < lower, first + t * BLOCK, upper + (t - lower) * BLOCK)
    else:
        return first + t * BLOCK


@triton.jit
def fill_row(
    V, new_V, T, new_T, Q, R, score, z, w, old_knee, old_top, first, knee, top, slack, tile, step, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From ``tile`` on every ``step``-th tile."""
    lower, upper, tiles = tiles_of(first, knee, top, slack, SLACK, BLOCK)
    for t in range(tile, tiles, step):
        c = tile_of(t, first, lower, upper, SLACK, BLOCK) + tl.arange(0, BLOCK)
        within, fits = c < width, c >= w
        at, below = settled(c, old_knee, slack, SLACK), settled(c - w, old_knee, slack, SLACK)
        can_skip, can_pick = within, within & fits
        if SLACK:
            can_skip, can_pick = can_skip & (c <= old_top), can_pick & (c - w <= old_top)
        skip = tl.load(V + at, can_skip, INFEASIBLE)
        pick = tl.load(V + below, can_pick, INFEASIBLE) + score
        value, q = decide(skip, pick, fits, VALUE, PROB, Q.dtype.element_ty)
        tl.store(new_V + c, value, mask=within)
        tl.store(Q + c, q, mask=within, cache_modifier=".cs")  # streamed: the rows should stay in cache
        if SOURCE is not None:
            skip, pick = tl.load(T + at, can_skip, 0.0), tl.load(T + below, can_pick, 0.0)
            tangent, r = follow(skip, pick, q, z, fits, DPROB, SOURCE)
            tl.store(new_T + c, tangent, mask=within)
            tl.store(R + c, r, mask=within, cache_modifier=".cs")


@triton.jit
def load_once(pointers, mask):
    return tl.load(pointers, mask, 0.0, eviction_policy="evict_first")


@triton.jit
def collect_row(
    E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack, tile, step, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns what adds up to [y], or in a direction to [Hz], and what is above the knee after this step.

    States in the constant part of a row decide like the knee, and stay there whatever they decide: what comes there is
    gathered, lane by lane, and leaves the rows.
    """
    if SLACK:
        at_knee, is_there = tl.maximum(knee, 0), knee >= low
        q_knee = tl.load(Q + at_knee, is_there, 0.0)
    else:
        q_knee = tl.load(Q + knee)
    if SOURCE is None:
        result = above_e * q_knee
    else:
        if SLACK:
            r_knee = tl.load(R + at_knee, is_there, 0.0)
        else:
            r_knee = tl.load(R + knee)
        result = above_d * q_knee + above_e * r_knee
    lower, upper, tiles = tiles_of(first, knee, top, slack, SLACK, BLOCK)
    for t in range(tile, tiles, step):
        c = tile_of(t, first, lower, upper, SLACK, BLOCK) + tl.arange(0, BLOCK)
        up = c + w
        here = (c >= low) & is_live(c, knee, top, slack, SLACK)
        fits = (up >= low) & is_live(up, knee, top, slack, SLACK)
        stays = is_live(c, new_knee, new_top, slack, SLACK)
        q, q_up = load_once(Q + c, here), load_once(Q + up, fits)
        e, e_up = tl.load(E + c, here, 0.0), tl.load(E + up, fits, 0.0)
        picked = e * q
        tl.store(new_E + c, e - picked + e_up * q_up, mask=c < width)  # [E]
        above_e += tl.where(stays, 0.0, e - picked)
        if SLACK:  # a pick from the upper part may come into the constant one
            lands = (c - w > new_knee) & (c - w <= slack)
            above_e += tl.where(lands, picked, 0.0)
        if SOURCE is None:
            result += picked
        else:
            r, r_up = load_once(R + c, here), load_once(R + up, fits)
            d, d_up = tl.load(D + c, here, 0.0), tl.load(D + up, fits, 0.0)
            change = d * q + e * r
            tl.store(new_D + c, d - change + (d_up * q_up + e_up * r_up), mask=c < width)  # [E']
            above_d += tl.where(stays, 0.0, d - change)
            if SLACK:
                above_d += tl.where(lands, change, 0.0)
            result += change
    return result, above_e, above_d


@triton.jit
def collect_memory(
    weights, y, C, total, goal, slack, n, E, D, Q, R, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the last item to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D = E + width, D + width
    above_e = tl.zeros([BLOCK], Q.dtype.element_ty)
    above_d = above_e
    prefix, w = total, weight_of(weights, n - 1, C)
    for j in range(n):
        i = n - 1 - j
        next_w = weight_of(weights, tl.maximum(i - 1, 0), C)
        knee, top, low = band_of(prefix, total, goal, slack, SLACK)
        prefix -= w
        new_knee, new_top, first = band_of(prefix, total, goal, slack, SLACK)
        result, above_e, above_d = collect_row(
            E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, line_of(first), new_knee, new_top, slack,
            0, 1, width, SOURCE, SLACK, BLOCK,
        )  # fmt: skip
        if not LATER:
            tl.store(y + i, total_of(result, 0, SOURCE))
        tl.debug_barrier()
        if LATER:
            tl.store(Q + tl.arange(0, BLOCK), result)
        E, new_E, D, new_D = new_E, E, new_D, D
        w = next_w
        Q -= width
        R -= width
    if LATER:
        add_up(y, n, Q + width, width, SOURCE, BLOCK)


@triton.jit
def fill_memory(
    theta, z, weights, scale, C, total, goal, slack, n, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From the first item to the last; V and T are two rows each. Returns the last ones."""
    new_V, new_T = V + width, T + width
    tl.store(V, tl.where(slack < 0, INFEASIBLE, 0.0).to(tl.float64))
    if SOURCE is not None:
        tl.store(T, 0.0)
    tl.debug_barrier()
    prefix = tl.zeros_like(total)
    w, score = weight_of(weights, 0, C), score_of(theta, 0, scale)
    for i in range(n):
        later = tl.minimum(i + 1, n - 1)
        next_w, next_score = weight_of(weights, later, C), score_of(theta, later, scale)
        z_i = tl.load(z + i)
        old_knee, old_top, _ = band_of(prefix, total, goal, slack, SLACK)
        prefix += w
        knee, top, low = band_of(prefix, total, goal, slack, SLACK)
        fill_row(
            V, new_V, T, new_T, Q, R, score, z_i, w, old_knee, old_top, line_of(low), knee, top, slack, 0, 1, width,
            VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        w, score = next_w, next_score
        Q += width
        R += width
    return V, T
