"""The distribution for JAX against all selections and their log-probabilities in NumPy; and the layers."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import knapgrad as kg  # noqa: E402
from knapgrad.regularizers import REGULARIZERS  # noqa: E402
from oracles import chi_square_p_value  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiler")

KEY = jax.random.key(3)
CONSTRAINTS = {
    "knapsack": kg.Knapsack([3, 1, 2, 2], 5),
    "at least, of each": kg.Knapsack([3, 1, 2, 2], [4, 5], at_least=[2, 3]),
    "top-k": kg.TopK(2),
    "choices": kg.MultipleChoice([[1, 2], [1, 3], [2, 4]], 7),
    "budgets": kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 3, 1]], [2, 4]),
}
SMOOTHINGS = {name: make(0.8) for name, make in REGULARIZERS.items()}


@pytest.fixture(params=CONSTRAINTS.values(), ids=CONSTRAINTS)
def constraint(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=SMOOTHINGS.values(), ids=SMOOTHINGS)
def smoothing(request: pytest.FixtureRequest) -> Any:
    return request.param


def scores(constraint: Any, seed: int = 0) -> np.ndarray:
    event = (3, 2) if isinstance(constraint, kg.MultipleChoice) else (4,)
    return np.random.default_rng(seed).normal(size=(2, *event)).astype(np.float32)


def everything(theta: np.ndarray, constraint: Any, smoothing: Any) -> tuple[np.ndarray, np.ndarray]:
    """All selections (count, *theta.shape), and their probabilities (count, batch)."""
    event = theta.shape[1:]
    y = np.array(list(product((0.0, 1.0), repeat=int(np.prod(event))))).reshape(-1, 1, *event)
    y = np.broadcast_to(y, (len(y), *theta.shape))
    return y, np.exp(kg.log_prob(theta.astype(np.float64), y, constraint, smoothing))


def weighted(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (p.reshape(*p.shape, *[1] * (y.ndim - p.ndim)) * y).sum(0)


@pytest.mark.thinned(4)
def test_moments_and_mode(constraint, smoothing):
    theta = scores(constraint)
    found = kg.jax.SubsetDistribution(jnp.asarray(theta), constraint, smoothing)
    y, p = everything(theta, constraint, smoothing)
    mean = weighted(p, y)
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    np.testing.assert_allclose(found.variance, mean * (1 - mean), atol=1e-5)
    np.testing.assert_allclose(found.entropy(), -(p * np.log(np.where(p > 0, p, 1))).sum(0), atol=1e-5)
    best = np.argmax(p, axis=0)
    np.testing.assert_array_equal(found.mode, y[best, np.arange(2)])
    assert found.batch_shape == (2,) and found.event_shape == theta.shape[1:]


@pytest.mark.thinned(9)
def test_samples_and_their_log_probabilities(constraint, smoothing):
    theta = scores(constraint)
    found = kg.jax.SubsetDistribution(jnp.asarray(theta), constraint, smoothing)
    drawn = found.sample(KEY, (20, 100))
    assert drawn.shape == (20, 100, *theta.shape) and np.asarray(constraint.contains(drawn)).all()
    np.testing.assert_array_equal(drawn, found.rsample(KEY, (20, 100)))
    y, p = everything(theta, constraint, smoothing)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found.log_prob(jnp.asarray(y, jnp.float32)), np.log(p), atol=1e-4, rtol=1e-5)
    flat, kinds = np.asarray(drawn).reshape(2000, 2, -1), y.reshape(len(y), 2, -1)
    for b in range(2):
        kind = (flat[:, None, b] == kinds[None, :, b]).all(-1).argmax(1)
        assert chi_square_p_value(Counter(kind.tolist()), dict(enumerate(p[:, b]))) > 1e-4


@pytest.mark.thinned(9)
@pytest.mark.parametrize("other", SMOOTHINGS.values(), ids=SMOOTHINGS)
def test_kl_and_its_gradient(other, smoothing):
    constraint = CONSTRAINTS["at least, of each" if other.name != smoothing.name else "choices"]
    theta, prior = scores(constraint), 0.3 * scores(constraint, 1)
    _, p = everything(theta, constraint, smoothing)
    _, q = everything(prior, constraint, other)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(p > 0, p * (np.log(p) - np.log(q)), 0.0).sum(0)

    def kl(theta: Any, prior: Any) -> Any:
        first = kg.jax.SubsetDistribution(theta, constraint, smoothing)
        return first.kl(kg.jax.SubsetDistribution(prior, constraint, other))

    @jax.jit
    def with_slope(theta: Any, prior: Any) -> Any:
        found, pull = jax.vjp(lambda theta: kl(theta, prior), theta)
        return found, pull(jnp.asarray(np.isfinite(expected), found.dtype))[0]

    found, slope = with_slope(jnp.asarray(theta), jnp.asarray(prior))
    np.testing.assert_allclose(found, expected, atol=2e-5)

    def total(theta: np.ndarray) -> float:
        _, p = everything(theta, constraint, smoothing)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(p > 0, p * (np.log(p) - np.log(q)), 0.0).sum(0)
        return terms[np.isfinite(expected)].sum()

    assert np.isfinite(slope).all()
    direction = np.random.default_rng(5).normal(size=theta.shape)
    step = 1e-5
    wide = theta.astype(np.float64)
    difference = (total(wide + step * direction) - total(wide - step * direction)) / (2 * step)
    np.testing.assert_allclose((np.asarray(slope) * direction).sum(), difference, atol=2e-3, rtol=2e-3)


@pytest.mark.thinned(9)
def test_gradients_of_samples_are_those_of_the_mean(constraint, smoothing):
    theta = jnp.asarray(scores(constraint))
    z = jnp.asarray(scores(constraint, 7))

    @jax.jit
    def everything(theta: Any, key: Any) -> Any:
        def through(pick: Any) -> Any:
            return jax.grad(lambda x: (pick(kg.jax.SubsetDistribution(x, constraint, smoothing)) * z).sum())(theta)

        drawn = through(lambda d: d.rsample(key, (3,))), through(lambda d: d.sample(key, (3,)))
        expected = jax.grad(lambda x: (kg.relax(x, constraint, smoothing) * z).sum())(theta)
        return through(lambda d: d.mean), *drawn, expected

    mean, kept, stopped, expected = everything(theta, KEY)
    np.testing.assert_allclose(mean, expected, atol=1e-5)
    np.testing.assert_allclose(kept, 3 * expected, atol=1e-5)
    np.testing.assert_array_equal(stopped, 0 * expected)


def test_it_is_a_pytree_and_keeps_no_tracer():
    distribution = kg.jax.SubsetDistribution(jnp.zeros((2, 4)), kg.TopK(2), kg.Gini(jnp.array(0.5)))
    distribution.mean  # noqa: B018  a table is kept
    inside = jax.jit(lambda: distribution.mean + distribution.sample(KEY).mean())()
    assert inside.shape == (2, 4) and distribution.mean.shape == (2, 4)

    @jax.jit
    def draw(distribution: Any, key: Any) -> Any:
        y = distribution.sample(key, (5,))
        return y, distribution.log_prob(y), distribution.kl(distribution)

    y, log_prob, nothing = draw(distribution, KEY)
    assert y.shape == (5, 2, 4) and log_prob.shape == (5, 2)
    np.testing.assert_allclose(nothing, 0.0, atol=1e-6)
    rows = jax.vmap(lambda x: kg.jax.SubsetDistribution(x, kg.TopK(2), kg.Gini(0.5)).mean)(jnp.zeros((2, 4)))
    np.testing.assert_allclose(rows, 0.5)
    again = jax.tree.map(lambda x: x, distribution)
    assert again.constraint == distribution.constraint and "SubsetDistribution(" in repr(again)


def test_one_table_serves_all():
    distribution = kg.jax.SubsetDistribution(jnp.zeros((2, 4)), kg.TopK(2), kg.Gini(0.5))
    text = str(jax.make_jaxpr(lambda: (distribution.mean, distribution.variance, distribution.sample(KEY, (3,))))())
    assert text.count("name=tabulate") == 1


@pytest.mark.parametrize("name", SMOOTHINGS)
def test_soft_selections_have_no_probability(name):
    theta, y = jnp.zeros(3), jnp.array([0.5, 0.5, 0.0])
    run = jax.jit(lambda y: kg.log_prob(theta, y, kg.TopK(1), SMOOTHINGS[name]))
    assert jnp.isnan(run(y)) and jnp.isfinite(run(jnp.array([0.0, 1.0, 0.0])))
    twice = jax.jit(
        lambda y: kg.log_prob(jnp.zeros((1, 2)), y, kg.MultipleChoice([1, 1], 2, optional=True), SMOOTHINGS[name])
    )
    assert twice(jnp.ones((1, 2))) == -jnp.inf  # hard, but not feasible
    if jax.default_backend() == "cpu":  # elsewhere nobody looks
        with pytest.raises(ValueError, match="zeros and ones"):
            kg.log_prob(theta, y, kg.TopK(1), SMOOTHINGS[name])


def test_errors():
    with pytest.raises(TypeError, match="theta must be a JAX array"):
        kg.jax.SubsetDistribution(np.zeros(3), kg.TopK(1), kg.Gini())
    one = kg.jax.SubsetDistribution(jnp.zeros(3), kg.TopK(1), kg.Gini())
    with pytest.raises(ValueError, match="equal event shapes"):
        one.kl(kg.jax.SubsetDistribution(jnp.zeros(4), kg.TopK(1), kg.Gini()))
    for limit in (kg.TopK(2), kg.Knapsack([1, 1, 1], 1)):
        with pytest.raises(ValueError, match="under the same constraint"):
            one.kl(kg.jax.SubsetDistribution(jnp.zeros(3), limit, kg.Gini()))
    with pytest.raises(TypeError, match="SubsetDistribution"):
        one.kl(3)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kg.jax.Nothing  # noqa: B018
    with pytest.raises(NotImplementedError, match="differentiate once less"):
        other = kg.jax.SubsetDistribution(jnp.ones(3), kg.TopK(1), kg.Shannon())
        jax.jit(jax.hessian(lambda x: kg.jax.SubsetDistribution(x, kg.TopK(1), kg.Gini()).kl(other)))(jnp.ones(3))


def test_layers():
    theta, limit = jnp.asarray(scores(CONSTRAINTS["knapsack"])), CONSTRAINTS["knapsack"]
    soft, hard = kg.jax.Relax(limit, kg.Gini(jnp.array(0.5))), kg.jax.Relax(limit, kg.Gini(0.5), hard=True)
    np.testing.assert_array_equal(soft(theta), kg.relax(theta, limit, kg.Gini(0.5)))
    np.testing.assert_array_equal(hard(theta), kg.solve(theta, limit))
    slopes = [jax.grad(lambda x, layer=layer: (layer(x) * x).sum())(theta) for layer in (soft, hard)]
    by_layer = jax.grad(lambda x: (hard(x) * jax.lax.stop_gradient(x)).sum())(theta)
    np.testing.assert_allclose(
        by_layer, jax.grad(lambda x: (soft(x) * jax.lax.stop_gradient(x)).sum())(theta), atol=1e-6
    )
    assert all(np.isfinite(slope).all() for slope in slopes)
    gradient = jax.grad(lambda layer: (layer(theta) * theta).sum(), allow_int=True)(soft)
    assert gradient.regularizer.gamma != 0
    drawn = jax.jit(lambda layer, key: layer(theta, key))(kg.jax.Sample(limit, kg.Shannon(0.5)), KEY)
    assert np.asarray(limit.contains(drawn)).all()
