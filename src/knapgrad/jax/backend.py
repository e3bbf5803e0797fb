"""JAX arrays: the functions of :class:`knapgrad.backends.Backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from knapgrad.constraints import Constraint
from knapgrad.jax import operators
from knapgrad.kernels.jax_scan import float64
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Regularizer

where, broadcast_to, concatenate = jnp.where, jnp.broadcast_to, jnp.concatenate

# Compiled once per regularizer and lattice, even if the caller does not use jit.
_value, _operator, _entropy, _sample, _log_prob, _frontier = (
    jax.jit(function, static_argnums=0)
    for function in (
        operators.value,
        operators.operator,
        operators.entropy,
        operators.sample,
        operators.log_prob,
        operators.frontier,
    )
)
solve = jax.jit(operators.solve)


def operator(theta: Array, lattice: Lattice, gamma: Any, regularizer: str, relaxed: bool) -> tuple[Array, Array | None]:
    gamma = jnp.asarray(gamma, theta.dtype)
    if relaxed:
        return _operator(regularizer, theta, lattice, gamma)
    return _value(regularizer, theta, lattice, gamma), None


def relax(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _operator(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype))[1]


def entropy(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _entropy(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype))


def frontier(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _frontier(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype))


def sample(theta: Array, uniforms: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _sample(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype), uniforms)


def log_prob(theta: Array, y: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _log_prob(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype), y)


def lattice(constraint: Constraint, theta: Array) -> Lattice:
    """In int32, since no weight above the reach matters; a capacity that is not valid is -1."""
    known = constraint.lattice(theta.shape[-1])
    if theta.shape[-1] * (known.reach + 1) >= 2**31:
        sides = " x ".join(f"{side:,}" for side in (theta.shape[-1], *(known.box or (known.reach + 1,))))
        raise ValueError(
            f"a table of {sides} entries is beyond the 32-bit indices of JAX; divide weights and "
            "capacities by a common factor, or give smaller capacities or bounds; if there is none, "
            f"{type(constraint).__name__}.from_real(..., resolution=...) rounds them safely"
        )
    capacity, slack, reach = _clipped(known.capacity, -1, known.reach), known.slack, known.reach
    if slack is not None:
        slack = _clipped(slack - (known.capacity - capacity), -1, reach)
    weights = _clipped(known.weights, 0, reach + 1)
    if slack is not None and not isinstance(weights, np.ndarray):  # all items may be too light for the least weight
        each = weights.reshape(*weights.shape[:-1], -1, known.options or 1).max(-1)
        capacity = jnp.where(capacity - slack > each.sum(-1), -1, capacity)
    return known.replace(weights=weights, capacity=capacity, slack=slack)


def _clipped(x: Any, least: int, most: int) -> Any:
    """As int32; in NumPy if x is known."""
    return (np if isinstance(x, np.ndarray) else jnp).clip(x, least, most).astype(np.int32)


def numbers(x: Array) -> Any:
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def known(x: Array) -> np.ndarray | None:
    if isinstance(x, jax.core.Tracer) or any(device.platform != "cpu" for device in x.devices()):
        return None
    return np.asarray(x)


def unchanging(x: Array) -> np.ndarray | None:
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def integers(x: Array) -> Array | None:
    if x.dtype.kind not in "iu":
        return None
    return x if x.dtype in (np.int32, np.int64) else x.astype(np.int32)  # with room for a bound, and a sign


def factor(regularizer: Regularizer) -> float:
    return regularizer.gamma


def requires_grad(x: Array) -> bool:
    return False


def is_floating(x: Array) -> bool:
    return x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def differentiates(*arrays: Any) -> bool:
    """Never: JAX calls again when it differentiates."""
    return False


def take(rows: Array, index: Any) -> Array:
    return jnp.take_along_axis(rows, jnp.broadcast_to(index, (*rows.shape[:-1], index.shape[-1])), -1)


def detached(x: Array) -> Array:
    return jax.lax.stop_gradient(x)


def computable(x: Array) -> Array:
    """Half precision is computed in float32."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def double(x: Array) -> Array:
    """float64 where it is switched on."""
    return x.astype(jax.dtypes.canonicalize_dtype(jnp.float64))


def exact() -> AbstractContextManager[Any]:
    return float64(True)


def sum_double(x: Array) -> Array:
    """The sum over items, in float64 where it is switched on."""
    return double(x).sum(-1)


def as_type(x: Any, like: Array) -> Array:
    return jnp.asarray(x, like.dtype)


as_total = as_type


def array(x: Any, like: Array, name: str) -> Array:
    """Numbers or an array of any framework as a JAX array."""
    return x if isinstance(x, Array) else jnp.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def differentiate(function: Callable[[Array], Array], x: Array) -> Array:
    result, derivative = jax.vjp(function, x)
    return derivative(jnp.zeros_like(result))


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
