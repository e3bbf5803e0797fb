"""Rows in memory, two of each kind in turn, worked on in tiles of BLOCK capacities with one barrier per item.

Only the live band is touched (:func:`knapgrad.kernels.triton.steps.band_of`): its lower part, up to the knee, and its
upper one, from the slack to the top. Reads from the constant part between them go to the knee.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.registers import add_up, total_of
from knapgrad.kernels.triton.steps import (
    INFEASIBLE,
    band_of,
    can_pick,
    decide,
    first_prefix,
    follow,
    is_live,
    score_of,
    settled,
    start_row,
    weight_of,
)  # fmt: skip


@triton.jit
def line_of(c):
    """Tiles start with a line of memory: stores of whole lines are cheaper, even with cells that nobody will read."""
    return c // 32 * 32


# With a GAP tiles are counted; else they are found by where they begin.


@triton.jit
def tiles_of(first, knee, top, slack, tile, step, GAP: tl.constexpr, BLOCK: tl.constexpr):
    """The range of every ``step``-th tile from number ``tile`` on; how many are in the lower part of a band, which
    begins at ``first``, and where the upper part begins."""
    if GAP:
        lower = tl.maximum(knee - first + BLOCK, 0) // BLOCK
        upper = tl.maximum(line_of(slack + 1), first + lower * BLOCK)
        return tile, lower + tl.maximum(top - upper + BLOCK, 0) // BLOCK, step, lower, upper
    else:
        return first + tile * BLOCK, top + 1, step * BLOCK, first, first


@triton.jit
def start_of(t, first, lower, upper, GAP: tl.constexpr, BLOCK: tl.constexpr):
    """Where a tile begins."""
    if GAP:
        return tl.where(t < lower, first + t * BLOCK, upper + (t - lower) * BLOCK)
    else:
        return t


@triton.jit
def fill_row(
    V, new_V, T, new_T, Q, R, score, z, w, sides, old_knee, old_top, first, knee, top, slack, tile, step, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    GAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills every ``step``-th tile from number ``tile`` on."""
    begin, end, stride, lower, upper = tiles_of(first, knee, top, slack, tile, step, GAP, BLOCK)
    for t in range(begin, end, stride):
        c = start_of(t, first, lower, upper, GAP, BLOCK) + tl.arange(0, BLOCK)
        within, fits = c < width, can_pick(c, w, sides)
        at, below, has_skip, has_pick = c, c - w, within, within & fits
        if SLACK:
            has_skip, has_pick = has_skip & (c <= old_top), has_pick & (c - w <= old_top)
        if GAP or not SLACK:
            at, below = settled(at, old_knee, slack, SLACK), settled(below, old_knee, slack, SLACK)
        none: tl.constexpr = INFEASIBLE if SLACK else 0.0  # without slack only cells that nobody reads
        skip, pick = tl.load(V + at, has_skip, none), tl.load(V + below, has_pick, none) + score
        value, q = decide(skip, pick, fits, VALUE, PROB, Q.dtype.element_ty)
        tl.store(new_V + c, value, mask=within)
        tl.store(Q + c, q, mask=within, cache_modifier=".cs")  # streamed: the rows should stay in cache
        if SOURCE is not None:
            skip, pick = tl.load(T + at, has_skip, 0.0), tl.load(T + below, has_pick, 0.0)
            tangent, r = follow(skip, pick, q, z, fits, DPROB, SOURCE)
            tl.store(new_T + c, tangent, mask=within)
            tl.store(R + c, r, mask=within, cache_modifier=".cs")


@triton.jit
def fill_any_row(
    V, new_V, T, new_T, Q, R, score, z, w, sides, old_knee, old_top, first, knee, top, slack, tile, step, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills a row with a gap or without: where all of the capacity must be used there is none, which is faster."""
    if SLACK:
        if old_knee < slack:
            fill_row(
                V, new_V, T, new_T, Q, R, score, z, w, sides, old_knee, old_top, first, knee, top, slack, tile, step,
                width, VALUE, PROB, DPROB, SOURCE, True, True, BLOCK,
            )  # fmt: skip
        else:
            fill_row(
                V, new_V, T, new_T, Q, R, score, z, w, sides, old_knee, old_top, first, knee, top, slack, tile, step,
                width, VALUE, PROB, DPROB, SOURCE, True, False, BLOCK,
            )  # fmt: skip
    else:
        fill_row(
            V, new_V, T, new_T, Q, R, score, z, w, sides, old_knee, old_top, first, knee, top, slack, tile, step, width,
            VALUE, PROB, DPROB, SOURCE, False, False, BLOCK,
        )  # fmt: skip


@triton.jit
def load_once(pointers, mask):
    return tl.load(pointers, mask, 0.0, eviction_policy="evict_first")


@triton.jit
def at_knee(table, knee, low, SLACK: tl.constexpr):
    """What a row of a table has there, or 0 where the knee is not in its band."""
    if SLACK:
        return tl.load(table + tl.maximum(knee, 0), knee >= low, 0.0)
    else:
        return tl.load(table + knee)


@triton.jit
def collect_row(
    E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack, tile, step, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, GAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns what adds up to [y], or in a direction to [Hz], and what is above the knee after this step.

    States in the constant part of a row decide like the knee, and lead to the constant part whatever they decide. So
    what arrives there is added up, lane by lane, outside of the rows.
    """
    if GAP or not SLACK:
        if SOURCE is None:
            result = above_e * at_knee(Q, knee, low, SLACK)
        else:
            result = above_d * at_knee(Q, knee, low, SLACK) + above_e * at_knee(R, knee, low, SLACK)
    else:
        result = above_e  # nothing but a NaN, of an infeasible instance
    begin, end, stride, lower, upper = tiles_of(first, knee, top, slack, tile, step, GAP, BLOCK)
    for t in range(begin, end, stride):
        c = start_of(t, first, lower, upper, GAP, BLOCK) + tl.arange(0, BLOCK)
        up = c + w
        here = (c >= low) & is_live(c, knee, top, slack, GAP)
        fits = (up >= low) & is_live(up, knee, top, slack, GAP)
        stays = is_live(c, new_knee, new_top, slack, GAP)
        q, q_up = load_once(Q + c, here), load_once(Q + up, fits)
        e, e_up = tl.load(E + c, here, 0.0), tl.load(E + up, fits, 0.0)
        picked = e * q
        tl.store(new_E + c, e - picked + e_up * q_up, mask=c < width)  # [E]
        above_e += tl.where(stays, 0.0, e - picked)
        if GAP:  # a pick from the upper part may come into the constant one
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
            if GAP:
                above_d += tl.where(lands, change, 0.0)
            result += change
    return result, above_e, above_d


@triton.jit
def collect_any_row(
    E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack, tile, step, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects from a row with a gap or without, as collect_row."""
    if SLACK:
        if new_knee < slack:
            result, above_e, above_d = collect_row(
                E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack,
                tile, step, width, SOURCE, True, True, BLOCK,
            )  # fmt: skip
        else:
            result, above_e, above_d = collect_row(
                E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack,
                tile, step, width, SOURCE, True, False, BLOCK,
            )  # fmt: skip
    else:
        result, above_e, above_d = collect_row(
            E, new_E, D, new_D, Q, R, above_e, above_d, w, low, knee, top, first, new_knee, new_top, slack,
            tile, step, width, SOURCE, False, False, BLOCK,
        )  # fmt: skip
    return result, above_e, above_d


@triton.jit
def collect_memory(
    weights, y, C, total, slack, n, E, D, Q, R, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects from the last item to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D = E + width, D + width
    above_e = tl.zeros([BLOCK], Q.dtype.element_ty)
    above_d = above_e
    prefix, w = total, weight_of(weights, n - 1, C)
    for j in range(n):
        i = n - 1 - j
        next_w = weight_of(weights, tl.maximum(i - 1, 0), C)
        knee, top, low = band_of(prefix, total, C, slack, SLACK)
        prefix -= w
        new_knee, new_top, first = band_of(prefix, total, C, slack, SLACK)
        result, above_e, above_d = collect_any_row(
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
    theta, z, weights, scale, C, total, slack, sides, n, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills from the first item to the last; V and T are two rows each. Returns the last ones."""
    new_V, new_T = V + width, T + width
    end = slack if len(sides) > 0 else -1
    start_row(V, end, tl.where(slack < 0, INFEASIBLE, 0.0).to(tl.float64), BLOCK)
    if SOURCE is not None:
        start_row(T, end, 0.0, BLOCK)
    tl.debug_barrier()
    prefix = first_prefix(total, C, sides)
    w, score = weight_of(weights, 0, C), score_of(theta, 0, scale)
    for i in range(n):
        later = tl.minimum(i + 1, n - 1)
        next_w, next_score = weight_of(weights, later, C), score_of(theta, later, scale)
        z_i = tl.load(z + i)
        old_knee, old_top, _ = band_of(prefix, total, C, slack, SLACK)
        prefix += w
        knee, top, low = band_of(prefix, total, C, slack, SLACK)
        fill_any_row(
            V, new_V, T, new_T, Q, R, score, z_i, w, sides, old_knee, old_top, line_of(low), knee, top, slack, 0, 1,
            width, VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        w, score = next_w, next_score
        Q += width
        R += width
    return V, T
