"""The sweeps of :mod:`knapgrad.reference` for JAX, by ``lax.scan`` over items or choices: they run on every device.

Functions take one instance and are batched by ``vmap``. Weights that instances share are not batched, so that shifting
their rows is one slice. V is in float64 for every dtype of theta, because a decision is a difference of two large V;
float64 is switched on for this sweep alone. (A TPU computes it with pairs of float32.) All else has theta's dtype.
Sweeps are kept separate, since XLA computes a step once for each of its results. Tags such as [V] name the equations
in docs/math.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from knapgrad import regularizers
from knapgrad.lattice import FEASIBLE, INFEASIBLE, LARGEST, Lattice, fits

Array = jax.Array
float64 = jax.enable_x64

# Arrays are leaves; what gives tables their shapes is known when a function is compiled.
jax.tree_util.register_dataclass(
    Lattice, ["weights", "capacity", "slack", "sizes"], ["reach", "heaviest", "options", "box", "counts"]
)


def _functions(regularizer: str) -> dict[str, Callable[..., Any]]:
    return {name: regularizers.rebind(f, jnp) for name, f in regularizers.functions(regularizer).items()}


def _scores(theta: Array, gamma: Array) -> Array:
    """theta / gamma. -inf takes an item out; +inf, what is out of range, or a gamma that is not positive, gives NaN."""
    gamma = gamma.astype(jnp.float64)
    scores = theta.astype(jnp.float64) / jnp.where(gamma > 0, gamma, jnp.nan)
    scores = jnp.where(abs(scores) <= LARGEST, scores, jnp.nan)
    return jnp.where((theta == -jnp.inf) & (gamma > 0), INFEASIBLE, scores)


def varying_axes(x: Array) -> frozenset[str]:
    """The axes of a mesh along which x differs, in ``jax.shard_map``. Versions of JAX have two names for it."""
    kind = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())


def varying(tree: Any) -> Any:
    """All arrays, marked as different between devices along the axes along which any of them is."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def mark(x: Array) -> Array:
        missing = tuple(axes - varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def scan(step: Callable[..., Any], carry: Any, items: Any, reverse: bool = False) -> Any:
    """``lax.scan``, whose carry is batched and sharded, and differs between devices, as soon as an item does."""
    zeros = [x[:0].sum() for x in jax.tree.leaves(items)]  # sums of nothing

    def like_items(x: Array) -> Array:
        for zero in zeros:
            x = x + zero.astype(x.dtype)
        return x

    return lax.scan(step, jax.tree.map(like_items, carry), items, reverse=reverse)


# Rows over the capacities 0..reach.


def shifted(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c - w]`` for every c, and an arbitrary number where c < w."""
    return lax.dynamic_slice(jnp.concatenate([row[:heaviest], row]), (heaviest - w,), row.shape)


def _down(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return lax.dynamic_slice(jnp.pad(row, (0, heaviest)), (w,), row.shape)


def _capacities(lattice: Lattice) -> Array:
    return jnp.arange(lattice.reach + 1, dtype=jnp.int32)


def _ups(row: Array, w: Array, heaviest: int) -> Array:
    """:func:`_up` by each of several weights, (options, reach + 1)."""
    return jax.vmap(lambda w: shifted(row, w, heaviest))(w)


# Choices. Their options are in an order of our own, in which every level of the tournament joins two slices: first come
# nodes that stay alone, which only the lowest level has, then those that are skipped, then as many that are picked.


def _order(options: int) -> np.ndarray:
    """The option in each row."""
    nodes = [range(options)]
    while len(nodes) < options:
        pairs = [node for node in nodes if len(node) > 1]
        alone = nodes[: len(nodes) - len(pairs)]
        nodes = [*alone, *(x[: len(x) // 2] for x in pairs), *(x[len(x) // 2 :] for x in pairs)]
    return np.array([node[0] for node in nodes])


def _level(nodes: Array) -> list[Array]:
    """The nodes that stay alone, that are skipped and that are picked."""
    half = 1 << ((len(nodes) - 1).bit_length() - 1)
    return [nodes[: 2 * half - len(nodes)], nodes[2 * half - len(nodes) : half], nodes[half:]]


def _each(function: Callable[..., Any], *rows: Array) -> Any:
    """``function``, entry by entry. On a CPU in a loop over rows: XLA would compute a level anew for each use of it."""

    def loop(*rows: Array) -> Any:
        return lax.map(lambda row: function(*row), rows)

    return lax.platform_dependent(*rows, cpu=loop, default=function)


def _rows(x: Array, lattice: Lattice) -> Array:
    """Numbers per item (n,), or as rows of choices (choices, options)."""
    m = lattice.options
    return x.reshape(x.shape[0] // m, m)[:, _order(m)] if m else x


def _items(x: Array, lattice: Lattice) -> Array:
    """The reverse."""
    return x[:, np.argsort(_order(lattice.options))].reshape(-1) if lattice.options else x


# Sweeps.


def _fill(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """The last row of [V], in float64, all NaN if a score is; and the table [Q] (n, reach + 1), or of choices [P]
    (choices, options, reach + 1)."""
    functions = _functions(regularizer)
    value, prob = functions["value"], functions["prob"]
    dtype, c = theta.dtype, _capacities(lattice)

    def smooth(pick: Array, skip: Array) -> tuple[Array, Array]:
        delta = (pick - skip).astype(dtype)
        larger = jnp.where(pick > skip, pick, skip)
        return larger + value(delta).astype(jnp.float64), prob(delta)  # [V], [Q]

    def step(V: Array, item: tuple[Array, Array]) -> Any:
        score, w = item
        inside = fits(c, w, lattice.box)
        joined, q = smooth(shifted(V, w, lattice.heaviest) + score, V)
        return jnp.where(inside, joined, V), jnp.where(inside, q, 0)

    def choose(V: Array, choice: tuple[Array, Array]) -> Any:
        scores, w = choice
        nodes = jnp.where(c >= w[:, None], _ups(V, w, lattice.heaviest) + scores[:, None], INFEASIBLE)
        P, decisions = jnp.ones((1, *c.shape), dtype), []
        while len(nodes) > 1:
            alone, skip, pick = _level(nodes)
            joined, q = _each(smooth, pick, skip)
            nodes = jnp.concatenate([alone, joined])
            decisions.append(q)
        for q in reversed(decisions):
            alone, either = jnp.split(P, [len(P) - len(q)])
            P = jnp.concatenate([alone, either * (1.0 - q), either * q])  # [P]
        return jnp.maximum(nodes[0], INFEASIBLE), P

    with float64(True):
        V = jnp.zeros(c.shape) if lattice.slack is None else jnp.where(c > lattice.slack, INFEASIBLE, 0.0)
        scores = _scores(theta, gamma)
        rows = _rows(scores, lattice), _rows(lattice.weights, lattice)
        V, Q = scan(choose if lattice.options else step, V, rows)
        return jnp.where(jnp.isnan(scores).any(), jnp.nan, V), Q


def _optimum(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """[V] at the capacity, NaN if it is infeasible, and the table."""
    goal = lattice.capacity
    V, Q = _fill(theta, lattice, gamma, regularizer)
    with float64(True):
        return jnp.where((goal < 0) | (V[goal] < FEASIBLE), jnp.nan, V[goal]).astype(theta.dtype), Q


def _nothing(value: Array) -> Array:
    """0, or NaN if the value is; not if it is infinite, since theta / gamma may be beyond the range of its type."""
    return jnp.where(jnp.isnan(value), jnp.nan, 0.0).astype(value.dtype)


def _follow(lattice: Lattice, regularizer: str, Q: Array, direction: str, z: Array) -> tuple[Array, Array]:
    """[V'] at the capacity, and the table [Q'] or [P']."""
    dprob, c = _functions(regularizer)["dprob"], _capacities(lattice)
    source = regularizers.rebind(regularizers.DIRECTIONS[direction], jnp)

    def step(T: Array, item: tuple[Array, Array, Array]) -> Any:
        q, w, z_i = item
        inside = fits(c, w, lattice.box)
        added, slope = source(q, z_i)
        change = shifted(T, w, lattice.heaviest) - T
        return jnp.where(inside, T + q * change + added, T), jnp.where(inside, dprob(q) * (change + slope), 0)

    def join(pick: Array, skip: Array, picked: Array, skipped: Array) -> tuple[Array, ...]:
        mass, change = picked + skipped, pick - skip
        q = jnp.where(mass > 0, picked / jnp.where(mass > 0, mass, 1.0), 0.0)  # [Q]
        q = jnp.where(q > 1.0, 1.0, q)  # a GPU does not round quotients to the nearest
        added, slope = source(q, 0.0)
        return skip + q * change + added, mass, q, mass * dprob(q) * (change + slope)  # [V'], [Q']

    def choose(T: Array, choice: tuple[Array, Array, Array]) -> Any:
        mass, w, z_o = choice
        nodes = _ups(T, w, lattice.heaviest) + z_o[:, None]
        R, decisions = jnp.zeros((1, *c.shape), Q.dtype), []
        while len(nodes) > 1:
            (alone, skip, pick), (unsplit, skipped, picked) = _level(nodes), _level(mass)
            joined, total, q, moved = _each(join, pick, skip, picked, skipped)
            nodes, mass = jnp.concatenate([alone, joined]), jnp.concatenate([unsplit, total])
            decisions.append((q, moved))
        for q, moved in reversed(decisions):
            alone, either = jnp.split(R, [len(R) - len(q)])
            R = jnp.concatenate([alone, either * (1.0 - q) - moved, either * q + moved])  # [P']
        return nodes[0], R

    rows = Q, _rows(lattice.weights, lattice), _rows(z, lattice)
    T, R = scan(choose if lattice.options else step, jnp.zeros(c.shape, Q.dtype), rows)
    return T[lattice.capacity], R


def _goal(lattice: Lattice, value: Array) -> Array:
    """All paths start at the capacity. The value is an argument so that its NaN reaches every item."""
    return (_capacities(lattice) == lattice.capacity).astype(value.dtype) + _nothing(value)


def _collect(lattice: Lattice, E: Array, Q: Array, R: Array | None = None) -> Array:
    """[y] of paths that start at c as often as E says, or with both tables [Hz]."""

    def down(row: Array, w: Array) -> Array:
        return _down(row, w, lattice.heaviest)

    def downs(rows: Array, w: Array) -> Array:
        return jax.vmap(down)(rows, w).sum(0)

    def step(E: Array, item: Any) -> Any:
        q, w = item
        picked = E * q
        return E - picked + down(picked, w), picked.sum()  # [E], [y]

    def tangent_step(rows: tuple[Array, Array], item: Any) -> Any:
        (E, D), (q, r, w) = rows, item
        picked, change = E * q, D * q + E * r
        return (E - picked + down(picked, w), D - change + down(change, w)), change.sum()  # [E], [E'], [Hz]

    def choose(E: Array, choice: Any) -> Any:
        P, w = choice
        return downs(E * P, w), (E * P).sum(-1)  # [E], [y]

    def tangent_choose(rows: tuple[Array, Array], choice: Any) -> Any:
        (E, D), (P, R, w) = rows, choice
        change = D * P + E * R
        return (downs(E * P, w), downs(change, w)), change.sum(-1)  # [E], [E'], [Hz]

    w, options = _rows(lattice.weights, lattice), lattice.options
    if R is None:
        y = scan(choose if options else step, E, (Q, w), reverse=True)[1]
    else:
        y = scan(tangent_choose if options else tangent_step, (E, 0.0 * E), (Q, R, w), reverse=True)[1]
    return _items(y, lattice)


# The functions of theta / gamma, for one instance: theta (n,), a lattice with weights (n,), int32, at most reach + 1,
# and numbers for capacity (int32, at most reach; below 0 if it is not valid) and slack; gamma a number, of theta's
# type: rounding it scales all scores alike, which does no harm.


def value(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The smoothed optimum."""
    return _optimum(theta, lattice, gamma, regularizer)[0]


def operator(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """The smoothed optimum, and its gradient, the relaxed selection (n,)."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    y = _collect(lattice, _goal(lattice, value), Q)
    return value, jnp.where(y > 1.0, 1.0, y)


def frontier(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The smoothed optimum at every capacity (reach + 1,), -inf where nothing is feasible."""
    V, _ = _fill(theta, lattice, gamma, regularizer)
    with float64(True):
        return jnp.where(V < FEASIBLE, -jnp.inf, V).astype(theta.dtype)


def frontier_vjp(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, cotangent: Array) -> Array:
    """The gradient (n,) of the sum of those optima weighted by a cotangent (reach + 1,)."""
    V, Q = _fill(theta, lattice, gamma, regularizer)
    with float64(True):
        E = jnp.where(V < FEASIBLE, 0.0, cotangent + (0.0 * V).astype(theta.dtype))
    return _collect(lattice, E, Q)


def vjp(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, z: Array) -> Array:
    """The symmetric Jacobian of the relaxed selection, times z (n,)."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    _, R = _follow(lattice, regularizer, Q, "linear", z)
    return _collect(lattice, _goal(lattice, value), Q, R)


def entropy(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The Shannon entropy of the distribution over selections."""
    return entropy_grad(theta, lattice, gamma, regularizer)[0]


def entropy_grad(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """The same, and its gradient (n,)."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    tangent, R = _follow(lattice, regularizer, Q, "entropy", jnp.zeros_like(theta))
    return tangent + _nothing(value), _collect(lattice, _goal(lattice, value), Q, R)


def tabulate(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array, Array]:
    """The smoothed optimum, the relaxed selection (n,) and the table."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    y = _collect(lattice, _goal(lattice, value), Q)
    return value, jnp.where(y > 1.0, 1.0, y), Q


def sample(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, uniforms: Array) -> Array:
    """A selection for each row of uniform numbers (samples, n) in [0, 1). A choice uses the first of its numbers."""
    return walk(lattice, *_optimum(theta, lattice, gamma, regularizer), uniforms)


def walk(lattice: Lattice, value: Array, Q: Array, uniforms: Array) -> Array:
    """The same with a table that is known."""
    nothing, samples, m = _nothing(value), len(uniforms), lattice.options

    def step(c: Array, item: Any) -> Any:
        row, w, u = item
        q = row[c]
        return jnp.where(u < q, c - w, c), (u < q) + 0.0 * q + nothing  # [sample]; NaN stays NaN

    def choose(c: Array, choice: Any) -> Any:
        P, w, u = choice
        p, options = P[np.argsort(_order(m))][:, c], np.arange(m, dtype=np.int32)[:, None]
        reached = jnp.cumsum(p[::-1], axis=0)[::-1]  # of this option and those after it
        last = jnp.where((p > 0) & (u[0] < reached), options, -1).max(0)
        picked = options == jnp.where(last < 0, (p > 0).argmax(0), last)  # [sample]
        return c - jnp.where(picked, w[:, None], 0).sum(0, dtype=c.dtype), picked + 0.0 * p + nothing

    w, u = lattice.weights, uniforms.T
    if m:
        w, u = w.reshape(len(Q), m), u.reshape(len(Q), m, samples)
    start = jnp.broadcast_to(lattice.capacity, (samples,))
    y = scan(choose if m else step, start, (Q, w, u), reverse=True)[1]
    return y.reshape(uniforms.T.shape).T


def solve(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The best selection (n,); of ties, the one that skips the later item or takes the earlier option."""
    return sample(theta, lattice, gamma, regularizer, jnp.full((1, *theta.shape), 0.5, theta.dtype))[0]


def _chances(lattice: Lattice, Q: Array, y: Array) -> tuple[Any, Array, Array]:
    """Where the path of each selection (samples, n) is in the table, the chance of each of its decisions, and the
    derivative of that by the table. A choice with more or less than one pick has no chance."""
    picked, used = y != 0, jnp.where(y != 0, lattice.weights, 0)
    if lattice.options:
        picked, used = (x.reshape(len(y), len(Q), lattice.options) for x in (picked, used))
        used = used.sum(-1)
    later = jnp.cumsum(used[:, ::-1], axis=1)[:, ::-1] - used
    at: Any = np.arange(len(Q)), jnp.maximum(lattice.capacity - later, 0)
    if lattice.options:
        at = at[0], picked[..., _order(lattice.options)].argmax(-1), at[1]
        return at, jnp.where(picked.sum(-1) == 1, Q[at], 0.0), jnp.ones(used.shape, Q.dtype)
    return at, jnp.where(picked, Q[at], 1.0 - Q[at]), jnp.where(picked, 1.0, -1.0)


def mode(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The selection (n,) of the highest probability."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    c = _capacities(lattice)

    def log(p: Array) -> Array:
        return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), INFEASIBLE)

    def step(M: Array, item: Any) -> Any:
        q, w = item[0].astype(M.dtype), item[1]
        inside = fits(c, w, lattice.box)
        pick = jnp.where(inside, shifted(M, w, lattice.heaviest) + log(q), INFEASIBLE)
        skip = M + log(1.0 - q)
        return jnp.maximum(jnp.where(pick > skip, pick, skip), INFEASIBLE), (pick > skip) + 0.0 * item[0]  # [mode]

    def choose(M: Array, choice: Any) -> Any:
        P, w = choice[0].astype(M.dtype), choice[1]
        nodes = jnp.where(c >= w[:, None], _ups(M, w, lattice.heaviest) + log(P), INFEASIBLE)
        best = jnp.where(nodes == nodes.max(0), _order(lattice.options)[:, None], lattice.options).min(0)
        hard = (_order(lattice.options)[:, None] == best) + 0.0 * choice[0]
        return jnp.maximum(nodes.max(0), INFEASIBLE), hard

    with float64(True):
        rows = Q, _rows(lattice.weights, lattice)
        _, hard = scan(choose if lattice.options else step, jnp.zeros(c.shape, jnp.float64), rows)
    return walk(lattice, value, hard, jnp.full((1, *theta.shape), 0.5, theta.dtype))[0]


def log_prob(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, y: Array) -> Array:
    """Log-probabilities (samples,) of selections y (samples, n)."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    return jnp.log(_chances(lattice, Q, y)[1]).sum(-1) + _nothing(value)  # [log-prob]


def log_prob_jvp(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, y: Array, z: Array) -> Array:
    """Their derivatives (samples,) in direction z (1, n), linear in z; 0 where the probability is."""
    value, Q = _optimum(theta, lattice, gamma, regularizer)
    sound = 1.0 + _nothing(value)  # a factor before and after, so that NaN gets through both ways
    _, R = _follow(lattice, regularizer, Q, "linear", sound * z[0])
    at, chance, sign = _chances(lattice, Q, y)
    slope = sign / jnp.where(chance > 0, chance, 1.0)
    possible = (chance > 0).all(-1)
    return sound * jnp.where(possible, (jnp.where(possible[:, None], slope, 0.0) * R[at]).sum(-1), 0.0)
