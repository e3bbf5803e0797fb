"""The distribution in NumPyro, as the example wraps it; tests/docs runs the example, with NUTS."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("numpyro")
pytest.importorskip("matplotlib")

import jax.numpy as jnp  # noqa: E402

import knapgrad as kg  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiler")

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "numpyro_subsets.py"))
Subsets: Any = EXAMPLE["Subsets"]
KEY = jax.random.key(0)
THETA = jnp.array([[1.0, -0.5, 0.3, 0.8], [0.2, 1.5, -1.0, 0.0], [0.0, 0.0, 2.0, -0.3]])
LIMIT, SMOOTHING = kg.Knapsack([3, 1, 2, 2], [5, 4, 3]), kg.Shannon(0.7)


def test_shapes_samples_and_probabilities():
    wrapped = Subsets(THETA, LIMIT, SMOOTHING, validate_args=True)
    plain = kg.jax.SubsetDistribution(THETA, LIMIT, SMOOTHING)
    assert wrapped.batch_shape == (3,) and wrapped.event_shape == (4,) and wrapped.is_discrete
    y = jax.jit(lambda key: wrapped.sample(key, (20,)))(KEY)
    np.testing.assert_array_equal(y, plain.sample(KEY, (20,)))
    assert LIMIT.contains(y).all() and wrapped.support(y).all()
    np.testing.assert_allclose(jax.jit(wrapped.log_prob)(y), plain.log_prob(y), rtol=1e-6)
    assert (wrapped.log_prob(jnp.ones_like(THETA)) == -jnp.inf).all()  # over the budget
    np.testing.assert_allclose(wrapped.mean, plain.mean, rtol=1e-6)
    assert wrapped.expand((2, 3)).log_prob(y[:2]).shape == (2, 3)


def test_it_is_a_pytree():
    """Through jit and vmap as an argument, with a limit for each instance."""
    wrapped, y = Subsets(THETA, LIMIT, SMOOTHING), jnp.zeros_like(THETA)
    expected = kg.log_prob(THETA, y, LIMIT, SMOOTHING)
    np.testing.assert_allclose(jax.jit(lambda d, y: d.log_prob(y))(wrapped, y), expected, rtol=1e-6)
    own = Subsets(THETA, kg.Knapsack(np.tile([3, 1, 2, 2], (3, 1)), [5, 4, 3]), kg.Shannon(jnp.full(3, 0.7)))
    draw = jax.jit(jax.vmap(lambda d, key: d.sample(key)))
    assert LIMIT.contains(draw(own, jax.random.split(KEY, 3))).all()
    slope = jax.grad(lambda d: d.log_prob(y).sum(), allow_int=True)(wrapped)
    np.testing.assert_allclose(slope.theta, -wrapped.mean / 0.7, rtol=1e-5)
