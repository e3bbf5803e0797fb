"""The sweeps of :mod:`knapgrad.reference` for JAX, by ``lax.scan`` over the items: they run on every device.

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
from jax import lax

from knapgrad import regularizers
from knapgrad.lattice import FEASIBLE, INFEASIBLE, Lattice

Array = jax.Array
float64 = jax.enable_x64

# Arrays are leaves; what gives tables their shapes is known when a function is compiled.
jax.tree_util.register_dataclass(Lattice, ["weights", "capacity", "slack"], ["reach", "heaviest"])


def _functions(regularizer: str) -> dict[str, Callable[..., Any]]:
    return {name: regularizers.rebind(f, jnp) for name, f in regularizers.functions(regularizer).items()}


def _scores(theta: Array, gamma: Array) -> Array:
    """theta / gamma. -inf takes an item out; +inf, or a gamma that is not positive, gives NaN."""
    gamma = gamma.astype(jnp.float64)
    scores = theta.astype(jnp.float64) / jnp.where(gamma > 0, gamma, jnp.nan)
    return jnp.where(scores == -jnp.inf, INFEASIBLE, jnp.where(scores == jnp.inf, jnp.nan, scores))


# Rows over the capacities 0..reach.


def _up(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c - w]`` for every c, and an arbitrary number where c < w."""
    return lax.dynamic_slice(jnp.concatenate([row[:heaviest], row]), (heaviest - w,), row.shape)


def _down(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return lax.dynamic_slice(jnp.pad(row, (0, heaviest)), (w,), row.shape)


def _capacities(lattice: Lattice) -> Array:
    return jnp.arange(lattice.reach + 1, dtype=jnp.int32)


def _fill(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """[V] at the capacity, and the table [Q] (n, reach + 1)."""
    functions = _functions(regularizer)
    value, prob = functions["value"], functions["prob"]
    dtype, goal, c = theta.dtype, lattice.capacity, _capacities(lattice)

    def step(V: Array, item: tuple[Array, Array]) -> Any:
        score, w = item
        fits = c >= w
        pick = _up(V, w, lattice.heaviest) + score
        delta = (pick - V).astype(dtype)
        larger = jnp.where(pick > V, pick, V)
        V = jnp.where(fits, larger + value(delta).astype(jnp.float64), V)
        return V, jnp.where(fits, prob(delta), 0)  # [V], [Q]

    with float64(True):
        V = jnp.zeros(c.shape) if lattice.slack is None else jnp.where(c > lattice.slack, INFEASIBLE, 0.0)
        V, Q = lax.scan(step, V, (_scores(theta, gamma), lattice.weights))
        result = jnp.where((goal < 0) | (V[goal] < FEASIBLE), jnp.nan, V[goal])
        return result.astype(dtype), Q


def _follow(lattice: Lattice, regularizer: str, Q: Array, direction: str, z: Array) -> tuple[Array, Array]:
    """[V'] at the capacity, and the table [Q']."""
    dprob, c = _functions(regularizer)["dprob"], _capacities(lattice)
    source = regularizers.rebind(regularizers.DIRECTIONS[direction], jnp)

    def step(T: Array, item: tuple[Array, Array, Array]) -> Any:
        q, w, z_i = item
        fits = c >= w
        added, slope = source(q, z_i)
        change = _up(T, w, lattice.heaviest) - T
        return jnp.where(fits, T + q * change + added, T), jnp.where(fits, dprob(q) * (change + slope), 0)

    T, R = lax.scan(step, jnp.zeros(c.shape, Q.dtype), (Q, lattice.weights, z))
    return T[lattice.capacity], R


def _collect(lattice: Lattice, value: Array, Q: Array, R: Array | None = None) -> Array:
    """[y], or with both tables [Hz]. The value is an argument so that its NaN reaches every item."""
    E = (_capacities(lattice) == lattice.capacity).astype(Q.dtype) + 0.0 * value

    def down(row: Array, w: Array) -> Array:
        return _down(row, w, lattice.heaviest)

    def step(E: Array, item: Any) -> Any:
        q, w = item
        picked = E * q
        return E - picked + down(picked, w), picked.sum()  # [E], [y]

    def tangent_step(rows: tuple[Array, Array], item: Any) -> Any:
        (E, D), (q, r, w) = rows, item
        picked, change = E * q, D * q + E * r
        return (E - picked + down(picked, w), D - change + down(change, w)), change.sum()  # [E], [E'], [Hz]

    if R is None:
        y = lax.scan(step, E, (Q, lattice.weights), reverse=True)[1]
        return jnp.where(y > 1.0, 1.0, y)
    return lax.scan(tangent_step, (E, 0.0 * E), (Q, R, lattice.weights), reverse=True)[1]


# The functions of theta / gamma, for one instance: theta (n,), a lattice with weights (n,), int32, at most reach + 1,
# and numbers for capacity (int32, at most reach; below 0 if it is not valid) and slack; gamma a number, of theta's
# type: rounding it scales all scores alike, which does no harm.


def value(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The smoothed optimum."""
    return _fill(theta, lattice, gamma, regularizer)[0]


def operator(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """The smoothed optimum, and its gradient, the relaxed selection (n,)."""
    value, Q = _fill(theta, lattice, gamma, regularizer)
    return value, _collect(lattice, value, Q)


def vjp(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, z: Array) -> Array:
    """The symmetric Jacobian of the relaxed selection, times z (n,)."""
    value, Q = _fill(theta, lattice, gamma, regularizer)
    _, R = _follow(lattice, regularizer, Q, "linear", z)
    return _collect(lattice, value, Q, R)


def entropy(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> tuple[Array, Array]:
    """The Shannon entropy of the distribution over selections, and its gradient (n,)."""
    value, Q = _fill(theta, lattice, gamma, regularizer)
    tangent, R = _follow(lattice, regularizer, Q, "entropy", theta)
    return tangent + 0.0 * value, _collect(lattice, value, Q, R)


def sample(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, uniforms: Array) -> Array:
    """A selection for each row of uniform numbers (samples, n) in [0, 1)."""
    value, Q = _fill(theta, lattice, gamma, regularizer)

    def step(c: Array, item: Any) -> Any:
        row, w, u = item
        q = row[c]
        return jnp.where(u < q, c - w, c), (u < q) + 0.0 * (q + value)  # [sample]; NaN stays NaN

    return jax.vmap(lambda u: lax.scan(step, lattice.capacity, (Q, lattice.weights, u), reverse=True)[1])(uniforms)


def solve(theta: Array, lattice: Lattice, gamma: Array, regularizer: str) -> Array:
    """The best selection (n,); of ties, the one that skips the later item."""
    return sample(theta, lattice, gamma, regularizer, jnp.full_like(theta, 0.5)[None])[0]


def _chances(lattice: Lattice, Q: Array, y: Array) -> tuple[Any, Array]:
    """Where the path of each selection (samples, n) is in the table, and the chance of each of its decisions."""
    used = jnp.where(y != 0, lattice.weights, 0)
    later = jnp.cumsum(used[:, ::-1], axis=1)[:, ::-1] - used
    at = jnp.arange(y.shape[1]), jnp.maximum(lattice.capacity - later, 0)
    return at, jnp.where(y != 0, Q[at], 1.0 - Q[at])


def log_prob(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, y: Array) -> Array:
    """Log-probabilities (samples,) of selections y (samples, n)."""
    value, Q = _fill(theta, lattice, gamma, regularizer)
    return jnp.log(_chances(lattice, Q, y)[1]).sum(-1) + 0.0 * value  # [log-prob]


def log_prob_jvp(theta: Array, lattice: Lattice, gamma: Array, regularizer: str, y: Array, z: Array) -> Array:
    """Their derivatives (samples,) in direction z (1, n), linear in z; 0 where the probability is."""
    _, Q = _fill(theta, lattice, gamma, regularizer)
    _, R = _follow(lattice, regularizer, Q, "linear", z[0])
    at, chance = _chances(lattice, Q, y)
    slope = jnp.where(y != 0, 1.0, -1.0) / jnp.where(chance > 0, chance, 1.0)
    possible = (chance > 0).all(-1)
    return jnp.where(possible, (jnp.where(possible[:, None], slope, 0.0) * R[at]).sum(-1), 0.0)
