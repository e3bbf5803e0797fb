"""Several budgets in JAX: derivatives, jit with constraints as arguments, vmap, pytrees and the distribution."""

from __future__ import annotations

import numpy as np
import pytest

import knapgrad as kg

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiler")

LIMIT = kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 3, 1]], [2, 4])
THETA = np.array([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25]])


@pytest.mark.parametrize("regularizer", ["shannon", "tsallis"])
def test_derivatives_are_those_of_torch(regularizer):
    torch = pytest.importorskip("torch")
    smoothing, z = getattr(kg, regularizer.capitalize())(0.7), np.cos(np.arange(8.0)).reshape(2, 4)
    theta = torch.tensor(THETA, requires_grad=True)
    (kg.relax(theta, LIMIT, smoothing) * torch.tensor(z)).sum().backward()

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: (kg.relax(x, LIMIT, smoothing) * z).sum())(x)

    np.testing.assert_allclose(gradient(jnp.asarray(THETA)), theta.grad, atol=1e-5)


def test_a_constraint_is_an_argument_and_equal_ones_do_not_compile_again():
    traces = []

    @jax.jit
    def relax(theta, limit):
        traces.append(1)
        return kg.relax(theta, limit, kg.Gini(0.5))

    theta = jnp.asarray(THETA, jnp.float32)
    for _ in range(2):
        y = relax(theta, kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 3, 1]], [2, 4]))
        np.testing.assert_allclose(y, kg.relax(THETA, LIMIT, kg.Gini(0.5)), atol=1e-6)
    assert len(traces) == 1
    leaves, tree = jax.tree.flatten(LIMIT)
    assert [x.shape for x in leaves] == [(2, 4), (2,)]
    assert jax.tree.unflatten(tree, leaves) == LIMIT


def test_vmap_over_traced_capacities():
    def one(theta, capacities):
        limit = kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 3, 1]], capacities, max_capacities=[3, 5])
        return kg.relax(theta, limit, kg.Shannon(0.5))

    capacities = np.array([[2, 4], [1, 5]])
    y = jax.jit(jax.vmap(one))(jnp.asarray(THETA, jnp.float32), jnp.asarray(capacities))
    for b in range(2):
        expected = kg.relax(THETA[b], kg.MultiKnapsack(LIMIT.weights, capacities[b]), kg.Shannon(0.5))
        np.testing.assert_allclose(y[b], expected, atol=1e-6)
    beyond = jax.jit(one)(jnp.asarray(THETA[0], jnp.float32), jnp.array([2, 6]))
    assert np.isnan(beyond).all()
    with pytest.raises(ValueError, match="max_capacities"):
        jax.jit(lambda c, w: kg.relax(jnp.zeros(4), kg.MultiKnapsack(w, c), kg.Gini()))(
            jnp.array([2, 4]), jnp.ones((2, 4), jnp.int32)
        )


def test_the_distribution():
    law = kg.jax.SubsetDistribution(jnp.asarray(THETA[0], jnp.float32), LIMIT, kg.Gini(0.7))
    every = np.array(np.meshgrid(*[[0.0, 1.0]] * 4)).reshape(4, -1).T.astype(np.float32)
    chances = np.exp(law.log_prob(every))
    np.testing.assert_allclose(chances.sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(chances @ every, law.mean, atol=1e-5)
    drawn = law.sample(jax.random.key(0), (50,))
    assert LIMIT.contains(np.asarray(drawn)).all()
    np.testing.assert_array_equal(law.sample(jax.random.key(0), 50), drawn)
    assert chances[(every == np.asarray(law.mode)).all(1)] >= chances.max() - 1e-6


def test_a_bound_of_the_capacities_keeps_what_was_compiled():
    traces = []

    @jax.jit
    def run(theta, limit):
        traces.append(limit)
        return kg.solve(theta, limit)

    for capacity in (3, 4, 5):
        limit = kg.MultiKnapsack([[1, 2, 3], [1, 1, 1]], [capacity, 2], max_capacities=[5, 2])
        np.testing.assert_array_equal(run(jnp.ones(3), limit), kg.solve(np.ones(3), limit))
    assert len(traces) == 1
