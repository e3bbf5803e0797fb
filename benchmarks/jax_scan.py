"""Baseline for GPUs: what one would write in JAX, a jitted ``lax.scan`` over the items, derivatives left to JAX.

The mathematics of :mod:`knapgrad.reference` on rows of theta's type over batch and capacity; relax is the gradient of
the value and the VJP is that of the gradient. Infeasible states hold a large negative number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

INFEASIBLE = -1e10


def smoothed_maximum(regularizer: str) -> Callable[..., Any]:
    """As in eager_torch: without abs or clip around a tie, where their second derivatives would be lost."""
    import jax.numpy as jnp

    def shannon(pick: Any, skip: Any) -> Any:
        delta = pick - skip
        near = jnp.abs(delta) < 60
        return jnp.where(near, skip + jnp.log1p(jnp.exp(jnp.where(near, delta, 0.0))), jnp.maximum(pick, skip))

    def gini(pick: Any, skip: Any) -> Any:
        delta = pick - skip
        return jnp.where(jnp.abs(delta) < 1, skip + 0.25 * (1 + delta) ** 2, jnp.maximum(pick, skip))

    def tsallis(pick: Any, skip: Any) -> Any:
        delta = pick - skip
        half = jnp.clip(0.5 * delta, -1, 1)
        square = 2 - half * half
        smooth = skip + half + (4 - square * jnp.sqrt(square)) / 3
        return jnp.where(jnp.abs(delta) < 2, smooth, jnp.maximum(pick, skip))

    return {"shannon": shannon, "gini": gini, "tsallis": tsallis}[regularizer]


def make(weights: np.ndarray, capacity: int, exactly: bool, regularizer: str) -> tuple[Callable, Callable]:
    """Jitted ``forward(theta) -> value, relax`` and ``both(theta, z) -> value, relax, product``; theta (batch, n)."""
    import jax
    import jax.numpy as jnp

    maximum = smoothed_maximum(regularizer)
    heavy = np.minimum(weights, capacity + 1).astype(np.int32)  # of an item that never fits, this is enough
    widest = int(heavy.max())
    c = np.arange(capacity + 1)

    def values(theta: Any) -> Any:
        first = np.where(exactly & (c > 0), INFEASIBLE, 0.0)
        row = jnp.broadcast_to(jnp.asarray(first, theta.dtype), (theta.shape[0], capacity + 1))

        def step(row: Any, item: Any) -> Any:
            score, w = item
            padded = jnp.pad(row, ((0, 0), (widest, 0)))
            pick = jax.lax.dynamic_slice_in_dim(padded, widest - w, capacity + 1, axis=1) + score[:, None]
            return jnp.where(c >= w, maximum(pick, row), row), None

        row, _ = jax.lax.scan(step, row, (theta.T, heavy))
        return row[:, capacity]

    def total(theta: Any) -> Any:
        optimum = values(theta)
        return optimum.sum(), optimum

    def relax(theta: Any) -> Any:
        (_, optimum), y = jax.value_and_grad(total, has_aux=True)(theta)
        return y, optimum

    def forward(theta: Any) -> Any:
        y, optimum = relax(theta)
        return optimum, y

    def both(theta: Any, z: Any) -> Any:
        y, pull, optimum = jax.vjp(relax, theta, has_aux=True)
        return optimum, y, pull(z)[0]

    return jax.jit(forward), jax.jit(both)
