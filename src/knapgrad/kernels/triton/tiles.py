"""Rows cut into tiles, one program of a single warp per tile, at different items at the same time: a pipeline.

A tile stays in registers, and a step needs no barrier. What a pick brings from another tile goes through memory, as
bits: each cell is written once, and holds ABSENT until then, so no flag and no fence is needed. A program reads the
cells of a group of items long before it needs them, and reads again what was not there yet. Where they are depends on
numbers that are read one group earlier still: a warp stops where it uses what has not arrived. Of each tile the last
HALO cells are sent: as far as a pick moves, or all.

It waits only for tiles that were taken before its own: programs take them in the order in which they start. So the
first that is not finished can always go on, however few programs are resident.

Items go in groups, and a tile takes part in those in which it has live states (:func:`steps.band_of`), which
``bands`` tells: of each instance the highest live state before each group and after the last, the lowest one, then
the first group of each tile, and the first one without it. A tile that joins starts from the highest live state below
it, if all of the capacity may stay unused, else it is infeasible. On the way back it leaves its mass to that state.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.registers import total_of
from knapgrad.kernels.triton.steps import (
    FEASIBLE,
    INFEASIBLE,
    can_pick,
    decide,
    follow,
    scale_of,
    sides_of,
    taint_of,
)  # fmt: skip

ABSENT = tl.constexpr(-1)  # all bits: a NaN that arithmetic may give too, so another one is sent instead of it
NUMBERS = ["n", "first", "count", "tiles", "inner", "plane", "moves_step", "limits_step", "gamma_step"]


@triton.jit
def send(edges, x, mask):
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
    tl.store(edges, tl.where(bits == ABSENT, ABSENT - 1, bits), mask=mask)


@triton.jit
def receive(edges, stride, weights, way: tl.constexpr, room, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Bits of the cells beyond the tile that are as far away as items weigh, for a group of them; 0 in other lanes, and
    beyond the ``room`` cells that there are that way. ``edges`` points to where the cell of lane 0 would be."""
    lane = tl.arange(0, TILE)
    found = ()
    for j in tl.static_range(GROUP):
        at = lane + way * of_lane(weights, j, TILE)
        beyond = ((at < 0) & (at >= -room)) | ((at >= TILE) & (at < TILE + room))
        found = found + (tl.load(edges + (j * stride + at), beyond, 0, volatile=True),)  # type: ignore[assignment]
    return found


@triton.jit
def receive_one(edge):
    """The bits of a cell, as soon as they are there."""
    bits = tl.load(edge, volatile=True)
    while bits == ABSENT:
        bits = tl.load(edge, volatile=True)
    return bits


@triton.jit
def some_absent(found, GROUP: tl.constexpr):
    absent = found[0] == ABSENT
    for j in tl.static_range(1, GROUP):
        absent = absent | (found[j] == ABSENT)
    return tl.max(absent.to(tl.int32), 0) > 0


@triton.jit
def groups_of(count, GROUP: tl.constexpr):
    return (count + GROUP - 1) // GROUP


@triton.jit
def span_of(bands, t, tiles, n, first, count, GROUP: tl.constexpr):
    """The first group of a tile, the first after its last, and from where to where it takes part in these items."""
    span = bands + 2 * (groups_of(n, GROUP) + 1) + t
    begin, end = tl.load(span), tl.load(span + tiles)
    return begin, end, tl.maximum(begin, first // GROUP), tl.minimum(end, groups_of(first + count, GROUP))


@triton.jit
def bands_at(bands, b, limits_step, n, tiles, GROUP: tl.constexpr):
    """The bands of instance b."""
    return bands + b * limits_step * 2 * (groups_of(n, GROUP) + 1 + tiles)


# Numbers of a group of items are in as many lanes: a load of each would cost more than a shuffle, and a load that is
# the same for all lanes goes to a register of the whole warp, for which it stops.


@triton.jit
def numbers_from(x, start, step: tl.constexpr, count, GROUP: tl.constexpr):
    """Numbers of a group of items, forwards or backwards; 0 beyond the last, or before the first."""
    lane = tl.arange(0, 32)
    i = start + step * lane
    return tl.load(x + i, (lane < GROUP) & (i >= 0) & (i < count), 0)


@triton.jit
def scores_from(theta, scale, start, count, GROUP: tl.constexpr):
    """Scores of a group of items, as score_of; beyond the last, that of one that is never picked."""
    lane = tl.arange(0, 32)
    there = (lane < GROUP) & (start + lane < count)
    score = tl.load(theta + start + lane, there, float("-inf")).to(tl.float64) * scale
    return tl.where(score == float("-inf"), INFEASIBLE, score)


@triton.jit
def of_lane(x, j: tl.constexpr, TILE: tl.constexpr):
    """What one lane has, for all."""
    return tl.gather(x, tl.full([TILE], j, tl.int32), 0)


@triton.jit(do_not_specialize=NUMBERS)
def fill_tiles_kernel(
    theta, z, moves, goals, slacks, bands, gamma,
    scale: tl.float64, n, first, count, tiles, inner, plane, moves_step, limits_step, gamma_step,
    turn, V_edges, T_edges, V_start, T_start, V_end, T_end, tables, value, tangent,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    BOX: tl.constexpr, GAMMAS: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr, HALO: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fills ``count`` items from item ``first`` on; rows are read and left at both ends. After the last item it stores
    value and tangent; NaN is left in Q at the goal as well, from where it reaches all that is computed. With WHOLE the
    value is 0, or NaN."""
    number = tl.atomic_add(turn, 1) + 1
    t, width, stride = number % tiles, tiles * TILE, tiles * HALO
    b = (number // tiles).to(tl.int64)
    bands = bands_at(bands, b, limits_step, n, tiles, GROUP)
    begin, _, from_group, to_group = span_of(bands, t, tiles, n, first, count, GROUP)
    if from_group >= to_group:
        return
    lane = tl.arange(0, TILE)
    c = t * TILE + lane
    dtype: tl.constexpr = theta.dtype.element_ty
    inverse = scale_of(gamma, scale, b, gamma_step, GAMMAS)
    goal, spare = tl.load(goals + b * limits_step), tl.load(slacks + b * limits_step)
    sides = sides_of(inner, plane, BOX)
    is_last = first + count == n
    theta += b * n
    is_goal = t == (0 if WHOLE else goal // TILE)
    taint = 0.0 * inverse
    if is_last & is_goal:
        taint = taint_of(theta, n, inverse, 256)
    start = from_group * GROUP - first
    theta += first
    z += b * n + first
    moves += b * moves_step + first
    row = b * width + c
    Q = tables + (b * count * (1 if SOURCE is None else 2) + start) * width + c
    R = Q + tl.cast(count, tl.int64) * width
    edge = (b * groups_of(count, GROUP) * GROUP + start) * stride + t * HALO
    V_in, V_out = V_edges + edge, V_edges + edge + lane - (TILE - HALO)
    T_in, T_out = T_edges + edge, T_edges + edge + lane - (TILE - HALO)
    sends = (lane >= TILE - HALO) & (t + 1 < tiles)
    V, T = tl.zeros([TILE], tl.float64), tl.zeros([TILE], dtype)
    if begin * GROUP < first:
        V = tl.load(V_start + row)
        if SOURCE is not None:
            T = tl.load(T_start + row)
    else:
        if SLACK:
            V = tl.where(c <= spare, V, INFEASIBLE)
        else:
            if begin > 0:
                below = tl.load(bands + begin) - t * TILE
                if HALO < TILE:
                    below = tl.maximum(below, -HALO)  # only these are sent, and they are equal
                V += receive_one(V_in + below).to(tl.float64, bitcast=True)
                if SOURCE is not None:
                    T += receive_one(T_in + below).to(dtype, bitcast=True)

    scores, weights = scores_from(theta, inverse, start, count, GROUP), numbers_from(moves, start, 1, count, GROUP)
    next_weights = numbers_from(moves, start + GROUP, 1, count, GROUP)
    ends = groups_of(n, GROUP) + 1
    lows = bands + ends
    low, next_low = numbers_from(lows, from_group, 1, ends, 1), numbers_from(lows, from_group + 1, 1, ends, 1)
    room = t * TILE - of_lane(low, 0, TILE) // TILE * TILE
    V_found = receive(V_in, stride, weights, -1, room, GROUP, TILE)
    if SOURCE is not None:
        directions = numbers_from(z, start, 1, count, GROUP)
        T_found = receive(T_in, stride, weights, -1, room, GROUP, TILE)
    for g in range(from_group, to_group):
        start = g * GROUP - first
        later = start + GROUP
        next_scores = scores_from(theta, inverse, later, count, GROUP)
        far_weights = numbers_from(moves, later + GROUP, 1, count, GROUP)
        far_low = numbers_from(lows, g + 2, 1, ends, 1)
        next_room = t * TILE - of_lane(next_low, 0, TILE) // TILE * TILE
        while some_absent(V_found, GROUP):
            V_found = receive(V_in, stride, weights, -1, room, GROUP, TILE)
        V_in += GROUP * stride
        V_next = receive(V_in, stride, next_weights, -1, next_room, GROUP, TILE)
        if SOURCE is not None:
            next_directions = numbers_from(z, later, 1, count, GROUP)
            while some_absent(T_found, GROUP):
                T_found = receive(T_in, stride, weights, -1, room, GROUP, TILE)
            T_in += GROUP * stride
            T_next = receive(T_in, stride, next_weights, -1, next_room, GROUP, TILE)
        for j in tl.static_range(GROUP):
            w = of_lane(weights, j, TILE)
            at = lane - w
            fits, below = can_pick(c, w, sides), tl.maximum(at, 0)
            send(V_out, V, sends)
            pick = tl.where(at < 0, V_found[j].to(tl.float64, bitcast=True), tl.gather(V, below, 0))
            V, q = decide(V, pick + of_lane(scores, j, TILE), fits, VALUE, PROB, dtype)
            stored = (lane >= 0) & (start + j < count)
            if STORED:
                tl.store(Q, q, mask=stored, cache_modifier=".cs")
            if SOURCE is not None:
                send(T_out, T, sends)
                pick = tl.where(at < 0, T_found[j].to(dtype, bitcast=True), tl.gather(T, below, 0))
                T, r = follow(T, pick, q, of_lane(directions, j, TILE), fits, DPROB, SOURCE)
                if STORED:
                    tl.store(R, r, mask=stored, cache_modifier=".cs")
            Q += width
            R += width
            V_out += stride
            T_out += stride
        scores, weights, next_weights, V_found = next_scores, next_weights, far_weights, V_next
        room, next_low = next_room, far_low
        if SOURCE is not None:
            directions, T_found = next_directions, T_next

    tl.store(V_end + row, V)
    if SOURCE is not None:
        tl.store(T_end + row, T)
    if WHOLE:
        tl.store(value + b, taint, mask=is_last & is_goal)
    elif is_last:
        V = tl.where((V < FEASIBLE) | (spare < 0), float("nan"), V) + taint
        at_goal = c == goal
        tl.store(value + b + 0 * lane, V, mask=at_goal)
        if SOURCE is not None:
            tl.store(tangent + b + 0 * lane, T + (0.0 * V).to(dtype), mask=at_goal)
        if STORED:
            past = groups_of(count, GROUP) * GROUP - count + 1  # rows from the last one to where Q is now
            tl.store(Q - tl.cast(past, tl.int64) * width, float("nan"), mask=at_goal & (V != V))


@triton.jit
def rows_before(table, width, last, count, GROUP: tl.constexpr, TILE: tl.constexpr):
    """A group of rows, backwards from number ``last``, to which a pointer points; 0 where there is none."""
    lane = tl.arange(0, TILE)
    found = ()
    for j in tl.static_range(GROUP):
        there = (lane >= 0) & (last >= j) & (last - j < count)
        found = found + (tl.load(table + (lane - j * width), there, 0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    return found


@triton.jit
def masses_of(folds, lowest, highest, dtype: tl.constexpr, TILE: tl.constexpr):
    """The sum of what tiles have left, from the lowest to the highest, as soon as it is there."""
    total = tl.zeros([TILE], dtype)
    for start in range(lowest, highest + 1, TILE):
        t = start + tl.arange(0, TILE)
        bits = tl.load(folds + t, t <= highest, 0, volatile=True)
        while tl.max((bits == ABSENT).to(tl.int32), 0) > 0:
            bits = tl.load(folds + t, t <= highest, 0, volatile=True)
        total += bits.to(dtype, bitcast=True)
    return tl.sum(total)


@triton.jit(do_not_specialize=NUMBERS)
def collect_tiles_kernel(
    theta, moves, goals, bands, n, first, count, tiles, moves_step, limits_step,
    turn, E_edges, D_edges, E_folds, D_folds, E_row, D_row, tables, terms,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, HALO: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Collects from the last of those items to the first, and from the last tile to the first; E and D are read and
    left in memory. With WHOLE they are read at the end of all items too. What adds up to [y] or [Hz] is left
    in ``terms``, which may be the tables."""
    number = tl.atomic_add(turn, 1) + 1
    t, width, stride = tiles - 1 - number % tiles, tiles * TILE, tiles * HALO
    b = (number // tiles).to(tl.int64)
    bands = bands_at(bands, b, limits_step, n, tiles, GROUP)
    begin, end, from_group, to_group = span_of(bands, t, tiles, n, first, count, GROUP)
    if from_group >= to_group:
        return
    lane = tl.arange(0, TILE)
    c = t * TILE + lane
    dtype: tl.constexpr = theta.dtype.element_ty
    moves += b * moves_step + first
    row = b * width + c
    last = to_group * GROUP - first - 1
    place = (b * count * (1 if SOURCE is None else 2) + last) * width + t * TILE
    Q = tables + place
    R = Q + tl.cast(count, tl.int64) * width
    terms += place + lane
    edge = (b * groups_of(count, GROUP) * GROUP + last) * stride + t * HALO
    E_in, E_out = E_edges + edge + (HALO - TILE), E_edges + edge + lane
    D_in, D_out = D_edges + edge + (HALO - TILE), D_edges + edge + lane
    sends = (lane < HALO) & (t > 0)
    E, D = (c == tl.load(goals + b * limits_step)).to(dtype), tl.zeros([TILE], dtype)
    if WHOLE or first + count < n:
        is_given = (lane >= 0) & (WHOLE or end > to_group)
        E = tl.load(E_row + row, is_given, 0.0)
        if SOURCE is not None:
            D = tl.load(D_row + row, is_given, 0.0)

    weights = numbers_from(moves, last, -1, count, GROUP)
    next_weights = numbers_from(moves, last - GROUP, -1, count, GROUP)
    qs = rows_before(Q, width, last, count, GROUP, TILE)
    above = of_lane(numbers_from(bands, to_group, 1, to_group + 1, 1), 0, TILE)  # after the group
    top = numbers_from(bands, to_group - 1, 1, to_group, 1)  # before it
    room = (above // TILE - t) * TILE
    E_found = receive(E_in, -stride, weights, 1, room, GROUP, TILE)
    if SOURCE is not None:
        rs = rows_before(R, width, last, count, GROUP, TILE)
        D_found = receive(D_in, -stride, weights, 1, room, GROUP, TILE)
    for k in range(to_group - from_group):
        g = to_group - 1 - k
        last = (g + 1) * GROUP - first - 1
        far_weights = numbers_from(moves, last - 2 * GROUP, -1, count, GROUP)
        next_top, top_here = numbers_from(bands, g - 1, 1, to_group, 1), of_lane(top, 0, TILE)
        next_room = (top_here // TILE - t) * TILE
        Q -= tl.cast(GROUP * width, tl.int64)
        next_qs = rows_before(Q, width, last - GROUP, count, GROUP, TILE)
        while some_absent(E_found, GROUP):
            E_found = receive(E_in, -stride, weights, 1, room, GROUP, TILE)
        E_in -= GROUP * stride
        E_next = receive(E_in, -stride, next_weights, 1, next_room, GROUP, TILE)
        if SOURCE is not None:
            R -= tl.cast(GROUP * width, tl.int64)
            next_rs = rows_before(R, width, last - GROUP, count, GROUP, TILE)
            while some_absent(D_found, GROUP):
                D_found = receive(D_in, -stride, weights, 1, room, GROUP, TILE)
            D_in -= GROUP * stride
            D_next = receive(D_in, -stride, next_weights, 1, next_room, GROUP, TILE)
        for j in tl.static_range(GROUP):
            at = lane + of_lane(weights, j, TILE)
            beyond, up = at >= TILE, tl.minimum(at, TILE - 1)
            picked = E * qs[j]
            send(E_out, picked, sends)
            change = picked
            if SOURCE is not None:
                change = D * qs[j] + E * rs[j]
                send(D_out, change, sends)
                arrives = tl.where(beyond, D_found[j].to(dtype, bitcast=True), tl.gather(change, up, 0))
                D = D - change + arrives  # [E']
            tl.store(terms, change, mask=(lane >= 0) & (last - j < count), cache_modifier=".cs")
            arrives = tl.where(beyond, E_found[j].to(dtype, bitcast=True), tl.gather(picked, up, 0))
            E = E - picked + arrives  # [E]
            terms -= width
            E_out -= stride
            D_out -= stride
        if (g > 0) & (tl.max(((top_here // TILE == t) & (above // TILE > t)).to(tl.int32), 0) > 0):
            highest = tl.load(bands + g + 1) // TILE
            E += tl.where(c == top_here, masses_of(E_folds + b * tiles, t + 1, highest, dtype, TILE), 0.0)
            if SOURCE is not None:
                D += tl.where(c == top_here, masses_of(D_folds + b * tiles, t + 1, highest, dtype, TILE), 0.0)
        weights, next_weights, qs, E_found = next_weights, far_weights, next_qs, E_next
        room, above, top = next_room, top_here, next_top
        if SOURCE is not None:
            rs, D_found = next_rs, D_next
    if begin * GROUP < first:
        tl.store(E_row + row, E)
        if SOURCE is not None:
            tl.store(D_row + row, D)
    else:
        send(E_folds + b * tiles + t + 0 * lane, tl.sum(E) + 0.0 * E, lane == 0)
        if SOURCE is not None:
            send(D_folds + b * tiles + t + 0 * lane, tl.sum(D) + 0.0 * D, lane == 0)


@triton.jit(do_not_specialize=NUMBERS)
def add_tiles_kernel(
    theta, bands, terms, y, n, first, count, tiles, limits_step,
    SOURCE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums up [y] or [Hz] of those items, over the tiles that take part: a group per program."""
    number, groups = tl.program_id(0), groups_of(count, GROUP)
    b, i = (number // groups).to(tl.int64), number % groups * GROUP + tl.arange(0, GROUP)
    bands = bands_at(bands, b, limits_step, n, tiles, GROUP) + first // GROUP + number % groups
    floor = tl.load(bands + groups_of(n, GROUP) + 1) // TILE * TILE
    ceiling = (tl.load(bands + 1) // TILE + 1) * TILE
    sums = tl.zeros([GROUP, BLOCK], theta.dtype.element_ty)
    rows = terms + (b * (1 if SOURCE is None else 2) * count + i) * (tiles * TILE)
    for start in range(floor, ceiling, BLOCK):
        c = start + tl.arange(0, BLOCK)
        sums += tl.load(rows[:, None] + c[None, :], (i < count)[:, None] & (c < ceiling)[None, :], 0.0)
    tl.store(y + b * n + first + i, total_of(sums, 1, SOURCE), mask=i < count)
