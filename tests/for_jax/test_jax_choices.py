"""JAX: the tournaments of the scan, and choices that are not possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import knapgrad as kg  # noqa: E402
from knapgrad import reference  # noqa: E402
from knapgrad.kernels import jax_scan  # noqa: E402
from knapgrad.kernels.triton import from_jax  # noqa: E402
from knapgrad.lattice import tournament  # noqa: E402


@pytest.fixture(autouse=True)
def compiled_in_a_hurry() -> Iterator[None]:
    """Most of a test is compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax_scan.float64(False):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def close(actual: Any, expected: Any, tolerance: float, what: str = "it") -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), what)
    actual, expected = actual[np.isfinite(expected)], expected[np.isfinite(expected)]
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)), f"{what} is off by {error}"


def test_every_level_of_the_tournament_is_two_slices():
    for options in range(1, 40):
        nodes = [(o, o + 1) for o in jax_scan._order(options)]
        joined = []
        while len(nodes) > 1:
            alone, skip, pick = jax_scan._level(nodes)
            joined += [(low, middle, high) for (low, middle), (_, high) in zip(skip, pick, strict=True)]
            assert all(low[1] == high[0] for low, high in zip(skip, pick))
            nodes = alone + [(low, high) for (low, _), (_, high) in zip(skip, pick)]
        assert sorted(joined) == sorted(map(tuple, tournament(options).tolist()))


def test_float32_scores_with_near_ties():
    """Scores of 1e4 gamma; every exchange of options of equal weight is worth about one gamma."""
    rng, gamma, shape = np.random.default_rng(3), 1e-4, (40, 4)
    weights = rng.integers(3, 9, shape)
    theta = (weights + gamma * rng.standard_normal(shape)).astype(np.float32)
    limit = kg.MultipleChoice(weights, 200)
    lattice = limit.lattice(theta.size)
    value, y = reference.operator(theta.astype(np.float64).reshape(-1) / np.float32(gamma), lattice, kg.Gini)
    close(kg.relax(jnp.asarray(theta), limit, kg.Gini(gamma)), y.reshape(shape), 1e-5)
    close(kg.value(jnp.asarray(theta), limit, kg.Gini(gamma)), value * gamma, 1e-5)
    assert ((y > 0.01) & (y < 0.99)).any()


def test_kernels_of_a_gpu_leave_choices_and_frontiers_to_the_scan(monkeypatch):
    monkeypatch.setattr(from_jax, "multiprocessors", lambda: 100)
    items, choices = kg.TopK(2).lattice(4), kg.MultipleChoice([1, 2], 4).lattice(4)
    for lattice, name, fused in ((items, "value", True), (items, "frontier", False), (choices, "value", False)):
        found = from_jax.find(name, "gini", jnp.zeros((3, 4), jnp.float32), lattice)
        assert (found is not None) == fused


# Infeasible instances

GROUPS, WIDTH = 3, 9


@pytest.mark.parametrize("traced", [True, False])
def test_an_infeasible_instance_is_nan(traced):
    """Below its lightest options; a least weight that no options reach; a group without options; a score that is no
    number; and traced numbers that are not valid. The first instance is feasible."""
    names = ["feasible", "capacity", "at least", "masked", "nan", "above the bound", "negative"]
    size = len(names) if traced else names.index("nan") + 1
    theta, weights = np.zeros((size, GROUPS, 3)), np.full((size, GROUPS, 3), [1, 2, 1])
    capacity, at_least = np.full(size, 6), np.full(size, 4)
    capacity[1], at_least[1] = 2, 1
    capacity[2], at_least[2] = 8, 8
    theta[3, 1], theta[4, 1, 1] = -np.inf, np.nan
    if traced:
        capacity[5], weights[6, 0, 0] = WIDTH + 1, -1

    def everything(theta: Any, key: Any, *numbers: Any) -> Any:
        limited, least = numbers[1:] or (capacity, at_least)
        limit = kg.MultipleChoice((numbers or (weights,))[0], limited, at_least=least, max_capacity=WIDTH)
        y, smoothing = jnp.zeros_like(theta).at[..., 0].set(1).at[:, 1:].set(jnp.array([0, 1.0, 0])), kg.Gini()
        relaxed, pull = jax.vjp(lambda theta: kg.relax(theta, limit, smoothing), theta)
        return {
            "value": kg.value(theta, limit, smoothing),
            "relax": relaxed,
            "vjp": pull(jnp.ones_like(theta))[0],
            "entropy": kg.entropy(theta, limit, smoothing),
            "log_prob": kg.log_prob(theta, y, limit, smoothing),
            "solve": kg.solve(theta, limit),
            "sample": kg.sample(theta, limit, smoothing, rng=key),
        }

    numbers = (weights, capacity, at_least) if traced else ()
    found = jax.jit(everything)(jnp.asarray(theta, jnp.float32), jax.random.key(0), *numbers)
    for operation, result in found.items():
        assert np.isfinite(result[0]).all(), operation
        for name, row in zip(names[1:], result[1:]):
            assert np.isnan(row).all(), f"{operation}: {name}"


def test_a_negative_weight_that_is_traced_is_nan():
    relax = jax.jit(lambda theta, weights: kg.relax(theta, kg.MultipleChoice(weights, 5, max_capacity=9), kg.Gini()))
    assert np.isnan(relax(jnp.ones((2, 2)), jnp.array([[-5, 0], [0, 0]]))).all()
    assert np.isfinite(relax(jnp.ones((2, 2)), jnp.array([[5, 0], [0, 0]]))).all()


HEAVY = {32: 2**30, 64: 2**62}  # four of them are 0 in integers of so many bits


@pytest.mark.parametrize("bits", HEAVY)
@pytest.mark.parametrize("traced", [["weights"], ["capacity"], ["weights", "capacity"], ["limit"]], ids=" and ".join)
def test_a_sum_of_lightest_options_is_not_wrapped(traced, bits):
    """The first instance has no selection, the second has."""
    heavy = HEAVY[bits] if traced == ["weights"] or bits == 32 else 2**59
    numbers = {"weights": np.array([[[heavy, heavy + 1]] * 4, [[1, 2]] * 4]), "capacity": np.array([9, 9])}
    theta = jnp.zeros((2, 4, 2))

    def everything(given: dict[str, Any]) -> Any:
        limit = given.get("limit") or kg.MultipleChoice(**numbers | given, max_capacity=10)
        return kg.relax(theta, limit, kg.Gini()), kg.solve(theta, limit), kg.frontier(theta, limit)

    arguments: dict[str, Any] = numbers | {"limit": kg.MultipleChoice(**numbers)} if traced == ["limit"] else numbers
    with jax_scan.float64(bits == 64):
        relaxed, solved, row = jax.jit(everything)({name: arguments[name] for name in traced})
    assert np.isnan(relaxed[0]).all() and np.isnan(solved[0]).all()
    assert np.isfinite(relaxed[1]).all() and np.isfinite(solved[1]).all()
    np.testing.assert_array_equal(row[:, :10], [[-np.inf] * 10, [-np.inf] * 4 + [0.0] * 6])
