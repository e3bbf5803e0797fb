"""The law of a number of items under Shannon, as a mixture of independent items over a few nodes of a circle.

p(y) ~ exp(x . y), x = theta / gamma, over selections of j to k items, is the law of independent items with p_i =
sigmoid(x_i - lam), given their count, for any tilt lam. At the tilt whose mean count is about k few nodes of the
count's characteristic function matter, whatever n and k (docs/math.md, "Without a table").

Per item a kernel keeps s = +-min(p, q), positive if p > q, so nothing is lost where p or q is small; numbers per item
have theta's type, and numbers per node are complex128. What a node t adds to the law of the count is
``c = f(t) G(t)``, with d = e^{it} - 1, u_i = 1 + p_i d, v_i = 1 / u_i and f = prod_i u_i: [node]. For items above the
tilt a factor e^{it} is taken out of u, which leaves 1 + |s| Re d - i s Im d.

Items are in the lanes. Products over the items are done in one of three ways: for four nodes at a time; for few items,
with nodes in the lanes; or, where the variance of the count is so large that nodes crowd around t = 0, by series of
Chebyshev polynomials of p - q, whose moments over the items serve all nodes.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.bands import COLUMNS
from knapgrad.kernels.numba.groups import BEYOND, GOALS, own
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import broadcast, cast, exp, lanes, load, reciprocal, store, total, where
from knapgrad.lattice import LARGEST

SINGLE, DOUBLE = 14.0, 30.0  # the exponent of what is left out, in float32 and float64
NODES = 64  # at most
TINY = 1e-18  # the least p and q: products of them are no subnormal numbers, which are slow
DEGREE = 8  # of the series
SMOOTH_FROM = 30.0  # the variance of the count from which the series is used, in float32
MIXED, SINGLE_SELECTION, INFEASIBLE, NOT_A_NUMBER = range(4)  # what an instance turns out to be


class Work(NamedTuple):
    """Scratch of one instance."""

    x: Any  # scores, padded by -inf to whole vectors; s, and two more arrays per item
    s: Any
    z: Any
    w: Any
    numbers: Any  # of theta's type: what nodes are to items
    d: Any  # complex128: nodes, and what they weigh
    c: Any
    A: Any
    hold: Any  # float64


class Law(NamedTuple):
    """The law of the selections of an instance: the mixture, or what else it is."""

    what: int
    k: int  # the largest count
    upper: float  # the tilt, in units of theta, in two parts: between large scores there may be none in one
    lower: float
    inverse: float  # 1 / gamma
    lam: float  # the tilt / gamma
    end: int  # the count of which the weight e^{lam (count - end)} is 1
    above: float  # how many items are above the tilt
    spread: float  # the variance of the count of independent items
    nodes: int  # how many
    is_fixed: bool  # whether all selections have as many items
    log_window: float  # log of the probability of the window of counts, weighted


@register_jitable
def sizes(n, width):
    """Lengths of the buffers of scratch: integers, float64, theta's type."""
    return COLUMNS + GOALS, 6 * (NODES + 4) + 64, 4 * padded(n, width) + 8 * (NODES + 4)


@register_jitable
def padded(n, width):
    return -(-n // width) * width


@inline
def work_of(scratch, n, width):
    """The parts of the scratch."""
    size, nodes, m = padded(n, width), NODES + 4, 2 * (NODES + 4)
    narrow, wide = scratch.narrow, scratch.wide
    return Work(
        narrow[:size], narrow[size : 2 * size], narrow[2 * size : 3 * size], narrow[3 * size : 4 * size],
        narrow[4 * size : 4 * size + 8 * nodes].reshape((nodes, 8)),
        wide[:m].view(np.complex128), wide[m : 2 * m].view(np.complex128), wide[2 * m : 3 * m].view(np.complex128),
        wide[3 * m : 3 * m + 64],
    )  # fmt: skip


@inline
def exponent_of(x):
    """L: what is left out is below e^-L."""
    return SINGLE if x.itemsize == 4 else DOUBLE


# The tilt.


@function
def spread_of(row, x, hold, zero):
    """Copies scores; returns how many are not masked, their mean, variance, minimum and maximum. The mean is NaN if a
    score is NaN or +inf."""
    n, width = row.shape[0], lanes(x)
    whole = n - n % width
    for i in range(0, whole, width):
        store(x, i, load(row, i, zero))
    for i in range(whole, x.shape[0]):
        x[i] = row[i] if i < n else -np.inf
    least, base = x.dtype.type(-3.4028234e38 if x.itemsize == 4 else -1.7976931348623157e308), x.dtype.type(0)
    for i in range(n):
        if x[i] >= least:
            base = x[i]
            break
    one = zero + 1.0
    count, first, second, low, high = zero, zero, zero, zero, zero
    for i in range(0, x.shape[0], width):
        a = load(x, i, zero)
        masked = a < least  # not so NaN, which passes on to the mean
        a = where(masked, zero, a - base)
        count, first, second = count + where(masked, zero, one), first + a, second + a * a
        low, high = where(a < low, a, low), where(a > high, a, high)
    n_free = float(total(count))
    mean = float(total(first)) / max(n_free, 1.0)
    variance = float(total(second)) / max(n_free, 1.0) - mean * mean
    double = broadcast(1.0, zero)
    store(hold, 0, cast(low, double))
    store(hold, 16, cast(high, double))
    lowest, highest = hold[0], hold[16]
    for lane in range(width):
        lowest, highest = min(lowest, hold[lane]), max(highest, hold[16 + lane])
    return n_free, base + mean, max(variance, 0.0), base + lowest, base + highest


@function
def fill(x, upper, lower, inverse, s, zero):
    """s of all items [tilt]; sum p, sum p q, and how many are above the tilt."""
    high, low, scale = x.dtype.type(upper), x.dtype.type(lower), x.dtype.type(inverse)
    one, tiny = zero + 1.0, x.dtype.type(TINY)
    mean, spread, above = zero, zero, zero
    for i in range(0, x.shape[0], lanes(x)):
        a = ((load(x, i, zero) - high) - low) * scale
        e = exp(-vector.abs(a))
        r = reciprocal(e + one)
        m = e * r + tiny
        up = a > zero
        store(s, i, where(up, m, -m))
        mean, spread, above = mean + where(up, r, m), spread + m * r, above + where(up, one, zero)
    return float(total(mean)), float(total(spread)), float(total(above))


@inline
def is_close(mean, count, spread):
    """Half a standard deviation off, or half an item, will do: P(count) max(1, deviation) stays near 0.3."""
    return abs(mean - count) <= 0.5 * max(1.0, math.sqrt(spread))


@inline
def parts_of(lam, gamma, x):
    """A tilt in units of theta, as two numbers of the type of x."""
    upper = float(x.dtype.type(lam * gamma))
    return upper, lam * gamma - upper


@function
def select(x, place):
    """The number that stands at a place when x is sorted; smaller ones then stand before it, others behind."""
    low, high = 0, x.shape[0] - 1
    while low < high:
        pivot, i, j = x[place], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i, j = i + 1, j - 1
        low, high = (i if j < place else low), (j if place < i else high)
    return float(x[place])


@function
def tilted(x, count, inverse, s, ordered, n_free, center, variance, low, high, zero):
    """The tilt with a mean count near ``count``, 0 < count < n_free, by Newton's steps on the logit of the mean within
    a bracket. Returns it, in two parts and over gamma, with sum p, sum p q, and how many are above."""
    gamma = 1.0 / inverse
    low, high = low * inverse - 40 - math.log(n_free), high * inverse + 40 + math.log(n_free)
    aim = math.log(count / (n_free - count))
    lam = center * inverse - aim * math.sqrt(1 + 0.3927 * variance * inverse * inverse)
    if not low < lam < high:
        lam = 0.5 * low + 0.5 * high
    base, is_exact = 0.0, False
    for step in range(200):
        upper, lower = parts_of(lam, gamma, x)
        if is_exact:
            upper, lower = base, lam * gamma
        mean, spread, above = fill(x, upper, lower, inverse, s, zero)
        if is_close(mean, count, spread):
            break
        if step == 12:  # scores far apart, or too large for their differences: from those that count separates
            ordered[:] = x
            base = select(ordered, x.shape[0] - int(count))
            next_ = ordered[0]
            for i in range(x.shape[0] - int(count)):
                next_ = max(next_, ordered[i])
            gap = (base - next_) * inverse
            low, high, is_exact = -gap - math.log(n_free) - 1, math.log(n_free) + 1, True
            lam = 0.5 * low + 0.5 * high
            continue
        low, high = (lam, high) if mean > count else (low, lam)
        new = math.nan
        if 0 < mean < n_free and spread > 1e-3 and (step < 6 or step % 2):
            logit = math.log(mean / (n_free - mean))
            new = lam + (logit - aim) * mean * (n_free - mean) / n_free / spread
        lam = new if low < new < high else 0.5 * low + 0.5 * high
    return upper, lower, lam + base * inverse, mean, spread, above


# Nodes.


@inline
def half_of(d):
    """e^{it/2} for t < pi, and tan(t / 4)."""
    cosine = math.sqrt(1 + 0.5 * d.real)
    sine = 0.5 * d.imag / cosine
    return complex(cosine, sine), sine / (1 + cosine)


@function
def place_nodes(spread, reach, most, L, d):
    """[nodes] Of the period ``reach`` at least, or one beyond which no count is: how many, their period, and d."""
    period = min(math.ceil(reach), most) | 1
    first = complex(math.cos(2 * math.pi / period), math.sin(2 * math.pi / period))
    e, count = 1 + 0j, 0
    while count < (period + 1) // 2 and spread * (1 - e.real) <= L + 3 and count < NODES:
        d[count] = complex(-2 * math.sin(math.pi * count / period) ** 2, math.sin(2 * math.pi * count / period))
        e *= first
        count += 1
    d[count : count + 4] = 0
    return count, period


@function
def products(s, c, d, count, hold, zero):
    """[node] c = prod of 1 + |s| Re d - i s Im d."""
    double = cast(zero, broadcast(1.0, zero))
    one, width = double + 1.0, lanes(s)
    for m in range(0, count, 4):
        r0 = r1 = r2 = r3 = one
        i0 = i1 = i2 = i3 = double
        a0, a1, a2, a3 = d[m].real, d[m + 1].real, d[m + 2].real, d[m + 3].real
        b0, b1, b2, b3 = -d[m].imag, -d[m + 1].imag, -d[m + 2].imag, -d[m + 3].imag
        for i in range(0, s.shape[0], width):
            q = cast(load(s, i, zero), double)
            a = vector.abs(q)
            u, v = one + a * a0, q * b0
            r0, i0 = r0 * u - i0 * v, r0 * v + i0 * u
            u, v = one + a * a1, q * b1
            r1, i1 = r1 * u - i1 * v, r1 * v + i1 * u
            u, v = one + a * a2, q * b2
            r2, i2 = r2 * u - i2 * v, r2 * v + i2 * u
            u, v = one + a * a3, q * b3
            r3, i3 = r3 * u - i3 * v, r3 * v + i3 * u
        c[m], c[m + 1] = across(r0, i0, hold, width), across(r1, i1, hold, width)
        c[m + 2], c[m + 3] = across(r2, i2, hold, width), across(r3, i3, hold, width)


@inline
def across(real, imaginary, hold, width):
    """The product over the lanes."""
    store(hold, 0, real)
    store(hold, 16, imaginary)
    result = 1 + 0j
    for lane in range(width):
        result *= complex(hold[lane], hold[16 + lane])
    return result


@function
def products_of_few(s, n, c, d, count, hold, zero):
    """The same with nodes in the lanes, for few items: there is nothing to multiply across lanes."""
    double, width = cast(zero, broadcast(1.0, zero)), lanes(s)
    for begin in range(0, count, width):
        for m in range(width):
            inside = begin + m < count
            hold[m], hold[m + 16] = (d[begin + m].real, -d[begin + m].imag) if inside else (0.0, 0.0)
        a, b = load(hold, 0, zero), load(hold, 16, zero)
        r0, i0, r1, i1 = double + 1.0, double, double + 1.0, double
        for i in range(0, n - 1, 2):
            q = float(s[i])
            u, v = a * abs(q) + 1.0, b * q
            r0, i0 = r0 * u - i0 * v, r0 * v + i0 * u
            q = float(s[i + 1])
            u, v = a * abs(q) + 1.0, b * q
            r1, i1 = r1 * u - i1 * v, r1 * v + i1 * u
        if n % 2:
            q = float(s[n - 1])
            u, v = a * abs(q) + 1.0, b * q
            r0, i0 = r0 * u - i0 * v, r0 * v + i0 * u
        store(hold, 32, r0 * r1 - i0 * i1)
        store(hold, 48, r0 * i1 + i0 * r1)
        for m in range(min(width, count - begin)):
            c[begin + m] = complex(hold[32 + m], hold[48 + m])


@function
def products_by_series(s, c, d, count, S, zero):
    """The same by moments of the items: log u = it/2 - log(1 + tau^2) - 2 sum_h (-i tau)^h T_h(p - q) / h."""
    double = cast(zero, broadcast(1.0, zero))
    one = double + 1.0
    s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = double
    for i in range(0, s.shape[0], lanes(s)):
        a = cast(load(s, i, zero), double)
        z = where(a > double, one, -one) - (a + a)
        z2 = z + z
        t2 = z2 * z - 1.0
        t3 = z2 * t2 - z
        t4 = z2 * t3 - t2
        t5 = z2 * t4 - t3
        t6 = z2 * t5 - t4
        t7 = z2 * t6 - t5
        t8 = z2 * t7 - t6
        s1, s2, s3, s4, s5, s6, s7, s8 = s1 + z, s2 + t2, s3 + t3, s4 + t4, s5 + t5, s6 + t6, s7 + t7, s8 + t8
    S[0], S[1], S[2], S[3], S[4] = s.shape[0], total(s1), total(s2), total(s3), total(s4)
    S[5], S[6], S[7], S[8] = total(s5), total(s6), total(s7), total(s8)
    for m in range(count):
        half, tau = half_of(d[m])
        power, log_f = 1 + 0j, 0j
        for h in range(1, DEGREE + 1):
            power *= complex(0, -tau)
            log_f -= 2 * power * S[h] / h
        size = math.exp(log_f.real - S[0] * math.log1p(tau * tau))
        angle = log_f.imag + S[0] * math.atan2(half.imag, half.real)
        c[m] = complex(size * math.cos(angle), size * math.sin(angle))


@inline
def power_minus_1(z):
    """e^z - 1."""
    sine = math.sin(0.5 * z.imag)
    return complex(math.expm1(z.real) * math.cos(z.imag) - 2 * sine * sine, math.exp(z.real) * math.sin(z.imag))


@function
def law_of(batch, b, work, frame, zero):
    """[tilt], [nodes], [node]: the law of an instance; s is in the scratch."""
    row, x, s, hold = batch.theta[b], work.x, work.s, work.hold
    n, L, gamma = row.shape[0], exponent_of(x), own(batch.gamma, b)
    k = own(batch.capacity, b)
    least = max(k - min(own(batch.slack, b), k), 0)
    feasible = own(batch.slack, b) >= 0
    inverse = 1.0 / gamma if gamma > 0.0 else np.nan
    n_free, center, variance, low, high = spread_of(row, x, hold, zero)
    largest = max(abs(low), abs(high))
    if not largest * inverse <= LARGEST or center != center:
        if largest < np.inf and center == center and gamma > 0.0:
            frame[BEYOND] = b + 1
        return Law(NOT_A_NUMBER, k, 0.0, 0.0, inverse, 0.0, 0, 0.0, 0.0, 0, True, 0.0)
    k = min(k, int(n_free))
    is_fixed = k == least
    if not feasible or least > n_free:
        return Law(INFEASIBLE, k, 0.0, 0.0, inverse, 0.0, 0, 0.0, 0.0, 0, is_fixed, 0.0)
    if k == 0 or least == n_free:
        return Law(SINGLE_SELECTION, k, 0.0, 0.0, inverse, 0.0, k, 0.0, 0.0, 0, True, 0.0)
    upper = lower = lam = mean = spread = above = 0.0
    goal = float(k)
    if not is_fixed:
        mean, spread, above = fill(x, 0.0, 0.0, inverse, s, zero)
        if mean < least:
            goal = float(least)
        elif mean <= k:
            goal = mean
    if is_fixed or not is_close(mean, goal, spread):
        upper, lower, lam, mean, spread, above = tilted(
            x, goal, inverse, s, work.w, n_free, center, variance, low, high, zero
        )  # fmt: skip
    r = L / 3 + math.sqrt(L * L / 9 + 2 * L * spread)
    first, last = max(least, math.floor(mean - r)), min(k, math.ceil(mean + r))
    if is_fixed:
        first = last = k
    if lam > 0:
        first = max(first, last - math.ceil(min(L / lam, 1e9)))
    elif lam < 0:
        last = min(last, first + math.ceil(min(-L / lam, 1e9)))
    off = max(abs(mean - first), abs(last - mean))
    count, period = place_nodes(spread, r + off, max(last, int(n_free) - first) + 1, L, work.d)
    c, d = work.c, work.d
    turned = above  # the items of which e^{it} was taken out
    if is_smooth(x, spread):
        products_by_series(s, c, d, count, hold, zero)
        turned = 0.0
    elif x.shape[0] <= 8 * lanes(x):
        products_of_few(s, n, c, d, count, hold, zero)
    else:
        products(s, c, d, count, hold, zero)
    end = last if lam >= 0 else first
    window = 0.0
    for m in range(count):
        t = 2 * math.pi * m / period
        angle = t * ((turned - end) % period)
        factor = complex(math.cos(angle), math.sin(angle))
        if last > first:
            z = complex(-lam, t) if lam >= 0 else complex(lam, -t)
            ratio = power_minus_1(z)
            factor *= last - first + 1 if ratio == 0 else power_minus_1((last - first + 1) * z) / ratio
        c[m] *= factor * (1 if m == 0 else 2)
        window += c[m].real
    for m in range(count):
        c[m] /= window
    c[count : count + 4] = 0
    return Law(
        MIXED, k, upper, lower, inverse, lam, end, above, spread, count, is_fixed,
        math.log(window / period) if window > 0 else np.nan,
    )  # fmt: skip


@inline
def is_smooth(x, spread):
    return x.itemsize == 4 and spread >= SMOOTH_FROM
