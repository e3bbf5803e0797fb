"""Paths through the table of a group: drawing selections, their log-probabilities, the most probable one.

A path goes from the last step to the first. At each step it looks up its decision, and goes on to a state of the row
before (``visit``). It may be the path of a selection or of an instance that is not feasible, or of NaN: every state is
cut to its row (``settle`` of bands and of boxes), and there is no decision where the table has nothing.
"""

import numpy as np

from knapgrad.kernels.numba import boxes, choices, rows
from knapgrad.kernels.numba.bands import finish, last_row, prepare, row_length, start_row
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.groups import is_nan, unpack
from knapgrad.kernels.numba.steps import harden_part
from knapgrad.kernels.numba.sweeps import collect_step, extend, fill, fold, of_items, shift_of, span_of, spans_of
from knapgrad.kernels.numba.variants import by_kind, dprob, function, inline, kernel
from knapgrad.kernels.numba.vector import broadcast, first_lane, item, lanes, load, set_item, store, where, zeros
from knapgrad.lattice import INFEASIBLE

step_of, visit = of_items("step_of"), of_items("visit")


@function
def weigh_item(batch, regularizer, i, bands, weights, states, Q, first, members, y, log_prob, cotangent, A, sums):
    """Adds the log-probability of the decisions on item i; if there are sums, its gradient to A and to them."""
    zero, width, step = zeros(A), lanes(A), step_of(batch, bands, weights, i)
    shift = shift_of(batch, bands, weights, i, width)
    for s in range(y.shape[0]):
        for lane in range(members):
            b, c = first + lane, states[s * members + lane]
            picked = y[s, b, i] != 0.0
            at, states[s * members + lane] = visit(batch, step, c, picked)
            if at < 0:
                if picked:
                    log_prob[s, b] = -np.inf  # a path that is lost goes on somewhere
            else:
                q = Q[at + lane]
                chance = q if picked else 1.0 - q
                log_prob[s, b] += np.log(chance)
                if sums.shape[0] > 0 and cotangent[s, b] != 0.0:
                    slope = first_lane(dprob(regularizer, broadcast(q, zero)))
                    seed = cotangent[s, b] * (slope if picked else -slope) / chance
                    A[c * batch.stride - shift + lane] += seed
                    A[c * batch.stride + lane] -= seed
                    sums[i * width + lane] += seed


@function
def harden_items(batch, bands, weights, M, Q):
    """The decisions then stand in the table as 0 and 1."""
    zero, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0]):
        extend(batch, i, bands, M, zero, width)
        shift = shift_of(batch, bands, weights, i, width)
        for number in range(spans_of(batch, bands, i) - 1, -1, -1):
            start, table, length = span_of(batch, bands, i, number, width)
            harden_part(M, Q, start, shift, table, length, zero, width)


@function
def walk_items(batch, bands, weights, c, Q, lane, y_b):
    """Picks the items whose decisions stand in the table."""
    for i in range(weights.shape[0] - 1, -1, -1):
        step = step_of(batch, bands, weights, i)
        at, skipped = visit(batch, step, c, False)
        y_b[i] = Q[at + lane] if at >= 0 else 0.0
        c = visit(batch, step, c, True)[1] if y_b[i] > 0.0 else skipped


draw = by_kind(rows.draw, choices.draw, boxes.draw)
weigh = by_kind(weigh_item, choices.weigh, weigh_item)
harden = by_kind(harden_items, choices.harden, harden_items)
walk = by_kind(walk_items, choices.walk, walk_items)


@inline
def start_paths(batch, goals, states, members, samples):
    """The states in which paths start."""
    for s in range(samples):
        for lane in range(members):
            set_item(states, s * members + lane, item(goals, lane) - batch.margin)


# The kernels.


@kernel
def sample_kernel(regularizer, scores, gamma, structure, layout, memory, begin, end, filled, uniforms, value, y):
    """[sample]"""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, bands, goals, states = lanes(scratch.narrow), scratch.bands, scratch.goals, scratch.states
    samples = y.shape[0]
    flat_uniforms, flat_y = uniforms.reshape(-1), y.reshape(-1)
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
            finish(batch, goals, V, first, members, value)
        start_paths(batch, goals, states, members, samples)
        draw(batch, bands, weights, states, samples, Q, first, members, flat_uniforms, flat_y)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], y[:, first + lane] = np.nan, np.nan


@kernel
def log_prob_kernel(
    regularizer, scores, gamma, structure, layout, memory, begin, end, filled, y, cotangent, backwards, value, log_prob,
    gradient,
):  # fmt: skip
    """[log-prob] along the path of each selection; backwards, an E sweep that receives terms along those paths."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, n, samples = lanes(scratch.narrow), batch.theta.shape[1], y.shape[0]
    bands, goals, states = scratch.bands, scratch.goals, scratch.states
    row, zero = row_length(batch, width), zeros(scratch.narrow)
    A, P = scratch.narrow[:row], scratch.narrow[row : 2 * row]
    sums = scratch.narrow[2 * row : 2 * row + (n * width if backwards else 0)]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
            finish(batch, goals, V, first, members, value)
        start_paths(batch, goals, states, members, samples)
        A[:] = 0.0
        for k in range(bands.shape[0] - 2, -1, -1):
            if backwards:
                A, P = collect_step(batch, k, bands, weights, A, P, Q, sums, zero, width)
            weigh(
                batch, regularizer, k, bands, weights, states, Q, first, members, y, log_prob, cotangent, A, sums
            )  # fmt: skip
            if backwards:
                fold(batch, k, bands, A, zero, width)
        if backwards:
            unpack(sums, first, members, batch.stride, width, gradient)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], log_prob[:, first + lane] = np.nan, np.nan
                if backwards:
                    gradient[first + lane] = np.nan


@kernel
def mode_kernel(regularizer, scores, gamma, structure, layout, memory, begin, end, value, y):
    """[mode]: a hard sweep M over the log-probabilities of the decisions."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, bands, goals = lanes(scratch.narrow), scratch.bands, scratch.goals
    M = scratch.narrow[: row_length(batch, width)]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        M[:] = 0.0
        harden(batch, bands, weights, M, Q)
        finish(batch, goals, V, first, members, value)
        for lane in range(members):
            b = first + lane
            if has_nan and is_nan(theta, lane, width):
                value[b], y[b] = np.nan, np.nan
            else:
                walk(batch, bands, weights, goals[lane] - batch.margin, Q, lane, y[b])


@kernel
def solve_kernel(hard, scores, gamma, structure, layout, memory, begin, end, value, y, last_rows):
    """The best option of each state, of ties the first; the table holds its number. Results: y, or the last rows."""
    batch, scratch = opened(scores, gamma, structure, layout, memory)
    width, options, bands, goals = lanes(scratch.narrow), batch.options, scratch.bands, scratch.goals
    stride, steps, zero = batch.stride, bands.shape[0] - 1, zeros(scratch.narrow)
    for group in range(begin, end):
        first, members, weights, theta, V, index, has_nan = prepare(batch, scratch, group)
        start_row(batch, bands, first, members, V, INFEASIBLE)
        for k in range(steps):
            extend(batch, k, bands, V, zero, width)
            start, length, table = choices.place_of(k, batch, bands, width)
            for j in range(length - width, -1, -width):
                best, picked = broadcast(INFEASIBLE, zero), zero
                for o in range(options):
                    p = k * options + o
                    leaf = load(V, start + j - item(weights, p) * stride, zero) + load(theta, p * width, zero)
                    picked = where(leaf > best, o + 0.0, picked)
                    best = where(leaf > best, leaf, best)
                store(V, start + j, best)
                store(index, table + j, picked)
        finish(batch, goals, V, first, members, value)
        for lane in range(members):
            b = first + lane
            broken = has_nan and is_nan(theta, lane, width)
            value[b] = np.nan if broken else value[b]
            if last_rows.shape[0] > 0:
                last_row(batch, bands, V, lane, last_rows[b])
                if broken:
                    last_rows[b] = np.nan
            elif broken:
                y[b] = np.nan
            else:
                choices.walk(batch, bands, weights, goals[lane] - batch.margin, index, lane, y[b])
