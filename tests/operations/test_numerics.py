"""The numerics contract of docs/math.md: near-ties, extremes and masks. For NaN see test_bad_scores.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from calls import OPERATIONS
from instances import Problem
from kinds import KINDS
from knapgrad.regularizers import REGULARIZERS as CLASSES
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


@pytest.mark.few_where_compiled(3)
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


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extremes_against_enumeration(dtype, backend, regularizer, kind):
    unit, tolerance = KINDS[kind].typical, TOLERANCES[dtype]
    for gamma, size in product(GAMMAS, SIZES):
        problem = replace(unit, theta=unit.theta * size, gamma=gamma).rounded(dtype)
        theta, what = backend.asarray(problem.theta, dtype), f"gamma {gamma}, scores of {size}"
        arguments = problem.constraint, problem.regularizer(regularizer)
        exact = problem.truths(regularizer)[0]
        y = backend.to_numpy(kg.relax(theta, *arguments)).reshape(-1)
        assert np.isfinite(y).all() and (y >= 0).all() and (y <= 1).all(), what
        assert np.abs(y - exact.relax).max() <= tolerance.relax, what
        value, entropy = (float(backend.to_numpy(call(theta, *arguments))) for call in (kg.value, kg.entropy))
        assert abs(value - exact.value) <= tolerance.value * max(abs(exact.value), float(problem.scale())), what
        assert abs(entropy - exact.entropy) <= tolerance.value * max(exact.entropy, 1.0), what


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


CALLS = {name: call for name, call in OPERATIONS.items() if "prior" not in name}


@pytest.mark.thinned_where_compiled(8)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_masks_make_no_nan(dtype, backend, regularizer, constraint):
    rng = np.random.default_rng(2)
    batch, n, k = 33, 17, 4
    theta = rng.standard_normal((batch, n))
    masked = rng.random((batch, n)).argsort(axis=-1) >= rng.integers(k, n, (batch, 1))
    theta[masked] = -np.inf
    problem = Problem(theta, None if constraint == "top-k" else rng.integers(0, 6, n), k)
    if constraint == "at least":  # what the best selections weigh
        loads = (kg.solve(theta, problem.constraint) * problem.weights).sum(-1).astype(int)
        problem = replace(problem, at_least=loads)
    given = backend.asarray(theta, dtype)
    y = backend.asarray(backend.to_numpy(kg.solve(given, problem.constraint)), dtype)
    arguments = y, problem.constraint, problem.regularizer(regularizer)
    for name, call in CALLS.items():
        result = backend.to_numpy(call(given, *arguments, rng=backend.rng(0)))
        assert not np.isnan(result).any(), name
        if result.shape == theta.shape:
            assert (result[masked] == 0).all(), name
        elif name != "log_prob":
            assert np.isfinite(result).all(), name


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
                    backend.asarray(p.theta, backend.widest), None, p.constraint, p.regularizer(regularizer)
                )
            )
            for p in (whole, part)
        )
        np.testing.assert_allclose(of_whole[kept] if operation == "relax" else of_whole, of_part, **allowed)


@pytest.mark.parametrize("size", [1e5, 1e6, 1.6e6, 2e6, 2.8e6, 4e6])
def test_infeasible_is_noticed_at_any_size_of_the_scores(size, backend, regularizer):
    smoothing = CLASSES[regularizer](1.0)
    theta = backend.asarray([size, -np.inf], "float32")
    if not backend.looks:
        assert np.isnan(backend.to_numpy(kg.relax(theta, kg.TopK(2), smoothing))).all()
        return
    with pytest.raises(ValueError, match="instance 0"):
        kg.relax(theta, kg.TopK(2), smoothing)
