"""Groups of instances, and which states of a row a group has to visit.

A *group* is what one set of vectors works on, in one of two layouts that share all of the code:

- 16 instances (8 in float64) with the same weights, one in each lane: cell c of a row is the vector at ``c * stride``;
- one instance, with 16 neighbouring capacities in the lanes: ``stride`` is 1, and theta is the same in every lane.

Only the *band* of live states of a row is touched (docs/math.md, "Live states"). It starts at
``max(C - later weights, w_i)``. With ``prefix`` the sum of the weights up to the item, and ``flat`` the least slack in
the group, it has two parts:

- up to the *knee*, ``min(prefix, flat)``. From there to ``flat`` a row is constant, and the knee stands for all
  of these states. (A plain knapsack has ``flat = C``, so this is all of its band.)
- from ``flat + 1`` to ``min(prefix + slack, C)``; above, states are infeasible. (Where all of the capacity must be
  used, ``flat`` is 0 and this is all.)

Where the parts come close to each other they are one, and nothing is constant.

With choices among options, a step is a choice instead of an item, and its weight is that of its heaviest option. The
band starts at ``C - later weights`` and is one part, up to the knee of a plain knapsack or up to ``prefix + slack``.
Before cell 0 of a row there is a margin that is infeasible, so that heavy options need no test.

With several budgets a row is a box of capacities, see :mod:`knapgrad.kernels.numba.boxes`.
"""

from typing import Any, NamedTuple

import numpy as np

from knapgrad.kernels.numba import boxes, vector
from knapgrad.kernels.numba.variants import by_kind, function, inline, kernel
from knapgrad.kernels.numba.vector import lanes, load, total, where, zeros
from knapgrad.lattice import FEASIBLE, INFEASIBLE, LARGEST


class Batch(NamedTuple):
    """A flat batch; what all instances share has one row."""

    theta: Any  # (batch, n)
    weights: Any  # (1 or batch, n), int64
    capacity: Any  # (1 or batch,), int64, at most the total weight
    slack: Any  # (1 or batch,), int64; if it is the capacity or more, all of it may stay unused
    gamma: Any  # (1 or batch,), float64
    stride: int  # lanes (instances in the lanes) or 1 (capacities in the lanes)
    tree: Any  # of the options of a choice (lattice.tournament), flat; of a box its sides (boxes.sides_of); else None
    options: int  # of a choice
    entries: int  # of the table per state
    margin: int  # cells before cell 0 of a row
    keeps: bool  # whether the table has all steps, or one at a time
    complete: bool  # whether the last row is needed down to state 0
    reach: int  # the largest capacity in any group


class Scratch(NamedTuple):
    bands: Any  # (steps + 1, COLUMNS), int64: a row per step, an item or a choice, and one for the group
    states: Any  # the capacities left along paths, int64
    wide: Any  # float64: a row of V, then theta
    narrow: Any  # theta's type: rows and tables
    table: Any  # (1 or groups, cells), theta's type: Q
    frame: Any  # what all this was made from, int64; a kernel says there which instance is out of range


BEYOND = 8  # where in the frame: the number of the instance, counted from 1

# Columns of bands. COUNT, NEXT and END count vectors from START on: the lower part is up to COUNT, the upper from NEXT
# to END. FILL and FROM say where the constant part of the row before is needed: up to FILL, and from FROM to flat, if
# they are not negative. The row of the group has flat as its KNEE and the largest capacity as its TOP.
START, KNEE, TOP, COUNT, NEXT, END, OFFSET, FILL, FROM = range(9)
COLUMNS = 11  # as many as boxes have


@function
def plan_items(batch, weights, lowest, highest, flat, slack, width, bands):
    """Fills ``bands`` for a group with capacities from lowest to highest and slacks from flat to slack; returns the
    table's length."""
    n, stride = weights.shape[0], batch.stride
    bands[n, KNEE], bands[n, TOP] = flat, highest
    low = 0
    for i in range(n):
        low = min(low + min(weights[i], highest + 1), lowest)
    for i in range(n - 1, -1, -1):
        bands[i, START] = max(low, weights[i])
        low = max(low - min(weights[i], highest + 1), 0)
    prefix = offset = below = cells = 0
    sharp, apart = flat < highest, True
    unit, margin = (1, 0) if stride > 1 else (width, 2)  # cells per vector; vectors that may be overhung
    for i in range(n):
        prefix = min(prefix + min(weights[i], highest + 1), highest)
        start, knee, top = bands[i, START], min(prefix, flat), min(prefix + max(slack, 0), highest)
        count, end = (max(knee - start, -1) + unit) // unit, (max(top - start, -1) + unit) // unit
        upper = max(flat + 1 - start, 0) // unit
        apart = apart and knee < flat and (not sharp or upper > count + margin)
        fill, begin = knee, -1
        if not apart:
            knee, count, upper = flat, end, end
            if sharp:
                fill, begin = -1, below + 1 if below < flat else -1
        elif top <= flat:
            upper = end = count
        elif weights[i] > 0:
            begin = max(knee, flat - weights[i]) + 1
        if i == 0:  # the first row is there
            fill, begin = -1, -1
        bands[i, KNEE], bands[i, TOP], bands[i, COUNT], bands[i, NEXT], bands[i, END] = knee, top, count, upper, end
        bands[i, OFFSET], bands[i, FILL], bands[i, FROM] = offset, fill, begin
        cells = max(cells, offset + end * width)
        offset += end * width if batch.keeps else 0
        below = knee
    return cells


@inline
def heaviest_of(weights, k, options, limit):
    heaviest = 0
    for p in range(k * options, (k + 1) * options):
        heaviest = max(heaviest, weights[p])
    return min(heaviest, limit)


@function
def plan_choices(batch, weights, lowest, highest, flat, slack, width, bands):
    """The same for choices. START, KNEE, TOP, COUNT and OFFSET are used."""
    options, steps = batch.options, bands.shape[0] - 1
    unit = 1 if batch.stride > 1 else width
    bands[steps, KNEE], bands[steps, TOP] = flat, highest
    low = 0
    for k in range(steps):
        low = min(low + heaviest_of(weights, k, options, highest + 1), lowest)
    for k in range(steps - 1, -1, -1):
        bands[k, START] = low
        low = max(low - heaviest_of(weights, k, options, highest + 1), 0)
    prefix = offset = cells = 0
    for k in range(steps):
        prefix = min(prefix + heaviest_of(weights, k, options, highest + 1), highest)
        top = min(prefix + max(slack, 0), highest) if flat < highest else prefix
        count = (max(top - bands[k, START], -1) + unit) // unit
        bands[k, KNEE], bands[k, TOP] = flat if flat < highest else top, top
        bands[k, COUNT], bands[k, OFFSET] = count, offset
        cells = max(cells, offset + count * width * batch.entries)
        offset += count * width * batch.entries if batch.keeps else 0
    return cells


plan = by_kind(plan_items, plan_choices, plan_items)


@inline
def members_of(batch, group, width):
    """The first instance of a group and the number of instances in it."""
    if batch.stride == 1:
        return group, 1
    return group * width, min(width, batch.theta.shape[0] - group * width)


@inline
def own(array, instance):
    """The row of an instance in an array that may hold one row for all."""
    return array[instance] if array.shape[0] > 1 else array[0]


@inline
def slack_of(batch, instance, highest):
    """The slack of an instance in a group whose largest capacity is ``highest``. States above its own capacity do not
    matter to it, so if all of its capacity may stay unused, ``highest`` is as good. (Top 0 is treated as top-k.)"""
    slack = max(own(batch.slack, instance), -1)
    return slack if slack < own(batch.capacity, instance) or slack == 0 else highest


@function
def bands_of_rows(batch, group, width, bands):
    first, members = members_of(batch, group, width)
    lowest = highest = own(batch.capacity, first)
    for b in range(first + 1, first + members):
        lowest = min(lowest, own(batch.capacity, b))
        highest = max(highest, own(batch.capacity, b))
    lowest = 0 if batch.complete else lowest
    flat = slack = slack_of(batch, first, highest)
    for b in range(first + 1, first + members):
        flat = min(flat, slack_of(batch, b, highest))
        slack = max(slack, slack_of(batch, b, highest))
    return plan(batch, own(batch.weights, first), lowest, highest, flat, slack, width, bands)


bands_of = by_kind(bands_of_rows, bands_of_rows, boxes.bands_of_box)


@kernel
def measure(batch, width, bands):
    """The largest capacity, and the length of the longest table, over all groups."""
    groups = -(-batch.theta.shape[0] // batch.stride)
    if batch.weights.shape[0] == 1 and batch.capacity.shape[0] == 1 and batch.slack.shape[0] == 1:
        groups = min(groups, 1)
    reach = cells = 0
    for group in range(groups):
        cells = max(cells, bands_of(batch, group, width, bands))
        reach = max(reach, bands[bands.shape[0] - 1, TOP])
    return reach, cells


@inline
def is_sharp(bands):
    """Whether some instance of the group must use some of its capacity."""
    group = bands.shape[0] - 1
    return bands[group, KNEE] < bands[group, TOP]


@inline
def settled(c, bands, i):
    """The state of row i that stands for c. (Only infeasible paths come above the top.)"""
    c = min(c, bands[i, TOP])
    return min(c, bands[i, KNEE]) if c <= bands[bands.shape[0] - 1, KNEE] else c


@inline
def goal_of_row(batch, scratch, instance):
    """The cell from which an instance starts its way back."""
    last = scratch.bands.shape[0] - 2
    return batch.margin + (settled(own(batch.capacity, instance), scratch.bands, last) if last >= 0 else 0)


goal_of = by_kind(goal_of_row, goal_of_row, boxes.goal_of_box, is_inline=True)  # called for every lane


@function
def start_of_row(batch, bands, first, members, row, never):
    """[V] before the first item: 0 up to the slack, ``never`` above."""
    row[:] = 0.0
    if batch.margin > 0:
        row[: batch.margin * batch.stride] = never
    if is_sharp(bands):
        highest, stride = bands[bands.shape[0] - 1, TOP], batch.stride
        for lane in range(stride):
            slack = slack_of(batch, first + min(lane, members - 1), highest)
            row[(batch.margin + slack + 1) * stride + lane :: stride] = never


start_row = by_kind(start_of_row, start_of_row, boxes.start_of_box)


@function
def pack(array, gamma, first, members, stride, width, packed):
    """(members, n), divided by gamma, to (n, width): one instance in each lane, or in all."""
    for lane in range(width):
        b = first + (0 if stride == 1 else min(lane, members - 1))
        scale = 1.0 / own(gamma, b) if own(gamma, b) > 0.0 else np.nan
        for i in range(array.shape[1]):
            packed[i * width + lane] = array[b, i] * scale


@inline
def all_in_range(packed, width, like):
    if packed.shape[0] == 0:
        return True
    outside = load(packed, 0, like) * 0.0
    for p in range(0, packed.shape[0], width):
        size = vector.abs(load(packed, p, like))
        outside = where(size < LARGEST, outside, size)
    return total(outside) == 0.0


@function
def pack_scores(batch, first, members, width, packed, frame, like):
    """Divided by gamma; -inf takes an item out, +inf and what is out of range becomes NaN. Returns whether there is a
    NaN."""
    pack(batch.theta, batch.gamma, first, members, batch.stride, width, packed)
    if all_in_range(packed, width, like):
        return False
    has_nan = False
    for p in range(packed.shape[0]):
        if not abs(packed[p]) <= LARGEST:
            b = first + (0 if batch.stride == 1 else min(p % width, members - 1))
            score, is_valid = batch.theta[b, p // width], own(batch.gamma, b) > 0.0
            if score == -np.inf and is_valid:
                packed[p] = INFEASIBLE
                continue
            packed[p], has_nan = np.nan, True
            if np.isfinite(score) and is_valid:
                frame[BEYOND] = b + 1
    return has_nan


@function
def is_nan(theta, lane, width):
    """Whether the instance in a lane is NaN: one score is enough, even of an item that is too heavy."""
    for p in range(lane, theta.shape[0], width):  # noqa: SIM110  Numba has no any() of a generator
        if np.isnan(theta[p]):
            return True
    return False


@function
def unpack(packed, first, members, stride, width, array):
    """(n, width) to (members, n): the reverse, where lanes of capacities add up."""
    like = zeros(packed)
    for i in range(array.shape[1]):
        if stride == 1:
            array[first, i] = total(load(packed, i * width, like))
        else:
            for lane in range(members):
                array[first + lane, i] = packed[i * width + lane]


@inline
def row_length(batch, width):
    """With room for the vector that may overhang the last cell, and the one that extends it."""
    return (batch.margin + batch.reach + 1) * batch.stride + 2 * width


@function
def prepare(batch, scratch, group):
    """Bands, packed theta and the parts of the scratch: first instance, members, weights, theta, V, the table, Q of
    items or P of choices, and whether there is a NaN in theta."""
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    first, members = members_of(batch, group, width)
    bands_of(batch, group, width, scratch.bands)
    row = row_length(batch, width)
    theta = scratch.wide[row : row + n * width]
    has_nan = pack_scores(batch, first, members, width, theta, scratch.frame, zeros(scratch.narrow))
    Q = own(scratch.table, group)
    return first, members, own(batch.weights, first), theta, scratch.wide[:row], Q, has_nan


@inline
def final(batch, scratch, V, instance, lane):
    """[V] at the goal; -inf for an infeasible instance."""
    value = V[goal_of(batch, scratch, instance) * batch.stride + lane]
    return -np.inf if value < FEASIBLE else value


@inline
def cell_in_row(batch, bands, c):
    """The cell that stands for c after the last step; -1 if no selection gets there."""
    last = bands.shape[0] - 2
    if last < 0:
        return batch.margin + (c if is_sharp(bands) else 0)
    if c > bands[last, TOP] and is_sharp(bands):
        return -1
    return batch.margin + settled(c, bands, last)


cell_of_last_row = by_kind(cell_in_row, cell_in_row, boxes.cell_in_box, is_inline=True)


@function
def last_row(batch, bands, V, lane, row):
    """[V] at all capacities after the last step, -inf where infeasible."""
    for c in range(row.shape[0]):
        at = cell_of_last_row(batch, bands, c)
        value = V[at * batch.stride + lane] if at >= 0 else INFEASIBLE
        row[c] = -np.inf if value < FEASIBLE else value


@function
def start_from(batch, bands, V, lane, cotangent, E):
    """The adjoint of :func:`last_row`: adds a cotangent to the row from which the way back starts."""
    for c in range(cotangent.shape[0]):
        cell = cell_of_last_row(batch, bands, c)
        at = cell * batch.stride + lane
        if cell >= 0 and not V[at] < FEASIBLE:
            E[at] += cotangent[c] + 0.0 * V[at]
