"""Paths through the table of an instance of choices, as in :mod:`knapgrad.kernels.triton.paths`."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.many_options import collect_in_loops, depth_of, heaviest_at
from knapgrad.kernels.triton.memory import line_of
from knapgrad.kernels.triton.option_instances import fill
from knapgrad.kernels.triton.options import limits_of_choices
from knapgrad.kernels.triton.paths import NUMBERS, log_chance
from knapgrad.kernels.triton.steps import band_of, scale_of, start_row, weight_of


@triton.jit
def harden(
    weights, C, total, goal, slack, choices, best, P, width, SLACK: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[mode]: a hard sweep over the log-probabilities of the options, which then stand in the table as 0 and 1."""
    new_best = best + width
    start_row(best, slack if SLACK else 0, 0.0, BLOCK)
    tl.debug_barrier()
    prefix = tl.zeros_like(total)
    for k in range(choices):
        _, old_top, _ = band_of(prefix, total, goal, slack, SLACK)
        prefix += heaviest_at(weights, k, C, M)
        _, top, low = band_of(prefix, total, goal, slack, SLACK)
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


@triton.jit(do_not_specialize=NUMBERS)
def sample_kernel(
    theta, uniforms, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, weights_step, capacity_step, slack_step, gamma_step,
    y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr,
    GAMMAS: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, DRAW: tl.constexpr, HARDEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[sample], LANES paths at a time; if not DRAW, the most probable option each time, or with HARDEN the mode.
    FILLED: tables are given, one per instance. These are ``batch`` instances of ``whole``, the stride of samples."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V = V_rows + program * (2 * width + nodes)
    choices, table = n // M, tl.cast(n, tl.int64) * width
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        P = tables + (tl.cast(b, tl.int64) if FILLED else program) * table
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of_choices(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, choices, False, SLACK, M, BLOCK
        )
        if not FILLED:
            fill(
                theta + items, theta, own, capacity + b * capacity_step,
                scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total, goal, spare, choices, V, V, P, P, width,
                VALUE, PROB, DPROB, None, SLACK, True, LOOPS, M, BLOCK,
            )  # fmt: skip
        if HARDEN:
            harden(own, C, total, goal, spare, choices, V, P, width, SLACK, M, BLOCK)
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            taint = tl.zeros([LANES], P.dtype.element_ty)
            prefix = total
            row = P + table - M * width
            for j in range(choices):
                k = choices - 1 - j
                _, top, low = band_of(prefix, total, goal, spare, SLACK)
                prefix -= heaviest_at(own, k, C, M)
                c = tl.maximum(tl.minimum(c, top), low)
                u = 0.5
                if DRAW:
                    u = tl.load(uniforms + at + k * M, live, 0.0)
                option = tl.full([LANES], -1, tl.int32)
                possible = tl.zeros([LANES], tl.int32)
                reached = tl.zeros([LANES], P.dtype.element_ty)
                for i in range(M):
                    o = M - 1 - i
                    p = tl.load(row + o * width + c, live, 0.0)
                    reached += p
                    option = tl.where((option < 0) & (u < reached), o, option)
                    possible = tl.where(p > 0.0, o, possible)
                option = tl.where(option < 0, possible, option)  # by rounding
                taint += 0.0 * reached  # a NaN stays
                for o in range(M):
                    picked = tl.where(option == o, 1.0, 0.0).to(P.dtype.element_ty)
                    tl.store(y + at + k * M + o, picked + taint, mask=live)
                c -= weight_of(own, k * M + option, C)
                row -= M * width
        tl.debug_barrier()


@triton.jit
def seed_of(
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


@triton.jit(do_not_specialize=NUMBERS)
def log_prob_kernel(
    theta, selections, cotangent, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, weights_step, capacity_step, slack_step, gamma_step,
    log_prob, gradient, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr,
    GAMMAS: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, BACKWARDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[log-prob] along the path of each selection; BACKWARDS, an E sweep that receives terms along those paths."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V = V_rows + program * (2 * width + nodes)
    choices, table = n // M, tl.cast(n, tl.int64) * width
    dtype: tl.constexpr = tables.dtype.element_ty
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        P = tables + (tl.cast(b, tl.int64) if FILLED else program) * table
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of_choices(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, choices, False, SLACK, M, BLOCK
        )
        if not FILLED:
            fill(
                theta + items, theta, own, capacity + b * capacity_step,
                scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total, goal, spare, choices, V, V, P, P, width,
                VALUE, PROB, DPROB, None, SLACK, True, LOOPS, M, BLOCK,
            )  # fmt: skip
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            result = tl.zeros([LANES], dtype)
            A = rows + program * (2 * width + nodes)
            new_A = A + width
            weight = result
            row = P + table - M * width
            above = tl.zeros([BLOCK], dtype)
            if BACKWARDS:
                above += 0.0 * tl.load(row + goal)  # a NaN reaches all
                weight = tl.load(cotangent + s.to(tl.int64) * whole + b, live, 0.0)
                tl.store(A + goal, 0.0)
                tl.debug_barrier()
            prefix = total
            for j in range(choices):
                k = choices - 1 - j
                _, top, low = band_of(prefix, total, goal, spare, SLACK)
                prefix -= heaviest_at(own, k, C, M)
                _, new_top, first = band_of(prefix, total, goal, spare, SLACK)
                c = tl.maximum(tl.minimum(c, top), low)  # an infeasible path leaves the band
                option, count = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
                for o in range(M):
                    picked = tl.load(selections + at + k * M + o, live, 0.0) != 0.0
                    option, count = tl.where(picked, o, option), count + picked.to(tl.int32)
                chance = tl.load(row + option * width + c, live, 1.0)
                result += tl.log(chance) + tl.where(count == 1, 0.0, float("-inf"))
                if BACKWARDS:
                    above, _ = collect_in_loops(
                        A, new_A, A, A, row, row, above, above, gradient + items, own, k, C, low, top, line_of(first),
                        new_top, width, None, SLACK, False, True, M, BLOCK,
                    )  # fmt: skip
                    tl.debug_barrier()
                    seed_of(
                        row, new_A, gradient + items, c, option, weight, live & (weight != 0.0), own, k, C, new_top,
                        width, DPROB, SLACK, M,
                    )  # fmt: skip
                    tl.debug_barrier()
                    A, new_A = new_A, A
                c -= weight_of(own, k * M + option, C)
                row -= M * width
            if not BACKWARDS:
                tl.store(log_prob + s.to(tl.int64) * whole + b, result, mask=live)
        tl.debug_barrier()
