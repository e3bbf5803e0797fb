"""Paths through the table of a group of choices: drawing selections, their log-probabilities, the best ones."""

import numpy as np

from knapgrad.kernels.numba.bands import (
    START,
    final,
    goal_of,
    is_nan,
    last_row,
    prepare,
    row_length,
    settled,
    start_row,
    unpack,
)  # fmt: skip
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.options import collect_choice, extend, fill_choices, place_of
from knapgrad.kernels.numba.paths import log_chance
from knapgrad.kernels.numba.variants import dprob, function, kernel
from knapgrad.kernels.numba.vector import broadcast, first_lane, item, lanes, load, store, where, zeros
from knapgrad.lattice import INFEASIBLE


@function
def cell_of(k, batch, bands, c, lane, width):
    """Where the options of choice k in state c are in the table: the first, and from one to the next."""
    _, length, table = place_of(k, batch, bands, width)
    return table + (c - bands[k, START]) * batch.stride + lane, length


@function
def next_state(k, batch, bands, c):
    """The state that stands for c before choice k."""
    return settled(c, bands, k - 1) if k > 0 else 0


@kernel
def sample_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, filled, uniforms, value, y):
    """[sample]: the last option whose probability, with those after it, exceeds a random number."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n, options, bands = lanes(scratch.narrow), batch.theta.shape[1], batch.options, scratch.bands
    for group in range(begin, end):
        first, members, weights, theta, V, P, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill_choices(batch, regularizer, scratch, first, members, weights, theta, V, P)
            for lane in range(members):
                value[first + lane] = final(batch, scratch, V, first + lane, lane)
        for lane in range(members):
            b = first + lane
            goal, broken = goal_of(batch, scratch, b) - batch.margin, has_nan and is_nan(theta, lane, width)
            value[b] = np.nan if broken else value[b]
            has_path = not broken and value[b] > -np.inf
            for s in range(y.shape[0]):
                c = goal
                y[s, b] = np.nan if broken else 0.0
                for k in range(n // options - 1 if has_path else -1, -1, -1):
                    at, length = cell_of(k, batch, bands, c, lane, width)
                    picked, mass, random = 0, 0.0, uniforms[s, b, k * options]
                    for o in range(options - 1, -1, -1):
                        probability = item(P, at + o * length)
                        mass += probability
                        if probability > 0.0:
                            picked = o
                        if random < mass:
                            break
                    y[s, b, k * options + picked] = 1.0
                    c = next_state(k, batch, bands, c - weights[k * options + picked])


@kernel
def log_prob_kernel(
    regularizer,
    scores,
    gamma,
    tree,
    layout,
    memory,
    begin,
    end,
    filled,
    y,
    cotangent,
    backwards,
    value,
    log_prob,
    gradient,
):
    """[log-prob] along the path of each selection; backwards, an E sweep that receives terms along those paths."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n, options, bands = lanes(scratch.narrow), batch.theta.shape[1], batch.options, scratch.bands
    row, steps, states = row_length(batch, width), bands.shape[0] - 1, scratch.states
    A, G, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    like = zeros(scratch.narrow)
    seeds = np.zeros(options, scratch.narrow.dtype)
    for group in range(begin, end):
        first, members, weights, theta, V, P, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill_choices(batch, regularizer, scratch, first, members, weights, theta, V, P)
            for lane in range(members):
                value[first + lane] = final(batch, scratch, V, first + lane, lane)
        for lane in range(members):
            goal = goal_of(batch, scratch, first + lane) - batch.margin
            for s in range(y.shape[0]):
                states[s * members + lane] = goal
        A[:] = 0.0
        for k in range(steps - 1, -1, -1):
            if backwards:
                collect_choice(k, batch, bands, weights, A, G, P, sums, like, width)
                A, G = G, A
            for s in range(y.shape[0]):
                for lane in range(members):
                    b, state = first + lane, s * members + lane
                    c = states[state]
                    picked, count = 0, 0
                    for o in range(options):
                        if y[s, b, k * options + o] != 0.0:
                            picked, count = o, count + 1
                    if count != 1 or weights[k * options + picked] > c:
                        log_prob[s, b] = -np.inf
                        continue
                    at, length = cell_of(k, batch, bands, c, lane, width)
                    log_prob[s, b] += np.log(P[at + picked * length])
                    if backwards and cotangent[s, b] != 0.0:
                        seed(regularizer, batch.tree, P, at, length, picked, seeds, like)
                        for o in range(options):
                            if seeds[o] != 0.0:
                                p = k * options + o
                                term = cotangent[s, b] * seeds[o]
                                sums[p * width + lane] += term
                                below = next_state(k, batch, bands, c - weights[p])
                                A[(batch.margin + below) * batch.stride + lane] += term
                    states[state] = next_state(k, batch, bands, c - weights[k * options + picked])
        if backwards:
            unpack(sums, first, members, batch.stride, width, gradient)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], log_prob[:, first + lane] = np.nan, np.nan
                if backwards:
                    gradient[first + lane] = np.nan


@function
def seed(regularizer, tree, P, at, length, picked, seeds, like):
    """The derivatives of the log-probability of an option by the values of all options in its state."""
    seeds[:] = 0.0
    for node in range(tree.shape[0] // 3):
        low, middle, high = tree[3 * node], tree[3 * node + 1], tree[3 * node + 2]
        if low <= picked < high:
            skips = picks = 0.0
            for o in range(low, middle):
                skips += P[at + o * length]
            for o in range(middle, high):
                picks += P[at + o * length]
            q = P[at] * 0 + picks / (skips + picks)
            slope = first_lane(dprob(regularizer, broadcast(q, like)))
            term = slope / q if picked >= middle else -slope / (1 - q)
            for o in range(low, high):
                whole = picks if o >= middle else skips
                if term != 0.0 and whole > 0.0:
                    seeds[o] += (term if o >= middle else -term) * P[at + o * length] / whole


@function
def walk(k_last, batch, bands, goal, weights, index, lane, width, y_b):
    """Follows the best option of each state, which stands in the first stream of the table."""
    c = goal
    for k in range(k_last, -1, -1):
        at, _ = cell_of(k, batch, bands, c, lane, width)
        picked = k * batch.options + int(index[at])
        y_b[picked] = 1.0
        c = next_state(k, batch, bands, c - weights[picked])


@kernel
def mode_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, value, y):
    """[mode]: a hard sweep M over the log-probabilities of the options."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, options, bands = lanes(scratch.narrow), batch.options, scratch.bands
    stride, steps, like = batch.stride, bands.shape[0] - 1, zeros(scratch.narrow)
    M = scratch.narrow[: row_length(batch, width)]
    for group in range(begin, end):
        first, members, weights, theta, V, P, has_nan = prepare(batch, scratch, group)
        fill_choices(batch, regularizer, scratch, first, members, weights, theta, V, P)
        M[:] = 0.0
        for k in range(steps):
            extend(k, batch, bands, M, like, width)
            start, length, table = place_of(k, batch, bands, width)
            for j in range(length - width, -1, -width):
                best, index = like - 1e30, like
                for o in range(options):
                    chance = log_chance(load(P, table + o * length + j, like))
                    leaf = load(M, start + j - weights[k * options + o] * stride, like) + chance
                    index = where(leaf > best, o + 0.0, index)
                    best = where(leaf > best, leaf, best)
                store(M, start + j, best)
                store(P, table + j, index)
        for lane in range(members):
            b = first + lane
            broken = has_nan and is_nan(theta, lane, width)
            value[b] = np.nan if broken else final(batch, scratch, V, b, lane)
            y[b] = np.nan if broken else 0.0
            if not broken and value[b] > -np.inf:
                walk(steps - 1, batch, bands, goal_of(batch, scratch, b) - batch.margin, weights, P, lane, width, y[b])


@kernel
def solve_kernel(hard, scores, gamma, tree, layout, memory, begin, end, value, y, rows):
    """The best option of each state, of ties the first; the table holds its number. Results: y, or the last rows."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, options, bands = lanes(scratch.narrow), batch.options, scratch.bands
    stride, steps, like = batch.stride, bands.shape[0] - 1, zeros(scratch.narrow)
    for group in range(begin, end):
        first, members, weights, theta, V, index, has_nan = prepare(batch, scratch, group)
        start_row(batch, bands, first, members, V, INFEASIBLE)
        for k in range(steps):
            extend(k, batch, bands, V, like, width)
            start, length, table = place_of(k, batch, bands, width)
            for j in range(length - width, -1, -width):
                best, picked = broadcast(INFEASIBLE, like), like
                for o in range(options):
                    p = k * options + o
                    leaf = load(V, start + j - item(weights, p) * stride, like) + load(theta, p * width, like)
                    picked = where(leaf > best, o + 0.0, picked)
                    best = where(leaf > best, leaf, best)
                store(V, start + j, best)
                store(index, table + j, picked)
        for lane in range(members):
            b = first + lane
            broken = has_nan and is_nan(theta, lane, width)
            value[b] = np.nan if broken else final(batch, scratch, V, b, lane)
            if rows.shape[0] > 0:
                last_row(batch, bands, V, lane, rows[b])
                if broken:
                    rows[b] = np.nan
            else:
                y[b] = np.nan if broken else 0.0
                if not broken and value[b] > -np.inf:
                    goal = goal_of(batch, scratch, b) - batch.margin
                    walk(steps - 1, batch, bands, goal, weights, index, lane, width, y[b])
