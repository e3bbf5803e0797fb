"""Paths through the table of a group of items with several budgets: :mod:`knapgrad.kernels.numba.paths` for boxes.

The state of a path is a cell of a row.
"""

import numpy as np

from knapgrad.kernels.numba.bands import final, goal_of, is_nan, prepare, row_length, unpack
from knapgrad.kernels.numba.box_sweeps import collect_row
from knapgrad.kernels.numba.boxes import (
    HIGH,
    LINE,
    LOW,
    MOVE,
    TABLE,
    extend,
    fold,
    lines_of,
    pitch_of,
    place_of,
    settled_cell,
    shift_of,
)
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.paths import harden_part
from knapgrad.kernels.numba.sweeps import fill
from knapgrad.kernels.numba.variants import dprob, inline, kernel
from knapgrad.kernels.numba.vector import broadcast, first_lane, lanes, store, zeros


@inline
def step_of(batch, bands, i, cell, width):
    """The capacities at a cell, and where its decision on item i is in the table, or -1 if the item does not fit."""
    pitch = pitch_of(batch, width)
    row, c = cell // pitch, cell % pitch
    a, b = row // batch.tree[0, 1], row % batch.tree[0, 1]
    if a < bands[i, MOVE] or b < bands[i, MOVE + 1] or c < bands[i, MOVE + 2]:
        return a, b, c, -1
    line = (a - bands[i, LOW]) * (bands[i, HIGH + 1] - bands[i, LOW + 1] + 1) + b - bands[i, LOW + 1]
    return a, b, c, bands[i, TABLE] + line * bands[i, LINE] + (c - bands[i, LOW + 2]) * batch.stride


@inline
def next_cell(batch, bands, i, a, b, c, picked, width):
    """The cell of the row before that a path goes to."""
    if i == 0:
        return 0
    if picked:
        a, b, c = a - bands[i, MOVE], b - bands[i, MOVE + 1], c - bands[i, MOVE + 2]
    return settled_cell(batch, bands, i - 1, a, b, c, width)


@kernel
def sample_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, filled, uniforms, value, y):
    """[sample]."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n, bands = lanes(scratch.narrow), batch.theta.shape[1], scratch.bands
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
            for lane in range(members):
                value[first + lane] = final(batch, scratch, V, first + lane, lane)
        for lane in range(members):
            goal = goal_of(batch, scratch, first + lane)
            for s in range(y.shape[0]):
                cell = goal
                for i in range(n - 1, -1, -1):
                    a, b, c, at = step_of(batch, bands, i, cell, width)
                    picked = False
                    if at >= 0:
                        q = Q[at + lane]
                        picked = uniforms[s, first + lane, i] < q
                    y[s, first + lane, i] = 1.0 if picked else 0.0
                    cell = next_cell(batch, bands, i, a, b, c, picked, width)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], y[:, first + lane] = np.nan, np.nan


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
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    stride, bands, states = batch.stride, scratch.bands, scratch.states
    row = row_length(batch, width)
    A, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    like = zeros(scratch.narrow)
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        if not filled:
            fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
            for lane in range(members):
                value[first + lane] = final(batch, scratch, V, first + lane, lane)
        for lane in range(members):
            goal = goal_of(batch, scratch, first + lane)
            for s in range(y.shape[0]):
                states[s * members + lane] = goal
        A[:] = 0.0
        for i in range(n - 1, -1, -1):
            shift = shift_of(batch, bands, i, width)
            if backwards:
                store(sums, i * width, collect_row(i, batch, bands, A, P, Q, like, width))
            for s in range(y.shape[0]):
                for lane in range(members):
                    instance, cell, picked = first + lane, states[s * members + lane], y[s, first + lane, i] != 0.0
                    a, b, c, at = step_of(batch, bands, i, cell, width)
                    if at < 0:
                        if picked:
                            log_prob[s, instance] = -np.inf
                            picked = False  # a path that is lost goes on somewhere
                    else:
                        q = Q[at + lane]
                        chance = q if picked else 1.0 - q
                        log_prob[s, instance] += np.log(chance)
                        if backwards and cotangent[s, instance] != 0.0:
                            slope = first_lane(dprob(regularizer, broadcast(q, like)))
                            seed = cotangent[s, instance] * (slope if picked else -slope) / chance
                            A[cell * stride - shift + lane] += seed
                            A[cell * stride + lane] -= seed
                            sums[i * width + lane] += seed
                    states[s * members + lane] = next_cell(batch, bands, i, a, b, c, picked, width)
            if backwards:
                fold(i, batch, bands, A, like, width)
        if backwards:
            unpack(sums, first, members, stride, width, gradient)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], log_prob[:, first + lane] = np.nan, np.nan
                if backwards:
                    gradient[first + lane] = np.nan


@kernel
def mode_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, value, y):
    """[mode]: a hard sweep M over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    bands, like = scratch.bands, zeros(scratch.narrow)
    M = scratch.narrow[: row_length(batch, width)]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        M[:] = 0.0
        for i in range(n):
            extend(i, batch, bands, M, like, width)
            shift = shift_of(batch, bands, i, width)
            for line in range(lines_of(bands, i) - 1, -1, -1):
                start, table = place_of(batch, bands, i, line, width)
                harden_part(M, Q, start, shift, table, 0, bands[i, LINE], like, width)
        for lane in range(members):
            value[first + lane] = final(batch, scratch, V, first + lane, lane)
            cell = goal_of(batch, scratch, first + lane)
            for i in range(n - 1, -1, -1):
                a, b, c, at = step_of(batch, bands, i, cell, width)
                y[first + lane, i] = Q[at + lane] if at >= 0 else 0.0
                cell = next_cell(batch, bands, i, a, b, c, y[first + lane, i] > 0.0, width)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], y[first + lane] = np.nan, np.nan
