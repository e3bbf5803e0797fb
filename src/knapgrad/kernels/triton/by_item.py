"""Rows that many programs share: one launch per item. Also for batches of nothing, which need no launch.

A table that is too large is filled again, piece by piece, from rows that were set aside.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from knapgrad.kernels.triton import plan, variants
from knapgrad.kernels.triton.batch import Batch, limits_of
from knapgrad.kernels.triton.launch import Launch, on
from knapgrad.kernels.triton.memory import collect_any_row, fill_any_row, line_of
from knapgrad.kernels.triton.steps import band_of, scale_of, score_of, sides_of
from knapgrad.kernels.triton.ways import Tabled
from knapgrad.lattice import FEASIBLE, INFEASIBLE, LARGEST

SPAN = 1024  # capacities of a program
_NUMBERS = ["n", "width", "length", "i", "row"]


@triton.jit
def _limits(prefix, goal, slack, b, i, n, SLACK: tl.constexpr):
    """The prefix sums of an instance before and after item i, their total, the goal and the slack."""
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
    """Fills the row after item i, and row number ``row`` of the table."""
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
    """Collects the row before item i, and a part of its [y] or [Hz], from row number ``row`` of the table."""
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


class ByItem(Tabled):
    """Sweeps over flat batches of one shape.

    Args:
        batch: its constants are kept, its theta is not.
        source: what a tangent sweep follows, or None.
    """

    def __init__(self, batch: Batch, source: str | None) -> None:
        self.shape, self.source = batch.theta.shape, source
        without = {name: x for name, x in batch.constants.items() if name != "gamma"}
        self.batch = batch._replace(theta=batch.theta.new_empty(0), constants=without)
        self.row_size = plan.whole_lines(batch.reach + 1) * batch.theta.itemsize
        self.at_once = max(plan.ITEM_SCRATCH // max(self.row_size * self.shape[1], 1), 1)

    def tables(self, theta: Tensor, strength: dict[str, Any], part: slice) -> Tensor:
        some = self._of(theta, strength).part(part)
        return _sweep(some, some.theta, self.source, relaxed=False, keep=True)["tables"]

    def sweep(self, theta: Tensor, z: Tensor, strength: dict[str, Any], relaxed: bool, keep: bool) -> dict[str, Tensor]:
        batch, (size, n) = self._of(theta, strength), self.shape
        if not theta.numel():
            value = theta.new_zeros(size, dtype=torch.float64)
            value.masked_fill_(limits_of(batch)[1] < 0, torch.nan)
            tangent, y = 0 * value.to(theta.dtype), torch.empty_like(theta)
            return {"value": value, "tangent": tangent, "y": y, "tables": theta.new_empty(size, 0)}
        count = 1 if self.source is None else 2
        group = min(max(plan.ITEM_SCRATCH // (count * self.row_size * (n + 6)), 1), 1 << 15)  # including the rows
        if keep or size <= group:
            return _sweep(batch, z, self.source, relaxed, keep)
        parts = [slice(k, k + group) for k in range(0, size, group)]
        found = [_sweep(batch.part(part), z[part], self.source, relaxed, keep) for part in parts]
        return {name: torch.cat([x[name] for x in found]) for name in found[0]}

    def _of(self, theta: Tensor, strength: dict[str, Any]) -> Batch:
        return self.batch._replace(theta=theta, constants=self.batch.constants | {"gamma": theta} | strength)


_SHARED = "gamma", "gamma_step", "scale", "inner", "plane", "GAMMAS", "SLACK", "BOX"


def _sweep(batch: Batch, z: Tensor, source: str | None, relaxed: bool, keep: bool) -> dict[str, Tensor]:
    """Value, tangent, y if RELAXED, and the tables if they are kept, of instances whose rows fit into memory."""
    theta, constants = batch.theta, batch.constants
    (size, n), width = theta.shape, plan.whole_lines(batch.reach + 1)
    count = 1 if source is None else 2
    # How many rows of the table are there at a time.
    length = n if keep else min(max(plan.ITEM_SCRATCH // (count * width * theta.itemsize), 1), n)
    capacity = constants["capacity"]
    prefix = torch.minimum(constants["weights"], capacity[:, None] + 1).cumsum(-1).expand(size, n)
    prefix = torch.nn.functional.pad(prefix, (1, 0)).contiguous()
    goal, slack = (x.expand(size).contiguous() for x in limits_of(batch))
    if constants["BOX"]:
        prefix += goal[:, None]  # as steps.first_prefix
    tiles = triton.cdiv(width, SPAN)
    y, above = theta.new_zeros(size, n, tiles), theta.new_zeros(size, tiles, 2, SPAN)
    V_rows, rows = theta.new_zeros(size, 2, width, dtype=torch.float64), theta.new_zeros(size, 6, width)
    V_rows[:, 0, 0].masked_fill_(slack < 0, INFEASIBLE)
    tables = theta.new_empty(size, count, length, width)
    every = {
        **{name: constants[name] for name in _SHARED},
        **variants.functions(batch.regularizer), "SOURCE": variants.source(source), "BLOCK": SPAN,
        "prefix": prefix, "goal": goal, "slack": slack, "rows": rows, "V_rows": V_rows, "tables": tables,
        "parts": y, "above": above, "z": z, "n": n, "width": width, "length": length,
    }  # fmt: skip

    def launch(kernel: Any) -> Launch:
        """A launch that is the same for all items but for two numbers."""
        arguments = {name: x for name, x in every.items() if name in kernel.arg_names}
        return Launch(kernel, (tiles, size), arguments, {"num_warps": 4}, {})

    fill_item, collect_item = launch(fill_item_kernel), launch(collect_item_kernel)

    def items(first: int) -> range:
        return range(first, min(first + length, n))

    def fill(first: int) -> None:
        fill_item.series({"theta": theta}, i=items(first), row=range(length))

    with on(theta.get_device()):
        starts, aside = range(0, n, length), []
        for first in starts:
            if len(starts) > 1:
                aside.append((V_rows[:, first % 2].clone(), rows[:, 4 + first % 2].clone()))
            fill(first)
        value = V_rows[:, n % 2].gather(1, goal[:, None])[:, 0]
        value = torch.where(value < FEASIBLE, torch.nan, value) + _taint(theta, constants)
        tangent = rows[:, 4 + n % 2].gather(1, goal[:, None])[:, 0] + 0 * value.to(theta.dtype)
        last = tables[:, 0, (n - 1) % length]
        last.scatter_add_(1, goal[:, None], 0 * value[:, None].to(theta.dtype))  # a NaN reaches all that follows
        rows[:, n % 2].scatter_(1, goal[:, None], 1.0)
        for first in reversed(starts if relaxed else []):
            if first != starts[-1]:
                V_rows[:, first % 2], rows[:, 4 + first % 2] = aside[first // length]
                fill(first)
            each = items(first)
            collect_item.series({"theta": theta}, i=each[::-1], row=range(len(each))[::-1])
    y = y.sum(-1) if source is not None else y.sum(-1).clamp(max=1)
    tables = tables.reshape(size, -1) if keep else theta.new_empty(size, 0)
    return {"value": value, "tangent": tangent, "y": y, "tables": tables}


def _taint(theta: Tensor, constants: dict[str, Any]) -> Tensor:
    """The taint of each instance, as in steps.taint_of."""
    scale = constants["scale"]
    if constants["GAMMAS"]:
        gamma = constants["gamma"].double()[:, None]
        scale = torch.where(gamma > 0, 1.0 / gamma, torch.nan)
    is_good = theta.isneginf() | ((theta.double() * scale).abs() <= LARGEST)
    return torch.where(is_good.all(-1), 0.0, torch.nan)
