"""Items with several budgets: a program takes one instance after the other, and works on rows in memory, over all
states of the box up to the goal, in tiles of BLOCK.

States are numbered as in :mod:`knapgrad.lattice`: a pick subtracts the weight, if no digit has to borrow. Nothing is
left out of a row: the states that a goal reaches are scattered over it.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.steps import decide, follow, scale_of, score_of, taint_of

NUMBERS = [
    "batch", "n", "width", "last", "inner", "plane", "weights_step", "capacity_step", "gamma_step",
]  # fmt: skip


@triton.jit
def fits(c, w, inner, plane):
    """Whether an item can be picked: digits of the last budget, and of the last two, do not borrow. Moduli of 1 are of
    budgets that are not there."""
    return (c >= w) & (c % inner >= w % inner) & (c % plane >= w % plane)


@triton.jit
def fill_box(
    theta, z, weights, scale, last, n, inner, plane, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the first item to the last; V and T are two rows each. Returns the last ones."""
    new_V, new_T = V + width, T + width
    for start in range(0, last + 1, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(V + c, tl.zeros([BLOCK], tl.float64), mask=c <= last)
        if SOURCE is not None:
            tl.store(T + c, tl.zeros([BLOCK], Q.dtype.element_ty), mask=c <= last)
    tl.debug_barrier()
    for i in range(n):
        w, score, z_i = tl.load(weights + i).to(tl.int32), score_of(theta, i, scale), tl.load(z + i)
        for start in range(0, last + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            within = c <= last
            inside = within & fits(c, w, inner, plane)
            skip, pick = tl.load(V + c, within, 0.0), tl.load(V + c - w, inside, 0.0) + score
            value, q = decide(skip, pick, inside, VALUE, PROB, Q.dtype.element_ty)
            tl.store(new_V + c, value, mask=within)
            tl.store(Q + c, q, mask=within)
            if SOURCE is not None:
                skip, pick = tl.load(T + c, within, 0.0), tl.load(T + c - w, inside, 0.0)
                tangent, r = follow(skip, pick, q, z_i, inside, DPROB, SOURCE)
                tl.store(new_T + c, tangent, mask=within)
                tl.store(R + c, r, mask=within)
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        Q += width
        R += width
    return V, T


@triton.jit
def collect_box(
    weights, y, last, n, inner, plane, E, D, Q, R, width,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the last item to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D = E + width, D + width
    for j in range(n):
        w = tl.load(weights + n - 1 - j).to(tl.int32)
        result = tl.zeros([BLOCK], Q.dtype.element_ty)
        for start in range(0, last + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            up, within = c + w, c <= last
            arrives = (up <= last) & fits(up, w, inner, plane)
            q, q_up = tl.load(Q + c, within, 0.0), tl.load(Q + up, arrives, 0.0)
            e, e_up = tl.load(E + c, within, 0.0), tl.load(E + up, arrives, 0.0)
            tl.store(new_E + c, e - e * q + e_up * q_up, mask=within)  # [E]
            if SOURCE is None:
                result += e * q
            else:
                r, r_up = tl.load(R + c, within, 0.0), tl.load(R + up, arrives, 0.0)
                d, d_up = tl.load(D + c, within, 0.0), tl.load(D + up, arrives, 0.0)
                change = d * q + e * r
                tl.store(new_D + c, d - change + (d_up * q_up + e_up * r_up), mask=within)  # [E']
                result += change
        total = tl.sum(result)  # [y], which rounding must not carry beyond 1, or [Hz]
        if SOURCE is None and not WHOLE:
            total = tl.where(total > 1.0, 1.0, total)
        tl.store(y + n - 1 - j, total)
        tl.debug_barrier()
        E, new_E, D, new_D = new_E, E, new_D, D
        Q -= width
        R -= width


@triton.jit(do_not_specialize=NUMBERS)
def operator_kernel(
    theta, z, weights, capacity, gamma, cotangent,
    scale: tl.float64, batch, n, width, last, inner, plane, weights_step, capacity_step, gamma_step,
    value, tangent, y, V_rows, rows, tables,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, GAMMAS: tl.constexpr,
    RELAXED: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value and, RELAXED, the marginals; in a direction, the tangent and its derivative. KEEP: a table per instance.
    WHOLE: the values of all states, and marginals of paths that start as often as a cotangent says."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    E = rows + program * 6 * width
    D, T = E + 2 * width, E + 4 * width
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
        given = tl.load(capacity + b * capacity_step).to(tl.int32)
        goal = tl.minimum(tl.maximum(given, 0), last)
        end = goal
        if WHOLE:
            end = last + 0 * goal
        strength = scale_of(gamma, scale, b, gamma_step, GAMMAS)
        V_end, T_end = fill_box(
            theta + items, z + items, own, strength, end, n, inner, plane, V, T, Q, R, width,
            VALUE, PROB, DPROB, SOURCE, BLOCK,
        )  # fmt: skip
        taint = taint_of(theta + items, n, strength, BLOCK)
        states = tl.cast(b, tl.int64) * (last + 1)
        if WHOLE:
            if not RELAXED:
                for start in range(0, last + 1, BLOCK):
                    c = start + tl.arange(0, BLOCK)
                    tl.store(value + states + c, tl.load(V_end + c, c <= last, 0.0) + taint, mask=c <= last)
        else:
            taint += tl.where(given < 0, float("nan"), 0.0)
            tl.store(value + b, tl.load(V_end + goal) + taint)
            if SOURCE is not None:
                tl.store(tangent + b, tl.load(T_end + goal) + taint.to(Q.dtype.element_ty))
        if RELAXED or KEEP:
            last_row = (n - 1) * width
            tl.store(Q + last_row + goal, float("nan"), mask=taint != taint)  # reaches all that is computed of it
        if RELAXED:
            for start in range(0, end + 1, BLOCK):
                c = start + tl.arange(0, BLOCK)
                if WHOLE:
                    first = tl.load(cotangent + states + c, c <= end, 0.0) + taint.to(Q.dtype.element_ty)
                else:
                    first = (c == goal).to(Q.dtype.element_ty)
                tl.store(E + c, first, mask=c <= end)
                if SOURCE is not None:
                    tl.store(D + c, tl.zeros([BLOCK], Q.dtype.element_ty), mask=c <= end)
            tl.debug_barrier()
            collect_box(
                own, y + items, end, n, inner, plane, E, D, Q + last_row, R + last_row, width, SOURCE, WHOLE, BLOCK
            )
        tl.debug_barrier()
