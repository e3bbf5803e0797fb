"""Rows cut into tiles, one program of a single warp per tile, at different items at the same time: a pipeline.

A tile stays in registers, and a step needs no barrier. What a pick brings from another tile goes through memory, as
bits: each cell is written once, and holds ABSENT until then, so no flag and no fence is needed. A program reads the
cells of a group of items long before it needs them, and reads again what was not there yet. Of each tile the last HALO
cells are sent: as far as a pick moves, or all.

It waits only for tiles that were taken before its own: programs take them in the order in which they start. So the
first that is not finished can always go on, however few programs are resident.
"""

import triton
import triton.language as tl

from knapgrad.kernels.triton.registers import total_of
from knapgrad.kernels.triton.steps import (
    FEASIBLE,
    INFEASIBLE,
    LARGEST,
    decide,
    follow,
    scale_of,
    score_of,
)  # fmt: skip

ABSENT = tl.constexpr(-1)  # all bits: a NaN that arithmetic may give too, so another one is sent instead of it
NUMBERS = ["n", "first", "count", "tiles", "moves_step", "limits_step", "gamma_step", "rows"]


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
        at = lane + way * weights[j]
        beyond = ((at < 0) & (at >= -room)) | ((at >= TILE) & (at < TILE + room))
        found = found + (tl.load(edges + (j * stride + at), beyond, 0, volatile=True),)  # type: ignore[assignment]
    return found


@triton.jit
def some_absent(found, GROUP: tl.constexpr):
    absent = found[0] == ABSENT
    for j in tl.static_range(1, GROUP):
        absent = absent | (found[j] == ABSENT)
    return tl.max(absent.to(tl.int32), 0) > 0


@triton.jit
def scores_from(theta, scale, start, count, GROUP: tl.constexpr):
    """Of a group of items; beyond the last, of one that is never picked."""
    scores = ()
    for j in tl.static_range(GROUP):
        score = score_of(theta, tl.minimum(start + j, count - 1), scale)
        scores = scores + (tl.where(start + j < count, score, INFEASIBLE),)  # type: ignore[assignment]
    return scores


@triton.jit
def numbers_from(x, start, step: tl.constexpr, count, GROUP: tl.constexpr):
    """Of a group of items, forwards or backwards; 0 beyond the last, or before the first."""
    found = ()
    for j in tl.static_range(GROUP):
        i = start + j * step
        found = found + (tl.load(x + i, (i >= 0) & (i < count), 0),)  # type: ignore[assignment]
    return found


@triton.jit
def bad_scores(theta, scale, start, count, GROUP: tl.constexpr):
    """Which of a group make their instance NaN, as in taint_of."""
    i = start + tl.arange(0, GROUP)
    given = tl.load(theta + i, i < count, 0.0).to(tl.float64)
    is_good = (given == float("-inf")) | (tl.abs(given * scale) <= LARGEST)
    return tl.where(is_good, 0, 1)


@triton.jit(do_not_specialize=NUMBERS)
def fill_tiles_kernel(
    theta, z, moves, goals, slacks, gamma,
    scale: tl.float64, n, first, count, tiles, moves_step, limits_step, gamma_step,
    turn, V_edges, T_edges, V_start, T_start, V_end, T_end, tables, value, tangent,
    VALUE: tl.constexpr, PROB: tl.constexpr, DPROB: tl.constexpr, SOURCE: tl.constexpr, SLACK: tl.constexpr,
    GAMMAS: tl.constexpr, STORED: tl.constexpr, HALO: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From item ``first`` on, ``count`` items; rows are read and left at both ends. STORED: with tables. After the last
    item, value and tangent; NaN is left in Q at the goal as well, from where it reaches all that is computed."""
    number = tl.atomic_add(turn, 1) + 1
    t, width, stride = number % tiles, tiles * TILE, tiles * HALO
    b = (number // tiles).to(tl.int64)
    lane = tl.arange(0, TILE)
    c = t * TILE + lane
    dtype: tl.constexpr = theta.dtype.element_ty
    strength = scale_of(gamma, scale, b, gamma_step, GAMMAS)
    goal = tl.load(goals + b * limits_step)
    theta += b * n + first
    z += b * n + first
    moves += b * moves_step + first
    row = b * width + c
    Q = tables + b * count * width * (1 if SOURCE is None else 2) + c
    R = Q + tl.cast(count, tl.int64) * width
    edge = b * groups_of(count, GROUP) * GROUP * stride + t * HALO
    V_in, V_out = V_edges + edge, V_edges + edge + lane - (TILE - HALO)
    T_in, T_out = T_edges + edge, T_edges + edge + lane - (TILE - HALO)
    sends = (lane >= TILE - HALO) & (t + 1 < tiles)
    if first == 0:
        V = tl.zeros([TILE], tl.float64)
        if SLACK:
            V = tl.where(c <= tl.load(slacks + b * limits_step), V, INFEASIBLE)
        T = tl.zeros([TILE], dtype)
    else:
        V = tl.load(V_start + row)
        T = tl.load(T_start + row) if SOURCE is not None else tl.zeros([TILE], dtype)
    bad = tl.zeros([GROUP], tl.int32)

    scores, weights = scores_from(theta, strength, 0, count, GROUP), numbers_from(moves, 0, 1, count, GROUP)
    V_found = receive(V_in, stride, weights, -1, t * TILE, GROUP, TILE)
    if SOURCE is not None:
        directions = numbers_from(z, 0, 1, count, GROUP)
        T_found = receive(T_in, stride, weights, -1, t * TILE, GROUP, TILE)
    for start in range(0, count, GROUP):
        later = start + GROUP
        next_scores = scores_from(theta, strength, later, count, GROUP)
        next_weights = numbers_from(moves, later, 1, count, GROUP)
        while some_absent(V_found, GROUP):
            V_found = receive(V_in, stride, weights, -1, t * TILE, GROUP, TILE)
        V_in += GROUP * stride
        V_next = receive(V_in, stride, next_weights, -1, t * TILE, GROUP, TILE)
        if SOURCE is not None:
            next_directions = numbers_from(z, later, 1, count, GROUP)
            while some_absent(T_found, GROUP):
                T_found = receive(T_in, stride, weights, -1, t * TILE, GROUP, TILE)
            T_in += GROUP * stride
            T_next = receive(T_in, stride, next_weights, -1, t * TILE, GROUP, TILE)
        bad = bad | bad_scores(theta, strength, start, count, GROUP)
        for j in tl.static_range(GROUP):
            at = lane - weights[j]
            fits, below = c >= weights[j], tl.maximum(at, 0)
            send(V_out, V, sends)
            pick = tl.where(at < 0, V_found[j].to(tl.float64, bitcast=True), tl.gather(V, below, 0))
            V, q = decide(V, pick + scores[j], fits, VALUE, PROB, dtype)
            stored = (lane >= 0) & (start + j < count)
            if STORED:
                tl.store(Q, q, mask=stored, cache_modifier=".cs")
            if SOURCE is not None:
                send(T_out, T, sends)
                pick = tl.where(at < 0, T_found[j].to(dtype, bitcast=True), tl.gather(T, below, 0))
                T, r = follow(T, pick, q, directions[j], fits, DPROB, SOURCE)
                if STORED:
                    tl.store(R, r, mask=stored, cache_modifier=".cs")
            Q += width
            R += width
            V_out += stride
            T_out += stride
        scores, weights, V_found = next_scores, next_weights, V_next
        if SOURCE is not None:
            directions, T_found = next_directions, T_next

    V = tl.where(tl.max(bad, 0) > 0, float("nan"), V)
    tl.store(V_end + row, V)
    if SOURCE is not None:
        tl.store(T_end + row, T)
    if first + count == n:
        V = tl.where(V < FEASIBLE, float("nan"), V) + 0.0 * strength
        at_goal = c == goal
        tl.store(value + b + 0 * lane, V, mask=at_goal)
        if SOURCE is not None:
            tl.store(tangent + b + 0 * lane, T + (0.0 * V).to(dtype), mask=at_goal)
        if STORED:
            past = groups_of(count, GROUP) * GROUP - count + 1  # rows from the last one to where Q is now
            tl.store(Q - tl.cast(past, tl.int64) * width, float("nan"), mask=at_goal & (V != V))


@triton.jit
def groups_of(count, GROUP: tl.constexpr):
    return (count + GROUP - 1) // GROUP


@triton.jit
def rows_before(table, width, start, count, GROUP: tl.constexpr, TILE: tl.constexpr):
    """A group of rows, backwards from the one to which a pointer points; 0 before the first."""
    lane = tl.arange(0, TILE)
    found = ()
    for j in tl.static_range(GROUP):
        there = (lane >= 0) & (start + j < count)
        found = found + (tl.load(table + (lane - j * width), there, 0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    return found


@triton.jit(do_not_specialize=NUMBERS)
def collect_tiles_kernel(
    theta, moves, goals, n, first, count, tiles, moves_step, limits_step,
    turn, E_edges, D_edges, E_row, D_row, tables, terms,
    SOURCE: tl.constexpr, HALO: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From the last of those items to the first, and from the last tile to the first; E and D are read and left in
    memory. What adds up to [y] or [Hz] is left in ``terms``, which may be the tables."""
    number = tl.atomic_add(turn, 1) + 1
    t, width, stride = tiles - 1 - number % tiles, tiles * TILE, tiles * HALO
    b = (number // tiles).to(tl.int64)
    lane = tl.arange(0, TILE)
    c = t * TILE + lane
    dtype: tl.constexpr = theta.dtype.element_ty
    moves += b * moves_step + first
    row = b * width + c
    last = tl.cast(count - 1, tl.int64) * width + t * TILE
    Q = tables + b * count * width * (1 if SOURCE is None else 2) + last
    R = Q + tl.cast(count, tl.int64) * width
    terms += b * count * width * (1 if SOURCE is None else 2) + last + lane
    edge = b * groups_of(count, GROUP) * GROUP * stride + t * HALO
    E_in, E_out = E_edges + edge + (HALO - TILE), E_edges + edge + lane
    D_in, D_out = D_edges + edge + (HALO - TILE), D_edges + edge + lane
    room, sends = (tiles - 1 - t) * TILE, (lane < HALO) & (t > 0)
    E, D = (c == tl.load(goals + b * limits_step)).to(dtype), tl.zeros([TILE], dtype)
    if first + count < n:
        E = tl.load(E_row + row)
        if SOURCE is not None:
            D = tl.load(D_row + row)

    weights = numbers_from(moves, count - 1, -1, count, GROUP)
    qs = rows_before(Q, width, 0, count, GROUP, TILE)
    E_found = receive(E_in, stride, weights, 1, room, GROUP, TILE)
    if SOURCE is not None:
        rs = rows_before(R, width, 0, count, GROUP, TILE)
        D_found = receive(D_in, stride, weights, 1, room, GROUP, TILE)
    for start in range(0, count, GROUP):
        later = start + GROUP
        next_weights = numbers_from(moves, count - 1 - later, -1, count, GROUP)
        Q -= tl.cast(GROUP * width, tl.int64)
        next_qs = rows_before(Q, width, later, count, GROUP, TILE)
        while some_absent(E_found, GROUP):
            E_found = receive(E_in, stride, weights, 1, room, GROUP, TILE)
        E_in += GROUP * stride
        E_next = receive(E_in, stride, next_weights, 1, room, GROUP, TILE)
        if SOURCE is not None:
            R -= tl.cast(GROUP * width, tl.int64)
            next_rs = rows_before(R, width, later, count, GROUP, TILE)
            while some_absent(D_found, GROUP):
                D_found = receive(D_in, stride, weights, 1, room, GROUP, TILE)
            D_in += GROUP * stride
            D_next = receive(D_in, stride, next_weights, 1, room, GROUP, TILE)
        for j in tl.static_range(GROUP):
            at = lane + weights[j]
            beyond, up = at >= TILE, tl.minimum(at, TILE - 1)
            picked = E * qs[j]
            send(E_out, picked, sends)
            change = picked
            if SOURCE is not None:
                change = D * qs[j] + E * rs[j]
                send(D_out, change, sends)
                arrives = tl.where(beyond, D_found[j].to(dtype, bitcast=True), tl.gather(change, up, 0))
                D = D - change + arrives  # [E']
            tl.store(terms, change, mask=(lane >= 0) & (start + j < count), cache_modifier=".cs")
            arrives = tl.where(beyond, E_found[j].to(dtype, bitcast=True), tl.gather(picked, up, 0))
            E = E - picked + arrives  # [E]
            terms -= width
            E_out += stride
            D_out += stride
        weights, qs, E_found = next_weights, next_qs, E_next
        if SOURCE is not None:
            rs, D_found = next_rs, D_next
    tl.store(E_row + row, E)
    if SOURCE is not None:
        tl.store(D_row + row, D)


@triton.jit(do_not_specialize=NUMBERS)
def add_tiles_kernel(
    theta, terms, y, n, first, count, tiles, rows,
    SOURCE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[y] or [Hz] of those items: sums over whole rows, ``rows`` in all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, i, width = row // count, row % count, tiles * TILE
    sums = tl.zeros([ROWS, BLOCK], theta.dtype.element_ty)
    begin = terms + (b * (1 if SOURCE is None else 2) * count + i) * width
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        sums += tl.load(begin[:, None] + c[None, :], (row < rows)[:, None] & (c < width)[None, :], 0.0)
    tl.store(y + b * n + first + i, total_of(sums, 1, SOURCE), mask=row < rows)
