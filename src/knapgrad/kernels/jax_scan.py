"""The sweeps of :mod:`knapgrad.reference` for JAX, by ``lax.scan`` over the items: they run on every device.

Functions are for one instance, and batched by ``vmap``; weights that instances share stay shared, so that a shift of
their rows is one slice. V is carried as a pair of float32, high and low part, when theta is in float32: a decision is a
difference of two large V, and JAX has no float64 unless it is switched on. All else has theta's type. Tags such as
[V] name the equations in docs/math.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from knapgrad import regularizers

Array = jax.Array

INFEASIBLE = -1e30  # finite, so that differences of infeasible values are numbers


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


# Numbers of twice the precision.


class Pair(NamedTuple):
    """high + low; in float64 there is no low, None."""

    high: Array
    low: Array | None

    def plus(self, other: Pair) -> Pair:
        high = self.high + other.high
        if self.low is None or other.low is None:
            return Pair(high, None)
        part = high - self.high
        lost = (self.high - (high - part)) + (other.high - part)
        return Pair(high, lost + (self.low + other.low))

    def plus_small(self, x: Array) -> Pair:
        """x is at most about 1; the sum is renormalised."""
        if self.low is None:
            return Pair(self.high + x, None)
        low = self.low + x
        high = self.high + low
        return Pair(high, low - (high - self.high))

    def minus(self, other: Pair) -> Array:
        """One number."""
        difference = self.high - other.high
        return difference if self.low is None or other.low is None else difference + (self.low - other.low)

    def map(self, function: Callable[..., Array], *others: Pair) -> Pair:
        low = None if self.low is None else function(self.low, *(x.low for x in others))
        return Pair(function(self.high, *(x.high for x in others)), low)


def _scores(problem: Problem) -> Pair:
    """theta / gamma. -inf is out, +inf is not a number, nor is anything over a gamma that is not positive."""
    theta, gamma = problem.theta, jnp.where(problem.gamma > 0, problem.gamma, jnp.nan)
    high = theta / gamma
    out = high == -jnp.inf
    low = None
    if theta.dtype != jnp.float64:
        (a, b), (c, d) = _halves(high), _halves(gamma)
        rest = (((theta - a * c) - a * d) - b * c) - b * d
        low = rest / gamma
        low = jnp.where(jnp.isfinite(low), low, 0.0)
    return Pair(jnp.where(out, INFEASIBLE, jnp.where(high == jnp.inf, jnp.nan, high)), low)


def _halves(x: Array) -> tuple[Array, Array]:
    """Two numbers of 12 bits each: their products are exact in float32."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high


# Rows over the capacities 0..reach.


def _up(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c - w]`` for every c, and 0 where c < w."""
    return lax.dynamic_slice(jnp.pad(row, (heaviest, 0)), (heaviest - w,), row.shape)


def _down(row: Array, w: Array, heaviest: int) -> Array:
    """``row[c + w]`` for every c, and 0 beyond the end."""
    return lax.dynamic_slice(jnp.pad(row, (0, heaviest)), (w,), row.shape)


def _fill(problem: Problem, choice: Choice, source: Callable[..., Any] | None, z: Array) -> tuple[Array, Array, Any]:
    """[V] and [Q], with a source [V'] and [Q'] too: V and V' at the capacity, and the tables (Q, Q') (n, reach + 1)."""
    value, prob, dprob = choice.functions()
    c = jnp.arange(choice.reach + 1)
    zeros = jnp.zeros(choice.reach + 1, problem.theta.dtype)
    scores = _scores(problem)
    V = Pair(jnp.where(c > 0, INFEASIBLE, zeros) if choice.exactly else zeros, None if scores.low is None else zeros)

    def step(rows: tuple[Pair, Array], item: tuple[Pair, Array, Array]) -> Any:
        (V, T), (score, w, z_i) = rows, item
        fits = c >= w
        pick = V.map(lambda row: _up(row, w, choice.heaviest)).plus(score)
        delta = pick.minus(V)
        larger = pick.map(lambda a, b: jnp.where(delta > 0.0, a, b), V)
        q = jnp.where(fits, prob(delta), 0.0)  # [Q]
        V = larger.plus_small(value(delta)).map(lambda a, b: jnp.where(fits, a, b), V)  # [V]
        if source is None:
            return (V, T), (q, None)
        added, slope = source(q, z_i)
        change = _up(T, w, choice.heaviest) - T
        r = jnp.where(fits, dprob(q) * (change + slope), 0.0)  # [Q']
        return (V, jnp.where(fits, T + q * change + added, T)), (q, r)  # [V']

    (V, T), tables = lax.scan(step, (V, zeros), (scores, problem.weights, z))
    goal = problem.capacity
    result = V.high[goal] if V.low is None else V.high[goal] + V.low[goal]
    return jnp.where((goal < 0) | (result < 0.5 * INFEASIBLE), jnp.nan, result), T[goal], tables


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
    certain = q * (1.0 - q)
    inside = jnp.where(certain > 0.0, q, 0.5)
    pick, skip = jnp.log(inside), jnp.log(1.0 - inside)
    added = jnp.where(certain > 0.0, -q * pick - (1.0 - q) * skip, certain)
    return added, jnp.where(certain > 0.0, skip - pick, certain)


# The functions of theta / gamma.


def operator(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    """The smoothed optimum, and its gradient, the relaxed selection (n,)."""
    value, _, tables = _fill(problem, choice, None, problem.theta)
    return value, _collect(problem, choice, value, tables)


def vjp(problem: Problem, choice: Choice, z: Array) -> Array:
    """The symmetric Jacobian of the relaxed selection, times z (n,)."""
    value, _, tables = _fill(problem, choice, _linear, z)
    return _collect(problem, choice, value, tables)


def entropy(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    """The Shannon entropy of the distribution over selections, and its gradient (n,)."""
    value, tangent, tables = _fill(problem, choice, _entropy, problem.theta)
    return tangent + 0.0 * value, _collect(problem, choice, value, tables)


def sample(problem: Problem, choice: Choice, uniforms: Array) -> Array:
    """A selection for each row of uniform numbers (samples, n) in [0, 1)."""
    value, _, (Q, _) = _fill(problem, choice, None, problem.theta)

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
    value, _, (Q, _) = _fill(problem, choice, None, problem.theta)
    return jnp.log(_chances(problem, Q, y)[1]).sum(-1) + 0.0 * value  # [log-prob]


def log_prob_jvp(problem: Problem, choice: Choice, y: Array, z: Array) -> Array:
    """Their derivatives (samples,) in direction z (n,), linear in z; 0 where the probability is."""
    _, _, (Q, _) = _fill(problem, choice, None, problem.theta)
    _, _, dprob = choice.functions()
    c = jnp.arange(choice.reach + 1)

    def step(T: Array, item: Any) -> Any:
        q, w, z_i = item
        change = jnp.where(c >= w, _up(T, w, choice.heaviest) - T + z_i, 0.0)
        return T + q * change, dprob(q) * change

    _, R = lax.scan(step, jnp.zeros(choice.reach + 1, z.dtype), (Q, problem.weights, z))
    at, chance = _chances(problem, Q, y)
    slope = jnp.where(y != 0, 1.0, -1.0) / jnp.where(chance > 0, chance, 1.0)
    possible = (chance > 0).all(-1)
    return jnp.where(possible, (jnp.where(possible[:, None], slope, 0.0) * R[at]).sum(-1), 0.0)
