"""The CPU kernels: every sweep of :mod:`knapgrad.reference`, fused per instance, in SIMD.

A *group* is what one set of vectors works on, in one of two layouts that share all of the code below:

- 16 instances (8 in float64) with the same weights, one in each lane: cell c of a row is the vector at ``c * stride``;
- one instance, with 16 neighbouring capacities in the lanes: ``stride`` is 1, and theta is the same in every lane.

A group is swept forwards and backwards in scratch that stays in cache; only the results leave. Three devices keep it
short:

- rows are updated in place, V by falling and E by rising capacity, so a shift by ``w_i`` reads what the step before
  left;
- only the live *band* of a row is touched: from ``start = max(C - later weights, w_i)`` to ``top = min(C, prefix
  sum)``. Above the prefix sum a knapsack row is constant: going forwards it is extended when it is needed, going
  backwards it is folded;
- V is kept in float64 whatever theta is, because a decision is a difference of two large V. All else has theta's type.

Infeasible is a large negative number, not -inf: differences of two such are finite, and exact absorption does the rest.
Tags such as [V] name the equations in docs/math.md.
"""

import hashlib
from math import log, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import NativeValue, models, overload, register_model, typeof_impl, unbox

from knapgrad import regularizers
from knapgrad.kernels import pool, vector
from knapgrad.kernels.vector import broadcast, cast, first_lane, item, lanes, load, set_item, store, total, where, zeros
from knapgrad.reference import INFEASIBLE

LOG2, LOG2_INVERSE = log(2), 1 / log(2)

_inline = njit(forceinline=True, error_model="numpy")
_function = njit(nogil=True, error_model="numpy")
_kernel = njit(nogil=True, error_model="numpy", cache=True)


# What varies between kernels is a type, so that each is compiled, and cached on disk, for its own case.


class Variant:
    """A choice that is made when a kernel is compiled: a regularizer, or what a tangent sweep follows."""

    def __init__(self, name: str) -> None:
        self.numba_type = VariantType(name)


# Numba's cache on disk notices changes in this file alone; in a type's name it sees the others too.
_SOURCES = hashlib.sha256(b"".join(Path(str(m.__file__)).read_bytes() for m in (regularizers, vector))).hexdigest()[:16]


class VariantType(types.Type):
    def __init__(self, variant: str) -> None:
        self.variant = variant
        super().__init__(name=f"Variant({variant}, {_SOURCES})")


@register_model(VariantType)
class _VariantModel(models.OpaqueModel):
    pass


@unbox(VariantType)
def _unbox_variant(_type: Any, _object: Any, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


@typeof_impl.register(Variant)
def _typeof_variant(variant: Variant, _context: Any) -> VariantType:
    return variant.numba_type


def smoothed(regularizer, delta):
    """What the smoothed maximum adds to the larger branch."""


def prob(regularizer, delta):
    """The probability of picking."""


def dprob(regularizer, q):
    """The derivative of prob."""


def source(direction, q, z):
    """Of a tangent sweep: what a decision adds to the tangent, and the derivative of that by its probability q."""


def _by_variant(function: Any, choices: dict[str, Any]) -> None:
    compiled = {name: _inline(regularizers.rebind(choice, vector)) for name, choice in choices.items()}

    @overload(function)
    def choose(variant, *arguments):
        chosen = compiled[variant.variant]
        return lambda variant, *arguments: chosen(*arguments)


xp: Any = vector


def _linear(q, z):
    return q * z, z


def _entropy(q, z):
    certain = q * (1.0 - q)
    inside = xp.where(certain > 0.0, q, 0.5)
    pick, skip = xp.log(inside), xp.log(1.0 - inside)
    return xp.where(certain > 0.0, -q * pick - (1.0 - q) * skip, certain), xp.where(certain > 0.0, skip - pick, certain)


_CLASSES: dict[str, Any] = {**regularizers.REGULARIZERS, "hard": regularizers.Hard}
_by_variant(smoothed, {name: cls.value for name, cls in _CLASSES.items()})
_by_variant(prob, {name: cls.prob for name, cls in _CLASSES.items()})
_by_variant(dprob, {name: cls.dprob for name, cls in _CLASSES.items()})
_by_variant(source, {"linear": _linear, "entropy": _entropy})
VARIANTS = {name: Variant(name) for name in (*_CLASSES, "linear", "entropy")}


# Groups and bands.


class Problem(NamedTuple):
    theta: Any  # (batch, n)
    weights: Any  # (1 or batch, n), int64
    capacity: Any  # (1 or batch,), int64
    gamma: Any  # (1 or batch,), float64
    exactly: bool  # top-k: the capacity must be used up
    stride: int  # lanes (instances in the lanes) or 1 (capacities in the lanes)
    reach: int  # the largest capacity that matters in any group


class Scratch(NamedTuple):
    bands: Any  # (n, 4), int64: start, top, number of vectors, offset in the table
    states: Any  # the capacities left along paths, int64
    wide: Any  # float64: a row of V, then theta
    narrow: Any  # theta's type: rows and tables
    table: Any  # (1 or groups, cells), theta's type: Q


START, TOP, COUNT, OFFSET = range(4)


@_function
def _plan(weights, lowest, highest, stride, width, bands):
    """Fills ``bands`` for one group whose capacities lie between lowest and highest; returns the table's length."""
    n = weights.shape[0]
    top = 0
    for i in range(n):
        top = min(top + min(weights[i], highest + 1), highest)
        bands[i, TOP] = top
    low = min(lowest, top)
    for i in range(n - 1, -1, -1):
        bands[i, START] = max(low, weights[i])
        low = max(low - min(weights[i], highest + 1), 0)
    offset = 0
    for i in range(n):
        cells = max(bands[i, TOP] - bands[i, START] + 1, 0)
        bands[i, COUNT] = cells if stride > 1 else (cells + width - 1) // width
        bands[i, OFFSET] = offset
        offset += bands[i, COUNT] * width
    return offset


@_function
def _members(problem, group, width):
    """The first instance of a group and the number of instances in it."""
    if problem.stride == 1:
        return group, 1
    return group * width, min(width, problem.theta.shape[0] - group * width)


@_function
def _own(array, instance):
    """The row of an instance in an array that may hold one row for all."""
    return array[instance] if array.shape[0] > 1 else array[0]


@_function
def _bands(problem, group, width, bands):
    first, members = _members(problem, group, width)
    lowest = highest = _own(problem.capacity, first)
    for b in range(first + 1, first + members):
        lowest = min(lowest, _own(problem.capacity, b))
        highest = max(highest, _own(problem.capacity, b))
    return _plan(_own(problem.weights, first), lowest, highest, problem.stride, width, bands)


@_kernel
def _measure(problem, width, bands):
    """The largest capacity that matters, and the length of the longest table, over all groups."""
    n = problem.weights.shape[1]
    groups = -(-problem.theta.shape[0] // problem.stride)
    if problem.weights.shape[0] == 1 and problem.capacity.shape[0] == 1:
        groups = min(groups, 1)
    reach = cells = 0
    for group in range(groups):
        cells = max(cells, _bands(problem, group, width, bands))
        reach = max(reach, bands[n - 1, TOP] if n > 0 else 0)
    return reach, cells


@_function
def _goal(problem, scratch, instance):
    """The state at which an instance starts its way back: its capacity, or all items if they fit."""
    n = problem.theta.shape[1]
    return min(_own(problem.capacity, instance), scratch.bands[n - 1, TOP]) if n > 0 else 0


@_function
def _pack(array, gamma, first, members, stride, width, packed):
    """(members, n), divided by gamma, to (n, width): one instance in each lane, or in all."""
    for lane in range(width):
        b = first + (0 if stride == 1 else min(lane, members - 1))
        scale = 1.0 / _own(gamma, b) if _own(gamma, b) > 0.0 else np.nan
        for i in range(array.shape[1]):
            packed[i * width + lane] = array[b, i] * scale


@_function
def _pack_scores(problem, first, members, width, packed):
    """-inf is out, +inf is not a number."""
    _pack(problem.theta, problem.gamma, first, members, problem.stride, width, packed)
    for p in range(packed.shape[0]):
        if np.isinf(packed[p]):
            packed[p] = INFEASIBLE if packed[p] < 0.0 else np.nan


@_function
def _unpack(packed, first, members, stride, width, array):
    """(n, width) to (members, n): the reverse, where lanes of capacities add up."""
    like = zeros(packed)
    for i in range(array.shape[1]):
        if stride == 1:
            array[first, i] = total(load(packed, i * width, like))
        else:
            for lane in range(members):
                array[first + lane, i] = packed[i * width + lane]


# The sweeps of one group.


@_inline
def _extend(row, old, new, stride, width, like):
    """A knapsack row is constant above the prefix sum: write that out up to the new one."""
    constant = load(row, old * stride, like) if stride > 1 else broadcast(row[old], like)
    for p in range((old + 1) * stride, (new + 1) * stride + width, width):
        store(row, p, constant)


@_inline
def _fold(row, old, new, stride, width, like):
    """The adjoint of extend: gather what arrived above the old prefix sum."""
    gathered = like
    for p in range((old + 1) * stride, (new + 1) * stride, width):
        gathered = gathered + load(row, p, like)
        store(row, p, like)
    if stride > 1:
        store(row, old * stride, load(row, old * stride, like) + gathered)
    else:
        row[old] += total(gathered)


@_function
def _start_values(row, exactly, stride):
    row[:] = INFEASIBLE if exactly else 0.0
    row[:stride] = 0.0


@_function
def _values(regularizer, problem, bands, weights, theta, V, Q):
    """The V sweep of [V] and [Q]."""
    like, width, stride = zeros(Q), lanes(Q), problem.stride
    _start_values(V, problem.exactly, stride)
    below = 0
    for i in range(weights.shape[0]):
        top, shift, start, table = bands[i, TOP], weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        if not problem.exactly and top > below:
            _extend(V, below, top, stride, width, like)
        below = top
        theta_i = load(theta, i * width, like)
        for j in range((bands[i, COUNT] - 1) * width, -1, -width):
            skip = load(V, start + j, like)
            pick = load(V, start + j - shift, like) + theta_i
            advantage = pick - skip
            delta = cast(advantage, like)
            store(V, start + j, where(advantage > 0.0, pick, skip) + cast(smoothed(regularizer, delta), skip))  # [V]
            store(Q, table + j, prob(regularizer, delta))  # [Q]


@_function
def _sums(problem, bands, weights, theta, M, X, Q):
    """[V] and [Q] of Shannon as sums over selections: exp V[c] = M[c] 2^X[c], with no exp or log in the loop."""
    like, width, stride = zeros(Q), lanes(Q), problem.stride
    never = _never(Q)
    M[:] = 1.0
    X[:] = never if problem.exactly else 0.0
    X[:stride] = 0.0
    below = 0
    for i in range(weights.shape[0]):
        top, shift, start, table = bands[i, TOP], weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        if not problem.exactly and top > below:
            _extend(M, below, top, stride, width, like)
            _extend(X, below, top, stride, width, like)
        below = top
        theta_i = load(theta, i * width, like)
        out = theta_i < 0.5 * INFEASIBLE
        power = where(out, never, vector.rint(theta_i * LOG2_INVERSE))
        rest = where(out, 0.0, theta_i - power * vector.LOG2_HIGH - power * vector.LOG2_LOW)
        factor_i, power_i = cast(vector.exp(rest), like), cast(power, like)
        for j in range((bands[i, COUNT] - 1) * width, -1, -width):
            skip, skip_power = load(M, start + j, like), load(X, start + j, like)
            pick, pick_power = load(M, start + j - shift, like) * factor_i, load(X, start + j - shift, like) + power_i
            ahead = pick_power - skip_power
            scale = vector.exp2(-vector.abs(ahead))
            pick = where(ahead > 0.0, pick, pick * scale)
            both = pick + where(ahead > 0.0, skip * scale, skip)
            store(M, start + j, both)  # [V]
            store(X, start + j, where(ahead > 0.0, pick_power, skip_power))
            store(Q, table + j, pick / both)  # [Q]
        if i % 16 == 15:  # M has grown by less than 3^16
            for p in range(0, (top + 1) * stride + width, width):
                m = load(M, p, like)
                store(M, p, where(m > 0.0, vector.mantissa(m), m))  # NaN stays NaN
                store(X, p, load(X, p, like) + vector.exponent(m))


@_inline
def _never(Q):
    """The power of two that stands for an infeasible state: whole numbers are exact to twice that."""
    return -(2.0**23) if Q.itemsize == 4 else -(2.0**52)


@_function
def _sums_fit(theta, Q, row):
    """Whether all exponents that can occur are far from that of an infeasible state."""
    like, width = zeros(Q), lanes(Q)
    largest = load(theta, 0, like) * 0.0
    for p in range(0, theta.shape[0], width):
        theta_i = load(theta, p, like)
        largest = largest + where(theta_i < 0.5 * INFEASIBLE, 0.0, vector.abs(theta_i))
    store(row, 0, largest)
    for lane in range(width):  # noqa: SIM110  Numba has no all() of a generator
        if row[lane] * LOG2_INVERSE > -0.25 * _never(Q):
            return False
    return True


def _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q):
    """Q, and V at the goals of the members of a group."""


@overload(_fill)
def _choose_fill(regularizer, problem, scratch, first, members, weights, theta, V, Q):
    def by_values(regularizer, problem, scratch, first, members, weights, theta, V, Q):
        _values(regularizer, problem, scratch.bands, weights, theta, V, Q)

    def by_sums(regularizer, problem, scratch, first, members, weights, theta, V, Q):
        if theta.shape[0] == 0 or not _sums_fit(theta, Q, V):
            _values(regularizer, problem, scratch.bands, weights, theta, V, Q)
            return
        row = _row_length(problem, lanes(Q))
        M, X = scratch.narrow[:row], scratch.narrow[row : 2 * row]  # before the backward sweep needs them
        _sums(problem, scratch.bands, weights, theta, M, X, Q)
        for lane in range(members):
            goal = _goal(problem, scratch, first + lane) * problem.stride + lane
            infeasible = X[goal] < 0.5 * _never(Q) and M[goal] == M[goal]
            V[goal] = INFEASIBLE if infeasible else np.log(np.float64(M[goal])) + X[goal] * LOG2

    return by_sums if regularizer.variant == "shannon" else by_values


@_inline
def _marginals_row(i, problem, bands, weights, E, P, Q, like, width):
    """One step of [E]; returns [y] of the item."""
    stride = problem.stride
    shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
    at_once = _at_once(stride, shift, width)
    y_i = like
    for j in range(0, bands[i, COUNT] * width, width):
        E_c = load(E, start + j, like)
        picked = E_c * load(Q, table + j, like)
        store(E, start + j, E_c - picked)
        if at_once:
            store(E, start + j - shift, load(E, start + j - shift, like) + picked)
        else:
            store(P, j, picked)
        y_i = y_i + picked
    if not at_once:
        _arrive(E, P, start - shift, bands[i, COUNT], width, like)
    return y_i


@_inline
def _at_once(stride, shift, width):
    """Whether picks are added in the same pass: a load across two vectors just stored would wait for both."""
    return stride > 1 or shift > 4 * width


@_inline
def _arrive(E, P, start, count, width, like):
    """Adds what was picked, in a pass of its own."""
    for j in range(0, count * width, width):
        store(E, start + j, load(E, start + j, like) + load(P, j, like))


@_inline
def _fold_row(i, problem, bands, E, like, width):
    below = bands[i - 1, TOP] if i > 0 else 0
    if not problem.exactly and below < bands[i, TOP]:
        _fold(E, below, bands[i, TOP], problem.stride, width, like)


@_function
def _start_marginals(problem, scratch, first, members, E):
    E[:] = 0.0
    for lane in range(members):
        E[_goal(problem, scratch, first + lane) * problem.stride + lane] = 1.0


@_function
def _marginals(problem, bands, weights, E, P, Q, y):
    """The E sweep of [E] and [y]."""
    like, width = zeros(Q), lanes(Q)
    for i in range(weights.shape[0] - 1, -1, -1):
        store(y, i * width, _marginals_row(i, problem, bands, weights, E, P, Q, like, width))
        _fold_row(i, problem, bands, E, like, width)


@_function
def _tangents(regularizer, direction, problem, bands, weights, z, T, Q, R):
    """The derivative T of the V sweep in a direction, [V'], and that of Q, [Q']."""
    like, width, stride = zeros(Q), lanes(Q), problem.stride
    T[:] = 0.0
    below = 0
    for i in range(weights.shape[0]):
        top, shift, start, table = bands[i, TOP], weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        if not problem.exactly and top > below:
            _extend(T, below, top, stride, width, like)
        below = top
        z_i = load(z, i * width, like)
        for j in range((bands[i, COUNT] - 1) * width, -1, -width):
            q = load(Q, table + j, like)
            T_c = load(T, start + j, like)
            change = load(T, start + j - shift, like) - T_c
            added, slope = source(direction, q, z_i)
            store(T, start + j, T_c + (q * change + added))  # [V']
            store(R, table + j, dprob(regularizer, q) * (change + slope))  # [Q']


@_function
def _tangent_marginals(problem, bands, weights, E, D, P, S, Q, R, product):
    """The E sweep together with its derivative D in the direction of the tangent sweep, [E'] and [Hz]."""
    like, width, stride = zeros(Q), lanes(Q), problem.stride
    for i in range(weights.shape[0] - 1, -1, -1):
        shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
        at_once = _at_once(stride, shift, width)
        sum_i = like
        for j in range(0, bands[i, COUNT] * width, width):
            q = load(Q, table + j, like)
            E_c = load(E, start + j, like)
            D_c = load(D, start + j, like)
            picked = E_c * q
            change = D_c * q + E_c * load(R, table + j, like)
            store(E, start + j, E_c - picked)
            store(D, start + j, D_c - change)
            if at_once:
                store(E, start + j - shift, load(E, start + j - shift, like) + picked)
                store(D, start + j - shift, load(D, start + j - shift, like) + change)
            else:
                store(P, j, picked)
                store(S, j, change)
            sum_i = sum_i + change
        if not at_once:
            _arrive(E, P, start - shift, bands[i, COUNT], width, like)
            _arrive(D, S, start - shift, bands[i, COUNT], width, like)
        store(product, i * width, sum_i)
        _fold_row(i, problem, bands, E, like, width)
        _fold_row(i, problem, bands, D, like, width)


@_function
def _final(problem, scratch, V, instance, lane):
    value = V[_goal(problem, scratch, instance) * problem.stride + lane]
    return -np.inf if value < 0.1 * INFEASIBLE else value


@_function
def _row_length(problem, width):
    """With room for the vector that may overhang the last cell, and the one that extends it."""
    return (problem.reach + 1) * problem.stride + 2 * width


@_function
def _prepare(problem, scratch, group):
    """Bands, packed theta and the parts of the scratch: first instance, members, weights, theta, V, Q."""
    width, n = lanes(scratch.narrow), problem.theta.shape[1]
    first, members = _members(problem, group, width)
    _bands(problem, group, width, scratch.bands)
    row = _row_length(problem, width)
    theta = scratch.wide[row : row + n * width]
    _pack_scores(problem, first, members, width, theta)
    Q = _own(scratch.table, group)
    return first, members, _own(problem.weights, first), theta, scratch.wide[:row], Q


@_function
def _spread_nan(first, members, width, theta, y):
    """A selection (samples, batch, n) whose path met a NaN is NaN in every item."""
    for lane in range(members):
        taint = 0.0
        for i in range(y.shape[2]):
            taint += 0.0 * theta[i * width + lane]
        if np.isnan(taint):
            for s in range(y.shape[0]):
                if np.isnan(y[s, first + lane]).any():
                    y[s, first + lane] = np.nan


# The kernels: all groups from ``begin`` to ``end``.


@_kernel
def _operator(regularizer, problem, scratch, begin, end, relaxed, value, y):
    width, n = lanes(scratch.narrow), problem.theta.shape[1]
    row = _row_length(problem, width)
    E, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    for group in range(begin, end):
        first, members, weights, theta, V, Q = _prepare(problem, scratch, group)
        _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q)
        for lane in range(members):
            value[first + lane] = _final(problem, scratch, V, first + lane, lane)
        if relaxed:
            _start_marginals(problem, scratch, first, members, E)
            _marginals(problem, scratch.bands, weights, E, P, Q, sums)
            _unpack(sums, first, members, problem.stride, width, y)
            for b in range(first, first + members):
                for i in range(n):
                    y[b, i] = 1.0 if y[b, i] > 1.0 else y[b, i]  # sums of probabilities round


@_kernel
def _tangent(regularizer, direction, problem, scratch, begin, end, z, backwards, value, tangent, product):
    width, n = lanes(scratch.narrow), problem.theta.shape[1]
    row, cells = _row_length(problem, width), scratch.table.shape[1]
    E, D = scratch.narrow[:row], scratch.narrow[row : 2 * row]
    T, S = scratch.narrow[2 * row : 3 * row], scratch.narrow[3 * row : 4 * row]
    rest = scratch.narrow[4 * row :]
    unit = np.ones(1)
    packed, sums, R = rest[: n * width], rest[n * width : 2 * n * width], rest[2 * n * width : 2 * n * width + cells]
    for group in range(begin, end):
        first, members, weights, theta, V, Q = _prepare(problem, scratch, group)
        _pack(z, unit, first, members, problem.stride, width, packed)
        _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q)
        _tangents(regularizer, direction, problem, scratch.bands, weights, packed, T, Q, R)
        for lane in range(members):
            value[first + lane] = _final(problem, scratch, V, first + lane, lane)
            tangent[first + lane] = T[_goal(problem, scratch, first + lane) * problem.stride + lane]
        if backwards:
            _start_marginals(problem, scratch, first, members, E)
            D[:] = 0.0
            _tangent_marginals(problem, scratch.bands, weights, E, D, T, S, Q, R, sums)
            _unpack(sums, first, members, problem.stride, width, product)


@_kernel
def _sample(regularizer, problem, scratch, begin, end, filled, uniforms, value, y):
    """[sample]: the paths of a group step through the items together."""
    (batch, n), stride, bands, states = problem.theta.shape, problem.stride, scratch.bands, scratch.states
    flat_uniforms, flat_y = uniforms.reshape(-1), y.reshape(-1)
    for group in range(begin, end):
        first, members, weights, theta, V, Q = _prepare(problem, scratch, group)
        if not filled:
            _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q)
            for lane in range(members):
                value[first + lane] = _final(problem, scratch, V, first + lane, lane)
        for s in range(y.shape[0]):
            for lane in range(members):
                states[s * members + lane] = _goal(problem, scratch, first + lane)
        # A step waits for the one before on its path, so paths take turns: those of all lanes, or of 8 samples.
        together, next_lane, next_random = (8, 0, batch * n) if members == 1 else (1, 1, n)
        for block in range(n, 0, -16):  # of items: a cache line of random numbers is used up before the next
            for s in range(0, y.shape[0], together):
                turns = min(together, y.shape[0] - s) * members
                for i in range(block - 1, max(block - 16, 0) - 1, -1):
                    weight, start, row = weights[i], bands[i, START], bands[i, OFFSET]
                    ceiling = problem.reach if problem.exactly else (bands[i - 1, TOP] if i > 0 else 0)
                    random = (s * batch + first) * n + i
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
                        set_item(states, s * members + turn, min(c - weight * picked, ceiling))
        _spread_nan(first, members, lanes(scratch.narrow), theta, y)


@_kernel
def _log_prob(regularizer, problem, scratch, begin, end, filled, y, cotangent, backwards, value, log_prob, gradient):
    """[log-prob] along the path of each selection; backwards, an E sweep that is fed along those paths."""
    width, n = lanes(scratch.narrow), problem.theta.shape[1]
    stride, bands, states, exactly = problem.stride, scratch.bands, scratch.states, problem.exactly
    row = _row_length(problem, width)
    A, P, sums = scratch.narrow[:row], scratch.narrow[row : 2 * row], scratch.narrow[2 * row : 2 * row + n * width]
    like = zeros(scratch.narrow)
    for group in range(begin, end):
        first, members, weights, theta, V, Q = _prepare(problem, scratch, group)
        if not filled:
            _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q)
            for lane in range(members):
                value[first + lane] = _final(problem, scratch, V, first + lane, lane)
        for s in range(y.shape[0]):
            for lane in range(members):
                states[s * members + lane] = _goal(problem, scratch, first + lane)
        A[:] = 0.0
        for i in range(n - 1, -1, -1):
            below = bands[i - 1, TOP] if i > 0 else 0
            if backwards:
                store(sums, i * width, _marginals_row(i, problem, bands, weights, A, P, Q, like, width))
            for s in range(y.shape[0]):
                for lane in range(members):
                    b, state = first + lane, s * members + lane
                    c, picked = states[state], y[s, b, i] != 0.0
                    if c < weights[i]:
                        if picked:
                            log_prob[s, b] = -np.inf
                        left = c
                    else:
                        q = Q[bands[i, OFFSET] + (c - bands[i, START]) * stride + lane]
                        chance = q if picked else 1.0 - q
                        log_prob[s, b] += np.log(chance)
                        left = c - weights[i] if picked else c
                        if backwards and cotangent[s, b] != 0.0:
                            slope = first_lane(dprob(regularizer, broadcast(q, like)))
                            seed = cotangent[s, b] * (slope if picked else -slope) / chance
                            A[(c - weights[i]) * stride + lane] += seed
                            A[c * stride + lane] -= seed
                            sums[i * width + lane] += seed
                    states[state] = left if exactly else min(left, below)
            if backwards:
                _fold_row(i, problem, bands, A, like, width)
        if backwards:
            _unpack(sums, first, members, stride, width, gradient)


@_inline
def _log_chance(q):
    return where(q > 0.0, vector.log(where(q > 0.0, q, 1.0)), -1e30)


@_kernel
def _mode(regularizer, problem, scratch, begin, end, value, y):
    """[mode]: a hard sweep M over the log-probabilities of the decisions, which then stand in the table as 0 and 1."""
    width, n = lanes(scratch.narrow), problem.theta.shape[1]
    stride, bands, like = problem.stride, scratch.bands, zeros(scratch.narrow)
    M = scratch.narrow[: _row_length(problem, width)]
    for group in range(begin, end):
        first, members, weights, theta, V, Q = _prepare(problem, scratch, group)
        _fill(regularizer, problem, scratch, first, members, weights, theta, V, Q)
        M[:] = 0.0
        for i in range(n):
            below = bands[i - 1, TOP] if i > 0 else 0
            shift, start, table = weights[i] * stride, bands[i, START] * stride, bands[i, OFFSET]
            if not problem.exactly and bands[i, TOP] > below:
                _extend(M, below, bands[i, TOP], stride, width, like)
            for j in range((bands[i, COUNT] - 1) * width, -1, -width):
                q = load(Q, table + j, like)
                pick = load(M, start + j - shift, like) + _log_chance(q)
                skip = load(M, start + j, like) + _log_chance(1.0 - q)
                store(M, start + j, where(pick > skip, pick, skip))
                store(Q, table + j, where(pick > skip, like + 1.0, where(q > -1.0, like, q)))  # NaN stays NaN
        for lane in range(members):
            value[first + lane] = _final(problem, scratch, V, first + lane, lane)
            c = _goal(problem, scratch, first + lane)
            for i in range(n - 1, -1, -1):
                picked = 0.0
                if c >= weights[i]:
                    picked = Q[bands[i, OFFSET] + (c - bands[i, START]) * stride + lane]
                y[first + lane, i] = picked
                c -= weights[i] if picked > 0.0 else 0
                c = c if problem.exactly else min(c, bands[i - 1, TOP] if i > 0 else 0)
        _spread_nan(first, members, width, theta, y.reshape(1, *y.shape))


# What the rest of the library calls: theta (*batch, n), weights broadcastable to it, capacity and gamma to the batch.
# All are functions of theta / gamma, which is formed in float64: rounded to float32 it would move near-ties. The
# largest capacity that matters, ``reach``, is for kernels that cannot look at their arguments; here it is measured.

# Instances go into the lanes when enough of them share their weights and the table of a group stays near the cache.
_LARGEST_SHARED_TABLE = 8 << 20  # bytes
_NANOSECONDS_PER_VECTOR = 8  # of a value + relax sweep, to tell whether threads are worth waking


def _layout(theta, weights, capacity, gamma, exactly):
    """The problem with a flat batch, its stride and reach; the number of groups; the length of a table."""
    n, batch = theta.shape[-1], prod(theta.shape[:-1])
    if weights.size != n:
        weights = np.broadcast_to(weights, theta.shape)
    if capacity.size != 1:
        capacity = np.broadcast_to(capacity, theta.shape[:-1])
    if gamma.size != 1:
        gamma = np.broadcast_to(gamma, theta.shape[:-1])
    theta, weights = _ready(theta, batch, n), _ready(weights, -(-weights.size // max(n, 1)), n)
    capacity, gamma = _ready(capacity, capacity.size), _ready(gamma.astype(np.float64, copy=False), gamma.size)
    width = vector.BYTES // theta.itemsize
    bands = np.empty((n, 4), np.int64)
    shared = weights.shape[0] == 1 and batch > width // 4
    for stride in (width, 1) if shared else (1,):
        reach, cells = _measure(Problem(theta, weights, capacity, gamma, exactly, stride, 0), width, bands)
        if cells * theta.itemsize <= _LARGEST_SHARED_TABLE:
            break
    return Problem(theta, weights, capacity, gamma, exactly, stride, reach), -(-batch // stride), cells


def _ready(array, *shape):
    """Of that shape, C-contiguous and writeable: the one memory layout that the kernels are compiled for."""
    flags = array.flags
    if not (flags.c_contiguous and flags.writeable):
        array = np.array(array, order="C")
    return array.reshape(shape)


def _run(kernel, variants, layout, *arguments, weight=1.0, samples=0, rows=2, tables=0, table=None):
    """Runs a kernel over all groups, in slices, each thread in its own scratch."""
    problem, groups, cells = layout
    theta = problem.theta
    n, width = theta.shape[1], vector.BYTES // theta.itemsize
    row = _row_length.py_func(problem, width)
    sizes = (samples * width, row + n * width, rows * row + 2 * n * width + tables * cells, cells)

    def work(begin: int, end: int) -> None:
        try:
            states, wide, narrow, own_table = pool.scratch(theta.dtype, sizes)
        except MemoryError as error:
            raise _too_large(problem, error) from None
        scratch = Scratch(np.empty((n, 4), np.int64), states, wide, narrow, own_table if table is None else table)
        kernel(*variants, problem, scratch, begin, end, *arguments)

    pool.run(work, groups, weight * groups * cells / width * _NANOSECONDS_PER_VECTOR)


def _too_large(problem, error: MemoryError) -> MemoryError:
    return MemoryError(
        f"the tables for a capacity of {problem.reach:,} do not fit into memory ({error}); divide weights and capacity "
        "by a common factor, or scale them down and round"
    )


def _check_feasible(value: np.ndarray, exactly: bool) -> None:
    if exactly and (value == -np.inf).any():
        instance = int(np.argmax(value == -np.inf))
        raise ValueError(
            f"theta leaves fewer than k items to choose from in instance {instance} (counted over the flattened "
            "batch): mask fewer items with -inf, or lower k there"
        )


def operator(theta, weights, capacity, gamma, regularizer, exactly, reach=None, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    layout = _layout(theta, weights, capacity, gamma, exactly)
    value, y = _outputs(layout)
    _run(_operator, [VARIANTS[regularizer]], layout, relaxed, value, y)
    _check_feasible(value, exactly)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape)


def tabulate(theta, weights, capacity, gamma, regularizer, exactly, reach=None):
    """The same, and the table Q of every group, for sample and log_prob with the same arguments."""
    layout = _layout(theta, weights, capacity, gamma, exactly)
    value, y = _outputs(layout)
    try:
        table = np.empty(layout[1:], theta.dtype)
    except MemoryError as error:
        raise _too_large(layout[0], error) from None
    _run(_operator, [VARIANTS[regularizer]], layout, True, value, y, table=table)
    _check_feasible(value, exactly)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), table


def vjp(theta, z, weights, capacity, gamma, regularizer, exactly, reach=None):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _tangent_of("linear", theta, z, weights, capacity, gamma, regularizer, exactly, True, 2.5)[1]


def entropy(theta, weights, capacity, gamma, regularizer, exactly, reach=None):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    return _tangent_of("entropy", theta, theta, weights, capacity, gamma, regularizer, exactly, False, 5.0)[0]


def entropy_grad(theta, weights, capacity, gamma, regularizer, exactly, reach=None):
    """Its gradient (*batch, n)."""
    return _tangent_of("entropy", theta, theta, weights, capacity, gamma, regularizer, exactly, True, 5.0)[1]


def _tangent_of(direction, theta, z, weights, capacity, gamma, regularizer, exactly, backwards, weight):
    layout = _layout(theta, weights, capacity, gamma, exactly)
    (value, product), z = _outputs(layout), _ready(z, *layout[0].theta.shape)
    tangent = np.empty_like(value)
    variants = [VARIANTS[regularizer], VARIANTS[direction]]
    _run(_tangent, variants, layout, z, backwards, value, tangent, product, weight=weight, rows=4, tables=1)
    _check_feasible(value, exactly)
    return tangent.reshape(theta.shape[:-1]), product.reshape(theta.shape)


def sample(theta, uniforms, weights, capacity, gamma, regularizer, exactly, reach=None, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    layout, samples = _layout(theta, weights, capacity, gamma, exactly), uniforms.shape[0]
    flat = _ready(uniforms, samples, *layout[0].theta.shape)
    value, y = np.zeros(flat.shape[1]), np.empty_like(flat)
    arguments = table is not None, flat, value, y
    _run(_sample, [VARIANTS[regularizer]], layout, *arguments, weight=1 + 0.05 * samples, samples=samples, table=table)
    _check_feasible(value, exactly)
    return y.reshape(uniforms.shape)


def solve(theta, weights, capacity, exactly, reach=None):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item."""
    uniforms = np.full((1, *theta.shape), 0.5, theta.dtype)
    return sample(theta, uniforms, weights, capacity, np.ones(1), "hard", exactly)[0]


def mode(theta, weights, capacity, gamma, regularizer, exactly, reach=None):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    layout = _layout(theta, weights, capacity, gamma, exactly)
    value, y = _outputs(layout)
    _run(_mode, [VARIANTS[regularizer]], layout, value, y, weight=2.0)
    _check_feasible(value, exactly)
    return y.reshape(theta.shape)


def log_prob(theta, y, weights, capacity, gamma, regularizer, exactly, reach=None, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    return _log_prob_of(theta, y, None, weights, capacity, gamma, regularizer, exactly, table)[0]


def log_prob_vjp(theta, y, cotangent, weights, capacity, gamma, regularizer, exactly, reach=None):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    return _log_prob_of(theta, y, cotangent, weights, capacity, gamma, regularizer, exactly, None)[1]


def _log_prob_of(theta, y, cotangent, weights, capacity, gamma, regularizer, exactly, table):
    layout, samples, backwards = _layout(theta, weights, capacity, gamma, exactly), y.shape[0], cotangent is not None
    value, gradient = _outputs(layout)
    value[:] = 0.0
    flat = _ready(y, samples, *gradient.shape)
    result = np.zeros(flat.shape[:2], theta.dtype)
    cotangent = _ready(cotangent, *result.shape) if backwards else result
    arguments = table is not None, flat, cotangent, backwards, value, result, gradient
    _run(_log_prob, [VARIANTS[regularizer]], layout, *arguments, weight=1 + 0.1 * samples, samples=samples, table=table)
    _check_feasible(value, exactly)
    return result.reshape(y.shape[:-1]), gradient.reshape(theta.shape)


def _outputs(layout):
    theta = layout[0].theta
    return np.empty(theta.shape[0]), np.empty_like(theta)
