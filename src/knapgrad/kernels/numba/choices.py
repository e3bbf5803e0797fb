"""Choices among options: the sweeps of a group, one step per choice.

The options of a choice are the leaves of a tree of decisions between two (:func:`knapgrad.lattice.tournament`). Going
forwards the tree is climbed in every state: its root is [V], and the product of the decisions down to each option is
the probability of that option, [P]. The table holds those, option by option: a stream of states for each. All else
reads the table.

Tags such as [V] name the equations in docs/math.md.
"""

import numpy as np
from numba.extending import overload

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.bands import COUNT, KNEE, OFFSET, START, TOP, is_sharp, settle, start_row
from knapgrad.kernels.numba.steps import log_chance
from knapgrad.kernels.numba.variants import dprob, function, inline, prob, smoothed, source
from knapgrad.kernels.numba.vector import broadcast, cast, first_lane, item, lanes, load, set_item, store, where, zeros
from knapgrad.lattice import INFEASIBLE


@inline
def slots_of(scratch, batch, width):
    """Room for a vector per option, at the end of the wide scratch, and four times that of the narrow one."""
    size = batch.options * width
    return scratch.wide[scratch.wide.shape[0] - size :], scratch.narrow[scratch.narrow.shape[0] - 4 * size :]


@inline
def is_extended(k, bands):
    """Whether states above the knee before choice k are needed, which all are like the knee."""
    return k > 0 and not is_sharp(bands) and bands[k - 1, TOP] < bands[k, TOP]


@function
def extend(batch, k, bands, row, zero, width):
    """Before choice k: writes the constant part of the row as far as the choice reads it."""
    if is_extended(k, bands):
        stride = batch.stride
        knee = (batch.margin + bands[k - 1, TOP]) * stride
        for p in range(knee + stride, (batch.margin + bands[k, TOP]) * stride + 1, width):
            if stride > 1:
                store(row, p, load(row, knee, zero))
            else:
                store(row, p, broadcast(row[knee], zero))


@function
def fold(batch, k, bands, row, zero, width):
    """After choice k, backwards: the adjoint of extend."""
    if is_extended(k, bands):
        stride = batch.stride
        knee = (batch.margin + bands[k - 1, TOP]) * stride
        end = (batch.margin + bands[k, TOP] + 1) * stride
        if stride > 1:
            gathered = load(row, knee, zero)
            for p in range(knee + stride, end, stride):
                gathered = gathered + load(row, p, zero)
            store(row, knee, gathered)
        else:
            row[knee] += row[knee + 1 : end].sum()
        row[knee + stride : end] = 0.0


@inline
def place_of(k, batch, bands, width):
    """Where the states of choice k begin in a row, how long a stream of its table is, and where the first begins."""
    return (batch.margin + bands[k, START]) * batch.stride, bands[k, COUNT] * width, bands[k, OFFSET]


@function
def fill_tree(regularizer, batch, scratch, weights, theta, V, P):
    """[V] and [P] by the tree."""
    zero, width, stride, bands = zeros(P), lanes(P), batch.stride, scratch.bands
    options, tree = batch.options, batch.tree
    nodes = tree.shape[0] // 3
    values, chances = slots_of(scratch, batch, width)
    for k in range(bands.shape[0] - 1):
        extend(batch, k, bands, V, zero, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            for o in range(options):
                p = k * options + o
                leaf = load(V, start + j - item(weights, p) * stride, zero) + load(theta, p * width, zero)
                store(values, o * width, leaf)
            for node in range(nodes):
                low, middle = item(tree, 3 * node) * width, item(tree, 3 * node + 1) * width
                skip, pick = load(values, low, zero), load(values, middle, zero)
                advantage = pick - skip
                delta = cast(advantage, zero)
                larger = where(advantage > 0.0, pick, skip)
                store(values, low, larger + cast(smoothed(regularizer, delta), skip))  # [V]
                store(chances, node * width, prob(regularizer, delta))  # [Q]
            root = load(values, 0, zero)
            store(V, start + j, where(root < INFEASIBLE, INFEASIBLE, root))
            store(P, table + j, zero + 1.0)
            for node in range(nodes - 1, -1, -1):
                low = table + item(tree, 3 * node) * length + j
                middle = table + item(tree, 3 * node + 1) * length + j
                mass = load(P, low, zero)
                picked = mass * load(chances, node * width, zero)
                store(P, middle, picked)  # [P]
                store(P, low, mass - picked)


@function
def fill_softmax(batch, scratch, weights, theta, V, P):
    """[V] and [P] of Shannon, for which the tree is a softmax over all options."""
    zero, width, stride, bands, options = zeros(P), lanes(P), batch.stride, scratch.bands, batch.options
    values, _ = slots_of(scratch, batch, width)
    for k in range(bands.shape[0] - 1):
        extend(batch, k, bands, V, zero, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            largest = broadcast(INFEASIBLE, zero)
            for o in range(options):
                p = k * options + o
                leaf = load(V, start + j - item(weights, p) * stride, zero) + load(theta, p * width, zero)
                store(values, o * width, leaf)
                largest = where(leaf > largest, leaf, largest)
            mass = zero
            for o in range(options):
                share = vector.exp(cast(load(values, o * width, zero) - largest, zero))
                store(P, table + o * length + j, share)
                mass = mass + share
            store(V, start + j, largest + cast(vector.log(mass), largest))  # [V]
            scale = (zero + 1.0) / mass
            for o in range(options):
                store(P, table + o * length + j, load(P, table + o * length + j, zero) * scale)  # [P]


def fill(batch, regularizer, scratch, first, members, weights, theta, V, P, R=None):
    """P, and V at the goals of the members of a group."""


@overload(fill)
def choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, P, R=None):
    def by_tree(batch, regularizer, scratch, first, members, weights, theta, V, P, R=None):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_tree(regularizer, batch, scratch, weights, theta, V, P)

    def by_softmax(batch, regularizer, scratch, first, members, weights, theta, V, P, R=None):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_softmax(batch, scratch, weights, theta, V, P)

    return by_softmax if regularizer.variant == "shannon" else by_tree


@function
def clear(k, batch, bands, row):
    """Before what choice k leaves is added to a row."""
    start = batch.margin * batch.stride
    row[start : (batch.margin + bands[k, TOP] + 1) * batch.stride + lanes(row)] = 0.0


@function
def collect_option(E, G, P, start, shift, table, length, zero, width):
    """One option of [E]; returns its [y]."""
    y_o = zero
    for j in range(0, length, width):
        picked = load(E, start + j, zero) * load(P, table + j, zero)
        store(G, start + j - shift, load(G, start + j - shift, zero) + picked)
        y_o = y_o + picked
    return y_o


@function
def collect_step(batch, k, bands, weights, E, G, P, y, zero, width):
    """One step of [E], from E to G; y gets the sums of its options."""
    start, length, table = place_of(k, batch, bands, width)
    clear(k, batch, bands, G)
    for o in range(batch.options):
        p = k * batch.options + o
        shift = item(weights, p) * batch.stride
        y_o = collect_option(E, G, P, start, shift, table + o * length, length, zero, width)
        store(y, p * width, y_o)
    return G, E


@function
def follow(batch, regularizer, direction, scratch, weights, z, T, P, R):
    """The derivative T of the V sweep in a direction, [V'], and that of P in R, [P'], unless R is None."""
    zero, width, stride, bands = zeros(P), lanes(P), batch.stride, scratch.bands
    options, tree = batch.options, batch.tree
    size, nodes = options * width, tree.shape[0] // 3
    _, slots = slots_of(scratch, batch, width)
    T[:] = 0.0
    for k in range(bands.shape[0] - 1):
        extend(batch, k, bands, T, zero, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            for o in range(options):
                p = k * options + o
                leaf = load(T, start + j - item(weights, p) * stride, zero) + load(z, p * width, zero)
                store(slots, o * width, leaf)
                store(slots, size + o * width, load(P, table + o * length + j, zero))
            for node in range(nodes):
                low, middle = item(tree, 3 * node) * width, item(tree, 3 * node + 1) * width
                picked = load(slots, size + middle, zero)
                mass = load(slots, size + low, zero) + picked
                q = where(mass > 0.0, picked / mass, where(mass < 1.0, zero, mass))  # [Q]; NaN stays NaN
                skip = load(slots, low, zero)
                change = load(slots, middle, zero) - skip
                added, slope = source(direction, q, zero)
                store(slots, low, skip + (q * change + added))  # [V']
                store(slots, size + low, mass)
                if R is not None:
                    store(slots, 2 * size + node * width, q)
                    store(slots, 3 * size + node * width, mass * (dprob(regularizer, q) * (change + slope)))  # [Q']
            store(T, start + j, load(slots, 0, zero))
            if R is None:
                continue
            store(R, table + j, zero)
            for node in range(nodes - 1, -1, -1):
                low = table + item(tree, 3 * node) * length + j
                middle = table + item(tree, 3 * node + 1) * length + j
                whole = load(R, low, zero)
                picked = whole * load(slots, 2 * size + node * width, zero) + load(slots, 3 * size + node * width, zero)
                store(R, middle, picked)  # [P']
                store(R, low, whole - picked)


@function
def collect_tangent_option(E, D, G, H, P, R, start, shift, table, length, zero, width):
    sum_o = zero
    for j in range(0, length, width):
        probability = load(P, table + j, zero)
        E_c = load(E, start + j, zero)
        picked = E_c * probability
        change = load(D, start + j, zero) * probability + E_c * load(R, table + j, zero)
        at = start + j - shift
        store(G, at, load(G, at, zero) + picked)
        store(H, at, load(H, at, zero) + change)
        sum_o = sum_o + change
    return sum_o


@function
def collect_tangent_step(batch, k, bands, weights, E, D, G, H, P, R, product, zero, width):
    """The same for E together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    start, length, table = place_of(k, batch, bands, width)
    clear(k, batch, bands, G)
    clear(k, batch, bands, H)
    for o in range(batch.options):
        p = k * batch.options + o
        shift, stream = item(weights, p) * batch.stride, table + o * length
        sum_o = collect_tangent_option(E, D, G, H, P, R, start, shift, stream, length, zero, width)
        store(product, p * width, sum_o)
    return G, H, E, D


# Paths. A step is what a path needs to know of a choice, read once for all paths.


@inline
def step_of(batch, bands, k, width):
    """The live states, where their options are in the table, and the states before."""
    knee, top = (bands[k - 1, KNEE], bands[k - 1, TOP]) if k > 0 else (0, 0)
    live = bands[k, START], bands[k, TOP], bands[k, OFFSET], bands[k, COUNT] * width
    return *live, knee, top, bands[bands.shape[0] - 1, KNEE]


@function
def draw(batch, bands, weights, states, samples, P, first, members, uniforms, y):
    """The last option whose probability, with those after it, exceeds a random number."""
    (size, n), m, width = batch.theta.shape, batch.options, lanes(P)
    for lane in range(members):
        for s in range(samples):
            c, of_path = item(states, s * members + lane), (s * size + first + lane) * n
            for p in range(of_path, of_path + n):
                set_item(y, p, 0.0)
            for k in range(bands.shape[0] - 2, -1, -1):
                start, top, table, stream, knee, below, least_slack = step_of(batch, bands, k, width)
                picked, mass, random = 0, 0.0, item(uniforms, of_path + k * m)
                if start <= c <= top:
                    at = table + (c - start) * batch.stride + lane
                    for o in range(m - 1, -1, -1):
                        probability = item(P, at + o * stream)
                        mass += probability
                        if probability > 0.0:
                            picked = o
                        if random < mass:
                            break
                    set_item(y, of_path + k * m + picked, 1.0)
                c = settle(c - item(weights, k * m + picked), knee, below, least_slack)


@function
def weigh(batch, regularizer, k, bands, weights, states, P, first, members, y, log_prob, cotangent, A, sums):
    """Adds the log-probability of what was picked of choice k; if there are sums, its gradient to A and to them."""
    m, width, zero = batch.options, lanes(A), zeros(A)
    start, top, table, stream, knee, below, least_slack = step_of(batch, bands, k, width)
    seeds = np.zeros(m if sums.shape[0] > 0 else 0, A.dtype)
    for s in range(y.shape[0]):
        for lane in range(members):
            b, c = first + lane, states[s * members + lane]
            picked, count, at = 0, 0, table + (c - start) * batch.stride + lane
            for o in range(m):
                if y[s, b, k * m + o] != 0.0:
                    picked, count = o, count + 1
            if not start <= c <= top or count != 1 or weights[k * m + picked] > c:
                log_prob[s, b] = -np.inf  # a path that is lost goes on somewhere
            else:
                log_prob[s, b] += np.log(P[at + picked * stream])
                if sums.shape[0] > 0 and cotangent[s, b] != 0.0:
                    seed(regularizer, batch.tree, P, at, stream, picked, seeds, zero)
                    for o in range(m):
                        if seeds[o] != 0.0:
                            p, term = k * m + o, cotangent[s, b] * seeds[o]
                            sums[p * width + lane] += term
                            cell = batch.margin + settle(c - weights[p], knee, below, least_slack)
                            A[cell * batch.stride + lane] += term
            states[s * members + lane] = settle(c - weights[k * m + picked], knee, below, least_slack)


@function
def seed(regularizer, tree, P, at, length, picked, seeds, zero):
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
            slope = first_lane(dprob(regularizer, broadcast(q, zero)))
            term = slope / q if picked >= middle else -slope / (1 - q)
            for o in range(low, high):
                whole = picks if o >= middle else skips
                if term != 0.0 and whole > 0.0:
                    seeds[o] += (term if o >= middle else -term) * P[at + o * length] / whole


@function
def harden(batch, bands, weights, M, P):
    """The number of the best option then stands in the first stream of the table."""
    zero, width = zeros(P), lanes(P)
    for k in range(bands.shape[0] - 1):
        extend(batch, k, bands, M, zero, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            best, index = zero - 1e30, zero
            for o in range(batch.options):
                chance = log_chance(load(P, table + o * length + j, zero))
                leaf = load(M, start + j - weights[k * batch.options + o] * batch.stride, zero) + chance
                index = where(leaf > best, o + 0.0, index)
                best = where(leaf > best, leaf, best)
            store(M, start + j, best)
            store(P, table + j, index)


@function
def walk(batch, bands, weights, c, index, lane, y_b):
    """Picks the options whose numbers stand in the table."""
    y_b[:] = 0.0
    for k in range(bands.shape[0] - 2, -1, -1):
        start, top, table, _, knee, below, least_slack = step_of(batch, bands, k, lanes(index))
        picked = k * batch.options
        if start <= c <= top:
            picked += np.int64(item(index, table + (c - start) * batch.stride + lane))
            y_b[picked] = 1.0
        c = settle(c - weights[picked], knee, below, least_slack)
