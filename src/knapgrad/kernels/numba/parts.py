"""A step of an item over one part of its row, vector by vector: what all sweeps of items are made of.

``start`` and ``table`` say where the band of the item begins in a row and in the table, ``shift`` how far a pick moves
down, and ``begin`` and ``end`` which part of the band is meant. Tags such as [V] name the equations in docs/math.md.
"""

from math import log

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.variants import dprob, inline, prob, smoothed, source
from knapgrad.kernels.numba.vector import broadcast, cast, load, store, total, where
from knapgrad.lattice import FEASIBLE

LOG2, LOG2_INVERSE = log(2), 1 / log(2)


@inline
def fill_part(regularizer, V, Q, start, shift, table, begin, end, theta_i, like, width):
    for j in range(end - width, begin - 1, -width):
        skip = load(V, start + j, like)
        pick = load(V, start + j - shift, like) + theta_i
        advantage = pick - skip
        delta = cast(advantage, like)
        store(V, start + j, where(advantage > 0.0, pick, skip) + cast(smoothed(regularizer, delta), skip))  # [V]
        store(Q, table + j, prob(regularizer, delta))  # [Q]


@inline
def follow_part(regularizer, direction, T, Q, R, start, shift, table, begin, end, z_i, like, width):
    for j in range(end - width, begin - 1, -width):
        q = load(Q, table + j, like)
        T_c = load(T, start + j, like)
        change = load(T, start + j - shift, like) - T_c
        added, slope = source(direction, q, z_i)
        store(T, start + j, T_c + (q * change + added))  # [V']
        store(R, table + j, dprob(regularizer, q) * (change + slope))  # [Q']


@inline
def collect_part(E, P, Q, start, shift, table, begin, end, together, y_i, like, width):
    for j in range(begin, end, width):
        E_c = load(E, start + j, like)
        picked = E_c * load(Q, table + j, like)
        store(E, start + j, E_c - picked)
        if together:
            store(E, start + j - shift, load(E, start + j - shift, like) + picked)
        else:
            store(P, j, picked)
        y_i = y_i + picked
    return y_i


@inline
def collect_tangent_part(E, D, P, S, Q, R, start, shift, table, begin, end, together, sum_i, like, width):
    for j in range(begin, end, width):
        q = load(Q, table + j, like)
        E_c = load(E, start + j, like)
        D_c = load(D, start + j, like)
        picked = E_c * q
        change = D_c * q + E_c * load(R, table + j, like)
        store(E, start + j, E_c - picked)
        store(D, start + j, D_c - change)
        if together:
            store(E, start + j - shift, load(E, start + j - shift, like) + picked)
            store(D, start + j - shift, load(D, start + j - shift, like) + change)
        else:
            store(P, j, picked)
            store(S, j, change)
        sum_i = sum_i + change
    return sum_i


@inline
def arrive_part(E, P, start, begin, end, like, width):
    """Adds what was picked, in a pass of its own."""
    for j in range(begin, end, width):
        store(E, start + j, load(E, start + j, like) + load(P, j, like))


@inline
def at_once(stride, shift, width):
    """Whether picks are added in the same pass: a load across two vectors just stored would wait for both."""
    return stride > 1 or shift > 4 * width


# Where a row is constant, one cell stands for the part: its knee, or the top of a box.


@inline
def constant_of(row, below, stride, like):
    """The value at the knee, which is the cell ``below``, in every lane."""
    return load(row, below * stride, like) if stride > 1 else broadcast(row[below], like)


@inline
def add_to_knee(row, below, stride, gathered, like):
    if stride > 1:
        store(row, below * stride, load(row, below * stride, like) + gathered)
    else:
        row[below] += total(gathered)


# Shannon as sums over selections: exp V[c] = M[c] 2^X[c], with no exp or log in the loop.


@inline
def never_of(Q):
    """The power of two that stands for an infeasible state: whole numbers are exact to twice that."""
    return -(2.0**23) if Q.itemsize == 4 else -(2.0**52)


@inline
def split(theta_i, Q, like):
    """exp(theta_i) as a factor and a power of two; an item that is out has that of an infeasible state."""
    out = theta_i < FEASIBLE
    power = where(out, never_of(Q), vector.rint(theta_i * LOG2_INVERSE))
    rest = where(out, 0.0, theta_i - power * vector.LOG2_HIGH - power * vector.LOG2_LOW)
    return cast(vector.exp(rest), like), cast(power, like)


@inline
def normalize(M, X, end, like, width):
    """Moves the exponents of M to X."""
    for p in range(0, end, width):
        m = load(M, p, like)
        store(M, p, where(m > 0.0, vector.mantissa(m), m))  # NaN stays NaN
        store(X, p, load(X, p, like) + vector.exponent(m))


@inline
def sum_part(M, X, Q, start, shift, table, begin, end, factor_i, power_i, like, width):
    for j in range(end - width, begin - 1, -width):
        skip, skip_power = load(M, start + j, like), load(X, start + j, like)
        pick, pick_power = load(M, start + j - shift, like) * factor_i, load(X, start + j - shift, like) + power_i
        ahead = pick_power - skip_power
        scale = vector.exp2(-vector.abs(ahead))
        pick = where(ahead > 0.0, pick, pick * scale)
        both = pick + where(ahead > 0.0, skip * scale, skip)
        store(M, start + j, both)  # [V]
        store(X, start + j, where(ahead > 0.0, pick_power, skip_power))
        store(Q, table + j, pick / both)  # [Q]
