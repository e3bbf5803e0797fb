"""Items cut into segments that were swept apart from each other, combined again: by Shannon, exactly.

Row V of a segment holds the log-partition of using exactly c there, T its tangent. Neighbours a and b are joined, and
so on up to the root of a binary tree:

    V[c] = log sum_i exp(a[i] + b[c - i])        T[c] = sum_i p(i | c) (Ta[i] + Tb[c - i])
    p(i | c) = exp(a[i] + b[c - i] - V[c])

The way back starts from E[c] = (c == goal) and D = 0, and is split at every join, likewise for b:

    Ea[i] = sum_c p(i | c) E[c]
    Da[i] = sum_c p(i | c) (D[c] + E[c] (Ta[i] + Tb[c - i] - T[c]))

A level of the tree is one launch each way. Its rows lie in memory in order, so those of any level (batch, rows, width)
are joined in pairs 2r and 2r + 1 to r. T grows with the number of items, and only differences of it count, so above the
segments it is in float64, as V is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from knapgrad.kernels.triton import plan
from knapgrad.kernels.triton.launch import Launch
from knapgrad.kernels.triton.steps import FEASIBLE, INFEASIBLE

NUMBERS = ["rows", "width", "goals_step"]

# States of a program, and those that it sums over at a time. At the root a join is needed at two states only, and a
# split has one state to sum over.
JOINED, JOINED_TO_ROOT = (16, 64), (1, 1024)
SPLIT, SPLIT_FROM_ROOT = (16, 64), (256, 1)


@triton.jit(do_not_specialize=NUMBERS)
def join_kernel(
    theta, goals, V, T, V_above, T_above, rows, width, goals_step,
    TANGENT: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows above from those below. ROOT: at the goal, and at the last state, which is NaN if any cell of any row is."""
    dtype: tl.constexpr = theta.dtype.element_ty
    number = tl.program_id(0)
    r, turn = (number % rows).to(tl.int64), number // rows
    if ROOT:
        goal = tl.load(goals + r * goals_step)
        first = tl.where(turn == 0, goal, width - 1)
    else:
        first = ((width + BLOCK - 1) // BLOCK - 1 - turn) * BLOCK  # the longest sums first
    c = first + tl.arange(0, BLOCK)
    a, Ta = V + 2 * r * width, T + 2 * r * width
    b, Tb = a + width, Ta + width
    # Each lane has its own maximum and its own sums relative to it: lanes meet once, at the end.
    highest = tl.full([BLOCK, STEP], INFEASIBLE, tl.float64)
    total = tl.zeros([BLOCK, STEP], tl.float64)
    change = tl.zeros([BLOCK, STEP], tl.float64)
    for start in range(0, tl.minimum(first + BLOCK, width), STEP):
        i = start + tl.arange(0, STEP)
        j = c[:, None] - i[None, :]
        is_pair = (j >= 0) & (c < width)[:, None]
        x = tl.load(a + i, i < width, INFEASIBLE)[None, :] + tl.load(b + j, is_pair, INFEASIBLE)
        rise = x - highest
        is_higher = rise > 0.0
        e = tl.exp(-tl.abs(rise.to(dtype)))
        kept = tl.where(is_higher, e, 1.0).to(tl.float64)
        added = tl.where(is_higher, 1.0, e).to(tl.float64)
        highest = tl.where(is_higher, x, highest)
        total = total * kept + added
        if TANGENT:
            tangent = tl.load(Ta + i, i < width, 0.0).to(tl.float64)[None, :] + tl.load(Tb + j, is_pair, 0.0)
            tangent = tl.where(x < FEASIBLE, 0.0, tangent)  # there it may be anything
            change = change * kept + added * tangent

    top = tl.max(highest, 1)
    share = tl.exp(highest - top[:, None])
    partition = tl.sum(total * share, 1)
    found = top + tl.log(partition)
    is_out = found < FEASIBLE
    at, is_own = r * width + c, c < width
    if ROOT:
        is_own = is_own & ((turn == 0) | (goal < width - 1))  # the two may be the same state
    tl.store(V_above + at, tl.where(is_out, INFEASIBLE, found), mask=is_own)
    if TANGENT:
        tangent = tl.sum(change * share, 1) / partition
        tl.store(T_above + at, tl.where(is_out, 0.0, tangent), mask=is_own)


@triton.jit(do_not_specialize=NUMBERS)
def split_kernel(
    theta, goals, V, T, V_above, T_above, E_above, D_above, E, D, value, tangent, rows, width, goals_step,
    TANGENT: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """E and D of the rows below. ROOT: from the goal alone; and value and tangent, NaN if the goal is infeasible."""
    dtype: tl.constexpr = theta.dtype.element_ty
    number = tl.program_id(0)
    r = (number % rows).to(tl.int64)
    parent, sibling = r // 2, (r ^ 1) * width
    first, last = number // rows * BLOCK, width - 1
    i = first + tl.arange(0, BLOCK)
    at = r * width + i
    own, Town = tl.load(V + at, i < width, INFEASIBLE), tl.zeros([BLOCK], tl.float64)
    V_above += parent * width
    T_above += parent * width
    E_above += parent * width
    D_above += parent * width
    begin = first
    if ROOT:
        begin = tl.load(goals + parent * goals_step)
        last = begin
    if TANGENT:
        Town = tl.load(T + at, i < width, 0.0).to(tl.float64)
    E_sum, D_sum = tl.zeros([BLOCK, STEP], dtype), tl.zeros([BLOCK, STEP], dtype)
    for start in range(begin, last + 1, STEP):
        c = start + tl.arange(0, STEP)
        j = c[None, :] - i[:, None]
        is_state = c <= last
        is_pair = (j >= 0) & is_state[None, :]
        whole = tl.load(V_above + c, is_state, INFEASIBLE)
        whole = tl.where(whole < FEASIBLE, -INFEASIBLE, whole)  # then p is 0, whatever is taken from it
        pair = own[:, None] + tl.load(V + sibling + j, is_pair, INFEASIBLE)
        p = tl.exp((pair - whole[None, :]).to(dtype))
        Ec, Dc = is_state.to(dtype), tl.zeros([STEP], dtype)
        if not ROOT:
            Ec = tl.load(E_above + c, is_state, 0.0)
        E_sum += p * Ec[None, :]
        if TANGENT:
            if not ROOT:
                Dc = tl.load(D_above + c, is_state, 0.0)
            slope = Town[:, None] + tl.load(T + sibling + j, is_pair, 0.0)
            slope = (slope - tl.load(T_above + c, is_state, 0.0)[None, :]).to(dtype)
            D_sum += tl.where(p == 0.0, 0.0, p * (Dc[None, :] + Ec[None, :] * slope))

    E_row = tl.sum(E_sum, 1)
    if ROOT:
        found = tl.load(V_above + begin)
        found = tl.where(found < FEASIBLE, float("nan"), found) + 0.0 * tl.load(V_above + (width - 1))
        taint = (0.0 * found).to(dtype)
        E_row += taint
        is_first = (first == 0) & (r % 2 == 0)
        tl.store(value + parent, found, mask=is_first)
        if TANGENT:
            tl.store(tangent + parent, tl.load(T_above + begin).to(dtype) + taint, mask=is_first)
    tl.store(E + at, E_row, mask=i < width)
    if TANGENT:
        tl.store(D + at, tl.where(E_row == E_row, tl.sum(D_sum, 1), E_row), mask=i < width)


class Segments:
    """Combines the rows of segments, in batches of one shape on one device: ``2 log2(segments)`` launches a call.

    Args:
        batch: the number of instances.
        segments: per instance, 2 or a higher power of 2.
        width: states 0..width - 1 of a row.
        dtype: of theta, and of all but V, the value, and T above the segments.
        has_tangent: whether rows T are given as well.
    """

    def __init__(self, batch: int, segments: int, width: int, dtype: torch.dtype, has_tangent: bool) -> None:
        self.dtype, self.has_tangent = dtype, has_tangent
        self.levels = segments.bit_length() - 1  # above the segments
        rows = [batch * segments >> level for level in range(self.levels + 1)]
        self.cells = [plan.whole_lines(count * width) for count in rows[1:]]  # whole lines: every level is aligned
        self.joins, self.splits = [], []
        for level in range(1, self.levels + 1):
            is_root = level == self.levels
            options = {"width": width, "TANGENT": has_tangent, "ROOT": is_root}
            block, step = JOINED_TO_ROOT if is_root else JOINED
            blocks = 2 if is_root else triton.cdiv(width, block)
            self.joins.append(_launch(join_kernel, rows[level], blocks, BLOCK=block, STEP=step, **options))
            block, step = SPLIT_FROM_ROOT if is_root else SPLIT
            blocks = triton.cdiv(width, block)
            self.splits.append(_launch(split_kernel, rows[level - 1], blocks, BLOCK=block, STEP=step, **options))

    def __call__(self, V: Tensor, T: Tensor | None, goals: Tensor) -> dict[str, Tensor]:
        """The value at the goals, the cotangents E of V, and with T the tangent and the cotangents D along T.

        NaN in a row makes all of its instance NaN, and so does a goal that is infeasible.

        Args:
            V: log-partitions (batch, segments, width) in float64, contiguous; INFEASIBLE where there is none.
            T: tangents of the same shape, in theta's type.
            goals: states (batch,) or (1,), int32.

        Returns:
            "value" (batch,) in float64 and "E" (batch, segments, width); "tangent" (batch,) and "D" as E.
        """
        E = V.new_empty(V.shape, dtype=self.dtype)
        found = {"value": V.new_empty(len(V)), "E": E}
        Vs, Es = [V, *self._above(V)], [E, *self._above(E)]
        Ts, Ds = Es, Es  # not looked at
        if self.has_tangent:
            assert T is not None
            found |= {"tangent": E.new_empty(len(V)), "D": torch.empty_like(E)}
            Ts, Ds = [T, *self._above(V)], [found["D"], *self._above(E)]
        given: dict[str, Any] = {"theta": E, "goals": goals, "goals_step": int(len(goals) > 1)}
        there = [
            {"V": Vs[k], "T": Ts[k], "V_above": Vs[k + 1], "T_above": Ts[k + 1], **given} for k in range(self.levels)
        ]
        for k in range(self.levels):
            self.joins[k](there[k])
        given = {"value": found["value"], "tangent": found.get("tangent", E)}
        for k in reversed(range(self.levels)):
            self.splits[k](
                {"E": Es[k], "D": Ds[k], "E_above": Es[k + 1], "D_above": Ds[k + 1], **there[k], **given}
            )  # fmt: skip
        return found

    def _above(self, x: Tensor) -> tuple[Tensor, ...]:
        """Memory for the rows of every level but that of the segments, of the type of x."""
        return x.new_empty(sum(self.cells)).split(self.cells)


def _launch(kernel: Any, rows: int, blocks: int, **arguments: Any) -> Launch:
    return Launch(kernel, rows * blocks, {"rows": rows, **arguments}, {"num_warps": 4}, {})
