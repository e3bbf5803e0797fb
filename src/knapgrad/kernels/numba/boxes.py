"""Several budgets: the row of an item is a box of capacities, up to three sides long.

The longest side lies in memory cell by cell, the others are loops over its lines: a step of an item does for every
line what it does for the one row of a knapsack. A line has room for the vector that may overhang its end.

The band of a row is a box too. On each side it ends at the *top*, the sum of the weights so far or the largest
capacity. Beyond, nothing changes along that side, so the top stands for all: going forwards it is copied where the
next item reads beyond it (extend), going backwards what arrived beyond is added to it (fold).
"""

import numpy as np

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.parts import add_to_knee, constant_of
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import load, store

# Columns of bands, three each: where the band of an item begins, its top, and the weights. Then how many vectors a
# line has in the table, and where the table of the item begins. The row of the group has the last cell of a row.
LOW, HIGH, MOVE, LINE, TABLE = 0, 3, 6, 9, 10
LAST = 2  # bands.TOP, where all kinds have it


def sides_of(box):
    """What the kernels know of a box, as an array: sizes of the sides, the longest last, and how far apart numbers of
    states are along each."""
    steps = [int(np.prod(box[k + 1 :], dtype=np.int64)) for k in range(len(box))]
    sides = sorted([(1, 1)] * (3 - len(box)) + list(zip(box, steps)), key=lambda side: side[0])
    return np.array(sides, np.int64).T.copy()


@inline
def pitch_of(batch, width):
    """How many cells a line takes."""
    return batch.tree[0, 2] + (width if batch.stride == 1 else 0)


@inline
def cell_of(batch, a, b, c, width):
    return (a * batch.tree[0, 1] + b) * pitch_of(batch, width) + c


@inline
def digit(batch, state, side):
    """The capacity along a side, of a numbered state."""
    return state // batch.tree[1, side] % batch.tree[0, side]


@inline
def own_capacity(batch, instance):
    return batch.capacity[instance] if batch.capacity.shape[0] > 1 else batch.capacity[0]


@inline
def capacities_of(batch, first, members, side):
    """The lowest and the highest capacity of a group along a side."""
    lowest = highest = digit(batch, own_capacity(batch, first), side)
    for b in range(first + 1, first + members):
        capacity = digit(batch, own_capacity(batch, b), side)
        lowest, highest = min(lowest, capacity), max(highest, capacity)
    return (0 if batch.complete else lowest), highest


@function
def bands_of_box(batch, group, width, bands):
    """Fills ``bands`` for a group; returns the table's length."""
    first, members = group, 1
    if batch.stride > 1:
        first, members = group * width, min(width, batch.theta.shape[0] - group * width)
    weights = batch.weights[first] if batch.weights.shape[0] > 1 else batch.weights[0]
    n, states = weights.shape[0], batch.tree[0, 0] * batch.tree[0, 1] * batch.tree[0, 2]
    for i in range(n):
        bands[i, LINE] = weights[i] < states  # whether the item can fit, for now
        for side in range(3):
            bands[i, MOVE + side] = digit(batch, weights[i], side)
    for side in range(3):
        _, highest = capacities_of(batch, first, members, side)
        for i in range(n):
            bands[i, LINE] = bands[i, LINE] and bands[i, MOVE + side] <= highest
    for side in range(3):
        lowest, highest = capacities_of(batch, first, members, side)
        prefix = 0
        for i in range(n):
            prefix = min(prefix + bands[i, LINE] * bands[i, MOVE + side], highest)
            bands[i, HIGH + side] = prefix
        low = min(lowest, prefix)
        for i in range(n - 1, -1, -1):
            bands[i, LOW + side] = max(low, bands[i, MOVE + side])
            low = max(low - bands[i, LINE] * bands[i, MOVE + side], 0)
    cells = offset = 0
    for i in range(n):
        if not bands[i, LINE]:
            bands[i, MOVE] = bands[i, LOW] = batch.tree[0, 0]  # more than any capacity
        unit = 1 if batch.stride > 1 else width
        bands[i, LINE] = (max(bands[i, HIGH + 2] - bands[i, LOW + 2], -1) + unit) // unit * width
        bands[i, TABLE] = offset
        size = lines_of(bands, i) * bands[i, LINE]
        cells = max(cells, offset + size)
        offset += size if batch.keeps else 0
    bands[n, LAST] = cell_of(batch, batch.tree[0, 0], 0, 0, width) - 1
    return cells


@inline
def lines_of(bands, i):
    """How many lines the band of an item has."""
    return max(bands[i, HIGH] - bands[i, LOW] + 1, 0) * max(bands[i, HIGH + 1] - bands[i, LOW + 1] + 1, 0)


@inline
def place_of(batch, bands, i, line, width):
    """Where a line of the band of an item begins, in a row and in the table."""
    breadth = bands[i, HIGH + 1] - bands[i, LOW + 1] + 1
    a, b = bands[i, LOW] + line // breadth, bands[i, LOW + 1] + line % breadth
    return cell_of(batch, a, b, bands[i, LOW + 2], width) * batch.stride, bands[i, TABLE] + line * bands[i, LINE]


@inline
def shift_of(batch, bands, i, width):
    return cell_of(batch, bands[i, MOVE], bands[i, MOVE + 1], bands[i, MOVE + 2], width) * batch.stride


@inline
def width_of(batch):
    """Lanes of a vector; for a batch with instances in the lanes any number does."""
    return batch.stride if batch.stride > 1 else vector.BYTES // batch.theta.itemsize


@inline
def settled_cell(batch, bands, i, a, b, c, width):
    """The cell of row i that stands for a state."""
    return cell_of(batch, min(a, bands[i, HIGH]), min(b, bands[i, HIGH + 1]), min(c, bands[i, HIGH + 2]), width)


@inline
def goal_of_box(batch, scratch, instance):
    """The cell from which an instance starts its way back."""
    return cell_in_box(batch, scratch.bands, own_capacity(batch, instance))


@inline
def cell_in_box(batch, bands, state):
    """The cell that stands for a numbered state after the last item."""
    last, width = bands.shape[0] - 2, width_of(batch)
    a, b, c = digit(batch, state, 0), digit(batch, state, 1), digit(batch, state, 2)
    return settled_cell(batch, bands, last, a, b, c, width) if last >= 0 else 0


@function
def start_of_box(batch, bands, first, members, row, never):
    """[V] before the first item: 0, since all of every budget may stay unused."""
    row[:] = 0.0


@function
def extend(i, batch, bands, row, like, width):
    """Before item i: copies what is constant beyond the tops of the row before as far as the item reads it. Vectors may
    write beyond that, up to the room at the end of a line."""
    if i == 0:
        return
    stride, pitch = batch.stride, pitch_of(batch, width) * batch.stride
    a, b, c = bands[i - 1, HIGH], bands[i - 1, HIGH + 1], bands[i - 1, HIGH + 2]
    next_a, next_b, next_c = bands[i, HIGH], bands[i, HIGH + 1], bands[i, HIGH + 2]
    for x in range(a + 1 if next_c > c else 0):
        for y in range(b + 1):
            top = cell_of(batch, x, y, c, width)
            constant = constant_of(row, top, stride, like)
            for p in range((top + 1) * stride, (top + 1 + next_c - c) * stride, width):
                store(row, p, constant)
    length = (next_c + 1) * stride
    for x in range(a + 1 if next_b > b else 0):
        top = cell_of(batch, x, b, 0, width) * stride
        for beyond in range(top + pitch, top + (next_b - b + 1) * pitch, pitch):
            copy(row, top, beyond, length, like, width)
    for x in range(a + 1, next_a + 1):
        for y in range(next_b + 1):
            top, beyond = cell_of(batch, a, y, 0, width) * stride, cell_of(batch, x, y, 0, width) * stride
            copy(row, top, beyond, length, like, width)


@function
def fold(i, batch, bands, row, like, width):
    """After item i, backwards: the adjoint of extend. Beyond the tops of item i all is 0."""
    if i == 0:
        return
    stride, pitch = batch.stride, pitch_of(batch, width) * batch.stride
    a, b, c = bands[i - 1, HIGH], bands[i - 1, HIGH + 1], bands[i - 1, HIGH + 2]
    next_a, next_b, next_c = bands[i, HIGH], bands[i, HIGH + 1], bands[i, HIGH + 2]
    length = (next_c + 1) * stride
    for x in range(a + 1, next_a + 1):
        for y in range(next_b + 1):
            top, beyond = cell_of(batch, a, y, 0, width) * stride, cell_of(batch, x, y, 0, width) * stride
            move(row, top, beyond, length, like, width)
    for x in range(a + 1 if next_b > b else 0):
        top = cell_of(batch, x, b, 0, width) * stride
        for beyond in range(top + pitch, top + (next_b - b + 1) * pitch, pitch):
            move(row, top, beyond, length, like, width)
    for x in range(a + 1 if next_c > c else 0):
        for y in range(b + 1):
            top, gathered = cell_of(batch, x, y, c, width), like
            for p in range((top + 1) * stride, (top + 1 + next_c - c) * stride, width):
                gathered = gathered + load(row, p, like)
                store(row, p, like)
            add_to_knee(row, top, stride, gathered, like)


@inline
def copy(row, top, beyond, length, like, width):
    for p in range(0, length, width):
        store(row, beyond + p, load(row, top + p, like))


@inline
def move(row, top, beyond, length, like, width):
    """Adds what is beyond a top to it."""
    for p in range(0, length, width):
        store(row, top + p, load(row, top + p, like) + load(row, beyond + p, like))
        store(row, beyond + p, like)
