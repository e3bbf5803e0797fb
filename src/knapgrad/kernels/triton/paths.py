"""Paths through the table of an instance: drawing selections, their log-probabilities, the most probable one.

A path goes from the last step to the first. At each step it looks up its decision, and goes on to a state of the row
before: what items do there is here, what choices do in :mod:`knapgrad.kernels.triton.option_paths`, in functions of the
same names (``draw``, ``weigh`` and ``harden``).

A pick that several budgets do not allow has a probability of 0 in the table, so no digits are looked at here.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton import instances
from knapgrad.kernels.triton.instances import fill, instance_of, table_at
from knapgrad.kernels.triton.memory import collect_any_row, line_of, start_of, tiles_of
from knapgrad.kernels.triton.option_paths import draw_choices, harden_choices, log_chance, weigh_choices
from knapgrad.kernels.triton.steps import band_of, first_prefix, is_live, settled, sides_of, start_row, weight_of

NUMBERS = [*instances.NUMBERS, "whole", "samples"]


@triton.jit
def draw_items(
    uniforms, y, weights, C, total, slack, n, Q, live, width,
    DRAW: tl.constexpr, SLACK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Draws the items of a path per lane."""
    c = tl.zeros([LANES], tl.int32) + C
    taint = tl.zeros([LANES], Q.dtype.element_ty)
    prefix = total
    Q += tl.cast(n - 1, tl.int64) * width
    for j in range(n):
        i = n - 1 - j
        w = weight_of(weights, i, C)
        knee, _, _ = band_of(prefix, total, C, slack, SLACK)
        c = settled(c, knee, slack, SLACK)
        q = tl.load(Q + c, live, 0.0)
        u = 0.5
        if DRAW:
            u = tl.load(uniforms + i, live, 0.0)
        taint += 0.0 * q  # a NaN stays
        tl.store(y + i, (u < q).to(Q.dtype.element_ty) + taint, mask=live)
        c = tl.where(u < q, c - w, c)
        prefix -= w
        Q -= width


@triton.jit
def weigh_items(
    selections, gradient, weight, weights, C, total, slack, n, Q, A, live, width,
    DPROB: tl.constexpr, SLACK: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns the log-probability of each path, or adds its gradient, times a weight; A is two rows."""
    new_A = A + width
    c = tl.zeros([LANES], tl.int32) + C
    result = tl.zeros([LANES], Q.dtype.element_ty)
    above = tl.zeros([BLOCK], Q.dtype.element_ty)
    prefix = total
    Q += tl.cast(n - 1, tl.int64) * width
    for j in range(n):
        i = n - 1 - j
        w = weight_of(weights, i, C)
        knee, top, low = band_of(prefix, total, C, slack, SLACK)
        prefix -= w
        new_knee, new_top, first = band_of(prefix, total, C, slack, SLACK)
        c = tl.maximum(settled(tl.minimum(c, top), knee, slack, SLACK), low)  # an infeasible path leaves the band
        q = tl.load(Q + c, live, 0.0)
        picked = tl.load(selections + i, live, 0.0) != 0.0
        chance = tl.where(picked, q, 1.0 - q)
        result += tl.log(chance)
        if BACKWARDS:
            sums, above, _ = collect_any_row(
                A, new_A, A, A, Q, Q, above, above, w, low, knee, top, line_of(first), new_knee, new_top,
                slack, 0, 1, width, None, SLACK, BLOCK,
            )  # fmt: skip
            slope = DPROB(q)
            used = live & (c >= w) & (weight != 0.0)
            seed = tl.where(used, weight * tl.where(picked, slope, -slope) / chance, 0.0)
            earlier = tl.load(gradient + i)
            tl.debug_barrier()
            tl.store(gradient + i, tl.sum(sums) + tl.sum(seed) + earlier)
            tl.atomic_add(new_A + settled(c - w, new_knee, slack, SLACK), seed, mask=used)
            tl.atomic_add(new_A + settled(c, new_knee, slack, SLACK), -seed, mask=used)
            tl.debug_barrier()
            A, new_A = new_A, A
        c = tl.where(picked, c - w, c)
        Q -= width
    return result


@triton.jit
def harden_items(weights, C, total, slack, sides, n, best, Q, width, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """[mode]: a hard sweep over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    new_best = best + width
    start_row(best, C if len(sides) > 0 else -1, 0.0, BLOCK)
    tl.debug_barrier()
    prefix = first_prefix(total, C, sides)
    for i in range(n):
        w = weight_of(weights, i, C)
        old_knee, old_top, _ = band_of(prefix, total, C, slack, SLACK)
        prefix += w
        knee, top, low = band_of(prefix, total, C, slack, SLACK)
        first = line_of(low)
        begin, end, stride, lower, upper = tiles_of(first, knee, top, slack, 0, 1, SLACK, BLOCK)
        for t in range(begin, end, stride):
            c = start_of(t, first, lower, upper, SLACK, BLOCK) + tl.arange(0, BLOCK)
            live, fits = (c >= low) & is_live(c, knee, top, slack, SLACK), c >= w
            has_skip, has_pick = live, live & fits
            if SLACK:
                has_skip, has_pick = has_skip & (c <= old_top), has_pick & (c - w <= old_top)
            q = tl.load(Q + c, live, 0.0)
            pick = tl.load(best + settled(c - w, old_knee, slack, SLACK), has_pick, 0.0) + log_chance(q)
            skip = tl.load(best + settled(c, old_knee, slack, SLACK), has_skip, 0.0) + log_chance(1.0 - q)
            better = fits & (pick > skip)
            tl.store(new_best + c, tl.where(better, pick, skip), mask=live)
            tl.store(Q + c, tl.where(better, 1.0, 0.0) + 0.0 * q, mask=live)
        tl.debug_barrier()
        best, new_best = new_best, best
        Q += width


@triton.jit
def table_of(
    theta, weights, capacity, slack, gamma, scale, b, n, width, reach,
    weights_step, capacity_step, slack_step, gamma_step, sides, V, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr,
    GAMMAS: tl.constexpr, NARROW: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """The table of instance b, which is filled here unless it is given, its weights, and what limits_of returns."""
    slab, steps = tl.cast(b, tl.int64) if FILLED else tl.program_id(0).to(tl.int64), n // M if M > 0 else n
    Q, _ = table_at(tables, slab, n, width, 1, M)
    own, given, inverse, C, total, spare = instance_of(
        weights, capacity, slack, gamma, scale, b, steps, reach, weights_step, capacity_step, slack_step, gamma_step,
        tl.int64, False, SLACK, BOX, GAMMAS, M, BLOCK,
    )  # fmt: skip
    if not FILLED:
        fill(
            theta + tl.cast(b, tl.int64) * n, theta, own, given, inverse, C,
            total if M > 0 else total.to(tl.int32), spare, sides, steps, V, Q, Q, Q, width,
            VALUE, PROB, DPROB, None, SLACK, True, NARROW, LOOPS, M, BLOCK,
        )  # fmt: skip
    return Q, own, C, total, spare


@triton.jit(do_not_specialize=NUMBERS)
def sample_kernel(
    theta, uniforms, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, inner, plane,
    weights_step, capacity_step, slack_step, gamma_step,
    y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr,
    GAMMAS: tl.constexpr, NARROW: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, DRAW: tl.constexpr, HARDEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[sample], or one path: of the more probable branch each time, or the mode. These are ``batch`` instances of
    ``whole``, the stride of samples."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V = V_rows + program * (2 * width + nodes)
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q, own, C, total, spare = table_of(
            theta, weights, capacity, slack, gamma, scale, b, n, width, reach,
            weights_step, capacity_step, slack_step, gamma_step, sides, V, tables,
            VALUE, PROB, DPROB, SLACK, BOX, GAMMAS, NARROW, LOOPS, M, BLOCK, FILLED,
        )  # fmt: skip
        if HARDEN:
            if M > 0:
                harden_choices(own, C, total, spare, n // M, V, Q, width, SLACK, M, BLOCK)
            else:
                harden_items(own, C, total, spare, sides, n, V, Q, width, SLACK, BLOCK)
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = (s.to(tl.int64) * whole + b) * n
            if M > 0:
                draw_choices(uniforms + at, y + at, own, C, total, spare, n, Q, live, width, DRAW, SLACK, M, LANES)
            else:
                draw_items(uniforms + at, y + at, own, C, total, spare, n, Q, live, width, DRAW, SLACK, LANES)
        tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def log_prob_kernel(
    theta, selections, cotangent, weights, capacity, slack, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, inner, plane,
    weights_step, capacity_step, slack_step, gamma_step,
    log_prob, gradient, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr,
    GAMMAS: tl.constexpr, NARROW: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, BACKWARDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[log-prob] along the path of each selection, or the E sweep that receives terms along those paths."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V, A = V_rows + program * (2 * width + nodes), rows + program * (2 * width + nodes)
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q, own, C, total, spare = table_of(
            theta, weights, capacity, slack, gamma, scale, b, n, width, reach,
            weights_step, capacity_step, slack_step, gamma_step, sides, V, tables,
            VALUE, PROB, DPROB, SLACK, BOX, GAMMAS, NARROW, LOOPS, M, BLOCK, FILLED,
        )  # fmt: skip
        items = tl.cast(b, tl.int64) * n
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live, at = s < samples, s.to(tl.int64) * whole
            weight = tl.zeros([LANES], Q.dtype.element_ty)
            if BACKWARDS:
                weight = tl.load(cotangent + at + b, live, 0.0)
                tl.store(A + C, 0.0)
                tl.debug_barrier()
            paths = selections + at * n + items
            if M > 0:
                result = weigh_choices(
                    paths, gradient + items, weight, own, C, total, spare, n, Q, A, live, width,
                    DPROB, SLACK, BACKWARDS, M, BLOCK, LANES,
                )  # fmt: skip
            else:
                result = weigh_items(
                    paths, gradient + items, weight, own, C, total, spare, n, Q, A, live, width,
                    DPROB, SLACK, BACKWARDS, BLOCK, LANES,
                )  # fmt: skip
            if not BACKWARDS:
                tl.store(log_prob + at + b, result, mask=live)
        tl.debug_barrier()
