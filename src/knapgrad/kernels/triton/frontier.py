"""The frontier of choices: the optimum at every capacity. One of items is one of choices between two."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.instances import NUMBERS, instance_of, table_at
from knapgrad.kernels.triton.options import collect_choices, fill_choices
from knapgrad.kernels.triton.steps import FEASIBLE, INFEASIBLE, sides_of, taint_of


@triton.jit(do_not_specialize=NUMBERS)
def frontier_kernel(
    theta, cotangent, weights, capacity, slack, gamma,
    scale: tl.float64, batch, n, width, reach, inner, plane, weights_step, capacity_step, slack_step, gamma_step,
    values, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr,
    GAMMAS: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """The last row of V, or the E sweep that starts from a cotangent of that row."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V = V_rows + program * (2 * width + nodes)
    E = rows + program * (2 * width + nodes)
    choices = n // M
    P, table = table_at(tables, program, n, width, 1, M)
    dtype: tl.constexpr = tables.dtype.element_ty
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        items = tl.cast(b, tl.int64) * n
        own, _, inverse, C, total, spare = instance_of(
            weights, capacity, slack, gamma, scale, b, choices, reach,
            weights_step, capacity_step, slack_step, gamma_step,
            tl.int64, True, SLACK, BOX, GAMMAS, M, BLOCK,
        )  # fmt: skip
        ahead = total + C  # every state of the last row is needed
        taint = taint_of(theta + items, n, inverse, BLOCK)
        last, _, top = fill_choices(
            theta + items, theta, own, inverse, C, ahead, spare, sides, choices,
            V, V, P, P, width, VALUE, PROB, DPROB, None, SLACK, BACKWARDS, LOOPS, M, BLOCK,
        )  # fmt: skip
        row = tl.cast(b, tl.int64) * (reach + 1)
        above = tl.zeros([BLOCK], dtype) + taint.to(dtype)  # a NaN reaches all
        for start in range(0, reach + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            within = c <= reach
            if SLACK:
                value = tl.load(last + c, within & (c <= top), INFEASIBLE)
            else:
                value = tl.load(last + tl.minimum(c, top), within, 0.0)
            if BACKWARDS:
                e = tl.load(cotangent + row + c, within, 0.0)
                e = tl.where(value < FEASIBLE, 0.0, e)
                tl.store(E + c, e, mask=within)
                if not SLACK:
                    above += tl.where(c > top, e, 0.0)
            else:
                value = tl.where(value < FEASIBLE, float("-inf"), value) + taint
                tl.store(values + row + c, value, mask=within)
        tl.debug_barrier()
        if BACKWARDS:
            collect_choices(
                own, y + items, C, total, ahead, spare, choices, E, E, P + table - M * width, P, above, above,
                width, None, SLACK, False, False, LOOPS, M, BLOCK,
            )  # fmt: skip
