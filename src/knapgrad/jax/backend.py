"""JAX arrays: the functions of :class:`knapgrad.backends.Backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from knapgrad.arguments import LARGEST_TRACED
from knapgrad.constraints import Constraint
from knapgrad.jax import operators
from knapgrad.kernels.jax_scan import float64
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Regularizer

where, broadcast_to, concatenate = jnp.where, jnp.broadcast_to, jnp.concatenate


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once per regularizer and lattice, even if the caller does not use jit."""

    def with_floor(regularizer: str, theta: Array, lattice: Lattice, gamma: Array, *extra: Array) -> Any:
        return function(regularizer, theta, lattice, _floored(gamma, theta).astype(theta.dtype), *extra)

    plain, floored = (jax.jit(f, static_argnums=0) for f in (function, with_floor))

    def call(regularizer: str, theta: Array, lattice: Lattice, gamma: Any, *extra: Array) -> Any:
        if _is_in_range(gamma, theta):
            return plain(regularizer, theta, lattice, jnp.asarray(gamma, theta.dtype), *extra)
        return floored(regularizer, theta, lattice, _positive(gamma), *extra)

    return call


_value, _operator, _entropy, _sample, _log_prob, _frontier = (
    _compiled(function)
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
    if relaxed:
        return _operator(regularizer, theta, lattice, gamma)
    return _value(regularizer, theta, lattice, gamma), None


def relax(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _operator(regularizer, theta, lattice, gamma)[1]


def entropy(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _entropy(regularizer, theta, lattice, gamma)


def frontier(theta: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _frontier(regularizer, theta, lattice, gamma)


def sample(theta: Array, uniforms: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _sample(regularizer, theta, lattice, gamma, uniforms)


def log_prob(theta: Array, y: Array, lattice: Lattice, gamma: Any, regularizer: str) -> Array:
    return _log_prob(regularizer, theta, lattice, gamma, y)


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
    slack = None if known.slack is None else _narrow(known.slack, -1, known.reach)
    weights = _narrow(known.weights, 0, known.reach + 1)
    return known.replace(weights=weights, capacity=known.capacity.astype(np.int32), slack=slack)


def _narrow(x: Any, least: int, most: int) -> Any:
    """As int32, to which large numbers are cut; in NumPy if x is known."""
    return (np if isinstance(x, np.ndarray) else jnp).clip(x, least, most).astype(np.int32)


def numbers(x: Array) -> Any:
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def known(x: Array) -> np.ndarray | None:
    if isinstance(x, jax.core.Tracer) or any(device.platform != "cpu" for device in x.devices()):
        return None
    return np.asarray(x)


def unchanging(x: Array) -> np.ndarray | None:
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def version(x: Array) -> None:
    return None


def integers(x: Array) -> Array | None:
    if x.dtype.kind not in "iu":
        return None
    if x.dtype in (np.int32, np.int64):
        return x
    if x.dtype.itemsize >= 4:  # unsigned, and may wrap
        x = jnp.minimum(x, LARGEST_TRACED)
    return x.astype(np.int32)  # with room for a bound, and a sign


def factor(regularizer: Regularizer) -> float:
    return regularizer.gamma


def strength(gamma: Any, theta: Array) -> Any:
    theta = computable(theta)
    return gamma if _is_in_range(gamma, theta) else _floored(_positive(gamma), theta)


_TINY = np.finfo(np.float32).tiny
_SMALL = 1e-20  # scores up to 1e13 and more of such a gamma are in range


def _is_in_range(gamma: Any, theta: Array) -> bool:
    """Whether sums of theta / gamma are in the range of theta's type, as far as gamma is a number."""
    return theta.dtype != jnp.float32 or (not isinstance(gamma, Array) and bool(gamma >= _SMALL))


def _positive(gamma: Any) -> Array:
    return gamma if isinstance(gamma, Array) else jnp.asarray(np.maximum(gamma, _TINY), jnp.float32)


@jax.jit
def _floored(gamma: Array, theta: Array) -> Array:
    """Gamma that is at least 2**-110 of the largest score of its instance, so that sums of theta / gamma are in the
    range of float32. XLA takes numbers below that range for 0, but not their bits."""
    is_positive = gamma > 0 if gamma.dtype != jnp.float32 else jax.lax.bitcast_convert_type(gamma, jnp.int32) > 0
    largest = jnp.where(jnp.isfinite(theta), abs(theta), 0.0).max(-1, initial=0.0)
    least = jax.lax.stop_gradient(jnp.maximum(2.0**-110 * largest, _TINY))
    return jnp.where(is_positive & (gamma < least), least.astype(gamma.dtype), gamma)


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
    if isinstance(x, Array):
        return x
    with np.errstate(over="ignore"):  # what is beyond float32 is infinite
        return jnp.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


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
