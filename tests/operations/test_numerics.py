"""The numerics contract of docs/math.md: near-ties, extremes, NaN and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from instances import Problem
from oracles import LONG_IS_LONGER, long_table

needs_long_double = pytest.mark.skipif(
    not LONG_IS_LONGER, reason="long double is double here: no truth to compare with"
)


def near_ties(constraint: str, n: int, scale: float, seed: int = 0) -> Problem:
    """Scores of the size ``scale`` gamma in which every exchange of items of equal weight is worth about one gamma."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(n)
    if constraint == "top-k":
        return Problem(scale + noise, None, max(n // 10, 1))
    weights = rng.integers(3, 9, n)
    capacity = int(weights.sum()) // 2
    # With negative scores the least weight is what binds.
    sign, least = (-1, capacity // 2) if constraint == "at least" else (1, None)
    return Problem(sign * scale * weights / 8 + noise, weights, capacity, at_least=least)


@pytest.mark.thinned(5)
@needs_long_double
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("n", [10, 100, 1000])
def test_near_ties(n, scale, dtype, regularizer, constraint):
    problem = near_ties(constraint, n, scale).rounded(dtype)
    theta, weights, limits, _ = replace(problem, theta=problem.theta[None]).rows()[0]
    value, y = long_table(theta, weights, limits, regularizer)
    for copies in (1, 16):
        batch = np.broadcast_to(theta, (copies, n)).astype(dtype)
        smoothing = problem.regularizer(regularizer)
        relaxed = kg.relax(batch, problem.constraint, smoothing)
        assert np.abs(relaxed.astype(np.longdouble) - y).max() <= TOLERANCES[dtype].relax
        error = np.abs(kg.value(batch, problem.constraint, smoothing).astype(np.longdouble) - value)
        assert error.max() <= TOLERANCES[dtype].value * abs(value)


@pytest.mark.thinned_where_compiled(1)
@needs_long_double
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("gamma", [0.1, 3.0])
def test_near_ties_with_a_gamma_that_does_not_divide_evenly(gamma, dtype, backend, regularizer, constraint):
    """theta/gamma must not be rounded to float32: at 1e4 that alone would move relax by 1e-3."""
    unit = near_ties(constraint, 100, 1e4)
    problem = replace(unit, theta=unit.theta * gamma, gamma=gamma).rounded(dtype)
    value, y = long_table(*problem.rows()[0][:3], regularizer, gamma)
    theta = backend.asarray(problem.theta, dtype)
    relaxed = backend.to_numpy(kg.relax(theta, problem.constraint, problem.regularizer(regularizer)))
    assert np.abs(relaxed - y.astype(np.float64)).max() <= TOLERANCES[dtype].relax
    actual = backend.to_numpy(kg.value(theta, problem.constraint, problem.regularizer(regularizer)))
    assert abs(float(actual) - float(value)) <= TOLERANCES[dtype].value * abs(float(value))


GAMMAS = [1e-8, 1e-4, 1.0, 1e4, 1e8]
SIZES = [1e-30, 1e-15, 1.0, 1e10, 1e20]
SHAPE = np.array([0.9, -0.4, 1.0, 0.1, -1.0, 0.55])
EXTREME = {
    "knapsack": Problem(SHAPE, [2, 3, 1, 0, 2, 4], 6),
    "top-k": Problem(SHAPE, None, 3),
    "at least": Problem(SHAPE, [2, 3, 1, 0, 2, 4], 6, at_least=4),
}


@pytest.mark.thinned_where_compiled(5)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_extremes_against_enumeration(gamma, size, dtype, backend, regularizer, constraint):
    unit = EXTREME[constraint]
    problem = replace(unit, theta=unit.theta * size, gamma=gamma).rounded(dtype)
    theta = backend.asarray(problem.theta, dtype)
    arguments = problem.constraint, problem.regularizer(regularizer)
    exact = problem.truths(regularizer)[0]
    y = backend.to_numpy(kg.relax(theta, *arguments))
    assert np.isfinite(y).all() and (y >= 0).all() and (y <= 1).all()
    assert np.abs(y - exact.relax).max() <= TOLERANCES[dtype].relax
    value = float(backend.to_numpy(kg.value(theta, *arguments)))
    assert abs(value - exact.value) <= TOLERANCES[dtype].value * max(abs(exact.value), float(problem.scale()))
    entropy = float(backend.to_numpy(kg.entropy(theta, *arguments)))
    assert abs(entropy - exact.entropy) <= TOLERANCES[dtype].value * max(exact.entropy, 1.0)


@pytest.mark.thinned_where_compiled(4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extremes_side_by_side_stay_finite(dtype, backend, regularizer, constraint):
    """Scores of all sizes in one instance: no accuracy is promised, numbers are."""
    rng = np.random.default_rng(0)
    n = 12
    theta = rng.choice([-1.0, 1.0], (40, n)) * 10.0 ** rng.uniform(-30, 20, (40, n))
    for gamma in GAMMAS:
        problem = Problem(theta, None if constraint == "top-k" else rng.integers(0, 5, n), 6, gamma)
        given = backend.asarray(theta, dtype)
        arguments = problem.constraint, problem.regularizer(regularizer)
        y = backend.to_numpy(kg.relax(given, *arguments))
        assert np.isfinite(y).all() and (y >= 0).all() and (y <= 1).all()
        if constraint == "top-k":
            assert np.abs(y.sum(axis=-1) - 6).max() <= n * TOLERANCES[dtype].relax
        assert np.isfinite(backend.to_numpy(kg.value(given, *arguments))).all()
        assert np.isfinite(backend.to_numpy(kg.entropy(given, *arguments))).all()
        samples = backend.to_numpy(kg.sample(given, *arguments, num_samples=3, rng=backend.rng(0)))
        assert Problem(theta, problem.weights, 6).allows(samples)
        log_probs = backend.to_numpy(kg.log_prob(given, backend.asarray(samples, dtype), *arguments))
        assert (log_probs <= 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_prob_of_an_unlikely_selection_is_not_lost(dtype, backend):
    """exp(-1000) is 0 in every dtype; its logarithm is not."""
    theta = np.array([0.0, 500.0, 1000.0, 250.0])
    for problem in (Problem(theta, None, 2), Problem(theta, [1, 2, 1, 1], 3)):
        y = np.array([1.0, 0.0, 0.0, 1.0])
        actual = backend.to_numpy(
            kg.log_prob(backend.asarray(theta, dtype), backend.asarray(y, dtype), problem.constraint, kg.Shannon())
        )
        exact = problem.truths("shannon")[0].log_prob(y)
        assert exact < -1000
        assert abs(float(actual) - exact) <= TOLERANCES[dtype].log_prob * abs(exact)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "solve": lambda theta, y, constraint, smoothing, rng: kg.solve(theta, constraint),
    "value": lambda theta, y, constraint, smoothing, rng: kg.value(theta, constraint, smoothing),
    "relax": lambda theta, y, constraint, smoothing, rng: kg.relax(theta, constraint, smoothing),
    "sample": lambda theta, y, constraint, smoothing, rng: kg.sample(theta, constraint, smoothing, rng=rng),
    "log_prob": lambda theta, y, constraint, smoothing, rng: kg.log_prob(theta, y, constraint, smoothing),
    "entropy": lambda theta, y, constraint, smoothing, rng: kg.entropy(theta, constraint, smoothing),
    "fenchel_young_loss": lambda theta, y, constraint, smoothing, rng: kg.fenchel_young_loss(
        theta, y, constraint, smoothing
    ),
    "divergence": lambda theta, y, constraint, smoothing, rng: kg.divergence(theta, constraint, smoothing),
}


@pytest.mark.thinned_where_compiled(8)
@pytest.mark.parametrize("shared", [True, False], ids=["shared weights", "own weights"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nan_reaches_its_own_instance_and_no_other(operation, dtype, shared, backend, regularizer, constraint):
    rng = np.random.default_rng(1)
    batch, n, k = 20, 6, 3
    theta = rng.standard_normal((batch, n))
    weights = None if constraint == "top-k" else rng.integers(0, 4, n) if shared else rng.integers(0, 4, (batch, n))
    capacity = k if shared else np.full(batch, k)
    problem = Problem(theta, weights, capacity)
    y = backend.asarray(backend.to_numpy(kg.solve(backend.asarray(theta, dtype), problem.constraint)), dtype)
    arguments = y, problem.constraint, problem.regularizer(regularizer)
    clean = backend.to_numpy(OPERATIONS[operation](backend.asarray(theta, dtype), *arguments, backend.rng(0)))
    for sick, item in ((0, 0), (7, 2), (19, n - 1)):
        bad = theta.copy()
        bad[sick, item] = np.nan
        dirty = backend.to_numpy(OPERATIONS[operation](backend.asarray(bad, dtype), *arguments, backend.rng(0)))
        healthy = np.arange(batch) != sick
        np.testing.assert_array_equal(dirty[healthy], clean[healthy])
        assert np.isnan(dirty[sick]).all(), f"NaN in item {item} was lost"


@pytest.mark.thinned_where_compiled(8)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_masks_make_no_nan(operation, dtype, backend, regularizer, constraint):
    rng = np.random.default_rng(2)
    batch, n, k = 33, 17, 4
    theta = rng.standard_normal((batch, n))
    masked = rng.random((batch, n)).argsort(axis=-1) >= rng.integers(k, n, (batch, 1))
    theta[masked] = -np.inf
    problem = Problem(theta, None if constraint == "top-k" else rng.integers(0, 6, n), k)
    given = backend.asarray(theta, dtype)
    y = backend.asarray(backend.to_numpy(kg.solve(given, problem.constraint)), dtype)
    arguments = y, problem.constraint, problem.regularizer(regularizer), backend.rng(0)
    result = backend.to_numpy(OPERATIONS[operation](given, *arguments))
    assert not np.isnan(result).any()
    if result.shape == theta.shape:
        assert (result[masked] == 0).all()
    elif operation != "log_prob":
        assert np.isfinite(result).all()


def test_a_mask_is_the_same_as_leaving_the_item_out(backend, regularizer, constraint):
    theta = np.array([0.4, -np.inf, 1.2, -0.3, -np.inf, 0.8])
    kept = np.isfinite(theta)
    weights = np.array([2, 1, 3, 1, 0, 2])
    whole = Problem(theta, None if constraint == "top-k" else weights, 3)
    part = Problem(theta[kept], None if constraint == "top-k" else weights[kept], 3)
    allowed = {"rtol": 45 * np.finfo(backend.widest).eps, "atol": 4.5 * np.finfo(backend.widest).eps}  # 1e-14, 1e-15
    for operation in ("value", "relax", "entropy"):
        of_whole, of_part = (
            backend.to_numpy(
                OPERATIONS[operation](
                    backend.asarray(p.theta, backend.widest), None, p.constraint, p.regularizer(regularizer), None
                )
            )
            for p in (whole, part)
        )
        np.testing.assert_allclose(of_whole[kept] if operation == "relax" else of_whole, of_part, **allowed)


def test_nan_in_an_item_that_has_to_be_picked(backend, regularizer):
    theta = backend.asarray([[0.5, np.nan], [0.5, 1.0]], backend.widest)
    smoothing = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}[regularizer](1.0)
    y = backend.to_numpy(kg.relax(theta, kg.TopK(2), smoothing))
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], 1.0)


@pytest.mark.parametrize("size", [1e5, 1e6, 1.6e6, 2e6, 2.8e6, 4e6])
def test_infeasible_is_noticed_at_any_size_of_the_scores(size, backend, regularizer):
    smoothing = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}[regularizer](1.0)
    theta = backend.asarray([size, -np.inf], "float32")
    if not backend.looks:
        assert np.isnan(backend.to_numpy(kg.relax(theta, kg.TopK(2), smoothing))).all()
        return
    with pytest.raises(ValueError, match="instance 0"):
        kg.relax(theta, kg.TopK(2), smoothing)


def test_divergence_is_not_negative_for_large_scores_in_float32(backend, regularizer):
    theta = 1e4 * np.random.default_rng(0).normal(size=(50, 20))
    smoothing = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}[regularizer](1.0)
    scores = backend.asarray(theta, "float32")
    divergence = backend.to_numpy(kg.divergence(scores, kg.TopK(5), smoothing, prior=scores))
    assert np.abs(divergence).max() <= 1e-5
