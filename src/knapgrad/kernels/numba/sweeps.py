"""The sweeps of a group of items: :mod:`knapgrad.reference` in SIMD, in scratch that stays in cache; and the kernels,
of items, of choices (:mod:`knapgrad.kernels.numba.options`) and of items with several budgets
(:mod:`knapgrad.kernels.numba.box_sweeps`).

- Rows are updated in place, V by falling and E by rising capacity, so a shift by ``w_i`` reads what the step before
  left.
- Only bands are touched (:mod:`knapgrad.kernels.numba.bands`). Where a row is constant, between its knee and ``flat``,
  only the knee is kept: going forwards the rest is written out where the next item reads it (extend), going backwards
  what arrived there is gathered at the knee (fold).
- V is in float64 for every dtype of theta, because a decision is a difference of two large V. The rest has theta's.

Infeasible is a large negative number, not -inf: differences of two of them are finite, and adding a score does not
change it.
Tags such as [V] name the equations in docs/math.md.
"""

import numpy as np
from numba.extending import overload

from knapgrad.kernels.numba import box_sweeps, options, vector
from knapgrad.kernels.numba.bands import (
    COUNT,
    END,
    FILL,
    FROM,
    KNEE,
    NEXT,
    OFFSET,
    START,
    TOP,
    final,
    goal_of,
    is_nan,
    last_row,
    pack,
    prepare,
    row_length,
    start_from,
    start_row,
    unpack,
)  # fmt: skip
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.parts import (
    LOG2,
    LOG2_INVERSE,
    add_to_knee,
    arrive_part,
    at_once,
    collect_part,
    collect_tangent_part,
    constant_of,
    fill_part,
    follow_part,
    never_of,
    normalize,
    split,
    sum_part,
)
from knapgrad.kernels.numba.variants import (
    CHOICES,
    by_kind,
    function,
    inline,
    kernel,
    kind_of,
)
from knapgrad.kernels.numba.vector import lanes, load, store, where, zeros
from knapgrad.lattice import FEASIBLE, INFEASIBLE


@inline
def extend(i, stride, bands, row, like, width):
    """Before item i: writes the constant part of the previous row to memory, as far as the item reads it. Vectors may
    write beyond that, within the constant part."""
    below, fill = bands[i - 1, KNEE] if i > 0 else 0, bands[i, FILL]
    if below < fill:
        constant = constant_of(row, below, stride, like)
        for p in range((below + 1) * stride, (fill + 1) * stride + width, width):
            store(row, p, constant)
    if bands[i, FROM] >= 0:
        begin, end = bands[i, FROM] * stride - width, (bands[bands.shape[0] - 1, KNEE] + 1) * stride - width
        constant = constant_of(row, below, stride, like)
        for p in range(end, begin, -width):
            store(row, max(p, (below + 1) * stride), constant)


@inline
def fold(i, stride, bands, row, like, width):
    """After item i, backwards: the adjoint of extend. Adds to the knee what arrived in the constant part."""
    below, fill = bands[i - 1, KNEE] if i > 0 else 0, bands[i, FILL]
    if below < fill:
        gathered = like
        for p in range((below + 1) * stride, (fill + 1) * stride, width):
            gathered = gathered + load(row, p, like)
            store(row, p, like)
        add_to_knee(row, below, stride, gathered, like)
    if bands[i, FROM] >= 0:
        begin, end = bands[i, FROM] * stride - width, (bands[bands.shape[0] - 1, KNEE] + 1) * stride - width
        gathered = like
        for p in range(end, begin, -width):
            at = max(p, (below + 1) * stride)
            gathered = gathered + load(row, at, like)
            store(row, at, like)
        add_to_knee(row, below, stride, gathered, like)


# The sweeps.


@inline
def parts(bands, i, width):
    """The end of the lower part of a band, and the begin and the end of the upper one."""
    return bands[i, COUNT] * width, bands[i, NEXT] * width, bands[i, END] * width


@function
def fill_values_of_items(batch, regularizer, bands, weights, theta, V, Q):
    """The V sweep of [V] and [Q]."""
    like, width, stride = zeros(Q), lanes(Q), batch.stride
    for i in range(weights.shape[0]):
        shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        extend(i, stride, bands, V, like, width)
        theta_i = load(theta, i * width, like)
        lower, begin, end = parts(bands, i, width)
        if begin < end:
            fill_part(regularizer, V, Q, start, shift, table, begin, end, theta_i, like, width)
        fill_part(regularizer, V, Q, start, shift, table, 0, lower, theta_i, like, width)


@function
def fill_sums_of_items(batch, bands, weights, theta, M, X, Q):
    """[V] and [Q] of Shannon as sums over selections."""
    like, width, stride = zeros(Q), lanes(Q), batch.stride
    for i in range(weights.shape[0]):
        shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        extend(i, stride, bands, M, like, width)
        extend(i, stride, bands, X, like, width)
        factor_i, power_i = split(load(theta, i * width, like), Q, like)
        lower, begin, end = parts(bands, i, width)
        if begin < end:
            sum_part(M, X, Q, start, shift, table, begin, end, factor_i, power_i, like, width)
        sum_part(M, X, Q, start, shift, table, 0, lower, factor_i, power_i, like, width)
        if i % 16 == 15:  # M has grown by less than 3^16
            normalize(M, X, (bands[i, TOP] + 1) * stride + width, like, width)


fill_values = by_kind(fill_values_of_items, options.fill_tree, box_sweeps.fill_values)
fill_sums = by_kind(fill_sums_of_items, options.fill_tree, box_sweeps.fill_sums)


@function
def sums_fit(theta, Q, row):
    """Whether all exponents that can occur are far from that of an infeasible state."""
    like, width = zeros(Q), lanes(Q)
    largest = load(theta, 0, like) * 0.0
    for p in range(0, theta.shape[0], width):
        theta_i = load(theta, p, like)
        largest = largest + where(theta_i < FEASIBLE, 0.0, vector.abs(theta_i))
    store(row, 0, largest)
    for lane in range(width):  # noqa: SIM110  Numba has no all() of a generator
        if row[lane] * LOG2_INVERSE > -0.25 * never_of(Q):
            return False
    return True


def fill(batch, regularizer, scratch, first, members, weights, theta, V, Q):
    """The table, and V at the goals of the members of a group."""


@overload(fill, strict=False)
def _choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, Q):
    def by_values(batch, regularizer, scratch, first, members, weights, theta, V, Q):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_values(batch, regularizer, scratch.bands, weights, theta, V, Q)

    def by_sums(batch, regularizer, scratch, first, members, weights, theta, V, Q):
        if theta.shape[0] == 0 or batch.complete or not sums_fit(theta, Q, V):
            start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
            fill_values(batch, regularizer, scratch.bands, weights, theta, V, Q)
            return
        row = row_length(batch, lanes(Q))
        M, X = scratch.narrow[:row], scratch.narrow[row : 2 * row]  # before the backward sweep needs them
        M[:] = 1.0
        start_row(batch, scratch.bands, first, members, X, never_of(Q))
        fill_sums(batch, scratch.bands, weights, theta, M, X, Q)
        for lane in range(members):
            goal = goal_of(batch, scratch, first + lane) * batch.stride + lane
            infeasible = X[goal] < 0.5 * never_of(Q) and M[goal] == M[goal]
            V[goal] = INFEASIBLE if infeasible else np.log(np.float64(M[goal])) + X[goal] * LOG2

    if kind_of(batch) == CHOICES:
        return options.choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
    return by_sums if regularizer.variant == "shannon" else by_values


@inline
def collect_row(i, batch, bands, weights, E, P, Q, like, width):
    """One step of [E]; returns [y] of the item."""
    stride = batch.stride
    shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
    together = at_once(stride, shift, width)
    lower, begin, end = parts(bands, i, width)
    y_i = collect_part(E, P, Q, start, shift, table, 0, lower, together, like, like, width)
    if begin < end:
        y_i = collect_part(E, P, Q, start, shift, table, begin, end, together, y_i, like, width)
    if not together:
        arrive_part(E, P, start - shift, 0, lower, like, width)
        if begin < end:
            arrive_part(E, P, start - shift, begin, end, like, width)
    return y_i


@function
def start_marginals(batch, scratch, first, members, E):
    E[:] = 0.0
    for lane in range(members):
        E[goal_of(batch, scratch, first + lane) * batch.stride + lane] = 1.0


@function
def collect_items(batch, bands, weights, E, P, Q, y):
    """The E sweep of [E] and [y]."""
    like, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0] - 1, -1, -1):
        store(y, i * width, collect_row(i, batch, bands, weights, E, P, Q, like, width))
        fold(i, batch.stride, bands, E, like, width)


@function
def follow_items(batch, regularizer, direction, scratch, weights, z, T, Q, R):
    """The derivative T of the V sweep in a direction, [V'], and that of Q, [Q']."""
    like, width, stride, bands = zeros(Q), lanes(Q), batch.stride, scratch.bands
    T[:] = 0.0
    for i in range(weights.shape[0]):
        shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        extend(i, stride, bands, T, like, width)
        z_i = load(z, i * width, like)
        lower, begin, end = parts(bands, i, width)
        if begin < end:
            follow_part(regularizer, direction, T, Q, R, start, shift, table, begin, end, z_i, like, width)
        follow_part(regularizer, direction, T, Q, R, start, shift, table, 0, lower, z_i, like, width)


@function
def collect_tangents_of_items(batch, bands, weights, E, D, P, S, Q, R, product):
    """The E sweep together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    like, width, stride = zeros(Q), lanes(Q), batch.stride
    for i in range(weights.shape[0] - 1, -1, -1):
        shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        together = at_once(stride, shift, width)
        lower, begin, end = parts(bands, i, width)
        sum_i = collect_tangent_part(E, D, P, S, Q, R, start, shift, table, 0, lower, together, like, like, width)
        if begin < end:
            sum_i = collect_tangent_part(
                E, D, P, S, Q, R, start, shift, table, begin, end, together, sum_i, like, width
            )
        if not together:
            arrive_part(E, P, start - shift, 0, lower, like, width)
            arrive_part(D, S, start - shift, 0, lower, like, width)
            if begin < end:
                arrive_part(E, P, start - shift, begin, end, like, width)
                arrive_part(D, S, start - shift, begin, end, like, width)
        store(product, i * width, sum_i)
        fold(i, stride, bands, E, like, width)
        fold(i, stride, bands, D, like, width)


collect = by_kind(collect_items, options.collect_choices, box_sweeps.collect)
follow = by_kind(follow_items, options.follow_choices, box_sweeps.follow)
collect_tangents = by_kind(collect_tangents_of_items, options.collect_tangents_of_choices, box_sweeps.collect_tangents)


# The kernels: all groups from ``begin`` to ``end``.


@kernel
def operator_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, relaxed, value, y):
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    row = row_length(batch, width)
    E, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        for lane in range(members):
            value[first + lane] = final(batch, scratch, V, first + lane, lane)
        if relaxed:
            start_marginals(batch, scratch, first, members, E)
            collect(batch, scratch.bands, weights, E, P, Q, sums)
            unpack(sums, first, members, batch.stride, width, y)
            for b in range(first, first + members):
                for i in range(n):
                    y[b, i] = 1.0 if y[b, i] > 1.0 else y[b, i]  # sums of probabilities round
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane] = np.nan
                if relaxed:
                    y[first + lane] = np.nan


@kernel
def tangent_kernel(
    regularizer, direction, scores, gamma, tree, layout, memory, begin, end, z, backwards, value, tangent, product
):
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    row, cells = row_length(batch, width), scratch.table.shape[1]
    E, D = scratch.narrow[:row], scratch.narrow[row : 2 * row]
    T, S = scratch.narrow[2 * row : 3 * row], scratch.narrow[3 * row : 4 * row]
    rest = scratch.narrow[4 * row :]
    unit = np.ones(1)
    packed, sums, R = rest[: n * width], rest[n * width : 2 * n * width], rest[2 * n * width : 2 * n * width + cells]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        pack(z, unit, first, members, batch.stride, width, packed)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        follow(batch, regularizer, direction, scratch, weights, packed, T, Q, R)
        for lane in range(members):
            value[first + lane] = final(batch, scratch, V, first + lane, lane)
            tangent[first + lane] = T[goal_of(batch, scratch, first + lane) * batch.stride + lane]
        if backwards:
            start_marginals(batch, scratch, first, members, E)
            D[:] = 0.0
            collect_tangents(batch, scratch.bands, weights, E, D, T, S, Q, R, sums)
            unpack(sums, first, members, batch.stride, width, product)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], tangent[first + lane] = np.nan, np.nan
                if backwards:
                    product[first + lane] = np.nan


@kernel
def frontier_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, rows, backwards, cotangent, y):
    """[V] of all capacities after the last step; backwards, an E sweep that starts from a row of cotangents."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    row = row_length(batch, width)
    E, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        if backwards:
            E[:] = 0.0
            for lane in range(members):
                start_from(batch, scratch.bands, V, lane, cotangent[first + lane], E)
            collect(batch, scratch.bands, weights, E, P, Q, sums)
            unpack(sums, first, members, batch.stride, width, y)
        else:
            for lane in range(members):
                last_row(batch, scratch.bands, V, lane, rows[first + lane])
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                if backwards:
                    y[first + lane] = np.nan
                else:
                    rows[first + lane] = np.nan
