"""Whole instances of choices among options, as in :mod:`knapgrad.kernels.triton.instances`."""

import triton
import triton.language as tl

from knapgrad.kernels.triton.instances import NUMBERS
from knapgrad.kernels.triton.options import collect_choices, fill_choices, limits_of_choices
from knapgrad.kernels.triton.steps import FEASIBLE, INFEASIBLE, checked, first_prefix, scale_of, sides_of, taint_of


@triton.jit
def fill(
    theta, z, weights, capacity, scale, C, total, goal, slack, choices, V, T, P, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    TABLE: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns V and T at the goal. For an instance that is infeasible, or has a NaN, that is NaN, which is left in the
    table as well."""
    V, T, _ = fill_choices(
        theta, z, weights, scale, C, total, goal, slack, (), choices, V, T, P, R, width,
        VALUE, PROB, DPROB, SOURCE, SLACK, TABLE, LOOPS, M, BLOCK,
    )  # fmt: skip
    value = tl.load(V + goal)
    tangent = value
    if SOURCE is not None:
        tangent = tl.load(T + goal)
    value = checked(value, capacity, theta, choices * M, scale, BLOCK)
    if TABLE:
        last = P + tl.cast(choices - 1, tl.int64) * M * width + goal
        for o in range(M):
            tl.store(last + o * width, float("nan"), mask=value != value)
    tl.debug_barrier()
    return value, tangent


@triton.jit(do_not_specialize=NUMBERS)
def operator_kernel(
    theta, z, weights, capacity, slack, gamma,
    scale: tl.float64, batch, n, width, reach, weights_step, capacity_step, slack_step, gamma_step,
    value, tangent, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    GAMMAS: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    RELAXED: tl.constexpr, KEEP: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Value and, RELAXED, the marginals; in a direction, the tangent and its derivative. KEEP: a table per instance."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0  # after the rows
    V = V_rows + program * (2 * width + nodes)
    E = rows + program * ((2 if SOURCE is None else 6) * width + nodes)
    D, T = E + 2 * width, E + 4 * width
    choices, table = n // M, tl.cast(n, tl.int64) * width
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        slab = tl.cast(b, tl.int64) if KEEP else program
        P = tables + slab * (1 if SOURCE is None else 2) * table
        R = P if SOURCE is None else P + table
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of_choices(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, choices, False, SLACK, M, BLOCK
        )
        v, t = fill(
            theta + items, z + items, own, capacity + b * capacity_step,
            scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total, goal, spare, choices, V, T, P, R, width,
            VALUE, PROB, DPROB, SOURCE, SLACK, RELAXED or KEEP, LOOPS, M, BLOCK,
        )  # fmt: skip
        tl.store(value + b, v)
        if SOURCE is not None:
            tl.store(tangent + b, t + 0.0 * v)
        if RELAXED:
            last = table - M * width
            tl.store(E + goal, 1.0)
            if SOURCE is not None:
                tl.store(D + goal, 0.0)
            tl.debug_barrier()
            nothing = tl.zeros([BLOCK], P.dtype.element_ty) + (0.0 * v).to(P.dtype.element_ty)  # a NaN reaches all
            collect_choices(
                own, y + items, C, total, total, goal, spare, choices, E, D, P + last, R + last, nothing, nothing,
                width, SOURCE, SLACK, True, LATER, LOOPS, M, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def frontier_kernel(
    theta, cotangent, weights, capacity, slack, gamma,
    scale: tl.float64, batch, n, width, reach, inner, plane, weights_step, capacity_step, slack_step, gamma_step,
    values, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr,
    GAMMAS: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """The last row of V; BACKWARDS, an E sweep that starts from a cotangent of that row."""
    program = tl.program_id(0).to(tl.int64)
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0
    V = V_rows + program * (2 * width + nodes)
    E = rows + program * (2 * width + nodes)
    choices, table = n // M, tl.cast(n, tl.int64) * width
    P = tables + program * table
    dtype: tl.constexpr = tables.dtype.element_ty
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of_choices(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, choices, True, SLACK, M, BLOCK
        )
        total += first_prefix(total, goal, sides)
        ahead = total + goal  # every state of the last row is needed
        strength = scale_of(gamma, scale, b, gamma_step, GAMMAS)
        taint = taint_of(theta + items, n, strength, BLOCK)
        last, _, top = fill_choices(
            theta + items, theta, own, strength, C, ahead, goal, spare, sides, choices,
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
                own, y + items, C, total, ahead, goal, spare, choices, E, E, P + table - M * width, P, above, above,
                width, None, SLACK, False, False, LOOPS, M, BLOCK,
            )  # fmt: skip
