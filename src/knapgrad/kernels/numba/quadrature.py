"""Operations on a number of items under Shannon without a table, from the law of :mod:`knapgrad.kernels.numba.laws`.

What nodes are to items, and items to nodes, is summed up for each pair of nodes over all items, or by series
(``laws.is_smooth``). Kernels take the arguments of those of a table.
"""

import numpy as np
from numba.extending import overload

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.groups import own
from knapgrad.kernels.numba.laws import (
    DEGREE,
    INFEASIBLE,
    MIXED,
    NOT_A_NUMBER,
    TINY,
    half_of,
    is_smooth,
    law_of,
    work_of,
)
from knapgrad.kernels.numba.variants import function, inline, kernel
from knapgrad.kernels.numba.vector import broadcast, cast, lanes, load, reciprocal, store, total, where, zeros

# What items get back from the nodes.


@inline
def parts(s, i, zero, one):
    """p, and p q."""
    a = load(s, i, zero)
    small = vector.abs(a)
    return where(a > zero, one - small, small), small * (one - small)


@inline
def certain(s, i, zero):
    """Where p or q is as small as can be."""
    return vector.abs(load(s, i, zero)) < s.dtype.type(2 * TINY)


@inline
def polynomial(z, r):
    """sum_h r_h T_h(z), h to 8, by Clenshaw."""
    z2 = z + z
    b7 = z2 * r[8] + r[7]
    b6 = z2 * b7 - r[8] + r[6]
    b5 = z2 * b6 - b7 + r[5]
    b4 = z2 * b5 - b6 + r[4]
    b3 = z2 * b4 - b5 + r[3]
    b2 = z2 * b3 - b4 + r[2]
    b1 = z2 * b2 - b3 + r[1]
    return z * b1 - b2 + r[0]


@function
def add_series(weight, half, tau, r):
    """Adds Re weight v(p) as a series in T_h(p - q), v = e^{-it/2} (1 + 2 sum_h (-i tau)^h T_h)."""
    term = weight / half
    r[0] += term.real
    term *= 2
    for h in range(1, DEGREE + 1):
        term *= complex(0, -tau)
        r[h] += term.real


@function
def answer(law, work, zero):
    """[relax] w = +-min(y, 1 - y), with the sign of s, from y = p + p q E[d v]."""
    s, w, d, c, numbers = work.s, work.w, work.d, work.c, work.numbers
    one, width = zero + 1.0, lanes(s)
    if is_smooth(s, law.spread):
        wide, r = work.hold[: DEGREE + 1], numbers.reshape(-1)[: DEGREE + 1]
        wide[:] = 0
        for m in range(law.nodes):
            half, tau = half_of(d[m])
            add_series(c[m] * d[m], half, tau, wide)
        for h in range(DEGREE + 1):
            r[h] = wide[h]
        for i in range(0, s.shape[0], width):
            p, pq = parts(s, i, zero, one)
            store(w, i, changed(load(s, i, zero), pq * polynomial(p + p - one, r), zero))
        return
    for m in range(law.nodes + law.nodes % 2):
        size = -2 * d[m].real  # |d|^2, and |u|^2 = (p - q)^2 + p q (4 - |d|^2) is no difference, for t near pi
        numbers[m, 0], numbers[m, 1], numbers[m, 2] = (c[m] * d[m]).real, size * c[m].real, 4 - size
    for i in range(0, s.shape[0], width):
        p, pq = parts(s, i, zero, one)
        sum_, distance = zero, p + p - one
        distance = distance * distance
        for m in range(0, law.nodes, 2):
            e, f = distance + pq * numbers[m, 2], distance + pq * numbers[m + 1, 2]
            a, b = p * numbers[m, 1] + numbers[m, 0], p * numbers[m + 1, 1] + numbers[m + 1, 0]
            sum_ = sum_ + (a * f + b * e) * reciprocal(e * f)
        store(w, i, changed(load(s, i, zero), pq * sum_, zero))


@inline
def changed(s, change, zero):
    """s after p has changed: q changes the other way, and is -s where s > 0."""
    return where(s > zero, nonnegative(s - change, zero), -nonnegative(change - s, zero))


@inline
def nonnegative(x, zero):
    return where(x < zero, zero, x)


@function
def write_selection(s, w, y):
    """y from w; items that are certain are 0 or 1."""
    for i in range(y.shape[0]):
        small = min(abs(w[i]), w.dtype.type(1)) if abs(s[i]) > 2 * TINY else w.dtype.type(0)
        y[i] = 1 - small if s[i] > 0 else small


@function
def sum_scores(x, s, law, zero):
    """sum x of the items above the tilt, over gamma, and sum log(1 + e^-|x - lam|), one logarithm for many items."""
    double, width = cast(zero, broadcast(1.0, zero)), lanes(s)
    scores, logs = double, 0.0
    for begin in range(0, s.shape[0], 32 * width):
        rest = double + 1.0
        for i in range(begin, min(begin + 32 * width, s.shape[0]), width):
            a = load(s, i, zero)
            rest = rest - rest * cast(vector.abs(a), double)
            scores = scores + cast(where(a > zero, load(x, i, zero), zero), double)
        logs -= total(vector.log(rest))
    return total(scores) * law.inverse, logs


@function
def value_of(row, law, work, zero):
    """[value] / gamma."""
    if law.what == MIXED:
        scores, logs = sum_scores(work.x, work.s, law, zero)
        return scores + law.lam * (law.end - law.above) + logs + law.log_window
    if law.what == NOT_A_NUMBER:
        return np.nan
    if law.what == INFEASIBLE:
        return -np.inf
    chosen = 0.0
    for i in range(row.shape[0] if law.k > 0 else 0):
        chosen += row[i] * law.inverse if row[i] > -np.inf else 0.0
    return chosen


@inline
def settle_selection(row, law, y):
    """Of an instance with a single selection, or none."""
    for i in range(row.shape[0]):
        chosen = 1.0 if law.k > 0 and row[i] > -np.inf else 0.0
        y[i] = np.nan if law.what == NOT_A_NUMBER else chosen


@function
def center(law, work, zero):
    """Where all selections have as many items, a constant in z changes nothing: sum p q z / sum p q is taken off, which
    leaves small numbers. Where an item is certain z does not matter, and is 0."""
    s, z = work.s, work.z
    one, width = zero + 1.0, lanes(s)
    upper, lower = zero, zero
    for i in range(0, s.shape[0], width):
        _, pq = parts(s, i, zero, one)
        known = where(certain(s, i, zero), zero, load(z, i, zero))
        store(z, i, known)
        upper, lower = upper + pq * known, lower + pq
    if law.is_fixed:
        mid = s.dtype.type(float(total(upper)) / max(float(total(lower)), 1e-30))
        for i in range(0, s.shape[0], width):
            store(z, i, load(z, i, zero) - mid)


@function
def node_sums(law, work, zero):
    """[A] A_m - E[A] = sum_i z_i p_i q_i d v_i, less its mean over the nodes."""
    s, z, d, c, A = work.s, work.z, work.d, work.c, work.A
    one, width = zero + 1.0, lanes(s)
    if is_smooth(s, law.spread):
        S = work.hold
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = zero
        for i in range(0, s.shape[0], width):
            p, pq = parts(s, i, zero, one)
            w = load(z, i, zero) * pq
            a = p + p - one
            a2 = a + a
            t1 = w * a
            t2 = a2 * t1 - w
            t3 = a2 * t2 - t1
            t4 = a2 * t3 - t2
            t5 = a2 * t4 - t3
            t6 = a2 * t5 - t4
            t7 = a2 * t6 - t5
            t8 = a2 * t7 - t6
            s0, s1, s2, s3, s4 = s0 + w, s1 + t1, s2 + t2, s3 + t3, s4 + t4
            s5, s6, s7, s8 = s5 + t5, s6 + t6, s7 + t7, s8 + t8
        S[0], S[1], S[2], S[3], S[4] = total(s0), total(s1), total(s2), total(s3), total(s4)
        S[5], S[6], S[7], S[8] = total(s5), total(s6), total(s7), total(s8)
        for m in range(law.nodes):
            half, tau = half_of(d[m])
            power, sum_ = 1 + 0j, S[0] + 0j
            for h in range(1, DEGREE + 1):
                power *= complex(0, -tau)
                sum_ += 2 * power * S[h]
            A[m] = d[m] / half * sum_
    else:
        for m in range(0, law.nodes, 2):
            x0, y0, x1, y1 = zero, zero, zero, zero
            h0, h1 = s.dtype.type(4 + 2 * d[m].real), s.dtype.type(4 + 2 * d[m + 1].real)
            for i in range(0, s.shape[0], width):
                p, pq = parts(s, i, zero, one)
                w = load(z, i, zero) * pq
                e = p + p - one
                e = e * e
                e, f = e + pq * h0, e + pq * h1
                r = reciprocal(e * f) * w
                e, f = r * f, r * e
                x0, y0, x1, y1 = x0 + e, y0 + e * p, x1 + f, y1 + f * p
            X, Y = float(total(x0)), float(total(y0))
            A[m] = d[m] * complex(X + d[m].real * Y, -d[m].imag * Y)
            X, Y = float(total(x1)), float(total(y1))
            A[m + 1] = d[m + 1] * complex(X + d[m + 1].real * Y, -d[m + 1].imag * Y)
    mean = 0.0
    for m in range(law.nodes):
        mean += (c[m] * A[m]).real
    for m in range(law.nodes):
        A[m] -= mean


@function
def product_of(law, work, scale, product, zero):
    """[Hz] p q (z E[(1 + d) v^2] + E[d A v]), times ``scale``."""
    s, z, w, d, c, A, numbers = work.s, work.z, work.w, work.d, work.c, work.A, work.numbers
    one, width, scale = zero + 1.0, lanes(s), s.dtype.type(scale)
    if is_smooth(s, law.spread):
        own_, other = numbers.reshape(-1)[: DEGREE + 1], numbers.reshape(-1)[DEGREE + 1 : 2 * DEGREE + 2]
        squares, rest = work.hold[: DEGREE + 1], work.hold[DEGREE + 1 : 2 * DEGREE + 2]
        squares[:], rest[:] = 0, 0
        for m in range(law.nodes):
            half, tau = half_of(d[m])
            add_series(c[m] * d[m] * A[m], half, tau, rest)
            if m > 0:  # v^2 = -(2 / d) dv/d(p - q), a series that is differentiated below
                term = -4 / d[m] * c[m] * half
                for h in range(1, DEGREE + 1):
                    term *= complex(0, -tau)
                    squares[h] += term.real
        last, next_ = 0.0, 0.0
        for h in range(DEGREE, 0, -1):
            now = next_ + 2 * h * squares[h]
            squares[h], next_, last = last, last, now
        squares[0] = last / 2 + c[0].real
        for h in range(DEGREE + 1):
            own_[h], other[h] = squares[h], rest[h]
        for i in range(0, s.shape[0], width):
            p, pq = parts(s, i, zero, one)
            a = p + p - one
            result = pq * (load(z, i, zero) * polynomial(a, own_) + polynomial(a, other)) * scale
            store(w, i, where(certain(s, i, zero), zero, result))
    else:
        for m in range(law.nodes):
            size, e, back = -2 * d[m].real, c[m] * (1 + d[m]), np.conj(d[m])
            numbers[m, 2], numbers[m, 3], numbers[m, 4] = 4 - size, (c[m] * d[m] * A[m]).real, size * (c[m] * A[m]).real
            numbers[m, 5], numbers[m, 6], numbers[m, 7] = e.real, 2 * (e * back).real, (e * back * back).real
        for i in range(0, s.shape[0], width):
            p, pq = parts(s, i, zero, one)
            mine, others, distance = zero, zero, p + p - one
            distance = distance * distance
            for m in range(law.nodes):
                r = reciprocal(distance + pq * numbers[m, 2])
                others = others + (p * numbers[m, 4] + numbers[m, 3]) * r
                mine = mine + ((p * numbers[m, 7] + numbers[m, 6]) * p + numbers[m, 5]) * (r * r)
            result = pq * (load(z, i, zero) * mine + others) * scale
            store(w, i, where(certain(s, i, zero), zero, result))
    for i in range(product.shape[0]):
        product[i] = w[i]


@function
def entropy_of(law, work, zero):
    """[entropy] sum log(1 + e^-|a|) + |a| min(y, 1 - y), a = x - lam, and what the window adds. Leaves y in w."""
    s, w, x = work.s, work.w, work.x
    _, logs = sum_scores(x, s, law, zero)
    result, counted = logs, 0.0
    for i in range(x.shape[0]):
        small = abs(float(w[i]))
        if small > 2 * TINY:
            result += abs(((x[i] - law.upper) - law.lower) * law.inverse) * small
        counted += 1.0 - small if w[i] > 0 or s[i] > 0 else small
    if not law.is_fixed:
        result += law.lam * (law.end - counted)
    return result + law.log_window


@function
def aim_at(z, work):
    for i in range(work.z.shape[0]):
        work.z[i] = z[i] if i < z.shape[0] else 0


@function
def aim_at_entropy(law, work):
    """Its gradient is the VJP with -x."""
    shift = 0.0 if law.is_fixed else law.lam
    for i in range(work.z.shape[0]):
        work.z[i] = -(((work.x[i] - law.upper) - law.lower) * law.inverse + shift)


def is_entropy(direction):
    """Never called by Python."""


@overload(is_entropy, inline="always")
def _is_entropy(direction):
    found = direction.variant == "entropy"
    return lambda direction: found


# The kernels: all instances from ``begin`` to ``end``, with the arguments of those of a table.


@kernel
def operator_kernel(regularizer, scores, gamma, structure, layout, memory, begin, end, relaxed, value, y):
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    n, zero = batch.theta.shape[1], zeros(scratch.narrow)
    work = work_of(scratch, n, lanes(scratch.narrow))
    for b in range(begin, end):
        law = law_of(batch, b, work, scratch.frame, zero)
        value[b] = value_of(batch.theta[b], law, work, zero)
        if relaxed:
            if law.what == MIXED:
                answer(law, work, zero)
                write_selection(work.s, work.w, y[b])
            else:
                settle_selection(batch.theta[b], law, y[b])


@kernel
def tangent_kernel(
    regularizer, direction, scores, gamma, structure, layout, memory, begin, end, z, backwards, value, tangent, product
):
    """For the linear direction the VJP; for the entropy, that and its gradient."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    n, zero = batch.theta.shape[1], zeros(scratch.narrow)
    work = work_of(scratch, n, lanes(scratch.narrow))
    follows_entropy = is_entropy(direction)
    for b in range(begin, end):
        law = law_of(batch, b, work, scratch.frame, zero)
        if law.what != MIXED:
            is_bad = law.what == NOT_A_NUMBER
            value[b] = value_of(batch.theta[b], law, work, zero)
            tangent[b] = np.nan if is_bad else 0.0
            if backwards:
                product[b] = np.nan if is_bad else 0.0
            continue
        value[b], tangent[b] = 0.0, 0.0
        if follows_entropy:
            answer(law, work, zero)
            tangent[b] = entropy_of(law, work, zero)
        if backwards:
            if follows_entropy:
                aim_at_entropy(law, work)
            else:
                aim_at(z[b], work)
            center(law, work, zero)
            node_sums(law, work, zero)
            product_of(law, work, 1.0, product[b], zero)


@kernel
def log_prob_kernel(
    regularizer, scores, gamma, structure, layout, memory, begin, end, filled, y, cotangent, backwards, value, log_prob,
    gradient,
):  # fmt: skip
    """[log-prob] -sum log(1 + e^-|a|) - sum of |a| where y and the tilt disagree, and what the window adds."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    n, zero = batch.theta.shape[1], zeros(scratch.narrow)
    work = work_of(scratch, n, lanes(scratch.narrow))
    for b in range(begin, end):
        law = law_of(batch, b, work, scratch.frame, zero)
        row = batch.theta[b]
        value[b] = value_of(row, law, work, zero) if law.what != MIXED else 0.0
        least = max(law.k - min(own(batch.slack, b), law.k), 0)
        logs = 0.0
        if law.what == MIXED:
            _, logs = sum_scores(work.x, work.s, law, zero)
            answer(law, work, zero)
        for j in range(y.shape[0]):
            picked, lost, masked = 0, 0.0, False
            for i in range(n):
                if y[j, b, i] != 0.0:
                    picked += 1
                    masked = masked or row[i] == -np.inf
                if law.what == MIXED and (y[j, b, i] != 0.0) != (work.s[i] > 0) and row[i] > -np.inf:
                    lost += abs(((float(row[i]) - law.upper) - law.lower) * law.inverse)
            if law.what == NOT_A_NUMBER:
                log_prob[j, b] = np.nan
            elif masked or picked > law.k or picked < least or law.what == INFEASIBLE:
                log_prob[j, b] = -np.inf
            elif law.what == MIXED:
                log_prob[j, b] = law.lam * (picked - law.end) - logs - lost - law.log_window
            else:
                log_prob[j, b] = 0.0
        if backwards:
            for i in range(n):
                gradient[b, i] = np.nan if law.what == NOT_A_NUMBER else 0.0
            if law.what == MIXED:
                for j in range(y.shape[0]):
                    if cotangent[j, b] != 0.0:
                        for i in range(n):
                            small = abs(work.w[i]) if abs(work.s[i]) > 2 * TINY else work.w.dtype.type(0)
                            is_picked = y[j, b, i] != 0.0
                            if work.s[i] > 0:
                                gradient[b, i] += cotangent[j, b] * (small if is_picked else small - 1)
                            else:
                                gradient[b, i] += cotangent[j, b] * (1 - small if is_picked else -small)


KERNELS = {"operator": operator_kernel, "tangent": tangent_kernel, "log_prob": log_prob_kernel}
