"""Whole instances: a program takes one after the other (a persistent grid) and does all sweeps of it.

Nothing but the results leaves. The table Q of items, or P of choices, lies in scratch, one per *resident* program, not
per instance. An instance without a feasible selection, or with a NaN, gives NaN: on a device nobody can raise without
waiting for it.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.memory import collect_memory, fill_memory
from knapgrad.kernels.triton.options import collect_choices, fill_choices
from knapgrad.kernels.triton.registers import collect_registers, fill_registers
from knapgrad.kernels.triton.steps import checked, limits_of, scale_of, sides_of

NUMBERS = [
    "batch", "n", "width", "reach", "inner", "plane", "weights_step", "capacity_step", "slack_step", "gamma_step",
]  # fmt: skip


@triton.jit
def instance_of(
    weights, capacity, slack, gamma, scale, b, steps, reach, weights_step, capacity_step, slack_step, gamma_step,
    dtype: tl.constexpr, FRONTIER: tl.constexpr, SLACK: tl.constexpr, BOX: tl.constexpr, GAMMAS: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where instance b has its weights and its capacity, 1 / gamma, and what limits_of returns."""
    weights += tl.cast(b, tl.int64) * weights_step
    capacity += b * capacity_step
    C, total, spare = limits_of(
        weights, capacity, slack + b * slack_step, reach, steps, dtype, FRONTIER, SLACK, BOX, M, BLOCK
    )
    return weights, capacity, scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total, spare


@triton.jit
def table_at(tables, slab, n, width, TABLES: tl.constexpr, M: tl.constexpr):
    """The table of a slab, or the first of its TABLES, and how many cells each has: of choices perhaps more than can be
    numbered in 32 bits."""
    if M > 0:
        cells = tl.cast(n, tl.int64) * width
        return tables + slab * TABLES * cells, cells
    else:
        return tables + slab * TABLES * n * width, n * width


@triton.jit
def fill(
    theta, z, weights, capacity, scale, C, total, slack, sides, steps, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    STORED: tl.constexpr, NARROW: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills the tables; returns V and T at the goal. For an instance that is infeasible, or has a NaN, that is NaN,
    which is left in the table at the goal as well: from there it reaches all that is computed of the instance."""
    if NARROW:
        V_row, T_row = fill_registers(
            theta, z, weights, scale, C, slack, sides, steps, Q, R, VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK
        )
        at_goal = tl.arange(0, BLOCK) == C
        value, tangent = tl.sum(tl.where(at_goal, V_row, 0.0)), tl.sum(tl.where(at_goal, T_row, 0.0))
        tl.debug_barrier()
    else:
        if M > 0:
            V, T, _ = fill_choices(
                theta, z, weights, scale, C, total, slack, sides, steps, V, T, Q, R, width,
                VALUE, PROB, DPROB, SOURCE, SLACK, STORED, LOOPS, M, BLOCK,
            )  # fmt: skip
        else:
            V, T = fill_memory(
                theta, z, weights, scale, C, total, slack, sides, steps, V, T, Q, R, width,
                VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK,
            )  # fmt: skip
        value = tl.load(V + C)
        tangent = value
        if SOURCE is not None:
            tangent = tl.load(T + C)
    value = checked(value, capacity, theta, steps * M if M > 0 else steps, scale, BLOCK)
    if M == 0:
        tl.store(Q + (steps - 1) * width + C, float("nan"), mask=value != value)
    elif STORED:
        last = Q + tl.cast(steps - 1, tl.int64) * M * width + C
        for o in range(M):
            tl.store(last + o * width, float("nan"), mask=value != value)
    tl.debug_barrier()
    return value, tangent


@triton.jit(do_not_specialize=NUMBERS)
def operator_kernel(
    theta, z, weights, capacity, slack, gamma,
    scale: tl.float64, batch, n, width, reach, inner, plane, weights_step, capacity_step, slack_step, gamma_step,
    value, tangent, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, RELAXED: tl.constexpr, KEEP: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """The value and the marginals; in a direction, the tangent and its derivative."""
    program = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = tables.dtype.element_ty
    nodes: tl.constexpr = M * BLOCK if LOOPS else 0  # after the rows
    V = V_rows + program * (2 * width + nodes)
    E = rows + program * ((2 if SOURCE is None else 6) * width + nodes)
    D, T = E + 2 * width, E + 4 * width
    sides, steps = sides_of(inner, plane, BOX), n // M if M > 0 else n
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        slab = tl.cast(b, tl.int64) if KEEP else program
        Q, table = table_at(tables, slab, n, width, 1 if SOURCE is None else 2, M)
        R = Q if SOURCE is None else Q + table
        items = tl.cast(b, tl.int64) * n
        own, given, inverse, C, total, spare = instance_of(
            weights, capacity, slack, gamma, scale, b, steps, reach,
            weights_step, capacity_step, slack_step, gamma_step,
            tl.int64 if M > 0 else tl.int32, False, SLACK, BOX, GAMMAS, M, BLOCK,
        )  # fmt: skip
        v, t = fill(
            theta + items, z + items, own, given, inverse, C, total, spare, sides, steps, V, T, Q, R, width,
            VALUE, PROB, DPROB, SOURCE, SLACK, RELAXED or KEEP, NARROW, LOOPS, M, BLOCK,
        )  # fmt: skip
        tl.store(value + b, v)
        if SOURCE is not None:
            tl.store(tangent + b, t + 0.0 * v)
        if RELAXED:
            if NARROW:
                last = (n - 1) * width
                collect_registers(own, y + items, C, n, Q + last, R + last, SOURCE, LATER, BLOCK)
            else:
                tl.store(E + C, 1.0)
                if SOURCE is not None:
                    tl.store(D + C, 0.0)
                tl.debug_barrier()
                if M > 0:
                    last = table - M * width
                    above = tl.zeros([BLOCK], dtype) + (0.0 * v).to(dtype)  # a NaN reaches all
                    collect_choices(
                        own, y + items, C, total, total, spare, steps, E, D, Q + last, R + last, above, above,
                        width, SOURCE, SLACK, True, LATER, LOOPS, M, BLOCK,
                    )  # fmt: skip
                else:
                    last = (n - 1) * width
                    collect_memory(
                        own, y + items, C, total, spare, n, E, D, Q + last, R + last, width,
                        SOURCE, SLACK, LATER, BLOCK,
                    )  # fmt: skip
