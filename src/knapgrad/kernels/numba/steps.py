"""A step of an item over one part of its row, vector by vector: what all sweeps of items are made of.

``start`` and ``table`` say where a span of live states begins in a row and in the table, ``length`` how long it is, and
``shift`` how far a pick moves down. Tags such as [V] name the equations in docs/math.md.
"""

from math import log

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.variants import dprob, inline, prob, slopes_in, smoothed, source
from knapgrad.kernels.numba.vector import broadcast, cast, load, store, total, where
from knapgrad.lattice import FEASIBLE

LOG2, LOG2_INVERSE = log(2), 1 / log(2)


@inline
def fill_part(regularizer, V, Q, R, start, shift, table, length, theta_i, zero, width):
    for j in range(length - width, -1, -width):
        skip = load(V, start + j, zero)
        pick = load(V, start + j - shift, zero) + theta_i
        advantage = pick - skip
        delta = cast(advantage, zero)
        store(V, start + j, where(advantage > 0.0, pick, skip) + cast(smoothed(regularizer, delta), skip))  # [V]
        store(Q, table + j, prob(regularizer, delta))  # [Q]
        if R is not None:  # of the smaller probability, which is not rounded as 1 - q is
            store(R, table + j, dprob(regularizer, prob(regularizer, -vector.abs(delta))))


@inline
def follow_part(regularizer, direction, T, Q, R, start, shift, table, length, z_i, zero, width):
    for j in range(length - width, -1, -width):
        q = load(Q, table + j, zero)
        T_c = load(T, start + j, zero)
        change = load(T, start + j - shift, zero) - T_c
        added, slope = source(direction, q, z_i)
        store(T, start + j, T_c + (q * change + added))  # [V']
        if R is not None:
            steepness = dprob(regularizer, q)
            if slopes_in(regularizer, direction, R) is not None:
                steepness = load(R, table + j, zero)
            store(R, table + j, steepness * (change + slope))  # [Q']


@inline
def collect_part(E, P, Q, start, shift, table, length, together, y_i, zero, width):
    for j in range(0, length, width):
        E_c = load(E, start + j, zero)
        picked = E_c * load(Q, table + j, zero)
        store(E, start + j, E_c - picked)
        if together:
            store(E, start + j - shift, load(E, start + j - shift, zero) + picked)
        else:
            store(P, j, picked)
        y_i = y_i + picked
    return y_i


@inline
def collect_tangent_part(E, D, P, S, Q, R, start, shift, table, length, together, sum_i, zero, width):
    for j in range(0, length, width):
        q = load(Q, table + j, zero)
        E_c = load(E, start + j, zero)
        D_c = load(D, start + j, zero)
        picked = E_c * q
        change = D_c * q + E_c * load(R, table + j, zero)
        store(E, start + j, E_c - picked)
        store(D, start + j, D_c - change)
        if together:
            store(E, start + j - shift, load(E, start + j - shift, zero) + picked)
            store(D, start + j - shift, load(D, start + j - shift, zero) + change)
        else:
            store(P, j, picked)
            store(S, j, change)
        sum_i = sum_i + change
    return sum_i


@inline
def arrive_part(E, P, start, length, zero, width):
    """Adds what was picked, in a pass of its own."""
    for j in range(0, length, width):
        store(E, start + j, load(E, start + j, zero) + load(P, j, zero))


@inline
def at_once(stride, shift, width):
    """Whether picks are added in the same pass: a load across two vectors just stored would wait for both."""
    return stride > 1 or shift > 4 * width


# The most probable path: the largest sum M of logarithms.


@inline
def log_chance(q):
    return where(q > 0.0, vector.log(where(q > 0.0, q, 1.0)), -1e30)


@inline
def harden_part(M, Q, start, shift, table, length, zero, width):
    for j in range(length - width, -1, -width):
        q = load(Q, table + j, zero)
        pick = load(M, start + j - shift, zero) + log_chance(q)
        skip = load(M, start + j, zero) + log_chance(1.0 - q)
        store(M, start + j, where(pick > skip, pick, skip))
        store(Q, table + j, where(pick > skip, zero + 1.0, where(q > -1.0, zero, q)))  # NaN stays NaN


# Where a row is constant, one cell stands for the part: its knee, or the top of a box.


@inline
def constant_of(row, below, stride, zero):
    """The value at the knee, which is the cell ``below``, in every lane."""
    return load(row, below * stride, zero) if stride > 1 else broadcast(row[below], zero)


@inline
def add_to_knee(row, below, stride, gathered, zero):
    if stride > 1:
        store(row, below * stride, load(row, below * stride, zero) + gathered)
    else:
        row[below] += total(gathered)


# Shannon as sums over selections: exp V[c] = M[c] 2^X[c], with no exp or log in the loop.


@inline
def never_of(Q):
    """The power of two that stands for an infeasible state: whole numbers are exact to twice that."""
    return -(2.0**23) if Q.itemsize == 4 else -(2.0**52)


@inline
def split(theta_i, Q, zero):
    """exp(theta_i) as a factor and a power of two; an item that is out has that of an infeasible state."""
    out = theta_i < FEASIBLE
    power = where(out, never_of(Q), vector.rint(theta_i * LOG2_INVERSE))
    rest = where(out, 0.0, theta_i - power * vector.LOG2_HIGH - power * vector.LOG2_LOW)
    return cast(vector.exp(rest), zero), cast(power, zero)


@inline
def normalize(M, X, end, zero, width):
    """Moves the exponents of M to X."""
    for p in range(0, end, width):
        m = load(M, p, zero)
        store(M, p, where(m > 0.0, vector.mantissa(m), m))  # NaN stays NaN
        store(X, p, load(X, p, zero) + vector.exponent(m))


@inline
def sum_part(M, X, Q, start, shift, table, length, factor_i, power_i, zero, width):
    for j in range(length - width, -1, -width):
        skip, skip_power = load(M, start + j, zero), load(X, start + j, zero)
        pick, pick_power = load(M, start + j - shift, zero) * factor_i, load(X, start + j - shift, zero) + power_i
        ahead = pick_power - skip_power
        scale = vector.exp2(-vector.abs(ahead))
        pick = where(ahead > 0.0, pick, pick * scale)
        both = pick + where(ahead > 0.0, skip * scale, skip)
        store(M, start + j, both)  # [V]
        store(X, start + j, where(ahead > 0.0, pick_power, skip_power))
        store(Q, table + j, pick / both)  # [Q]
