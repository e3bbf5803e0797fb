"""Items with several budgets: a program takes one instance after the other, and works on rows in memory, in tiles of
BLOCK.

States are numbered as in :mod:`knapgrad.lattice`: a pick subtracts the weight, if no digit has to borrow. The first
budget has the leading digit, so its capacities are planes of ``lead`` states each. Of these only the live ones are
touched, as the cells of a row in :mod:`knapgrad.kernels.triton.memory`: from the lowest that the goal can reach up to
the knee, where all items so far fit. Beyond the knee nothing changes from plane to plane.
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
def weight_in(weights, i, goal, last, inner, plane):
    """What an item weighs, and how many planes that is. One that never fits on the way from the goal is too heavy for
    every state, and counts for nothing."""
    w, lead = tl.load(weights + i).to(tl.int32), tl.maximum(inner, plane)
    inside = fits(goal, w, inner, plane)
    return tl.where(inside, w, last + 1), tl.where(inside, w // lead, 0)


@triton.jit
def band_in(prefix, total, end, lead, BAND: tl.constexpr):
    """The first and the last state, and the knee, of the row after items that have ``prefix`` planes."""
    highest = end // lead
    if BAND:
        knee = tl.minimum(prefix, highest)
        first = tl.maximum(highest - (total - prefix), 0) * lead
        return first, tl.minimum((knee + 1) * lead - 1, end), knee
    else:
        return 0 * highest, end, highest


@triton.jit
def settled_in(c, knee, lead):
    """The state that stands for c."""
    return c - tl.maximum(c // lead - knee, 0) * lead


@triton.jit
def fill_box(
    theta, z, weights, scale, goal, total, end, last, n, inner, plane, V, T, Q, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, BAND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From the first item to the last; V and T are two rows each. Returns the last ones."""
    new_V, new_T, lead = V + width, T + width, tl.maximum(inner, plane)
    prefix = 0 * total
    _, top, knee = band_in(prefix, total, end, lead, BAND)
    for start in range(0, top + 1, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(V + c, tl.zeros([BLOCK], tl.float64), mask=c <= top)
        if SOURCE is not None:
            tl.store(T + c, tl.zeros([BLOCK], Q.dtype.element_ty), mask=c <= top)
    tl.debug_barrier()
    for i in range(n):
        w, planes = weight_in(weights, i, goal, last, inner, plane)
        score, z_i, old_knee = score_of(theta, i, scale), tl.load(z + i), knee
        prefix += planes
        first, top, knee = band_in(prefix, total, end, lead, BAND)
        for start in range(first, top + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            within = c <= top
            inside = within & fits(c, w, inner, plane)
            at, below = settled_in(c, old_knee, lead), settled_in(c - w, old_knee, lead)
            skip, pick = tl.load(V + at, within, 0.0), tl.load(V + below, inside, 0.0) + score
            value, q = decide(skip, pick, inside, VALUE, PROB, Q.dtype.element_ty)
            tl.store(new_V + c, value, mask=within)
            tl.store(Q + c, q, mask=within)
            if SOURCE is not None:
                skip, pick = tl.load(T + at, within, 0.0), tl.load(T + below, inside, 0.0)
                tangent, r = follow(skip, pick, q, z_i, inside, DPROB, SOURCE)
                tl.store(new_T + c, tangent, mask=within)
                tl.store(R + c, r, mask=within)
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        Q += width
        R += width
    return V, T


@triton.jit
def leave(E, D, Q, R, c, mask, SOURCE: tl.constexpr):
    """What picks take from states, and in a direction its change; then what stays there."""
    q, e = tl.load(Q + c, mask, 0.0), tl.load(E + c, mask, 0.0)
    picked = e * q
    if SOURCE is None:
        return picked, picked, e - picked, picked
    else:
        r, d = tl.load(R + c, mask, 0.0), tl.load(D + c, mask, 0.0)
        change = d * q + e * r
        return picked, change, e - picked, d - change


@triton.jit
def collect_box(
    weights, y, goal, total, end, last, n, inner, plane, E, D, Q, R, width,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the last item to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D, lead = E + width, D + width, tl.maximum(inner, plane)
    prefix = total
    first, top, knee = band_in(prefix, total, end, lead, BAND)
    for j in range(n):
        w, planes = weight_in(weights, n - 1 - j, goal, last, inner, plane)
        prefix -= planes
        new_first, new_top, new_knee = band_in(prefix, total, end, lead, BAND)
        result = tl.zeros([BLOCK], Q.dtype.element_ty)
        for start in range(new_first, top + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            up = c + w
            arrives = (up >= first) & (up <= top) & fits(up, w, inner, plane)
            _, change, e, d = leave(E, D, Q, R, c, (c >= first) & (c <= top), SOURCE)
            result += change
            picked, change, _, _ = leave(E, D, Q, R, up, arrives, SOURCE)
            e, d = e + picked, d + change
            if start + BLOCK > new_knee * lead:  # what stays beyond the knee comes to it
                for beyond in range(lead, (knee - new_knee) * lead + 1, lead):
                    from_there = (c // lead == new_knee) & (c + beyond >= first) & (c + beyond <= top)
                    _, _, more_e, more_d = leave(E, D, Q, R, c + beyond, from_there, SOURCE)
                    e, d = e + more_e, d + more_d
            tl.store(new_E + c, e, mask=c <= new_top)  # [E]
            if SOURCE is not None:
                tl.store(new_D + c, d, mask=c <= new_top)  # [E']
        sum_of_picks = tl.sum(result)  # [y], which rounding must not carry beyond 1, or [Hz]
        if SOURCE is None and not WHOLE:
            sum_of_picks = tl.where(sum_of_picks > 1.0, 1.0, sum_of_picks)
        tl.store(y + n - 1 - j, sum_of_picks)
        tl.debug_barrier()
        E, new_E, D, new_D = new_E, E, new_D, D
        first, top, knee = new_first, new_top, new_knee
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
    """Value and, RELAXED, the marginals; in a direction, the tangent and its derivative. KEEP: a table per instance, of
    all states up to the capacity. WHOLE: the values of all states, and marginals of paths that start as often as a
    cotangent says."""
    BAND: tl.constexpr = not (KEEP or WHOLE)
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
        end, total = goal, 0 * goal
        if WHOLE:
            goal = last + 0 * goal
            end = goal
        if BAND:
            for i in range(n):
                _, planes = weight_in(own, i, goal, last, inner, plane)
                total += planes
            end = settled_in(goal, total, tl.maximum(inner, plane))
        strength = scale_of(gamma, scale, b, gamma_step, GAMMAS)
        V_end, T_end = fill_box(
            theta + items, z + items, own, strength, goal, total, end, last, n, inner, plane, V, T, Q, R, width,
            VALUE, PROB, DPROB, SOURCE, BAND, BLOCK,
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
            tl.store(value + b, tl.load(V_end + end) + taint)
            if SOURCE is not None:
                tl.store(tangent + b, tl.load(T_end + end) + taint.to(Q.dtype.element_ty))
        if RELAXED or KEEP:
            last_row = (n - 1) * width
            tl.store(Q + last_row + end, float("nan"), mask=taint != taint)  # reaches all that is computed of it
        if RELAXED:
            for start in range(0, end + 1, BLOCK):
                c = start + tl.arange(0, BLOCK)
                if WHOLE:
                    begin = tl.load(cotangent + states + c, c <= end, 0.0) + taint.to(Q.dtype.element_ty)
                else:
                    begin = (c == end).to(Q.dtype.element_ty)
                tl.store(E + c, begin, mask=c <= end)
                if SOURCE is not None:
                    tl.store(D + c, tl.zeros([BLOCK], Q.dtype.element_ty), mask=c <= end)
            tl.debug_barrier()
            collect_box(
                own, y + items, goal, total, end, last, n, inner, plane, E, D, Q + last_row, R + last_row, width,
                SOURCE, WHOLE, BAND, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
