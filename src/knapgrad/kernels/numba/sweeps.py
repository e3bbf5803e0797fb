"""The sweeps of a group: :mod:`knapgrad.reference` in SIMD, in scratch that stays in cache; and the kernels.

- Rows are updated in place, V by falling and E by rising capacity, so a shift by ``w_i`` reads what the step before
  left.
- Only bands are touched (:mod:`knapgrad.kernels.numba.bands`), span by span.
- V is in float64 for every dtype of theta, because a decision is a difference of two large V. The rest has theta's.

Items with one budget or several differ in where their spans are (:mod:`~knapgrad.kernels.numba.rows`,
:mod:`~knapgrad.kernels.numba.boxes`). Choices have steps of their own (:mod:`~knapgrad.kernels.numba.choices`).

Infeasible is a large negative number, not -inf: differences of two of them are finite, and adding a score does not
change it.
Tags such as [V] name the equations in docs/math.md.
"""

import numpy as np
from numba.extending import overload

from knapgrad.kernels.numba import boxes, choices, rows, vector
from knapgrad.kernels.numba.bands import finish, last_row, prepare, row_length, start_from, start_row
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.groups import is_nan, pack, unpack
from knapgrad.kernels.numba.steps import (
    LOG2,
    LOG2_INVERSE,
    arrive_part,
    at_once,
    collect_part,
    collect_tangent_part,
    fill_part,
    follow_part,
    never_of,
    normalize,
    split,
    sum_part,
)
from knapgrad.kernels.numba.variants import CHOICES, by_kind, function, inline, kernel, kind_of, slopes_in
from knapgrad.kernels.numba.vector import item, lanes, load, set_item, store, where, zeros
from knapgrad.lattice import FEASIBLE, INFEASIBLE


def of_items(name):
    """What items with one budget and with several have under the same name; choices do without."""
    return by_kind(getattr(rows, name), None, getattr(boxes, name), is_inline=True)


spans_of, span_of, shift_of = of_items("spans_of"), of_items("span_of"), of_items("shift_of")
extend = by_kind(rows.extend, choices.extend, boxes.extend, is_inline=True)
fold = by_kind(rows.fold, choices.fold, boxes.fold, is_inline=True)


@function
def fill_values_of_items(batch, regularizer, bands, weights, theta, V, Q, R):
    """The V sweep of [V] and [Q]."""
    zero, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0]):
        extend(batch, i, bands, V, zero, width)
        shift, theta_i = shift_of(batch, bands, weights, i, width), load(theta, i * width, zero)
        for number in range(spans_of(batch, bands, i) - 1, -1, -1):
            start, table, length = span_of(batch, bands, i, number, width)
            fill_part(regularizer, V, Q, R, start, shift, table, length, theta_i, zero, width)


@function
def fill_sums_of_items(batch, bands, weights, theta, M, X, Q):
    """[V] and [Q] of Shannon as sums over selections."""
    zero, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0]):
        extend(batch, i, bands, M, zero, width)
        extend(batch, i, bands, X, zero, width)
        shift = shift_of(batch, bands, weights, i, width)
        factor_i, power_i = split(load(theta, i * width, zero), Q, zero)
        for number in range(spans_of(batch, bands, i) - 1, -1, -1):
            start, table, length = span_of(batch, bands, i, number, width)
            sum_part(M, X, Q, start, shift, table, length, factor_i, power_i, zero, width)
        if i % 16 == 15:  # M has grown by less than 3^16
            normalize(M, X, normal_length(batch, bands, i, width), zero, width)


normal_length = of_items("normal_length")


@function
def follow_items(batch, regularizer, direction, scratch, weights, z, T, Q, R):
    """The derivative T of the V sweep in a direction, [V'], and that of Q in R, [Q'], unless R is None."""
    zero, width, bands = zeros(Q), lanes(Q), scratch.bands
    T[:] = 0.0
    for i in range(weights.shape[0]):
        extend(batch, i, bands, T, zero, width)
        shift, z_i = shift_of(batch, bands, weights, i, width), load(z, i * width, zero)
        for number in range(spans_of(batch, bands, i) - 1, -1, -1):
            start, table, length = span_of(batch, bands, i, number, width)
            follow_part(regularizer, direction, T, Q, R, start, shift, table, length, z_i, zero, width)


@inline
def collect_item(batch, i, bands, weights, E, P, Q, y, zero, width):
    """One step of [E] and [y]."""
    shift, y_i = shift_of(batch, bands, weights, i, width), zero
    together = at_once(batch.stride, shift, width)
    for number in range(spans_of(batch, bands, i)):
        start, table, length = span_of(batch, bands, i, number, width)
        y_i = collect_part(E, P, Q, start, shift, table, length, together, y_i, zero, width)
        if not together:
            arrive_part(E, P, start - shift, length, zero, width)
    store(y, i * width, y_i)
    return E, P


@inline
def collect_tangent_of_item(batch, i, bands, weights, E, D, P, S, Q, R, product, zero, width):
    """The same for E together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    shift, sum_i = shift_of(batch, bands, weights, i, width), zero
    together = at_once(batch.stride, shift, width)
    for number in range(spans_of(batch, bands, i)):
        start, table, length = span_of(batch, bands, i, number, width)
        sum_i = collect_tangent_part(E, D, P, S, Q, R, start, shift, table, length, together, sum_i, zero, width)
        if not together:
            arrive_part(E, P, start - shift, length, zero, width)
            arrive_part(D, S, start - shift, length, zero, width)
    store(product, i * width, sum_i)
    return E, D, P, S


fill_values = by_kind(fill_values_of_items, None, fill_values_of_items)
fill_sums = by_kind(fill_sums_of_items, None, fill_sums_of_items)
follow = by_kind(follow_items, choices.follow, follow_items)
collect_step = by_kind(collect_item, choices.collect_step, collect_item, is_inline=True)
collect_tangent_step = by_kind(
    collect_tangent_of_item, choices.collect_tangent_step, collect_tangent_of_item, is_inline=True
)


@function
def collect(batch, bands, weights, E, P, Q, y):
    """The E sweep of [E] and [y]."""
    zero, width = zeros(Q), lanes(Q)
    for k in range(bands.shape[0] - 2, -1, -1):
        E, P = collect_step(batch, k, bands, weights, E, P, Q, y, zero, width)
        fold(batch, k, bands, E, zero, width)


@function
def collect_tangents(batch, bands, weights, E, D, P, S, Q, R, product):
    """The E sweep together with its derivative D, [E'] and [Hz]."""
    zero, width = zeros(Q), lanes(Q)
    for k in range(bands.shape[0] - 2, -1, -1):
        E, D, P, S = collect_tangent_step(batch, k, bands, weights, E, D, P, S, Q, R, product, zero, width)
        fold(batch, k, bands, E, zero, width)
        fold(batch, k, bands, D, zero, width)


@function
def start_marginals(batch, goals, members, E):
    E[:] = 0.0
    for lane in range(members):
        set_item(E, item(goals, lane) * batch.stride + lane, 1.0)


@function
def sums_fit(theta, Q, row):
    """Whether all exponents that can occur are far from that of an infeasible state."""
    zero, width = zeros(Q), lanes(Q)
    largest = load(theta, 0, zero) * 0.0
    for p in range(0, theta.shape[0], width):
        theta_i = load(theta, p, zero)
        largest = largest + where(theta_i < FEASIBLE, 0.0, vector.abs(theta_i))
    store(row, 0, largest)
    for lane in range(width):  # noqa: SIM110  Numba has no all() of a generator
        if row[lane] * LOG2_INVERSE > -0.25 * never_of(Q):
            return False
    return True


def fill(batch, regularizer, scratch, first, members, weights, theta, V, Q, R=None):
    """The table, and V at the goals of the members of a group. With R, of items, also the slopes of decisions."""


@overload(fill, strict=False)
def _choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, Q, R=None):
    def by_values(batch, regularizer, scratch, first, members, weights, theta, V, Q, R=None):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_values(batch, regularizer, scratch.bands, weights, theta, V, Q, R)

    def by_sums(batch, regularizer, scratch, first, members, weights, theta, V, Q, R=None):
        if theta.shape[0] == 0 or batch.complete or not sums_fit(theta, Q, V):
            start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
            fill_values(batch, regularizer, scratch.bands, weights, theta, V, Q, R)
            return
        row = row_length(batch, lanes(Q))
        M, X = scratch.narrow[:row], scratch.narrow[row : 2 * row]  # before the backward sweep needs them
        M[:] = 1.0
        start_row(batch, scratch.bands, first, members, X, never_of(Q))
        fill_sums(batch, scratch.bands, weights, theta, M, X, Q)
        for lane in range(members):
            goal = scratch.goals[lane] * batch.stride + lane
            infeasible = X[goal] < 0.5 * never_of(Q) and M[goal] == M[goal]
            V[goal] = INFEASIBLE if infeasible else np.log(np.float64(M[goal])) + X[goal] * LOG2

    if kind_of(batch) == CHOICES:
        return choices.choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, Q, R)
    return by_sums if regularizer.variant == "shannon" else by_values


# The kernels: all groups from ``begin`` to ``end``.


@kernel
def operator_kernel(regularizer, scores, gamma, structure, layout, memory, begin, end, relaxed, value, y):
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, n, goals = lanes(scratch.narrow), batch.theta.shape[1], scratch.goals
    row = row_length(batch, width)
    E, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        finish(batch, goals, V, first, members, value)
        if relaxed:
            start_marginals(batch, goals, members, E)
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
    regularizer, direction, scores, gamma, structure, layout, memory, begin, end, z, backwards, value, tangent, product
):
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, n, goals = lanes(scratch.narrow), batch.theta.shape[1], scratch.goals
    row, cells = row_length(batch, width), scratch.table.shape[1]
    E, D = scratch.narrow[:row], scratch.narrow[row : 2 * row]
    T, S = scratch.narrow[2 * row : 3 * row], scratch.narrow[3 * row : 4 * row]
    rest = scratch.narrow[4 * row :]
    unit = np.ones(1)
    packed, sums, R = rest[: n * width], rest[n * width : 2 * n * width], rest[2 * n * width : 2 * n * width + cells]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        pack(z, unit, first, members, batch.stride, width, packed)
        slopes = slopes_in(regularizer, direction, R)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q, slopes)
        if backwards:
            follow(batch, regularizer, direction, scratch, weights, packed, T, Q, R)
        else:
            follow(batch, regularizer, direction, scratch, weights, packed, T, Q, None)
        finish(batch, goals, V, first, members, value)
        for lane in range(members):
            tangent[first + lane] = item(T, item(goals, lane) * batch.stride + lane)
        if backwards:
            start_marginals(batch, goals, members, E)
            D[:] = 0.0
            collect_tangents(batch, scratch.bands, weights, E, D, T, S, Q, R, sums)
            unpack(sums, first, members, batch.stride, width, product)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], tangent[first + lane] = np.nan, np.nan
                if backwards:
                    product[first + lane] = np.nan


@kernel
def frontier_kernel(regularizer, scores, gamma, structure, layout, memory, begin, end, rows, backwards, cotangent, y):
    """[V] of all capacities after the last step; backwards, an E sweep that starts from a row of cotangents."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
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
