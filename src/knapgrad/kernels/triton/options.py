"""Choices among options: M items in a row, of which exactly one is picked.

A tile of capacities is worked on with all its M leaves in registers, joined two by two by a tree that is unrolled when
a kernel is compiled. The table holds P, the probability of each option, in one row per option. Rows are in memory, and
only the live band is touched, as in :mod:`knapgrad.kernels.triton.memory`; a prefix sum counts the heaviest option of
each choice.

M numbers or tensors are a tuple here. Where they are too many, :mod:`knapgrad.kernels.triton.many_options` loops over
them.
"""

# mypy: disable-error-code="assignment"
# (tuples that grow)

import triton
import triton.language as tl

from knapgrad.kernels.triton.many_options import collect_in_loops, fill_in_loops, heaviest_at
from knapgrad.kernels.triton.memory import line_of, load_once
from knapgrad.kernels.triton.registers import add_up, total_of
from knapgrad.kernels.triton.steps import INFEASIBLE, band_of, can_pick, first_prefix, score_of, start_row, weight_of


@triton.jit
def weights_of(weights, k, C, M: tl.constexpr):
    """The weights of the options of choice k."""
    found = ()
    for o in tl.static_range(M):
        found = found + (weight_of(weights, k * M + o, C),)
    return found


@triton.jit
def scores_of(theta, k, scale, M: tl.constexpr):
    found = ()
    for o in tl.static_range(M):
        found = found + (score_of(theta, k * M + o, scale),)
    return found


@triton.jit
def numbers_of(x, k, M: tl.constexpr):
    found = ()
    for o in tl.static_range(M):
        found = found + (tl.load(x + k * M + o),)
    return found


@triton.jit
def heaviest_of(weights, M: tl.constexpr):
    heaviest = weights[0]
    for o in tl.static_range(1, M):
        heaviest = tl.maximum(heaviest, weights[o])
    return heaviest


@triton.jit
def times(x, P, SIZE: tl.constexpr):
    """x P, for the options of a branch; the one of a leaf has P = 1."""
    if SIZE == 1:
        return (x,)
    else:
        found = ()
        for o in tl.static_range(SIZE):
            found = found + (x * P[o],)
        return found


@triton.jit
def times_changed(x, dx, P, R, SIZE: tl.constexpr):
    """The derivative of x P, where x changes by dx, and P by R."""
    if SIZE == 1:
        return (dx,)
    else:
        found = ()
        for o in tl.static_range(SIZE):
            found = found + (x * R[o] + dx * P[o],)
        return found


@triton.jit
def join(
    V, T, c, weights, sides, scores, z, old_top,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Joins options LOW..HIGH-1 at capacities c: [V], [V'], and for each option [P] and [P']. LOW and HIGH give the
    tree of :func:`knapgrad.lattice.tournament`. JOIN is this function, which Triton 3.3 could not call by its name."""
    if HIGH - LOW == 1:
        below = c - weights[LOW]
        fits = can_pick(c, weights[LOW], sides)
        if SLACK:
            fits = fits & (below <= old_top)
        else:
            below = tl.minimum(below, old_top)  # the row is constant above
        value = tl.load(V + below, fits, INFEASIBLE) + scores[LOW]
        if SOURCE is None:
            return value, value, (), ()
        else:
            return value, tl.load(T + below, fits, 0.0) + z[LOW], (), ()
    else:
        MIDDLE: tl.constexpr = LOW + (HIGH - LOW) // 2
        skip, skip_t, skip_p, skip_r = JOIN(
            V, T, c, weights, sides, scores, z, old_top, VALUE, PROB, DPROB, SOURCE, SLACK, dtype, LOW, MIDDLE, JOIN
        )
        pick, pick_t, pick_p, pick_r = JOIN(
            V, T, c, weights, sides, scores, z, old_top, VALUE, PROB, DPROB, SOURCE, SLACK, dtype, MIDDLE, HIGH, JOIN
        )
        advantage = pick - skip
        delta = advantage.to(dtype)
        q = PROB(delta)
        value = tl.where(advantage > 0.0, pick, skip) + VALUE(delta).to(tl.float64)
        P = times(1.0 - q, skip_p, MIDDLE - LOW) + times(q, pick_p, HIGH - MIDDLE)
        if SOURCE is None:
            return value, value, P, ()
        else:
            added, slope = SOURCE(q, 0.0)
            change = pick_t - skip_t
            r = DPROB(q) * (change + slope)
            R = times_changed(1.0 - q, -r, skip_p, skip_r, MIDDLE - LOW)
            R = R + times_changed(q, r, pick_p, pick_r, HIGH - MIDDLE)
            return value, skip_t + q * change + added, P, R


@triton.jit
def fill_choice(
    V, new_V, T, new_T, P, R, weights, sides, scores, z, old_top, first, top, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    STORED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = P.dtype.element_ty
    for start in range(first, top + 1, BLOCK):
        c = start + tl.arange(0, BLOCK)
        within = c < width
        value, tangent, p, r = join(
            V, T, c, weights, sides, scores, z, old_top, VALUE, PROB, DPROB, SOURCE, SLACK, dtype, 0, M, join
        )
        tl.store(new_V + c, tl.where(value < INFEASIBLE, INFEASIBLE, value), mask=within)
        if SOURCE is not None:
            tl.store(new_T + c, tangent, mask=within)
        if STORED:
            if M == 1:
                p = (tl.full([BLOCK], 1.0, dtype),)
                r = (tl.zeros([BLOCK], dtype),)
            for o in tl.static_range(M):
                tl.store(P + o * width + c, p[o], mask=within, cache_modifier=".cs")
                if SOURCE is not None:
                    tl.store(R + o * width + c, r[o], mask=within, cache_modifier=".cs")


@triton.jit
def fill_choices(
    theta, z, weights, scale, C, ahead, slack, sides, choices, V, T, P, R, width,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    STORED: tl.constexpr, LOOPS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills from the first choice to the last; V and T are two rows each. Returns the last ones, and the top of their
    band. ``ahead`` is the total weight, or more, so that no state is too low to matter."""
    new_V, new_T = V + width, T + width
    V_nodes, T_nodes = V + 2 * width, T + 2 * width
    if SLACK or len(sides) > 0:
        start_row(V, slack, tl.where(slack < 0, INFEASIBLE, 0.0).to(tl.float64), BLOCK)
        if SOURCE is not None:
            start_row(T, slack, 0.0, BLOCK)
    else:
        tl.store(V, 0.0)
        if SOURCE is not None:
            tl.store(T, 0.0)
    tl.debug_barrier()
    prefix = first_prefix(ahead, C, sides)
    for k in range(choices):
        _, old_top, _ = band_of(prefix, ahead, C, slack, SLACK)
        if LOOPS:
            prefix += heaviest_at(weights, k, C, M)
            _, top, low = band_of(prefix, ahead, C, slack, SLACK)
            fill_in_loops(
                V, new_V, T, new_T, P, R, V_nodes, T_nodes, theta, z, weights, k, C, scale, old_top, line_of(low),
                top, width, VALUE, PROB, DPROB, SOURCE, SLACK, STORED, M, BLOCK,
            )  # fmt: skip
        else:
            w, scores = weights_of(weights, k, C, M), scores_of(theta, k, scale, M)
            z_k = scores
            if SOURCE is not None:
                z_k = numbers_of(z, k, M)
            prefix += heaviest_of(w, M)
            _, top, low = band_of(prefix, ahead, C, slack, SLACK)
            fill_choice(
                V, new_V, T, new_T, P, R, w, sides, scores, z_k, old_top, line_of(low), top, width,
                VALUE, PROB, DPROB, SOURCE, SLACK, STORED, M, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        if STORED:
            P += M * width
            R += M * width
    _, top, _ = band_of(prefix, ahead, C, slack, SLACK)
    return V, T, top


@triton.jit
def collect_choice(
    E, new_E, D, new_D, P, R, above_e, above_d, weights, low, top, first, new_top, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns for each option what adds up to [y], or in a direction to [Hz], and what is above the band, where rows
    are constant, after this step."""
    result = ()
    for o in tl.static_range(M):
        if SLACK:
            result = result + (above_e,)  # nothing but a NaN
        elif SOURCE is None:
            result = result + (above_e * tl.load(P + o * width + top),)
        else:
            result = result + (above_d * tl.load(P + o * width + top) + above_e * tl.load(R + o * width + top),)
    for start in range(first, top + 1, BLOCK):
        c = start + tl.arange(0, BLOCK)
        e = tl.zeros([BLOCK], P.dtype.element_ty)
        d = e
        added = ()
        for o in tl.static_range(M):
            up = c + weights[o]
            here = (up >= low) & (up <= top)
            p, e_up = load_once(P + o * width + up, here), tl.load(E + up, here, 0.0)
            picked = e_up * p
            e += picked  # [E]
            if SOURCE is None:
                added = added + (result[o] + picked,)
            else:
                change = tl.load(D + up, here, 0.0) * p + e_up * load_once(R + o * width + up, here)
                d += change  # [E']
                added = added + (result[o] + change,)
        result = added
        tl.store(new_E + c, e, mask=c < width)
        if SOURCE is not None:
            tl.store(new_D + c, d, mask=c < width)
        if not SLACK:
            above_e += tl.where(c > new_top, e, 0.0)
            if SOURCE is not None:
                above_d += tl.where(c > new_top, d, 0.0)
    return result, above_e, above_d


@triton.jit
def collect_choices(
    weights, y, C, total, ahead, slack, choices, E, D, P, R, above_e, above_d, width,
    SOURCE: tl.constexpr, SLACK: tl.constexpr, CUT: tl.constexpr, LATER: tl.constexpr, LOOPS: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects from the last choice to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D = E + width, D + width
    prefix = total
    for j in range(choices):
        k = choices - 1 - j
        _, top, low = band_of(prefix, ahead, C, slack, SLACK)
        if LOOPS:
            prefix -= heaviest_at(weights, k, C, M)
            _, new_top, first = band_of(prefix, ahead, C, slack, SLACK)
            above_e, above_d = collect_in_loops(
                E, new_E, D, new_D, P, R, above_e, above_d, y, weights, k, C, low, top, line_of(first), new_top, width,
                SOURCE, SLACK, CUT, False, M, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
        else:
            w = weights_of(weights, k, C, M)
            prefix -= heaviest_of(w, M)
            _, new_top, first = band_of(prefix, ahead, C, slack, SLACK)
            result, above_e, above_d = collect_choice(
                E, new_E, D, new_D, P, R, above_e, above_d, w, low, top, line_of(first), new_top, width,
                SOURCE, SLACK, M, BLOCK,
            )  # fmt: skip
            if not LATER:
                for o in tl.static_range(M):
                    tl.store(y + k * M + o, total_of(result[o], 0, SOURCE) if CUT else tl.sum(result[o]))
            tl.debug_barrier()
            if LATER:
                for o in tl.static_range(M):
                    tl.store(P + o * width + tl.arange(0, BLOCK), result[o])
        E, new_E, D, new_D = new_E, E, new_D, D
        P -= M * width
        R -= M * width
    if LATER:
        add_up(y, choices * M, P + M * width, width, SOURCE, BLOCK)
