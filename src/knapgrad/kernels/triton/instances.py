"""Whole instances: a program takes one after the other (a persistent grid) and does all sweeps of it.

Nothing but the results leaves. The table Q lies in scratch, one per *resident* program, not per instance. An instance
without a feasible selection, or with a NaN, gives NaN: on a device nobody can raise without waiting for it.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.memory import collect_memory, fill_memory
from knapgrad.kernels.triton.registers import collect_registers, fill_registers
from knapgrad.kernels.triton.steps import checked, limits_of, scale_of, sides_of

NUMBERS = [
    "batch", "n", "width", "reach", "inner", "plane", "weights_step", "capacity_step", "slack_step", "gamma_step",
]  # fmt: skip


@triton.jit
def fill(
    theta, z, weights, capacity, scale, C, total, goal, slack, sides, n, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills the tables; returns V and T at the goal. For an instance that is infeasible, or has a NaN, that is NaN,
    which is left in Q at the goal as well: from there it reaches all that is computed of the instance."""
    if NARROW:
        V_row, T_row = fill_registers(
            theta, z, weights, scale, C, slack, sides, n, Q, R, VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK
        )
        at_goal = tl.arange(0, BLOCK) == goal
        value, tangent = tl.sum(tl.where(at_goal, V_row, 0.0)), tl.sum(tl.where(at_goal, T_row, 0.0))
        tl.debug_barrier()
    else:
        V, T = fill_memory(
            theta, z, weights, scale, C, total, goal, slack, sides, n, V, T, Q, R, width,
            VALUE, PROB, DPROB, SOURCE, SLACK, BLOCK,
        )  # fmt: skip
        value = tl.load(V + goal)
        tangent = value
        if SOURCE is not None:
            tangent = tl.load(T + goal)
    value = checked(value, capacity, theta, n, scale, BLOCK)
    tl.store(Q + (n - 1) * width + goal, float("nan"), mask=value != value)
    tl.debug_barrier()
    return value, tangent


@triton.jit(do_not_specialize=NUMBERS)
def operator_kernel(
    theta, z, weights, capacity, slack, gamma,
    scale: tl.float64, batch, n, width, reach, inner, plane, weights_step, capacity_step, slack_step, gamma_step,
    value, tangent, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    RELAXED: tl.constexpr, KEEP: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Value and, RELAXED, the marginals; in a direction, the tangent and its derivative. KEEP: a table per instance."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    E = rows + program * (2 if SOURCE is None else 6) * width
    D, T = E + 2 * width, E + 4 * width
    sides = sides_of(inner, plane, BOX)
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        slab = tl.cast(b, tl.int64) if KEEP else program
        if SOURCE is None:
            Q = tables + slab * n * width
            R = Q
        else:
            Q = tables + slab * 2 * n * width
            R = Q + n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal, spare = limits_of(
            own, capacity + b * capacity_step, slack + b * slack_step, reach, n, tl.int32, SLACK, BOX, BLOCK
        )
        v, t = fill(
            theta + items, z + items, own, capacity + b * capacity_step,
            scale_of(gamma, scale, b, gamma_step, GAMMAS), C, total, goal, spare, sides, n, V, T, Q, R, width,
            VALUE, PROB, DPROB, SOURCE, SLACK, NARROW, BLOCK,
        )  # fmt: skip
        tl.store(value + b, v)
        if SOURCE is not None:
            tl.store(tangent + b, t + 0.0 * v)
        if RELAXED:
            last = (n - 1) * width
            if NARROW:
                collect_registers(own, y + items, C, goal, n, Q + last, R + last, SOURCE, LATER, BLOCK)
            else:
                tl.store(E + goal, 1.0)
                if SOURCE is not None:
                    tl.store(D + goal, 0.0)
                tl.debug_barrier()
                collect_memory(
                    own, y + items, C, total, goal, spare, n, E, D, Q + last, R + last, width,
                    SOURCE, SLACK, LATER, BLOCK,
                )  # fmt: skip
