"""JAX arrays: what :mod:`knapgrad.ops` asks of every framework."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from knapgrad.constraints import Constraint
from knapgrad.jax import operators
from knapgrad.kernels.jax_scan import Choice, Problem

where, broadcast_to = jnp.where, jnp.broadcast_to


def _compiled(function: Any) -> Any:
    """Compiled once for each choice, also when the caller does not compile."""
    compiled = partial(jax.jit, static_argnums=0)(function)

    def call(theta: Array, *rest: Any) -> Any:
        *extra, weights, capacity, gamma, regularizer, exactly, reach = rest
        heaviest = int(weights.max(initial=0)) if isinstance(weights, np.ndarray) else reach + 1
        choice = Choice(regularizer, exactly, reach, heaviest)
        return compiled(choice, Problem(theta, weights, capacity, jnp.asarray(gamma, theta.dtype)), *extra)

    return call


_value, _operator, _solve = _compiled(operators.value), _compiled(operators.operator), _compiled(operators.solve)
entropy, sample, log_prob = _compiled(operators.entropy), _compiled(operators.sample), _compiled(operators.log_prob)


def operator(theta: Array, *problem: Any) -> tuple[Array, Array | None]:
    *problem_alone, relaxed = problem
    return _operator(theta, *problem_alone) if relaxed else (_value(theta, *problem_alone), None)


def solve(theta: Array, weights: Any, capacity: Any, exactly: bool, reach: int) -> Array:
    return _solve(jax.lax.stop_gradient(theta), weights, capacity, np.ones(()), "hard", exactly, reach)


def is_floating(x: Array) -> bool:
    return x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def differentiates(*arrays: Any) -> bool:
    """Whether the relaxed selection is worth computing beside a value: JAX asks again when it differentiates."""
    return False


def detached(x: Array) -> Array:
    return jax.lax.stop_gradient(x)


def may_be_selection(y: Array) -> bool:
    """False if it can be seen, without stalling a device or a trace, that it is not of zeros and ones."""
    if isinstance(y, jax.core.Tracer) or any(device.platform != "cpu" for device in y.devices()):
        return True
    return bool(np.isin(np.asarray(y), (0, 1)).all())


def computable(x: Array) -> Array:
    """Half precision is computed in float32."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def double(x: Array) -> Array:
    """float64 where it is switched on."""
    return x.astype(jax.dtypes.canonicalize_dtype(jnp.float64))


def sum_double(x: Array) -> Array:
    """The sum over items, in float64 where it is switched on."""
    return double(x).sum(-1)


def as_type(x: Any, like: Array) -> Array:
    return jnp.asarray(x, like.dtype)


def array(x: Any, like: Array, name: str) -> Array:
    """Numbers of any origin as an array."""
    return x if isinstance(x, Array) else jnp.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def constants(constraint: Constraint, like: Array) -> tuple[Any, Any]:
    """Weights and capacity for operators on an array (*batch, n), as int32: no weight above the reach matters. A
    capacity above what the constraint was made for, or below 0, is marked as not valid, and so is one with a traced
    weight below 0."""
    reach = constraint.reach_of(like.shape[-1])
    weights, capacity = constraint.weights_of(like.shape[-1]), constraint.capacity
    limit = reach if constraint.exactly else constraint.max_capacity
    valid: Any = True
    if isinstance(weights, np.ndarray):
        weights = np.minimum(weights, reach + 1).astype(np.int32)
    else:
        valid = (weights >= 0).all(-1)
        weights = _clipped(weights, reach + 1)
    if isinstance(capacity, np.ndarray) and valid is True:
        return weights, np.minimum(capacity, reach).astype(np.int32)
    if not isinstance(capacity, np.ndarray):
        wide = _wide(capacity)
        valid &= (wide >= 0) if limit is None else (wide >= 0) & (wide <= limit)
    return weights, jnp.where(valid, _clipped(jnp.asarray(capacity), reach), -1)


def _clipped(x: Array, most: int) -> Array:
    return jnp.clip(_wide(x), 0, most).astype(jnp.int32)


def _wide(x: Array) -> Array:
    """Integers that a bound has room in."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def uniforms(rng: Any, shape: tuple[int, ...], like: Array) -> Array:
    """Random numbers in [0, 1) from a JAX key, of the old or the new style."""
    if rng is None:
        raise ValueError("rng must be a JAX key for JAX arrays, which have no global generator: jax.random.key(seed)")
    is_key = isinstance(rng, Array) and (
        jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or (rng.dtype == jnp.uint32 and rng.ndim == 1)
    )
    if not is_key:
        raise TypeError(f"rng must be a JAX key for JAX arrays, got {type(rng).__name__}; use jax.random.key(seed)")
    return jax.random.uniform(rng, shape, like.dtype)
