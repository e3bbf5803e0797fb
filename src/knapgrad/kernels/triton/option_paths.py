"""What paths do at a choice among options (:mod:`knapgrad.kernels.triton.paths`)."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.many_options import collect_in_loops, depth_of, heaviest_at
from knapgrad.kernels.triton.memory import line_of
from knapgrad.kernels.triton.steps import band_of, start_row, weight_of


@triton.jit
def log_chance(q):
    return tl.where(q > 0.0, tl.log(tl.where(q > 0.0, q, 1.0).to(tl.float64)), -1e30)


@triton.jit
def draw_choices(
    uniforms, y, weights, C, total, slack, n, P, live, width,
    DRAW: tl.constexpr, SLACK: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Draws the options of a path per lane: the last one whose probability, with those after it, exceeds a random
    number."""
    c = tl.zeros([LANES], tl.int32) + C
    taint = tl.zeros([LANES], P.dtype.element_ty)
    prefix, choices = total, n // M
    P = P + tl.cast(n, tl.int64) * width - M * width
    for j in range(choices):
        k = choices - 1 - j
        _, top, low = band_of(prefix, total, C, slack, SLACK)
        prefix -= heaviest_at(weights, k, C, M)
        c = tl.maximum(tl.minimum(c, top), low)
        u = 0.5
        if DRAW:
            u = tl.load(uniforms + k * M, live, 0.0)
        option = tl.full([LANES], -1, tl.int32)
        possible = tl.zeros([LANES], tl.int32)
        reached = tl.zeros([LANES], P.dtype.element_ty)
        for i in range(M):
            o = M - 1 - i
            p = tl.load(P + o * width + c, live, 0.0)
            reached += p
            option = tl.where((option < 0) & (u < reached), o, option)
            possible = tl.where(p > 0.0, o, possible)
        option = tl.where(option < 0, possible, option)  # by rounding
        taint += 0.0 * reached  # a NaN stays
        for o in range(M):
            picked = tl.where(option == o, 1.0, 0.0).to(P.dtype.element_ty)
            tl.store(y + k * M + o, picked + taint, mask=live)
        c -= weight_of(weights, k * M + option, C)
        P -= M * width


@triton.jit
def weigh_choices(
    selections, gradient, weight, weights, C, total, slack, n, P, A, live, width,
    DPROB: tl.constexpr, SLACK: tl.constexpr, BACKWARDS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Returns the log-probability of each path, or adds its gradient, times a weight; A is two rows."""
    new_A = A + width
    c = tl.zeros([LANES], tl.int32) + C
    result = tl.zeros([LANES], P.dtype.element_ty)
    above = tl.zeros([BLOCK], P.dtype.element_ty)
    prefix, choices = total, n // M
    P = P + tl.cast(n, tl.int64) * width - M * width
    if BACKWARDS:
        above += 0.0 * tl.load(P + C)  # a NaN reaches all
    for j in range(choices):
        k = choices - 1 - j
        _, top, low = band_of(prefix, total, C, slack, SLACK)
        prefix -= heaviest_at(weights, k, C, M)
        _, new_top, first = band_of(prefix, total, C, slack, SLACK)
        c = tl.maximum(tl.minimum(c, top), low)  # an infeasible path leaves the band
        option, count = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
        for o in range(M):
            picked = tl.load(selections + k * M + o, live, 0.0) != 0.0
            option, count = tl.where(picked, o, option), count + picked.to(tl.int32)
        chance = tl.load(P + option * width + c, live, 1.0)
        result += tl.log(chance) + tl.where(count == 1, 0.0, float("-inf"))
        if BACKWARDS:
            above, _ = collect_in_loops(
                A, new_A, A, A, P, P, above, above, gradient, weights, k, C, low, top, line_of(first), new_top, width,
                None, SLACK, False, True, M, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
            seed_choice(
                P, new_A, gradient, c, option, weight, live & (weight != 0.0), weights, k, C, new_top, width,
                DPROB, SLACK, M,
            )  # fmt: skip
            tl.debug_barrier()
            A, new_A = new_A, A
        c -= weight_of(weights, k * M + option, C)
        P -= M * width
    return result


@triton.jit
def seed_choice(
    P, new_A, gradient, c, option, weight, used, weights, k, C, new_top, width,
    DPROB: tl.constexpr, SLACK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The derivative of the log-probability of ``option`` by the scores of all, times a weight: added to the gradient,
    and to the row below. Lane by lane, down the tree to that option."""
    low, high = 0 * option, 0 * option + M
    for _ in range(depth_of(M)):
        middle = low + (high - low) // 2
        skip, pick = tl.zeros_like(weight), tl.zeros_like(weight)
        for o in range(M):
            p = tl.load(P + o * width + c)
            skip += tl.where((o >= low) & (o < middle), p, 0.0)
            pick += tl.where((o >= middle) & (o < high), p, 0.0)
        mass = skip + pick
        q = pick / tl.where(mass == 0.0, 1.0, mass)
        picked, between = option >= middle, used & (high - low > 1)
        slope = tl.where(between, weight * DPROB(q) / tl.where(between, tl.where(picked, q, q - 1.0), 1.0), 0.0)
        skip, pick = -slope / tl.where(skip == 0.0, 1.0, skip), slope / tl.where(pick == 0.0, 1.0, pick)
        for o in range(M):
            inside = between & (o >= low) & (o < high)
            seed = tl.where(inside, tl.where(o < middle, skip, pick) * tl.load(P + o * width + c), 0.0)
            tl.atomic_add(gradient + k * M + o, tl.sum(seed))
            below = c - weight_of(weights, k * M + o, C)
            fits = inside & (below >= 0)
            if SLACK:
                fits = fits & (below <= new_top)
            else:
                below = tl.minimum(below, new_top)
            tl.atomic_add(new_A + below, seed, mask=fits)
        low, high = tl.where(picked, middle, low), tl.where(picked, high, middle)


@triton.jit
def harden_choices(
    weights, C, total, slack, choices, best, P, width, SLACK: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[mode]: a hard sweep over the log-probabilities of the options, which then stand in the table as 0 and 1."""
    new_best = best + width
    start_row(best, slack if SLACK else 0, 0.0, BLOCK)
    tl.debug_barrier()
    prefix = tl.zeros_like(total)
    for k in range(choices):
        _, old_top, _ = band_of(prefix, total, C, slack, SLACK)
        prefix += heaviest_at(weights, k, C, M)
        _, top, low = band_of(prefix, total, C, slack, SLACK)
        for start in range(line_of(low), top + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            live = (c >= low) & (c <= top)
            value, option = tl.full([BLOCK], float("-inf"), tl.float64), tl.zeros([BLOCK], tl.int32)
            for o in range(M):
                below = c - weight_of(weights, k * M + o, C)
                fits = live & (below >= 0)
                if SLACK:
                    fits = fits & (below <= old_top)
                else:
                    below = tl.minimum(below, old_top)
                chance = log_chance(tl.load(P + o * width + c, live, 0.0))
                reached = tl.load(best + below, fits, -1e30) + chance
                better = reached > value
                value, option = tl.where(better, reached, value), tl.where(better, o, option)
            tl.store(new_best + c, value, mask=live)
            for o in range(M):
                p = tl.load(P + o * width + c, live, 0.0)
                tl.store(P + o * width + c, tl.where(option == o, 1.0, 0.0) + 0.0 * p, mask=live)
        tl.debug_barrier()
        best, new_best = new_best, best
        P += M * width
