"""The sweeps of a group of items with several budgets: those of :mod:`knapgrad.kernels.numba.sweeps`, line by line.

Tags such as [V] name the equations in docs/math.md.
"""

from knapgrad.kernels.numba.boxes import LAST, LINE, extend, fold, lines_of, place_of, shift_of
from knapgrad.kernels.numba.parts import (
    arrive_part,
    at_once,
    collect_part,
    collect_tangent_part,
    fill_part,
    follow_part,
    normalize,
    split,
    sum_part,
)
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import lanes, load, store, zeros


@function
def fill_values(batch, regularizer, bands, weights, theta, V, Q):
    """The V sweep of [V] and [Q]."""
    like, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0]):
        extend(i, batch, bands, V, like, width)
        shift, theta_i = shift_of(batch, bands, i, width), load(theta, i * width, like)
        for line in range(lines_of(bands, i) - 1, -1, -1):
            start, table = place_of(batch, bands, i, line, width)
            fill_part(regularizer, V, Q, start, shift, table, 0, bands[i, LINE], theta_i, like, width)


@function
def fill_sums(batch, bands, weights, theta, M, X, Q):
    """[V] and [Q] of Shannon as sums over selections."""
    like, width, n = zeros(Q), lanes(Q), weights.shape[0]
    for i in range(n):
        extend(i, batch, bands, M, like, width)
        extend(i, batch, bands, X, like, width)
        shift = shift_of(batch, bands, i, width)
        factor_i, power_i = split(load(theta, i * width, like), Q, like)
        for line in range(lines_of(bands, i) - 1, -1, -1):
            start, table = place_of(batch, bands, i, line, width)
            sum_part(M, X, Q, start, shift, table, 0, bands[i, LINE], factor_i, power_i, like, width)
        if i % 16 == 15:  # M has grown by less than 3^16
            normalize(M, X, (bands[n, LAST] + 1) * batch.stride + width, like, width)


@function
def follow(batch, regularizer, direction, scratch, weights, z, T, Q, R):
    """The derivative T of the V sweep in a direction, [V'], and that of Q, [Q']."""
    like, width, bands = zeros(Q), lanes(Q), scratch.bands
    T[:] = 0.0
    for i in range(weights.shape[0]):
        extend(i, batch, bands, T, like, width)
        shift, z_i = shift_of(batch, bands, i, width), load(z, i * width, like)
        for line in range(lines_of(bands, i) - 1, -1, -1):
            start, table = place_of(batch, bands, i, line, width)
            follow_part(regularizer, direction, T, Q, R, start, shift, table, 0, bands[i, LINE], z_i, like, width)


@inline
def collect_row(i, batch, bands, E, P, Q, like, width):
    """One step of [E]; returns [y] of the item."""
    shift, length, y_i = shift_of(batch, bands, i, width), bands[i, LINE], like
    together = at_once(batch.stride, shift, width)
    for line in range(lines_of(bands, i)):
        start, table = place_of(batch, bands, i, line, width)
        y_i = collect_part(E, P, Q, start, shift, table, 0, length, together, y_i, like, width)
        if not together:
            arrive_part(E, P, start - shift, 0, length, like, width)
    return y_i


@function
def collect(batch, bands, weights, E, P, Q, y):
    """The E sweep of [E] and [y]."""
    like, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0] - 1, -1, -1):
        store(y, i * width, collect_row(i, batch, bands, E, P, Q, like, width))
        fold(i, batch, bands, E, like, width)


@function
def collect_tangents(batch, bands, weights, E, D, P, S, Q, R, product):
    """The E sweep together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    like, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0] - 1, -1, -1):
        shift, length, sum_i = shift_of(batch, bands, i, width), bands[i, LINE], like
        together = at_once(batch.stride, shift, width)
        for line in range(lines_of(bands, i)):
            start, table = place_of(batch, bands, i, line, width)
            sum_i = collect_tangent_part(E, D, P, S, Q, R, start, shift, table, 0, length, together, sum_i, like, width)
            if not together:
                arrive_part(E, P, start - shift, 0, length, like, width)
                arrive_part(D, S, start - shift, 0, length, like, width)
        store(product, i * width, sum_i)
        fold(i, batch, bands, E, like, width)
        fold(i, batch, bands, D, like, width)
