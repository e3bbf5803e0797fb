"""Which states of a row a group of instances has to visit.

Only the *band* of live states of a row is touched (docs/math.md, "Live states"). It starts at
``max(C - later weights, w_i)``. With ``prefix`` the sum of the weights up to the item, and ``least_slack`` the least
slack in the group, it has two parts:

- up to the *knee*, ``min(prefix, least_slack)``. From there to ``least_slack`` a row is constant, and the knee stands
  for all of these states. (A plain knapsack has ``least_slack = C``, so this is all of its band.)
- from ``least_slack + 1`` to ``min(prefix + slack, C)``; above, states are infeasible. (Where all of the capacity must
  be used, ``least_slack`` is 0 and this is all.)

Where the parts come close to each other they are one, and nothing is constant.

With choices among options, a step is a choice instead of an item, and its weight is that of its heaviest option. The
band starts at ``C - later weights`` and is one part, up to the knee of a plain knapsack or up to ``prefix + slack``.
Before cell 0 of a row there is a margin that is infeasible, so that heavy options need no test.

With several budgets a row is a box of capacities, see :mod:`knapgrad.kernels.numba.boxes`.
"""

import numpy as np

from knapgrad.kernels.numba import boxes
from knapgrad.kernels.numba.groups import LAST, members_of, own, pack_scores
from knapgrad.kernels.numba.variants import by_kind, function, inline, kernel
from knapgrad.kernels.numba.vector import item, lanes, set_item, zeros
from knapgrad.lattice import FEASIBLE, INFEASIBLE

# Columns of bands. COUNT, NEXT and END count vectors from START on: the lower part is up to COUNT, the upper from NEXT
# to END. FILL and FROM say where the constant part of the row before is needed: up to FILL, and from FROM to the least
# slack, if they are not negative. The row of the group has the least slack as its KNEE, and as its TOP (groups.LAST,
# which all kinds have) the largest capacity.
START, KNEE, TOP, COUNT, NEXT, END, OFFSET, FILL, FROM = 0, 1, LAST, *range(3, 9)
COLUMNS = 11  # as many as boxes have


@function
def plan_items(batch, weights, lowest, highest, least_slack, slack, width, bands):
    """Fills ``bands`` for a group with capacities from lowest to highest and slacks from the least one to ``slack``;
    returns the table's length."""
    n, stride = weights.shape[0], batch.stride
    bands[n, KNEE], bands[n, TOP] = least_slack, highest
    low = 0
    for i in range(n):
        low = min(low + min(weights[i], highest + 1), lowest)
    for i in range(n - 1, -1, -1):
        bands[i, START] = max(low, weights[i])
        low = max(low - min(weights[i], highest + 1), 0)
    prefix = offset = below = cells = 0
    sharp, apart = least_slack < highest, True
    unit, margin = (1, 0) if stride > 1 else (width, 2)  # cells per vector; vectors that may be overhung
    for i in range(n):
        prefix = min(prefix + min(weights[i], highest + 1), highest)
        start, knee, top = bands[i, START], min(prefix, least_slack), min(prefix + max(slack, 0), highest)
        count, end = (max(knee - start, -1) + unit) // unit, (max(top - start, -1) + unit) // unit
        upper = max(least_slack + 1 - start, 0) // unit
        apart = apart and knee < least_slack and (not sharp or upper > count + margin)
        fill, begin = knee, -1
        if not apart:
            knee, count, upper = least_slack, end, end
            if sharp:
                fill, begin = -1, below + 1 if below < least_slack else -1
        elif top <= least_slack:
            upper = end = count
        elif weights[i] > 0:
            begin = max(knee, least_slack - weights[i]) + 1
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
def plan_choices(batch, weights, lowest, highest, least_slack, slack, width, bands):
    """The same for choices. START, KNEE, TOP, COUNT and OFFSET are used."""
    options, steps = batch.options, bands.shape[0] - 1
    unit = 1 if batch.stride > 1 else width
    bands[steps, KNEE], bands[steps, TOP] = least_slack, highest
    low = 0
    for k in range(steps):
        low = min(low + heaviest_of(weights, k, options, highest + 1), lowest)
    for k in range(steps - 1, -1, -1):
        bands[k, START] = low
        low = max(low - heaviest_of(weights, k, options, highest + 1), 0)
    prefix = offset = cells = 0
    for k in range(steps):
        prefix = min(prefix + heaviest_of(weights, k, options, highest + 1), highest)
        top = min(prefix + max(slack, 0), highest) if least_slack < highest else prefix
        count = (max(top - bands[k, START], -1) + unit) // unit
        bands[k, KNEE], bands[k, TOP] = least_slack if least_slack < highest else top, top
        bands[k, COUNT], bands[k, OFFSET] = count, offset
        cells = max(cells, offset + count * width * batch.entries)
        offset += count * width * batch.entries if batch.keeps else 0
    return cells


plan = by_kind(plan_items, plan_choices, plan_items)


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
    least_slack = slack = slack_of(batch, first, highest)
    for b in range(first + 1, first + members):
        least_slack = min(least_slack, slack_of(batch, b, highest))
        slack = max(slack, slack_of(batch, b, highest))
    return plan(batch, own(batch.weights, first), lowest, highest, least_slack, slack, width, bands)


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
def settle(c, knee, top, least_slack):
    """The state of a row that stands for c, whatever c is: every path goes on from here, those without a feasible
    selection and of NaN included, and so never leaves its row."""
    c = min(c, top)
    return min(c, knee) if c <= least_slack else c


@inline
def settled(c, bands, i):
    """The same, in row i."""
    return settle(c, bands[i, KNEE], bands[i, TOP], bands[bands.shape[0] - 1, KNEE])


@function
def goals_in_row(batch, bands, first, members, goals):
    """The cells from which instances start their way back."""
    last = bands.shape[0] - 2
    for lane in range(members):
        c = settled(own(batch.capacity, first + lane), bands, last) if last >= 0 else 0
        set_item(goals, lane, batch.margin + c)


find_goals = by_kind(goals_in_row, goals_in_row, boxes.goals_in_box)


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
    find_goals(batch, scratch.bands, first, members, scratch.goals)
    row = row_length(batch, width)
    theta = scratch.wide[row : row + n * width]
    has_nan = pack_scores(batch, first, members, width, theta, scratch.frame, zeros(scratch.narrow))
    Q = own(scratch.table, group)
    return first, members, own(batch.weights, first), theta, scratch.wide[:row], Q, has_nan


@inline
def finish(batch, goals, V, first, members, value):
    """[V] at the goals; -inf for an infeasible instance."""
    for lane in range(members):
        final = item(V, item(goals, lane) * batch.stride + lane)
        value[first + lane] = -np.inf if final < FEASIBLE else final


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
