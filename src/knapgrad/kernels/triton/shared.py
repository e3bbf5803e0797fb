"""Rows that many programs share: one launch per item."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.memory import collect_any_row, fill_any_row, line_of
from knapgrad.kernels.triton.steps import band_of, scale_of, score_of, sides_of

_NUMBERS = ["n", "width", "length", "i", "row"]


@triton.jit
def _limits(prefix, goal, slack, b, i, n, SLACK: tl.constexpr):
    """Of an instance: the prefix sums before and after item i, their total, the goal and the slack."""
    prefix += b * (n + 1) + i
    target = tl.load(goal + b).to(tl.int32)
    spare = target
    if SLACK:
        spare = tl.load(slack + b).to(tl.int32)
    return tl.load(prefix), tl.load(prefix + 1), tl.load(prefix + n - i), target, spare


@triton.jit(do_not_specialize=[*_NUMBERS, "inner", "plane", "gamma_step"])
def fill_item_kernel(
    theta, z, prefix, goal, slack, gamma, V_rows, rows, tables,
    scale: tl.float64, n, width, length, i, row, inner, plane, gamma_step,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    before, after, total, target, spare = _limits(prefix, goal, slack, b, i, n, SLACK)
    V = V_rows + b * 2 * width
    T = rows + b * 6 * width + 4 * width
    Q = tables + (b * (1 if SOURCE is None else 2) * length + row) * width
    old_knee, old_top, _ = band_of(before, total, target, spare, SLACK)
    knee, top, low = band_of(after, total, target, spare, SLACK)
    even, odd = (i % 2) * width, (1 - i % 2) * width
    fill_any_row(
        V + even, V + odd, T + even, T + odd, Q, Q + length.to(tl.int64) * width,
        score_of(theta + b * n, i, scale_of(gamma, scale, b, gamma_step, GAMMAS)), tl.load(z + b * n + i),
        (after - before).to(tl.int32), sides_of(inner, plane, BOX), old_knee, old_top, line_of(low), knee, top, spare,
        tl.program_id(0), tl.num_programs(0), width, VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def collect_item_kernel(
    theta, prefix, goal, slack, parts, above, rows, tables, n, width, length, i, row,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    before, after, total, target, spare = _limits(prefix, goal, slack, b, i, n, SLACK)
    E = rows + b * 6 * width
    D = E + 2 * width
    Q = tables + (b * (1 if SOURCE is None else 2) * length + row) * width
    knee, top, low = band_of(after, total, target, spare, SLACK)
    new_knee, new_top, first = band_of(before, total, target, spare, SLACK)
    even, odd = (i % 2) * width, (1 - i % 2) * width
    lanes = above + (b * tl.num_programs(0) + tl.program_id(0)) * 2 * BLOCK + tl.arange(0, BLOCK)
    result, above_e, above_d = collect_any_row(
        E + odd, E + even, D + odd, D + even, Q, Q + length.to(tl.int64) * width,
        tl.load(lanes), tl.load(lanes + BLOCK), (after - before).to(tl.int32), low, knee, top, line_of(first),
        new_knee, new_top, spare, tl.program_id(0), tl.num_programs(0), width, SOURCE, SLACK, BLOCK,
    )  # fmt: skip
    tl.store(lanes, above_e)
    tl.store(lanes + BLOCK, above_d)
    tl.store(parts + (b * n + i) * tl.num_programs(0) + tl.program_id(0), tl.sum(result))
