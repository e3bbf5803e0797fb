"""The Kullback-Leibler divergence between two distributions over selections, for any two regularizers.

Plain sweeps of one instance in float64, which JAX differentiates on the spot; not fast. Derivatives are right at ties
too, where a smoothed maximum has kinks that JAX does not see through.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from knapgrad.jax import operators
from knapgrad.kernels import jax_scan
from knapgrad.lattice import INFEASIBLE, Lattice, fits, tournament
from knapgrad.regularizers import functions, rebind

if TYPE_CHECKING:
    from knapgrad.jax.distribution import SubsetDistribution


def of_paths(p: SubsetDistribution, q: SubsetDistribution) -> Array:
    """The expected divergence of the decisions along p's paths."""
    lattice, names = p._problem.lattice, (p.regularizer.name, q.regularizer.name)
    shape = jnp.broadcast_shapes(p._scores.shape, q._scores.shape)
    ours, theirs = (jnp.broadcast_to(x._scaled, shape) for x in (p, q))

    def one(ours: Array, lattice: Lattice, gamma: Array, _: str, theirs: Array) -> Array:
        return _once_differentiable(names, (ours, theirs), lattice)

    result = operators._batched(one, "", 0, ours, lattice, jnp.ones((), ours.dtype), (theirs,))
    return result.astype(p.theta.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once_differentiable(names: tuple[str, str], scores: tuple[Array, Array], lattice: Lattice) -> Array:
    with jax_scan.float64(True):
        return _divergence(_double(scores), lattice, names).astype(scores[0].dtype)


def _forward(names: tuple[str, str], scores: tuple[Array, Array], lattice: Lattice) -> tuple[Array, Any]:
    with jax_scan.float64(True):
        result, slopes = jax.value_and_grad(_divergence)(_double(scores), lattice, names)
        slopes = [jnp.where(jnp.isfinite(result), x, 0.0).astype(scores[0].dtype) for x in slopes]
        result = result.astype(scores[0].dtype)
    return result, (tuple(operators._constant(x, *scores) for x in slopes), lattice)


def _backward(names: tuple[str, str], kept: Any, cotangent: Array) -> Any:
    slopes, _ = kept
    return tuple(cotangent * slope for slope in slopes), None


_once_differentiable.defvjp(_forward, _backward)


def _double(scores: tuple[Array, Array]) -> tuple[Array, Array]:
    return scores[0].astype(jnp.float64), scores[1].astype(jnp.float64)


def _divergence(scores: tuple[Array, Array], lattice: Lattice, names: tuple[str, str]) -> Array:
    """Of one instance."""
    m, c = lattice.options, jnp.arange(lattice.reach + 1)
    w = lattice.weights.reshape(-1, m) if m else jnp.stack([0 * lattice.weights, lattice.weights], -1)

    def step(K: Array, choice: Any) -> Any:
        P, other, w = choice
        never = (P > 0) & (other <= 0)
        surprise = jnp.log(jnp.where(P > 0, P, 1.0)) - jnp.log(jnp.where((P > 0) & ~never, other, 1.0))
        before = jax.vmap(lambda w: jax_scan.shifted(K, w, lattice.heaviest))(w)
        known = jnp.where(P > 0, P * (jnp.where(P > 0, before, 0.0) + surprise), 0.0).sum(0)
        return jnp.where(never.any(0), jnp.inf, known), None

    tables = [_probabilities(x, w, lattice, name) for x, name in zip(scores, names)]
    K, _ = jax_scan.scan(step, jnp.zeros(c.shape, jnp.float64), (*tables, w))
    missing = jnp.isnan(scores[0]).any() | jnp.isnan(scores[1]).any() | (lattice.capacity < 0)
    return jnp.where(missing, jnp.nan, K[lattice.capacity])


def _probabilities(scores: Array, w: Array, lattice: Lattice, regularizer: str) -> Array:
    """[P] (steps, options, reach + 1)."""
    value, prob, dprob = (rebind(f, jnp) for f in functions(regularizer).values())
    scores = jnp.where(scores == -jnp.inf, INFEASIBLE, scores)
    scores = scores.reshape(w.shape) if lattice.options else jnp.stack([0 * scores, scores], -1)
    c, fixed = jnp.arange(lattice.reach + 1), lax.stop_gradient

    def step(V: Array, choice: Any) -> Any:
        score, w = choice
        shifted = jax.vmap(lambda w: jax_scan.shifted(V, w, lattice.heaviest))(w)
        nodes = list(jnp.where(fits(c, w[:, None], lattice.box), shifted + score[:, None], INFEASIBLE))
        shares = [jnp.ones_like(V) for _ in nodes]
        for low, middle, high in tournament(len(nodes)).tolist():
            skip, pick = nodes[low], nodes[middle]
            delta = fixed(pick - skip)
            q = prob(delta)
            joined = fixed(jnp.where(delta > 0, pick, skip)) + value(delta)
            nodes[low] = joined + q * (pick - fixed(pick)) + (1 - q) * (skip - fixed(skip))
            chance = q + dprob(q) * (pick - skip - delta)
            shares[low:middle] = [share * (1 - chance) for share in shares[low:middle]]
            shares[middle:high] = [share * chance for share in shares[middle:high]]
        return jnp.maximum(nodes[0], INFEASIBLE), jnp.stack(shares)

    V = jnp.zeros(c.shape) if lattice.slack is None else jnp.where(c > lattice.slack, INFEASIBLE, 0.0)
    return jax_scan.scan(step, V, (scores, w))[1]
