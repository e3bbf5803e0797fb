"""Paths through the table of an instance: drawing selections, their log-probabilities, the most probable one.

A pick that several budgets do not allow has a probability of 0 in the table, so no digits are looked at here.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton import instances
from knapgrad.kernels.triton.instances import fill
from knapgrad.kernels.triton.memory import collect_any_row, line_of, start_of, tiles_of
from knapgrad.kernels.triton.steps import (
    band_of,
    first_prefix,
    is_live,
    limits_of,
    scale_of,
    settled,
    sides_of,
    start_row,
    weight_of,
)

NUMBERS = [*instances.NUMBERS, "whole", "samples"]


@triton.jit
def harden(weights, C, total, goal, slack, sides, n, M, Q, width, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """[mode]: a hard sweep M over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    new_M = M + width
    start_row(M, goal if len(sides) > 0 else -1, 0.0, BLOCK)
    tl.debug_barrier()
    prefix = first_prefix(total, goal, sides)
    for i in range(n):
        w = weight_of(weights, i, C)
        old_knee, old_top, _ = band_of(prefix, total, goal, slack, SLACK)
        prefix += w
        knee, top, low = band_of(prefix, total, goal, slack, SLACK)
        first = line_of(low)
        begin, end, stride, lower, upper = tiles_of(first, knee, top, slack, 0, 1, SLACK, BLOCK)
        for t in range(begin, end, stride):
            c = start_of(t, first, lower, upper, SLACK, BLOCK) + tl.arange(0, BLOCK)
            live, fits = (c >= low) & is_live(c, knee, top, slack, SLACK), c >= w
            has_skip, has_pick = live, live & fits
            if SLACK:
                has_skip, has_pick = has_skip & (c <= old_top), has_pick & (c - w <= old_top)
            q = tl.load(Q + c, live, 0.0)
            pick = tl.load(M + settled(c - w, old_knee, slack, SLACK), has_pick, 0.0) + log_chance(q)
            skip = tl.load(M + settled(c, old_knee, slack, SLACK), has_skip, 0.0) + log_chance(1.0 - q)
            better = fits & (pick > skip)
            tl.store(new_M + c, tl.where(better, pick, skip), mask=live)
            tl.store(Q + c, tl.where(better, 1.0, 0.0) + 0.0 * q, mask=live)
        tl.debug_barrier()
        M, new_M = new_M, M
        Q += width


@triton.jit
def log_chance(q):
    return tl.where(q > 0.0, tl.log(tl.where(q > 0.0, q, 1.0).to(tl.float64)), -1e30)


@triton.jit(do_not_specialize=NUMBERS)
def sample_kernel(
    theta, uniforms, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, inner, plane,
    weights_step, capacity_step, slack_step, gamma_step,
    y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, DRAW: tl.constexpr, HARDEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[sample], LANES paths at a time; if not DRAW, the more probable branch each time, or with HARDEN the mode.
    FILLED: tables are given, one per instance. These are ``batch`` instances of ``whole``, the stride of samples."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q = tables + (tl.cast(b, tl.int64) if FILLED else program) * n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, n, tl.int64, SLACK, BOX, BLOCK
        )
        if not FILLED:
            fill(
                theta + items, theta, own, capacity + b * capacity_step,
                scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total.to(tl.int32), goal, spare, sides, n,
                V, Q, Q, Q, width, VALUE, PROB, DPROB, None, SLACK, NARROW, BLOCK,
            )  # fmt: skip
        if HARDEN:
            harden(own, C, total, goal, spare, sides, n, V, Q, width, SLACK, BLOCK)
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            taint = tl.zeros([LANES], Q.dtype.element_ty)
            prefix = total
            row = Q + tl.cast(n - 1, tl.int64) * width
            for j in range(n):
                i = n - 1 - j
                w = weight_of(own, i, C)
                knee, _, _ = band_of(prefix, total, goal, spare, SLACK)
                c = settled(c, knee, spare, SLACK)
                q = tl.load(row + c, live, 0.0)
                u = 0.5
                if DRAW:
                    u = tl.load(uniforms + at + i, live, 0.0)
                taint += 0.0 * q  # a NaN stays
                tl.store(y + at + i, (u < q).to(Q.dtype.element_ty) + taint, mask=live)
                c = tl.where(u < q, c - w, c)
                prefix -= w
                row -= width
        tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def log_prob_kernel(
    theta, selections, cotangent, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, inner, plane,
    weights_step, capacity_step, slack_step, gamma_step,
    log_prob, gradient, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, BACKWARDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[log-prob] along the path of each selection; BACKWARDS, an E sweep that receives terms along those paths."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q = tables + (tl.cast(b, tl.int64) if FILLED else program) * n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, n, tl.int64, SLACK, BOX, BLOCK
        )
        if not FILLED:
            fill(
                theta + items, theta, own, capacity + b * capacity_step,
                scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total.to(tl.int32), goal, spare, sides, n,
                V, Q, Q, Q, width, VALUE, PROB, DPROB, None, SLACK, NARROW, BLOCK,
            )  # fmt: skip
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            result = tl.zeros([LANES], Q.dtype.element_ty)
            A = rows + program * 2 * width
            new_A = A + width
            weight = result
            above = tl.zeros([BLOCK], Q.dtype.element_ty)
            if BACKWARDS:
                weight = tl.load(cotangent + s.to(tl.int64) * whole + b, live, 0.0)
                tl.store(A + goal, 0.0)
                tl.debug_barrier()
            prefix = total
            row = Q + tl.cast(n - 1, tl.int64) * width
            for j in range(n):
                i = n - 1 - j
                w = weight_of(own, i, C)
                knee, top, low = band_of(prefix, total, goal, spare, SLACK)
                prefix -= w
                new_knee, new_top, first = band_of(prefix, total, goal, spare, SLACK)
                c = tl.maximum(
                    settled(tl.minimum(c, top), knee, spare, SLACK), low
                )  # an infeasible path leaves the band
                q = tl.load(row + c, live, 0.0)
                picked = tl.load(selections + at + i, live, 0.0) != 0.0
                chance = tl.where(picked, q, 1.0 - q)
                result += tl.log(chance)
                if BACKWARDS:
                    sums, above, _ = collect_any_row(
                        A, new_A, A, A, row, row, above, above, w, low, knee, top, line_of(first), new_knee, new_top,
                        spare, 0, 1, width, None, SLACK, BLOCK,
                    )  # fmt: skip
                    slope = DPROB(q)
                    used = live & (c >= w) & (weight != 0.0)
                    seed = tl.where(used, weight * tl.where(picked, slope, -slope) / chance, 0.0)
                    earlier = tl.load(gradient + items + i)
                    tl.debug_barrier()
                    tl.store(gradient + items + i, tl.sum(sums) + tl.sum(seed) + earlier)
                    tl.atomic_add(new_A + settled(c - w, new_knee, spare, SLACK), seed, mask=used)
                    tl.atomic_add(new_A + settled(c, new_knee, spare, SLACK), -seed, mask=used)
                    tl.debug_barrier()
                    A, new_A = new_A, A
                c = tl.where(picked, c - w, c)
                row -= width
            if not BACKWARDS:
                tl.store(log_prob + s.to(tl.int64) * whole + b, result, mask=live)
        tl.debug_barrier()
