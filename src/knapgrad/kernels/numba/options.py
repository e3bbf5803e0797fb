"""Choices among options: the sweeps of a group, one step per choice.

The options of a choice are the leaves of a tree of decisions between two (:func:`knapgrad.lattice.tournament`). Going
forwards the tree is climbed in every state: its root is [V], and the product of the decisions down to each option is
the probability of that option, [P]. The table holds those, option by option: a stream of states for each. All else
reads the table.

Tags such as [V] name the equations in docs/math.md.
"""

from numba.extending import overload

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.bands import COUNT, OFFSET, START, TOP, is_sharp, start_row
from knapgrad.kernels.numba.variants import dprob, function, inline, prob, smoothed, source
from knapgrad.kernels.numba.vector import broadcast, cast, item, lanes, load, store, where, zeros
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
def extend(k, batch, bands, row, like, width):
    """Before choice k: writes the constant part of the row as far as the choice reads it."""
    if is_extended(k, bands):
        stride = batch.stride
        knee = (batch.margin + bands[k - 1, TOP]) * stride
        for p in range(knee + stride, (batch.margin + bands[k, TOP]) * stride + 1, width):
            if stride > 1:
                store(row, p, load(row, knee, like))
            else:
                store(row, p, broadcast(row[knee], like))


@function
def fold(k, batch, bands, row, like):
    """After choice k, backwards: the adjoint of extend."""
    if is_extended(k, bands):
        stride = batch.stride
        knee = (batch.margin + bands[k - 1, TOP]) * stride
        end = (batch.margin + bands[k, TOP] + 1) * stride
        if stride > 1:
            gathered = load(row, knee, like)
            for p in range(knee + stride, end, stride):
                gathered = gathered + load(row, p, like)
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
    like, width, stride, bands = zeros(P), lanes(P), batch.stride, scratch.bands
    options, tree = batch.options, batch.tree
    nodes = tree.shape[0] // 3
    values, chances = slots_of(scratch, batch, width)
    for k in range(bands.shape[0] - 1):
        extend(k, batch, bands, V, like, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            for o in range(options):
                p = k * options + o
                leaf = load(V, start + j - item(weights, p) * stride, like) + load(theta, p * width, like)
                store(values, o * width, leaf)
            for node in range(nodes):
                low, middle = item(tree, 3 * node) * width, item(tree, 3 * node + 1) * width
                skip, pick = load(values, low, like), load(values, middle, like)
                advantage = pick - skip
                delta = cast(advantage, like)
                larger = where(advantage > 0.0, pick, skip)
                store(values, low, larger + cast(smoothed(regularizer, delta), skip))  # [V]
                store(chances, node * width, prob(regularizer, delta))  # [Q]
            root = load(values, 0, like)
            store(V, start + j, where(root < INFEASIBLE, INFEASIBLE, root))
            store(P, table + j, like + 1.0)
            for node in range(nodes - 1, -1, -1):
                low = table + item(tree, 3 * node) * length + j
                middle = table + item(tree, 3 * node + 1) * length + j
                mass = load(P, low, like)
                picked = mass * load(chances, node * width, like)
                store(P, middle, picked)  # [P]
                store(P, low, mass - picked)


@function
def fill_softmax(batch, scratch, weights, theta, V, P):
    """[V] and [P] of Shannon, for which the tree is a softmax over all options."""
    like, width, stride, bands, options = zeros(P), lanes(P), batch.stride, scratch.bands, batch.options
    values, _ = slots_of(scratch, batch, width)
    for k in range(bands.shape[0] - 1):
        extend(k, batch, bands, V, like, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            largest = broadcast(INFEASIBLE, like)
            for o in range(options):
                p = k * options + o
                leaf = load(V, start + j - item(weights, p) * stride, like) + load(theta, p * width, like)
                store(values, o * width, leaf)
                largest = where(leaf > largest, leaf, largest)
            mass = like
            for o in range(options):
                share = vector.exp(cast(load(values, o * width, like) - largest, like))
                store(P, table + o * length + j, share)
                mass = mass + share
            store(V, start + j, largest + cast(vector.log(mass), largest))  # [V]
            scale = (like + 1.0) / mass
            for o in range(options):
                store(P, table + o * length + j, load(P, table + o * length + j, like) * scale)  # [P]


def fill_choices(batch, regularizer, scratch, first, members, weights, theta, V, P):
    """P, and V at the goals of the members of a group."""


@overload(fill_choices)
def choose_fill(batch, regularizer, scratch, first, members, weights, theta, V, P):
    def by_tree(batch, regularizer, scratch, first, members, weights, theta, V, P):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_tree(regularizer, batch, scratch, weights, theta, V, P)

    def by_softmax(batch, regularizer, scratch, first, members, weights, theta, V, P):
        start_row(batch, scratch.bands, first, members, V, INFEASIBLE)
        fill_softmax(batch, scratch, weights, theta, V, P)

    return by_softmax if regularizer.variant == "shannon" else by_tree


@function
def clear(k, batch, bands, row):
    """Before what choice k leaves is added to a row."""
    start = batch.margin * batch.stride
    row[start : (batch.margin + bands[k, TOP] + 1) * batch.stride + lanes(row)] = 0.0


@function
def collect_option(E, G, P, start, shift, table, length, like, width):
    """One option of [E]; returns its [y]."""
    y_o = like
    for j in range(0, length, width):
        picked = load(E, start + j, like) * load(P, table + j, like)
        store(G, start + j - shift, load(G, start + j - shift, like) + picked)
        y_o = y_o + picked
    return y_o


@function
def collect_choice(k, batch, bands, weights, E, G, P, y, like, width):
    """One step of [E], from E to G; y gets the sums of its options."""
    options = batch.options
    start, length, table = place_of(k, batch, bands, width)
    clear(k, batch, bands, G)
    for o in range(options):
        p = k * options + o
        shift = item(weights, p) * batch.stride
        y_o = collect_option(E, G, P, start, shift, table + o * length, length, like, width)
        store(y, p * width, y_o)
    fold(k, batch, bands, G, like)


@function
def collect_choices(batch, bands, weights, E, G, P, y):
    """The E sweep of [E] and [y]."""
    like, width = zeros(P), lanes(P)
    for k in range(bands.shape[0] - 2, -1, -1):
        collect_choice(k, batch, bands, weights, E, G, P, y, like, width)
        E, G = G, E


@function
def follow_choices(batch, regularizer, direction, scratch, weights, z, T, P, R):
    """The derivative T of the V sweep in a direction, [V'], and that of P, [P']."""
    like, width, stride, bands = zeros(P), lanes(P), batch.stride, scratch.bands
    options, tree = batch.options, batch.tree
    size, nodes = options * width, tree.shape[0] // 3
    _, slots = slots_of(scratch, batch, width)
    T[:] = 0.0
    for k in range(bands.shape[0] - 1):
        extend(k, batch, bands, T, like, width)
        start, length, table = place_of(k, batch, bands, width)
        for j in range(length - width, -1, -width):
            for o in range(options):
                p = k * options + o
                leaf = load(T, start + j - item(weights, p) * stride, like) + load(z, p * width, like)
                store(slots, o * width, leaf)
                store(slots, size + o * width, load(P, table + o * length + j, like))
            for node in range(nodes):
                low, middle = item(tree, 3 * node) * width, item(tree, 3 * node + 1) * width
                picked = load(slots, size + middle, like)
                mass = load(slots, size + low, like) + picked
                q = where(mass > 0.0, picked / mass, where(mass < 1.0, like, mass))  # [Q]; NaN stays NaN
                skip = load(slots, low, like)
                change = load(slots, middle, like) - skip
                added, slope = source(direction, q, like)
                store(slots, low, skip + (q * change + added))  # [V']
                store(slots, size + low, mass)
                store(slots, 2 * size + node * width, q)
                store(slots, 3 * size + node * width, mass * (dprob(regularizer, q) * (change + slope)))  # [Q']
            store(T, start + j, load(slots, 0, like))
            store(R, table + j, like)
            for node in range(nodes - 1, -1, -1):
                low = table + item(tree, 3 * node) * length + j
                middle = table + item(tree, 3 * node + 1) * length + j
                whole = load(R, low, like)
                picked = whole * load(slots, 2 * size + node * width, like) + load(slots, 3 * size + node * width, like)
                store(R, middle, picked)  # [P']
                store(R, low, whole - picked)


@function
def collect_tangent_option(E, D, G, H, P, R, start, shift, table, length, like, width):
    sum_o = like
    for j in range(0, length, width):
        probability = load(P, table + j, like)
        E_c = load(E, start + j, like)
        picked = E_c * probability
        change = load(D, start + j, like) * probability + E_c * load(R, table + j, like)
        at = start + j - shift
        store(G, at, load(G, at, like) + picked)
        store(H, at, load(H, at, like) + change)
        sum_o = sum_o + change
    return sum_o


@function
def collect_tangents_of_choices(batch, bands, weights, E, D, G, H, P, R, product):
    """The E sweep together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    like, width, options = zeros(P), lanes(P), batch.options
    for k in range(bands.shape[0] - 2, -1, -1):
        start, length, table = place_of(k, batch, bands, width)
        clear(k, batch, bands, G)
        clear(k, batch, bands, H)
        for o in range(options):
            p = k * options + o
            shift, stream = item(weights, p) * batch.stride, table + o * length
            sum_o = collect_tangent_option(E, D, G, H, P, R, start, shift, stream, length, like, width)
            store(product, p * width, sum_o)
        fold(k, batch, bands, G, like)
        fold(k, batch, bands, H, like)
        E, D, G, H = G, H, E, D
