"""The sweeps of :mod:`knapgrad.reference` for JAX, by ``lax.scan`` over the items: they run on every device.

Functions are for one instance, and batched by ``vmap``; weights that instances share stay shared, so that a shift of
their rows is one slice. V is carried in float64 whatever theta is, because a decision is a difference of two large V:
that type is switched on for this sweep alone. (A TPU computes it with pairs of float32.) All else has theta's type.
Sweeps are apart as far as they can be, since XLA computes a step once for each of its results. Tags such as [V] name
the equations in docs/math.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from knapgrad import regularizers
from knapgrad.reference import INFEASIBLE

Array = jax.Array
float64 = jax.enable_x64


class Choice(NamedTuple):
    """What is known when a function is compiled."""

    regularizer: str
    exactly: bool
    reach: int  # the largest capacity that matters
    heaviest: int  # no weight is larger

    def functions(self) -> Any:
        cls = regularizers.REGULARIZERS.get(self.regularizer, regularizers.Hard)
        return (regularizers.rebind(function, jnp) for function in cls.functions())


class Problem(NamedTuple):
    """One instance."""

    theta: Array  # (n,)
    weights: Array  # (n,), int32, at most reach + 1
    capacity: Array  # (), int32, at most reach; below 0 if it is not valid
    gamma: Array  # (), of theta's type: rounding it scales all scores alike, which does no harm


def _scores(problem: Problem) -> Array:
    """theta / gamma. -inf is out, +inf is not a number, nor is anything over a gamma that is not positive."""
    gamma = problem.gamma.astype(jnp.float64)
    scores = problem.theta.astype(jnp.float64) / jnp.where(gamma > 0, gamma, jnp.nan)
    return jnp.where(scores == -jnp.inf, INFEASIBLE, jnp.where(scores == jnp.inf, jnp.nan, scores))


# Rows over the capacities 0..reach.


def _up(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c - w]`` for every c, and something where c < w."""
    return lax.dynamic_slice(jnp.concatenate([row[:heaviest], row]), (heaviest - w,), row.shape)


def _down(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return lax.dynamic_slice(jnp.pad(row, (0, heaviest)), (w,), row.shape)


def _fill(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    """[V] at the capacity, and the table [Q] (n, reach + 1)."""
    value, prob, _ = choice.functions()
    dtype, goal = problem.theta.dtype, problem.capacity
    c = jnp.arange(choice.reach + 1, dtype=jnp.int32)

    def step(V: Array, item: tuple[Array, Array]) -> Any:
        score, w = item
        fits = c >= w
        pick = _up(V, w, choice.heaviest) + score
        delta = (pick - V).astype(dtype)
        larger = jnp.where(pick > V, pick, V)
        V = jnp.where(fits, larger + value(delta).astype(jnp.float64), V)
        return V, jnp.where(fits, prob(delta), 0)  # [V], [Q]

    with float64(True):
        V = jnp.where(c > 0, INFEASIBLE, 0.0) if choice.exactly else jnp.zeros(c.shape)
        V, Q = lax.scan(step, V, (_scores(problem), problem.weights))
        result = jnp.where((goal < 0) | (V[goal] < 0.5 * INFEASIBLE), jnp.nan, V[goal])
        return result.astype(dtype), Q


def _follow(problem: Problem, choice: Choice, Q: Array, source: Callable[..., Any], z: Array) -> tuple[Array, Array]:
    """[V'] at the capacity, and the table [Q']."""
    _, _, dprob = choice.functions()
    c = jnp.arange(choice.reach + 1, dtype=jnp.int32)

    def step(T: Array, item: tuple[Array, Array, Array]) -> Any:
        q, w, z_i = item
        fits = c >= w
        added, slope = source(q, z_i)
        change = _up(T, w, choice.heaviest) - T
        return jnp.where(fits, T + q * change + added, T), jnp.where(fits, dprob(q) * (change + slope), 0)

    T, R = lax.scan(step, jnp.zeros(c.shape, Q.dtype), (Q, problem.weights, z))
    return T[problem.capacity], R


def _collect(problem: Problem, choice: Choice, value: Array, tables: Any) -> Array:
    """[y], or with both tables [Hz]. The value is there for its NaN, which should reach every item."""
    E = (
        jnp.where(jnp.arange(tables[0].shape[1]) == problem.capacity, 1.0, 0.0).astype(problem.theta.dtype)
        + 0.0 * value
    )

    def down(row: Array, w: Array) -> Array:
        return _down(row, w, choice.heaviest)

    def step(E: Array, item: Any) -> Any:
        (q, _), w = item
        picked = E * q
        return E - picked + down(picked, w), picked.sum()  # [E], [y]

    def tangent_step(rows: tuple[Array, Array], item: Any) -> Any:
        (E, D), ((q, r), w) = rows, item
        picked, change = E * q, D * q + E * r
        return (E - picked + down(picked, w), D - change + down(change, w)), change.sum()  # [E], [E'], [Hz]

    if tables[1] is None:
        y = lax.scan(step, E, (tables, problem.weights), reverse=True)[1]
        return jnp.where(y > 1.0, 1.0, y)
    return lax.scan(tangent_step, (E, 0.0 * E), (tables, problem.weights), reverse=True)[1]


def _linear(q: Array, z: Array) -> tuple[Array, Array]:
    return q * z, z


def _entropy(q: Array, z: Array) -> tuple[Array, Array]:
    spread = q * (1.0 - q)
    inside = jnp.where(spread > 0.0, q, 0.5)
    pick, skip = jnp.log(inside), jnp.log(1.0 - inside)
    added = jnp.where(spread > 0.0, -q * pick - (1.0 - q) * skip, spread)
    return added, jnp.where(spread > 0.0, skip - pick, spread)


# The functions of theta / gamma.


def value(problem: Problem, choice: Choice) -> Array:
    """The smoothed optimum."""
    return _fill(problem, choice)[0]


def operator(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    """The smoothed optimum, and its gradient, the relaxed selection (n,)."""
    value, Q = _fill(problem, choice)
    return value, _collect(problem, choice, value, (Q, None))


def vjp(problem: Problem, choice: Choice, z: Array) -> Array:
    """The symmetric Jacobian of the relaxed selection, times z (n,)."""
    value, Q = _fill(problem, choice)
    _, R = _follow(problem, choice, Q, _linear, z)
    return _collect(problem, choice, value, (Q, R))


def entropy(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    """The Shannon entropy of the distribution over selections, and its gradient (n,)."""
    value, Q = _fill(problem, choice)
    tangent, R = _follow(problem, choice, Q, _entropy, problem.theta)
    return tangent + 0.0 * value, _collect(problem, choice, value, (Q, R))


def sample(problem: Problem, choice: Choice, uniforms: Array) -> Array:
    """A selection for each row of uniform numbers (samples, n) in [0, 1)."""
    value, Q = _fill(problem, choice)

    def step(c: Array, item: Any) -> Any:
        row, w, u = item
        q = row[c]
        return jnp.where(u < q, c - w, c), (u < q) + 0.0 * (q + value)  # [sample]; NaN stays NaN

    return jax.vmap(lambda u: lax.scan(step, problem.capacity, (Q, problem.weights, u), reverse=True)[1])(uniforms)


def solve(problem: Problem, choice: Choice) -> Array:
    """The best selection (n,); of ties, the one that skips the later item."""
    return sample(problem, choice._replace(regularizer="hard"), jnp.full_like(problem.theta, 0.5)[None])[0]


def _chances(problem: Problem, Q: Array, y: Array) -> tuple[Any, Array]:
    """Where the path of each selection (samples, n) is in the table, and the chance of each of its decisions."""
    used = jnp.where(y != 0, problem.weights, 0)
    later = jnp.cumsum(used[:, ::-1], axis=1)[:, ::-1] - used
    at = jnp.arange(y.shape[1]), jnp.maximum(problem.capacity - later, 0)
    return at, jnp.where(y != 0, Q[at], 1.0 - Q[at])


def log_prob(problem: Problem, choice: Choice, y: Array) -> Array:
    """Log-probabilities (samples,) of selections y (samples, n)."""
    value, Q = _fill(problem, choice)
    return jnp.log(_chances(problem, Q, y)[1]).sum(-1) + 0.0 * value  # [log-prob]


def log_prob_jvp(problem: Problem, choice: Choice, y: Array, z: Array) -> Array:
    """Their derivatives (samples,) in direction z (1, n), linear in z; 0 where the probability is."""
    _, Q = _fill(problem, choice)
    _, R = _follow(problem, choice, Q, _linear, z[0])
    at, chance = _chances(problem, Q, y)
    slope = jnp.where(y != 0, 1.0, -1.0) / jnp.where(chance > 0, chance, 1.0)
    possible = (chance > 0).all(-1)
    return jnp.where(possible, (jnp.where(possible[:, None], slope, 0.0) * R[at]).sum(-1), 0.0)
