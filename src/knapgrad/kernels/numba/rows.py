"""One budget: where the band of an item is in its row. :mod:`knapgrad.kernels.numba.boxes` has the same functions.

A band has one span of live states or two (:mod:`knapgrad.kernels.numba.bands`). Where a row is constant, between its
knee and the least slack, only the knee is kept: going forwards the rest is written out where the next item reads it
(extend), going backwards what arrived there is gathered at the knee (fold).
"""

import numpy as np

from knapgrad.kernels.numba.bands import COUNT, END, FILL, FROM, KNEE, NEXT, OFFSET, START, TOP, settle
from knapgrad.kernels.numba.steps import add_to_knee, constant_of
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import item, load, set_item, store


@inline
def spans_of(batch, bands, i):
    return 2 if bands[i, NEXT] < bands[i, END] else 1


@inline
def span_of(batch, bands, i, number, width):
    """Where a span begins in a row and in the table, and its length."""
    begin, end = (bands[i, NEXT], bands[i, END]) if number > 0 else (0, bands[i, COUNT])
    return bands[i, START] * batch.stride + begin * width, bands[i, OFFSET] + begin * width, (end - begin) * width


@inline
def shift_of(batch, bands, weights, i, width):
    return weights[i] * batch.stride


@inline
def normal_length(batch, bands, i, width):
    """How much of a row is in use."""
    return (bands[i, TOP] + 1) * batch.stride + width


@inline
def extend(batch, i, bands, row, zero, width):
    """Before item i: writes the constant part of the previous row to memory, as far as the item reads it. Vectors may
    write beyond that, within the constant part."""
    stride, below, fill = batch.stride, bands[i - 1, KNEE] if i > 0 else 0, bands[i, FILL]
    if below < fill:
        constant = constant_of(row, below, stride, zero)
        for p in range((below + 1) * stride, (fill + 1) * stride + width, width):
            store(row, p, constant)
    if bands[i, FROM] >= 0:
        begin, end = bands[i, FROM] * stride - width, (bands[bands.shape[0] - 1, KNEE] + 1) * stride - width
        constant = constant_of(row, below, stride, zero)
        for p in range(end, begin, -width):
            store(row, max(p, (below + 1) * stride), constant)


@inline
def fold(batch, i, bands, row, zero, width):
    """After item i, backwards: the adjoint of extend. Adds to the knee what arrived in the constant part."""
    stride, below, fill = batch.stride, bands[i - 1, KNEE] if i > 0 else 0, bands[i, FILL]
    if below < fill:
        gathered = zero
        for p in range((below + 1) * stride, (fill + 1) * stride, width):
            gathered = gathered + load(row, p, zero)
            store(row, p, zero)
        add_to_knee(row, below, stride, gathered, zero)
    if bands[i, FROM] >= 0:
        begin, end = bands[i, FROM] * stride - width, (bands[bands.shape[0] - 1, KNEE] + 1) * stride - width
        gathered = zero
        for p in range(end, begin, -width):
            at = max(p, (below + 1) * stride)
            gathered = gathered + load(row, at, zero)
            store(row, at, zero)
        add_to_knee(row, below, stride, gathered, zero)


# Paths. A step is what a path needs to know of an item, read once for all paths.


@inline
def step_of(batch, bands, weights, i):
    knee, top = (bands[i - 1, KNEE], bands[i - 1, TOP]) if i > 0 else (0, 0)
    return weights[i], bands[i, START], bands[i, OFFSET], knee, top, bands[bands.shape[0] - 1, KNEE]


@inline
def visit(batch, step, c, picked):
    """Where the decision in state c is in the table, -1 where the item does not fit, or no selection gets to; and the
    state of the row before that a path goes to."""
    weight, start, row, knee, top, least_slack = step
    at = row + (c - start) * batch.stride if c >= start else -1
    return at, settle(c - weight * (picked and at >= 0), knee, top, least_slack)


@function
def draw(batch, bands, weights, states, samples, Q, first, members, uniforms, y):
    """A step waits for the one before on its path, so paths take turns: those of all lanes, or of 8 samples."""
    (size, n), group = batch.theta.shape, bands.shape[0] - 1
    together, next_random = (8, size * n) if members == 1 else (1, n)
    apart = 0 < bands[group, KNEE] < bands[group, TOP]  # else a row ends at its knee, or has none
    for block in range(n, 0, -16):  # of items: a cache line of random numbers is used up before the next
        for s in range(0, samples, together):
            turns = min(together, samples - s) * members
            for i in range(block - 1, max(block - 16, 0) - 1, -1):
                step, at = step_of(batch, bands, weights, i), (s * size + first) * n + i
                if apart:
                    take_turns(batch, step, True, states, s * members, turns, Q, members, uniforms, y, at, next_random)
                else:
                    take_turns(batch, step, False, states, s * members, turns, Q, members, uniforms, y, at, next_random)


@inline
def take_turns(batch, step, apart, states, path, turns, Q, members, uniforms, y, at, next_random):
    """The decisions of some paths on one item."""
    (weight, start, row, knee, top, least_slack), next_lane = step, np.int64(members > 1)
    last = top if least_slack <= 0 else knee  # below 0 if some instance of the group has no feasible selection
    for turn in range(turns):
        c, picked = item(states, path + turn), 0  # an integer: a jump on a random bit is mispredicted half of the time
        if c >= start:
            q = item(Q, row + (c - start) * batch.stride + turn * next_lane)
            picked = np.int64(item(uniforms, at) < q)
            set_item(y, at, picked + 0.0 * q)  # NaN stays NaN
        else:
            set_item(y, at, 0.0)
        c -= weight * picked
        set_item(states, path + turn, settle(c, knee, top, least_slack) if apart else min(c, last))
        at += next_random
