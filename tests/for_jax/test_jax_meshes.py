"""Batches that are spread over several devices: by ``jax.shard_map``, and by jit on meshes of either kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import knapgrad as kg  # noqa: E402

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices"),
    pytest.mark.usefixtures("quick_compiler"),
]

LIMIT, SMOOTHING, KEY = kg.Knapsack([3, 1, 2, 2, 4], 6), kg.Gini(0.5), jax.random.key(0)
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "solve": lambda theta, limit: kg.solve(theta, limit),
    "value": lambda theta, limit: kg.value(theta, limit, SMOOTHING),
    "relax": lambda theta, limit: kg.relax(theta, limit, SMOOTHING),
    "sample": lambda theta, limit: kg.sample(theta, limit, SMOOTHING, rng=KEY),
    "samples": lambda theta, limit: kg.sample(theta, limit, SMOOTHING, rng=KEY, num_samples=3)[1],
    "log_prob": lambda theta, limit: kg.log_prob(theta, kg.solve(theta, limit), limit, SMOOTHING),
    "log_prob, Shannon": lambda theta, limit: kg.log_prob(theta, kg.solve(theta, limit), limit, kg.Shannon()),
    "entropy": lambda theta, limit: kg.entropy(theta, limit, SMOOTHING),
    "fenchel_young_loss": lambda theta, limit: kg.fenchel_young_loss(theta, 0 * theta, limit, SMOOTHING),
    "divergence": lambda theta, limit: kg.divergence(theta, limit, SMOOTHING),
    "frontier": lambda theta, limit: kg.frontier(theta, limit, SMOOTHING),
}


def gradient(name: str) -> Callable[[Any, Any], Any]:
    return lambda theta, limit: jax.grad(lambda theta: OPERATIONS[name](theta, limit).sum())(theta)


OPERATIONS |= {
    f"gradient of {name}": gradient(name)
    for name in ("value", "relax", "log_prob", "entropy", "fenchel_young_loss", "divergence", "frontier")
}


def numbers(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def mesh_of(kind: Any) -> Any:
    return jax.make_mesh((4,), ("batch",), axis_types=(kind,), devices=jax.devices()[:4])


SPLIT = PartitionSpec("batch")


def by_shard_map(function: Callable[..., Any], theta: Any) -> Any:
    mesh = mesh_of(AxisType.Auto)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT))(theta)


def by_jit(function: Callable[..., Any], theta: Any, kind: Any) -> Any:
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = jax.device_put(theta, NamedSharding(mesh, SPLIT))
        compiled = jax.jit(function).lower(placed).compile()
        text = compiled.as_text()
        for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert word not in text  # instances have nothing to tell one another
        return compiled(placed)


WAYS = {
    "shard_map": by_shard_map,
    "explicit": lambda function, theta: by_jit(function, theta, AxisType.Explicit),
    "auto": lambda function, theta: by_jit(function, theta, AxisType.Auto),
}


def check(way: str, function: Callable[[Any, Any], Any], theta: Any, limit: Any, compare: bool = True) -> None:
    found = WAYS[way](lambda theta: function(theta, limit), theta)
    if compare:
        np.testing.assert_allclose(found, function(theta, limit), rtol=1e-5, atol=1e-5)
    assert len(found.sharding.device_set) == 4 and found.sharding.spec[0] == "batch"


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("error:Explicitly requested dtype float64")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_runs_where_its_instances_are(name, way):
    random = "sample" in name and way == "shard_map"  # each device draws its numbers from the same key
    check(way, OPERATIONS[name], numbers(8, 5), LIMIT, compare=not random)


@pytest.mark.parametrize("way", ["explicit", "auto"])
@pytest.mark.parametrize("name", ["solve", "relax", "gradient of relax"])
def test_constraints_of_each_instance(name, way):
    rng = np.random.default_rng(0)
    limit = kg.Knapsack(rng.integers(0, 4, (8, 5)), np.arange(2, 10), at_least=np.arange(8) % 3)
    check(way, OPERATIONS[name], numbers(8, 5), limit)
    check(way, OPERATIONS[name], numbers(8, 3, 2), kg.MultipleChoice([1, 2], np.arange(4, 12)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constraints_travel_with_their_instances(kind):
    limits = kg.Knapsack(np.random.default_rng(0).integers(0, 4, (8, 5)), np.arange(2, 10))
    mesh = mesh_of(kind)
    run = jax.shard_map(
        lambda theta, limit: kg.relax(theta, limit, SMOOTHING), mesh=mesh, in_specs=(SPLIT, SPLIT), out_specs=SPLIT
    )
    theta, placed = jax.device_put((numbers(8, 5), limits), NamedSharding(mesh, SPLIT))
    for _ in range(2):  # it stays where it was put when somebody has looked at it
        found = jax.jit(run)(theta, placed)
        np.testing.assert_allclose(found, kg.relax(numbers(8, 5), limits, SMOOTHING), rtol=1e-6, atol=1e-6)
        assert placed == limits
    assert jax.tree.leaves(placed)[0].sharding.spec == SPLIT


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_array_that_was_made_before_the_mesh(kind):
    theta = numbers(8, 5)
    with jax.set_mesh(mesh_of(kind)):
        found = jax.jit(lambda theta: kg.relax(theta, LIMIT, SMOOTHING))(theta)
    np.testing.assert_allclose(found, kg.relax(theta, LIMIT, SMOOTHING), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["explicit", "auto"])
def test_batches_of_two_dimensions(way):
    check(way, OPERATIONS["gradient of relax"], numbers(8, 3, 5), LIMIT)


def test_a_gradient_by_gamma_is_summed_over_devices():
    theta, mesh = numbers(8, 5), mesh_of(AxisType.Auto)

    def loss(gamma, theta):
        return jax.lax.psum(kg.value(theta, LIMIT, kg.Shannon(gamma)).sum(), "batch")

    spread = jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), SPLIT), out_specs=PartitionSpec())
    found = jax.jit(jax.grad(spread))(0.5, theta)
    expected = jax.grad(lambda gamma: kg.value(theta, LIMIT, kg.Shannon(gamma)).sum())(0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
