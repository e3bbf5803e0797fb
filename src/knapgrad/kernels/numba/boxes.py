"""Several budgets: the row of an item is a box of capacities, up to three sides long.

The longest side lies in memory cell by cell, the others are loops over its lines: a step of an item does for every
line what it does for the one row of a knapsack. A line has room for the vector that may overhang its end.

The band of a row is a box too. On each side it ends at the *top*, the sum of the weights so far or the largest
capacity. Beyond, nothing changes along that side, so the top stands for all: going forwards it is copied where the
next item reads beyond it (extend), going backwards what arrived beyond is added to it (fold).
"""

import numpy as np

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.groups import LAST, members_of, own
from knapgrad.kernels.numba.steps import add_to_knee, constant_of
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import item, load, set_item, store

# Columns of bands, three each: where the band of an item begins, its top, and the weights. Then how many vectors a
# line has in the table, and where the table of the item begins. The row of the group has groups.LAST alone.
LOW, HIGH, MOVE, LINE, TABLE = 0, 3, 6, 9, 10


def sides_of(box):
    """What the kernels know of a box, as an array: sizes of the sides, the longest last, and how far apart numbers of
    states are along each."""
    steps = [int(np.prod(box[k + 1 :], dtype=np.int64)) for k in range(len(box))]
    sides = sorted([(1, 1)] * (3 - len(box)) + list(zip(box, steps)), key=lambda side: side[0])
    return np.array(sides, np.int64).T.copy()


@inline
def pitch_of(batch, width):
    """How many cells a line takes."""
    return batch.sides[0, 2] + (width if batch.stride == 1 else 0)


@inline
def cell_of(batch, a, b, c, width):
    return (a * batch.sides[0, 1] + b) * pitch_of(batch, width) + c


@inline
def settle(a, b, c, high):
    """As ``bands.settle``: what stands for these capacities in a row, whatever they are, so that no path leaves it."""
    return min(a, high[0]), min(b, high[1]), min(c, high[2])


@inline
def digit(batch, state, side):
    """The capacity along a side, of a numbered state."""
    return state // batch.sides[1, side] % batch.sides[0, side]


@inline
def capacities_of(batch, first, members, side):
    """The lowest and the highest capacity of a group along a side."""
    lowest = highest = digit(batch, own(batch.capacity, first), side)
    for b in range(first + 1, first + members):
        capacity = digit(batch, own(batch.capacity, b), side)
        lowest, highest = min(lowest, capacity), max(highest, capacity)
    return (0 if batch.complete else lowest), highest


@function
def bands_of_box(batch, group, width, bands):
    """Fills ``bands`` for a group; returns the table's length."""
    first, members = members_of(batch, group, width)
    weights = own(batch.weights, first)
    n, states = weights.shape[0], batch.sides[0, 0] * batch.sides[0, 1] * batch.sides[0, 2]
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
            bands[i, MOVE] = bands[i, LOW] = batch.sides[0, 0]  # more than any capacity
        unit = 1 if batch.stride > 1 else width
        bands[i, LINE] = (max(bands[i, HIGH + 2] - bands[i, LOW + 2], -1) + unit) // unit * width
        bands[i, TABLE] = offset
        size = lines_of(bands, i) * bands[i, LINE]
        cells = max(cells, offset + size)
        offset += size if batch.keeps else 0
    bands[n, LAST] = cell_of(batch, batch.sides[0, 0], 0, 0, width) - 1
    return cells


@inline
def lines_of(bands, i):
    """How many lines the band of an item has."""
    return max(bands[i, HIGH] - bands[i, LOW] + 1, 0) * max(bands[i, HIGH + 1] - bands[i, LOW + 1] + 1, 0)


@inline
def spans_of(batch, bands, i):
    return lines_of(bands, i)


@inline
def span_of(batch, bands, i, line, width):
    """Where a line of the band of an item begins, in a row and in the table, and its length."""
    breadth, length = bands[i, HIGH + 1] - bands[i, LOW + 1] + 1, bands[i, LINE]
    a, b = bands[i, LOW] + line // breadth, bands[i, LOW + 1] + line % breadth
    return cell_of(batch, a, b, bands[i, LOW + 2], width) * batch.stride, bands[i, TABLE] + line * length, length


@inline
def shift_of(batch, bands, weights, i, width):
    return cell_of(batch, bands[i, MOVE], bands[i, MOVE + 1], bands[i, MOVE + 2], width) * batch.stride


@inline
def width_of(batch):
    """Lanes of a vector; for a batch with instances in the lanes any number does."""
    return batch.stride if batch.stride > 1 else vector.BYTES // batch.theta.itemsize


@inline
def settled_cell(batch, bands, i, a, b, c, width):
    """The cell of row i that stands for a state."""
    a, b, c = settle(a, b, c, (bands[i, HIGH], bands[i, HIGH + 1], bands[i, HIGH + 2]))
    return cell_of(batch, a, b, c, width)


@inline
def goals_in_box(batch, bands, first, members, goals):
    for lane in range(members):
        set_item(goals, lane, cell_in_box(batch, bands, own(batch.capacity, first + lane)))


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


@inline
def extend(batch, i, bands, row, zero, width):
    copy_tops(batch, i, bands, row, zero, width)


@inline
def fold(batch, i, bands, row, zero, width):
    add_to_tops(batch, i, bands, row, zero, width)


@function
def copy_tops(batch, i, bands, row, zero, width):
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
            constant = constant_of(row, top, stride, zero)
            for p in range((top + 1) * stride, (top + 1 + next_c - c) * stride, width):
                store(row, p, constant)
    length = (next_c + 1) * stride
    for x in range(a + 1 if next_b > b else 0):
        top = cell_of(batch, x, b, 0, width) * stride
        for beyond in range(top + pitch, top + (next_b - b + 1) * pitch, pitch):
            copy(row, top, beyond, length, zero, width)
    for x in range(a + 1, next_a + 1):
        for y in range(next_b + 1):
            top, beyond = cell_of(batch, a, y, 0, width) * stride, cell_of(batch, x, y, 0, width) * stride
            copy(row, top, beyond, length, zero, width)


@function
def add_to_tops(batch, i, bands, row, zero, width):
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
            move(row, top, beyond, length, zero, width)
    for x in range(a + 1 if next_b > b else 0):
        top = cell_of(batch, x, b, 0, width) * stride
        for beyond in range(top + pitch, top + (next_b - b + 1) * pitch, pitch):
            move(row, top, beyond, length, zero, width)
    for x in range(a + 1 if next_c > c else 0):
        for y in range(b + 1):
            top, gathered = cell_of(batch, x, y, c, width), zero
            for p in range((top + 1) * stride, (top + 1 + next_c - c) * stride, width):
                gathered = gathered + load(row, p, zero)
                store(row, p, zero)
            add_to_knee(row, top, stride, gathered, zero)


@inline
def copy(row, top, beyond, length, zero, width):
    for p in range(0, length, width):
        store(row, beyond + p, load(row, top + p, zero))


@inline
def move(row, top, beyond, length, zero, width):
    """Adds what is beyond a top to it."""
    for p in range(0, length, width):
        store(row, top + p, load(row, top + p, zero) + load(row, beyond + p, zero))
        store(row, beyond + p, zero)


@inline
def normal_length(batch, bands, i, width):
    return (bands[bands.shape[0] - 1, LAST] + 1) * batch.stride + width


# Paths. The state of a path is a cell of a row.


@inline
def step_of(batch, bands, weights, i):
    low = bands[i, LOW], bands[i, LOW + 1], bands[i, LOW + 2]
    move = bands[i, MOVE], bands[i, MOVE + 1], bands[i, MOVE + 2]
    high = (bands[i - 1, HIGH], bands[i - 1, HIGH + 1], bands[i - 1, HIGH + 2]) if i > 0 else (0, 0, 0)
    return low, move, high, bands[i, HIGH + 1] - bands[i, LOW + 1] + 1, bands[i, LINE], bands[i, TABLE]


@inline
def capacities_at(batch, cell):
    pitch = pitch_of(batch, width_of(batch))
    row = cell // pitch
    return row // batch.sides[0, 1], row % batch.sides[0, 1], cell % pitch


@inline
def visit(batch, step, cell, picked):
    """Where the decision at a cell is in the table, -1 where the item does not fit, or no selection gets to; and the
    cell of the row before that a path goes to."""
    (a, b, c), (low, move, high, breadth, length, table) = capacities_at(batch, cell), step
    at = -1
    if a >= low[0] and b >= low[1] and c >= low[2]:
        at = table + ((a - low[0]) * breadth + b - low[1]) * length + (c - low[2]) * batch.stride
        if picked:
            a, b, c = a - move[0], b - move[1], c - move[2]
    a, b, c = settle(a, b, c, high)
    return at, cell_of(batch, a, b, c, width_of(batch))


@function
def draw(batch, bands, weights, states, samples, Q, first, members, uniforms, y):
    size, n = batch.theta.shape
    for lane in range(members):
        for s in range(samples):
            a, b, c = capacities_at(batch, item(states, s * members + lane))
            first_random = (s * size + first + lane) * n
            for i in range(n - 1, -1, -1):
                low, move, high, breadth, length, table = step_of(batch, bands, weights, i)
                picked = 0
                if a >= low[0] and b >= low[1] and c >= low[2]:
                    at = table + ((a - low[0]) * breadth + b - low[1]) * length + (c - low[2]) * batch.stride
                    picked = np.int64(item(uniforms, first_random + i) < item(Q, at + lane))
                set_item(y, first_random + i, picked)
                a, b, c = settle(a - move[0] * picked, b - move[1] * picked, c - move[2] * picked, high)
