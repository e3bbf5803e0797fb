"""The GPU kernels, in Triton: every sweep of :mod:`knapgrad.reference`, fused per instance.

A program takes one instance after the other (a persistent grid) and does all sweeps of it; nothing but the results
leaves. Rows live in one of two places, which share the step from row to row:

- *narrow* rows (up to 128 capacities, 512 in small batches) in registers, shifted by a gather among threads;
- wider rows in scratch memory of the program, two of each kind in turn, worked on in tiles of BLOCK capacities with one
  barrier an item. Only the live band is touched: from ``low = max(goal - later weights, 0)`` to ``top = min(prefix sum,
  goal)``, where ``goal = min(C, total weight)``. Above the prefix sum a knapsack row is constant, so reads are clamped
  there; under top-k such states are infeasible.

The table Q lies in the scratch too, one for each *resident* program, not for each instance. Rows beyond LARGEST_ROW
capacities are shared by many programs, with one launch an item.

V is kept in float64 whatever theta is, because a decision is a difference of two large V. All else has theta's type.
An instance without a feasible selection, or with a NaN, gives NaN: on a device nobody can raise without waiting for it.
Tags such as [V] name the equations in docs/math.md.
"""

from typing import Any

import triton
import triton.language as tl

from knapgrad import reference, regularizers
from knapgrad.kernels import triton_math

if not hasattr(tl, "gather"):
    raise ImportError(f"Triton {triton.__version__} is too old, 3.2 is needed")

_INFEASIBLE = tl.constexpr(reference.INFEASIBLE)


# The regularizers, chosen by name when a kernel is compiled.


def _compiled(function: Any) -> Any:
    return triton.jit(regularizers.rebind(function, triton_math))


_shannon_value, _shannon_prob, _shannon_dprob = map(_compiled, regularizers.Shannon.functions())
_gini_value, _gini_prob, _gini_dprob = map(_compiled, regularizers.Gini.functions())
_tsallis_value, _tsallis_prob, _tsallis_dprob = map(_compiled, regularizers.Tsallis.functions())
_hard_value, _hard_prob, _hard_dprob = map(_compiled, regularizers.Hard.functions())


@triton.jit
def _smoothed(delta, REGULARIZER: tl.constexpr):
    """What the smoothed maximum adds to the larger branch."""
    if REGULARIZER == "shannon":
        return _shannon_value(delta)
    elif REGULARIZER == "gini":
        return _gini_value(delta)
    elif REGULARIZER == "tsallis":
        return _tsallis_value(delta)
    else:
        return _hard_value(delta)


@triton.jit
def _prob(delta, REGULARIZER: tl.constexpr):
    """The probability of picking."""
    if REGULARIZER == "shannon":
        return _shannon_prob(delta)
    elif REGULARIZER == "gini":
        return _gini_prob(delta)
    elif REGULARIZER == "tsallis":
        return _tsallis_prob(delta)
    else:
        return _hard_prob(delta)


@triton.jit
def _dprob(q, REGULARIZER: tl.constexpr):
    """The derivative of prob."""
    if REGULARIZER == "shannon":
        return _shannon_dprob(q)
    elif REGULARIZER == "gini":
        return _gini_dprob(q)
    elif REGULARIZER == "tsallis":
        return _tsallis_dprob(q)
    else:
        return _hard_dprob(q)


# One step: from the old row to the new one. DIRECTION is what a tangent sweep follows: "none", "linear" or "entropy".


@triton.jit
def _decide(skip, pick, fits, REGULARIZER: tl.constexpr, dtype: tl.constexpr):
    """[V] and [Q]."""
    advantage = pick - skip
    delta = advantage.to(dtype)
    V = tl.where(advantage > 0.0, pick, skip) + _smoothed(delta, REGULARIZER).to(tl.float64)
    return tl.where(fits, V, skip), tl.where(fits, _prob(delta, REGULARIZER), 0.0)


@triton.jit
def _follow(skip, pick, q, z, fits, REGULARIZER: tl.constexpr, DIRECTION: tl.constexpr):
    """[V'] and [Q'], where the direction says what a decision adds to the tangent on average, and its slope in q."""
    if DIRECTION == "linear":
        added = q * z
        slope = z
    else:
        spread = q * (1.0 - q)
        inside = tl.where(spread > 0.0, q, 0.5)
        log_pick, log_skip = tl.log(inside), tl.log(1.0 - inside)
        added = tl.where(spread > 0.0, -q * log_pick - (1.0 - q) * log_skip, spread)
        slope = tl.where(spread > 0.0, log_skip - log_pick, spread)
    change = pick - skip
    T = tl.where(fits, skip + q * change + added, skip)
    return T, tl.where(fits, _dprob(q, REGULARIZER) * (change + slope), 0.0)


@triton.jit
def _score(theta, i, scale):
    """-inf is out, +inf is not a number."""
    score = tl.load(theta + i).to(tl.float64) * scale
    score = tl.where(score == float("-inf"), _INFEASIBLE, score)
    return tl.where(score == float("inf"), float("nan"), score)


@triton.jit
def _direction(z, i, DIRECTION: tl.constexpr):
    if DIRECTION == "linear":
        return tl.load(z + i)
    else:
        return 0.0


@triton.jit
def _weight(weights, i, C):
    """Of an item that never fits, C + 1 is as good as the true weight."""
    return tl.minimum(tl.load(weights + i), C + 1).to(tl.int32)


# Narrow rows.


@triton.jit
def _fill_narrow(
    theta, z, weights, scale, C, n, Q, R,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = Q.dtype.element_ty
    c = tl.arange(0, BLOCK)
    V = tl.zeros([BLOCK], tl.float64)
    if EXACTLY:
        V = tl.where(c == 0, V, _INFEASIBLE)
    T = tl.zeros([BLOCK], dtype)
    w, score = _weight(weights, 0, C), _score(theta, 0, scale)
    for i in range(n):
        later = tl.minimum(i + 1, n - 1)
        next_w, next_score = _weight(weights, later, C), _score(theta, later, scale)
        fits, below = c >= w, tl.maximum(c - w, 0)
        V, q = _decide(V, tl.gather(V, below, 0) + score, fits, REGULARIZER, dtype)
        tl.store(Q + c, q)
        if DIRECTION != "none":
            T, r = _follow(T, tl.gather(T, below, 0), q, _direction(z, i, DIRECTION), fits, REGULARIZER, DIRECTION)
            tl.store(R + c, r)
        w, score = next_w, next_score
        Q += BLOCK
        R += BLOCK
    return V, T


@triton.jit
def _collect_narrow(weights, y, C, goal, n, Q, R, DIRECTION: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    E = (c == goal).to(Q.dtype.element_ty)
    D = tl.zeros_like(E)
    w = _weight(weights, n - 1, C)
    # Three rows ahead: loads take longer than a step.
    q1, q2, q3 = tl.load(Q + c), tl.load(Q + c - (n > 1) * BLOCK), tl.load(Q + c - tl.minimum(n - 1, 2) * BLOCK)
    if DIRECTION != "none":
        r1, r2, r3 = tl.load(R + c), tl.load(R + c - (n > 1) * BLOCK), tl.load(R + c - tl.minimum(n - 1, 2) * BLOCK)
    for j in range(n):
        i = n - 1 - j
        next_w = _weight(weights, tl.maximum(i - 1, 0), C)
        ahead = tl.minimum(i, 3) * BLOCK
        q, q1, q2, q3 = q1, q2, q3, tl.load(Q + c - ahead)
        up, inside = tl.minimum(c + w, BLOCK - 1), c + w < BLOCK
        picked = E * q
        if DIRECTION != "none":
            r, r1, r2, r3 = r1, r2, r3, tl.load(R + c - ahead)
            change = D * q + E * r
            D = D - change + tl.where(inside, tl.gather(change, up, 0), 0.0)  # [E']
        else:
            change = picked
        if LATER:
            tl.store(Q + c, change)
        else:
            tl.store(y + i, _total(change, 0, DIRECTION))
        E = E - picked + tl.where(inside, tl.gather(picked, up, 0), 0.0)  # [E]
        w = next_w
        Q -= BLOCK
        R -= BLOCK
    if LATER:
        _add_up(y, n, Q + BLOCK, BLOCK, DIRECTION, BLOCK)


@triton.jit
def _total(x, axis: tl.constexpr, DIRECTION: tl.constexpr):
    """[y], which rounding must not carry beyond 1, or [Hz]."""
    total = tl.sum(x, axis=axis)
    if DIRECTION == "none":
        total = tl.where(total > 1.0, 1.0, total)
    return total


@triton.jit
def _add_up(y, n, parts, width, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over threads of several warps are expensive: put off to the end, they were left in the used-up rows of Q."""
    tl.debug_barrier()
    for start in range(0, n, 16):
        i = start + tl.arange(0, 16)
        at = i[:, None] * width + tl.arange(0, BLOCK)[None, :]
        tl.store(y + i, _total(tl.load(parts + at, (i < n)[:, None], 0.0), 1, DIRECTION), mask=i < n)
    tl.debug_barrier()


# Rows in memory.


@triton.jit
def _fill_row(
    V, new_V, T, new_T, Q, R, score, z, w, old, first, top, step, width,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(first, top + 1, step):
        c = start + tl.arange(0, BLOCK)
        within, fits = c < width, c >= w
        at, below = tl.minimum(c, old), tl.minimum(c - w, old)
        skip = tl.load(V + at, mask=within, other=0.0)
        if EXACTLY:
            skip = tl.where(c <= old, skip, _INFEASIBLE)
        pick = tl.load(V + below, mask=within & fits, other=0.0) + score
        value, q = _decide(skip, pick, fits, REGULARIZER, Q.dtype.element_ty)
        tl.store(new_V + c, value, mask=within)
        tl.store(Q + c, q, mask=within, cache_modifier=".cs")  # streamed: the rows should stay in cache
        if DIRECTION != "none":
            skip = tl.load(T + at, mask=within, other=0.0)
            pick = tl.load(T + below, mask=within & fits, other=0.0)
            tangent, r = _follow(skip, pick, q, z, fits, REGULARIZER, DIRECTION)
            tl.store(new_T + c, tangent, mask=within)
            tl.store(R + c, r, mask=within, cache_modifier=".cs")


@triton.jit
def _load_once(pointers, mask):
    return tl.load(pointers, mask, 0.0, eviction_policy="evict_first")


@triton.jit
def _collect_row(
    E, new_E, D, new_D, Q, R, above_e, above_d, w, low, top, first, new_top, step, width,
    DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns what adds up to [y], or in a direction to [Hz], and what is above the prefix sum after this step.

    States above the prefix sum decide like the one at it, and stay above whatever they decide: what skips up there is
    gathered, lane by lane, and leaves the rows.
    """
    q_top = tl.load(Q + top)
    if DIRECTION == "none":
        result = above_e * q_top
    else:
        result = above_d * q_top + above_e * tl.load(R + top)
    for start in range(first, top + 1, step):
        c = start + tl.arange(0, BLOCK)
        up = c + w
        here, stays, fits = (c >= low) & (c <= top), c <= new_top, (up >= low) & (up <= top)
        q, q_up = _load_once(Q + c, here), _load_once(Q + up, fits)
        e, e_up = tl.load(E + c, here, 0.0), tl.load(E + up, fits, 0.0)
        picked = e * q
        tl.store(new_E + c, e - picked + e_up * q_up, mask=c < width)  # [E]
        above_e += tl.where(stays, 0.0, e - picked)
        if DIRECTION == "none":
            result += picked
        else:
            r, r_up = _load_once(R + c, here), _load_once(R + up, fits)
            d, d_up = tl.load(D + c, here, 0.0), tl.load(D + up, fits, 0.0)
            change = d * q + e * r
            tl.store(new_D + c, d - change + (d_up * q_up + e_up * r_up), mask=c < width)  # [E']
            above_d += tl.where(stays, 0.0, d - change)
            result += change
    return result, above_e, above_d


@triton.jit
def _collect_wide(
    weights, y, C, total, goal, n, E, D, Q, R, width,
    DIRECTION: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the last item to the first; E and D are two rows each, of which the first is filled."""
    new_E, new_D = E + width, D + width
    above_e = tl.zeros([BLOCK], Q.dtype.element_ty)
    above_d = above_e
    prefix, w = total, _weight(weights, n - 1, C)
    for j in range(n):
        i = n - 1 - j
        next_w = _weight(weights, tl.maximum(i - 1, 0), C)
        top, low = _band(prefix, total, goal)
        prefix -= w
        new_top, first = _band(prefix, total, goal)
        result, above_e, above_d = _collect_row(
            E, new_E, D, new_D, Q, R, above_e, above_d, w, low, top, _line(first), new_top, BLOCK, width,
            DIRECTION, BLOCK,
        )  # fmt: skip
        if not LATER:
            tl.store(y + i, _total(result, 0, DIRECTION))
        tl.debug_barrier()
        if LATER:
            tl.store(Q + tl.arange(0, BLOCK), result)
        E, new_E, D, new_D = new_E, E, new_D, D
        w = next_w
        Q -= width
        R -= width
    if LATER:
        _add_up(y, n, Q + width, width, DIRECTION, BLOCK)


@triton.jit
def _fill_wide(
    theta, z, weights, scale, C, total, goal, n, V, T, Q, R, width,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the first item to the last; V and T are two rows each. Returns the last ones."""
    new_V, new_T = V + width, T + width
    tl.store(V, 0.0)
    if DIRECTION != "none":
        tl.store(T, 0.0)
    tl.debug_barrier()
    prefix = tl.zeros_like(total)
    w, score = _weight(weights, 0, C), _score(theta, 0, scale)
    for i in range(n):
        later = tl.minimum(i + 1, n - 1)
        next_w, next_score = _weight(weights, later, C), _score(theta, later, scale)
        z_i = _direction(z, i, DIRECTION)
        old, _ = _band(prefix, total, goal)
        prefix += w
        top, low = _band(prefix, total, goal)
        _fill_row(
            V, new_V, T, new_T, Q, R, score, z_i, w, old, _line(low), top, BLOCK, width,
            REGULARIZER, EXACTLY, DIRECTION, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        V, new_V, T, new_T = new_V, V, new_T, T
        w, score = next_w, next_score
        Q += width
        R += width
    return V, T


@triton.jit
def _band(prefix, total, goal):
    """The top and the bottom of the row after the items that weigh prefix."""
    return tl.minimum(prefix, goal).to(tl.int32), tl.maximum(goal - (total - prefix), 0).to(tl.int32)


@triton.jit
def _line(c):
    """Tiles start with a line of memory: stores of whole lines are cheaper, even with cells that nobody will read."""
    return c // 32 * 32


# Whole instances.


@triton.jit
def _limits(weights, capacity, reach, n, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """The capacity, the total weight and the state to start from, the smaller of the two. Totals have 32 bits where one
    program works on a whole table: its cells are numbered in as many."""
    C = tl.minimum(tl.load(capacity), reach).to(tl.int32)
    total = tl.zeros([], dtype)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.minimum(tl.load(weights + i, i < n, 0), C + 1).to(dtype))
    return C, total, tl.minimum(C, total).to(tl.int32)


@triton.jit
def _scale(gamma, scale, b, gamma_step, GAMMAS: tl.constexpr):
    """1 / gamma: a number for all instances, or in memory."""
    if GAMMAS:
        strength = tl.load(gamma + b * gamma_step).to(tl.float64)
        return tl.where(strength > 0.0, 1.0 / strength, float("nan"))
    else:
        return scale


@triton.jit
def _fill(
    theta, z, weights, scale, C, total, goal, n, V, T, Q, R, width,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, DIRECTION: tl.constexpr, NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills the tables; returns V and T at the goal. For an infeasible instance that is NaN, which is left in Q at the
    goal as well: from there it reaches all that is computed of the instance."""
    if NARROW:
        V_row, T_row = _fill_narrow(theta, z, weights, scale, C, n, Q, R, REGULARIZER, EXACTLY, DIRECTION, BLOCK)
        at_goal = tl.arange(0, BLOCK) == goal
        value, tangent = tl.sum(tl.where(at_goal, V_row, 0.0)), tl.sum(tl.where(at_goal, T_row, 0.0))
        tl.debug_barrier()
    else:
        V, T = _fill_wide(
            theta, z, weights, scale, C, total, goal, n, V, T, Q, R, width,
            REGULARIZER, EXACTLY, DIRECTION, BLOCK,
        )  # fmt: skip
        value = tl.load(V + goal)
        tangent = value
        if DIRECTION != "none":
            tangent = tl.load(T + goal)
    value = tl.where(value < 0.5 * _INFEASIBLE, float("nan"), value)
    tl.store(Q + (n - 1) * width + goal, float("nan"), mask=value != value)
    tl.debug_barrier()
    return value, tangent


_UNSPECIALIZED = ["batch", "whole", "samples", "n", "width", "reach", "weights_step", "capacity_step", "gamma_step"]


@triton.jit(do_not_specialize=[x for x in _UNSPECIALIZED if x not in ("whole", "samples")])
def operator_kernel(
    theta, z, weights, capacity, gamma,
    scale: tl.float64, batch, n, width, reach, weights_step, capacity_step, gamma_step,
    value, tangent, y, V_rows, rows, tables,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    DIRECTION: tl.constexpr, RELAXED: tl.constexpr, KEEP: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Value and, RELAXED, the marginals; in a direction, the tangent and its derivative. KEEP: a table an instance."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    E = rows + program * (2 if DIRECTION == "none" else 6) * width
    D, T = E + 2 * width, E + 4 * width
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        slab = tl.cast(b, tl.int64) if KEEP else program
        if DIRECTION == "none":
            Q = tables + slab * n * width
            R = Q
        else:
            Q = tables + slab * 2 * n * width
            R = Q + n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal = _limits(own, capacity + b * capacity_step, reach, n, tl.int32, BLOCK)
        v, t = _fill(
            theta + items, z + items, own, _scale(gamma, scale, b, gamma_step, GAMMAS), C, total, goal, n,
            V, T, Q, R, width, REGULARIZER, EXACTLY, DIRECTION, NARROW, BLOCK,
        )  # fmt: skip
        tl.store(value + b, v)
        if DIRECTION != "none":
            tl.store(tangent + b, t + 0.0 * v)
        if RELAXED:
            last = (n - 1) * width
            if NARROW:
                _collect_narrow(own, y + items, C, goal, n, Q + last, R + last, DIRECTION, LATER, BLOCK)
            else:
                tl.store(E + goal, 1.0)
                if DIRECTION != "none":
                    tl.store(D + goal, 0.0)
                tl.debug_barrier()
                _collect_wide(
                    own, y + items, C, total, goal, n, E, D, Q + last, R + last, width, DIRECTION, LATER, BLOCK
                )


@triton.jit
def _harden(weights, C, total, goal, n, M, Q, width, BLOCK: tl.constexpr):
    """[mode]: a hard sweep M over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    new_M = M + width
    tl.store(M, 0.0)
    tl.debug_barrier()
    prefix = tl.zeros_like(total)
    for i in range(n):
        w = _weight(weights, i, C)
        old, _ = _band(prefix, total, goal)
        prefix += w
        top, low = _band(prefix, total, goal)
        for start in range(low, top + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            within, fits = c <= top, c >= w
            q = tl.load(Q + c, within, 0.0)
            pick = tl.load(M + tl.minimum(c - w, old), within & fits, 0.0) + _log_chance(q)
            skip = tl.load(M + tl.minimum(c, old), within, 0.0) + _log_chance(1.0 - q)
            better = fits & (pick > skip)
            tl.store(new_M + c, tl.where(better, pick, skip), mask=within)
            tl.store(Q + c, tl.where(better, 1.0, 0.0) + 0.0 * q, mask=within)
        tl.debug_barrier()
        M, new_M = new_M, M
        Q += width


@triton.jit
def _log_chance(q):
    return tl.where(q > 0.0, tl.log(tl.where(q > 0.0, q, 1.0).to(tl.float64)), -1e30)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def sample_kernel(
    theta, uniforms, weights, capacity, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, weights_step, capacity_step, gamma_step,
    y, V_rows, rows, tables,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, DRAW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[sample], LANES paths at a time; if not DRAW, the mode. FILLED: the tables are there, one an instance. These are
    ``batch`` instances of a ``whole``: samples are that far apart."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q = tables + (tl.cast(b, tl.int64) if FILLED else program) * n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal = _limits(own, capacity + b * capacity_step, reach, n, tl.int64, BLOCK)
        if not FILLED:
            _fill(
                theta + items, theta, own, _scale(gamma, scale, b, gamma_step, GAMMAS), C, total.to(tl.int32), goal,
                n, V, Q, Q, Q, width, REGULARIZER, EXACTLY, "none", NARROW, BLOCK,
            )  # fmt: skip
        if not DRAW and REGULARIZER != "hard":
            _harden(own, C, total, goal, n, V, Q, width, BLOCK)
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            taint = tl.zeros([LANES], Q.dtype.element_ty)
            prefix = total
            row = Q + tl.cast(n - 1, tl.int64) * width
            for j in range(n):
                i = n - 1 - j
                w = _weight(own, i, C)
                top, _ = _band(prefix, total, goal)
                c = tl.minimum(c, top)
                q = tl.load(row + c, live, 0.0)
                u = 0.5
                if DRAW:
                    u = tl.load(uniforms + at + i, live, 0.0)
                taint += 0.0 * q  # a NaN stays
                tl.store(y + at + i, (u < q).to(Q.dtype.element_ty) + taint, mask=live)
                c = tl.where(u < q, c - w, c)
                prefix -= w
                row -= width
        tl.debug_barrier()


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def log_prob_kernel(
    theta, selections, cotangent, weights, capacity, gamma,
    scale: tl.float64, batch, whole, samples, n, width, reach, weights_step, capacity_step, gamma_step,
    log_prob, gradient, V_rows, rows, tables,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, GAMMAS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    FILLED: tl.constexpr, BACKWARDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[log-prob] along the path of each selection; BACKWARDS, an E sweep that is fed along those paths."""
    program = tl.program_id(0).to(tl.int64)
    V = V_rows + program * 2 * width
    for b in range(tl.program_id(0), batch, tl.num_programs(0)):
        Q = tables + (tl.cast(b, tl.int64) if FILLED else program) * n * width
        items = tl.cast(b, tl.int64) * n
        own = weights + tl.cast(b, tl.int64) * weights_step
        C, total, goal = _limits(own, capacity + b * capacity_step, reach, n, tl.int64, BLOCK)
        if not FILLED:
            _fill(
                theta + items, theta, own, _scale(gamma, scale, b, gamma_step, GAMMAS), C, total.to(tl.int32), goal,
                n, V, Q, Q, Q, width, REGULARIZER, EXACTLY, "none", NARROW, BLOCK,
            )  # fmt: skip
        for start in range(0, samples, LANES):
            s = start + tl.arange(0, LANES)
            live = s < samples
            at = s.to(tl.int64) * whole * n + items
            c = tl.zeros([LANES], tl.int32) + goal
            result = tl.zeros([LANES], Q.dtype.element_ty)
            A = rows + program * 2 * width
            new_A = A + width
            weight = result
            above = tl.zeros([BLOCK], Q.dtype.element_ty)
            if BACKWARDS:
                weight = tl.load(cotangent + s.to(tl.int64) * whole + b, live, 0.0)
                tl.store(A + goal, 0.0)
                tl.debug_barrier()
            prefix = total
            row = Q + tl.cast(n - 1, tl.int64) * width
            for j in range(n):
                i = n - 1 - j
                w = _weight(own, i, C)
                top, low = _band(prefix, total, goal)
                prefix -= w
                new_top, first = _band(prefix, total, goal)
                c = tl.maximum(tl.minimum(c, top), low)  # only an infeasible path leaves the band
                q = tl.load(row + c, live, 0.0)
                picked = tl.load(selections + at + i, live, 0.0) != 0.0
                chance = tl.where(picked, q, 1.0 - q)
                result += tl.log(chance)
                if BACKWARDS:
                    sums, above, _ = _collect_row(
                        A, new_A, A, A, row, row, above, above, w, low, top, _line(first), new_top, BLOCK, width,
                        "none", BLOCK,
                    )  # fmt: skip
                    slope = _dprob(q, REGULARIZER)
                    used = live & (c >= w) & (weight != 0.0)
                    seed = tl.where(used, weight * tl.where(picked, slope, -slope) / chance, 0.0)
                    earlier = tl.load(gradient + items + i)
                    tl.debug_barrier()
                    tl.store(gradient + items + i, tl.sum(sums) + tl.sum(seed) + earlier)
                    tl.atomic_add(new_A + c - w, seed, mask=used)
                    tl.atomic_add(new_A + tl.minimum(c, new_top), -seed, mask=used)
                    tl.debug_barrier()
                    A, new_A = new_A, A
                c = tl.where(picked, c - w, c)
                row -= width
            if not BACKWARDS:
                tl.store(log_prob + s.to(tl.int64) * whole + b, result, mask=live)
        tl.debug_barrier()


# Rows that many programs share: one launch an item.


@triton.jit(do_not_specialize=["n", "width", "length", "i", "row", "gamma_step"])
def fill_item_kernel(
    theta, z, prefix, goal, gamma, V_rows, rows, tables,
    scale: tl.float64, n, width, length, i, row, gamma_step,
    REGULARIZER: tl.constexpr, EXACTLY: tl.constexpr, GAMMAS: tl.constexpr, BLOCK: tl.constexpr,
    DIRECTION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    target = tl.load(goal + b).to(tl.int32)
    V = V_rows + b * 2 * width
    T = rows + b * 6 * width + 4 * width
    Q = tables + (b * (1 if DIRECTION == "none" else 2) * length + row) * width
    prefix += b * (n + 1) + i
    total = tl.load(prefix + n - i)
    old, _ = _band(tl.load(prefix), total, target)
    top, low = _band(tl.load(prefix + 1), total, target)
    w = (tl.load(prefix + 1) - tl.load(prefix)).to(tl.int32)
    even, odd = (i % 2) * width, (1 - i % 2) * width
    _fill_row(
        V + even, V + odd, T + even, T + odd, Q, Q + length.to(tl.int64) * width,
        _score(theta + b * n, i, _scale(gamma, scale, b, gamma_step, GAMMAS)), _direction(z + b * n, i, DIRECTION),
        w, old, _line(low) + tl.program_id(0) * BLOCK, top, tl.num_programs(0) * BLOCK, width,
        REGULARIZER, EXACTLY, DIRECTION, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "width", "length", "i", "row"])
def collect_item_kernel(
    prefix, goal, parts, above, rows, tables, n, width, length, i, row, BLOCK: tl.constexpr, DIRECTION: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    target = tl.load(goal + b).to(tl.int32)
    E = rows + b * 6 * width
    D = E + 2 * width
    Q = tables + (b * (1 if DIRECTION == "none" else 2) * length + row) * width
    prefix += b * (n + 1) + i
    total = tl.load(prefix + n - i)
    top, low = _band(tl.load(prefix + 1), total, target)
    new_top, first = _band(tl.load(prefix), total, target)
    w = (tl.load(prefix + 1) - tl.load(prefix)).to(tl.int32)
    even, odd = (i % 2) * width, (1 - i % 2) * width
    lanes = above + (b * tl.num_programs(0) + tl.program_id(0)) * 2 * BLOCK + tl.arange(0, BLOCK)
    result, above_e, above_d = _collect_row(
        E + odd, E + even, D + odd, D + even, Q, Q + length.to(tl.int64) * width,
        tl.load(lanes), tl.load(lanes + BLOCK), w, low, top, _line(first) + tl.program_id(0) * BLOCK, new_top,
        tl.num_programs(0) * BLOCK, width, DIRECTION, BLOCK,
    )  # fmt: skip
    tl.store(lanes, above_e)
    tl.store(lanes + BLOCK, above_d)
    tl.store(parts + (b * n + i) * tl.num_programs(0) + tl.program_id(0), tl.sum(result))
