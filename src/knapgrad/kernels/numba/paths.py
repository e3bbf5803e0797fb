"""Paths through the table of a group of items: drawing selections, their log-probabilities, the most probable one."""

import numpy as np

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.bands import (
    KNEE,
    OFFSET,
    START,
    final,
    goal_of,
    is_nan,
    prepare,
    row_length,
    settled,
    unpack,
)  # fmt: skip
from knapgrad.kernels.numba.frames import opened
from knapgrad.kernels.numba.sweeps import collect_row, extend, fill, fold, parts
from knapgrad.kernels.numba.variants import dprob, inline, kernel
from knapgrad.kernels.numba.vector import broadcast, first_lane, item, lanes, load, set_item, store, where, zeros


@kernel
def sample_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, filled, uniforms, value, y):
    """[sample]: the paths of a group step through the items together."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    (size, n), stride, bands, states = batch.theta.shape, batch.stride, scratch.bands, scratch.states
    flat_uniforms, flat_y = uniforms.reshape(-1), y.reshape(-1)
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
        # A step waits for the one before on its path, so paths take turns: those of all lanes, or of 8 samples.
        together, next_lane, next_random = (8, 0, size * n) if members == 1 else (1, 1, n)
        flat = bands[n, KNEE]
        for block in range(n, 0, -16):  # of items: a cache line of random numbers is used up before the next
            for s in range(0, y.shape[0], together):
                turns = min(together, y.shape[0] - s) * members
                for i in range(block - 1, max(block - 16, 0) - 1, -1):
                    weight, start, row = weights[i], bands[i, START], bands[i, OFFSET]
                    knee = bands[i - 1, KNEE] if i > 0 else 0
                    random = (s * size + first) * n + i
                    for turn in range(turns):
                        c = item(states, s * members + turn)
                        at = random + turn * next_random
                        picked = 0  # an integer: a jump on a random bit would be mispredicted half of the time
                        if c >= weight:
                            q = item(Q, row + (c - start) * stride + turn * next_lane)
                            picked = np.int64(item(flat_uniforms, at) < q)
                            set_item(flat_y, at, picked + 0.0 * q)  # NaN stays NaN
                        else:
                            set_item(flat_y, at, 0.0)
                        c -= weight * picked
                        set_item(states, s * members + turn, min(c, knee) if c <= flat else c)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, lanes(scratch.narrow)):
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
            if backwards:
                store(sums, i * width, collect_row(i, batch, bands, weights, A, P, Q, like, width))
            for s in range(y.shape[0]):
                for lane in range(members):
                    b, state = first + lane, s * members + lane
                    c, picked = states[state], y[s, b, i] != 0.0
                    if c < weights[i]:
                        if picked:
                            log_prob[s, b] = -np.inf
                    else:
                        q = Q[bands[i, OFFSET] + (c - bands[i, START]) * stride + lane]
                        chance = q if picked else 1.0 - q
                        log_prob[s, b] += np.log(chance)
                        if backwards and cotangent[s, b] != 0.0:
                            slope = first_lane(dprob(regularizer, broadcast(q, like)))
                            seed = cotangent[s, b] * (slope if picked else -slope) / chance
                            A[(c - weights[i]) * stride + lane] += seed
                            A[c * stride + lane] -= seed
                            sums[i * width + lane] += seed
                        c -= weights[i] if picked else 0
                    states[state] = settled(c, bands, i - 1) if i > 0 else 0
            if backwards:
                fold(i, stride, bands, A, like, width)
        if backwards:
            unpack(sums, first, members, stride, width, gradient)
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], log_prob[:, first + lane] = np.nan, np.nan
                if backwards:
                    gradient[first + lane] = np.nan


@inline
def log_chance(q):
    return where(q > 0.0, vector.log(where(q > 0.0, q, 1.0)), -1e30)


@inline
def harden_part(M, Q, start, shift, table, begin, end, like, width):
    for j in range(end - width, begin - 1, -width):
        q = load(Q, table + j, like)
        pick = load(M, start + j - shift, like) + log_chance(q)
        skip = load(M, start + j, like) + log_chance(1.0 - q)
        store(M, start + j, where(pick > skip, pick, skip))
        store(Q, table + j, where(pick > skip, like + 1.0, where(q > -1.0, like, q)))  # NaN stays NaN


@kernel
def mode_kernel(regularizer, scores, gamma, tree, layout, memory, begin, end, value, y):
    """[mode]: a hard sweep M over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    batch, scratch = opened(scores, gamma, tree, layout, memory)
    width, n = lanes(scratch.narrow), batch.theta.shape[1]
    stride, bands, like = batch.stride, scratch.bands, zeros(scratch.narrow)
    M = scratch.narrow[: row_length(batch, width)]
    for group in range(begin, end):
        first, members, weights, theta, V, Q, has_nan = prepare(batch, scratch, group)
        fill(batch, regularizer, scratch, first, members, weights, theta, V, Q)
        M[:] = 0.0
        for i in range(n):
            shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
            extend(i, stride, bands, M, like, width)
            lower, upper, top = parts(bands, i, width)
            harden_part(M, Q, start, shift, table, upper, top, like, width)
            harden_part(M, Q, start, shift, table, 0, lower, like, width)
        for lane in range(members):
            value[first + lane] = final(batch, scratch, V, first + lane, lane)
            c = goal_of(batch, scratch, first + lane)
            for i in range(n - 1, -1, -1):
                picked = 0.0
                if c >= weights[i]:
                    picked = Q[bands[i, OFFSET] + (c - bands[i, START]) * stride + lane]
                y[first + lane, i] = picked
                c -= weights[i] if picked > 0.0 else 0
                c = settled(c, bands, i - 1) if i > 0 else 0
        for lane in range(members if has_nan else 0):
            if is_nan(theta, lane, width):
                value[first + lane], y[first + lane] = np.nan, np.nan
