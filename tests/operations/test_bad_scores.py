"""Scores that are NaN, +inf or out of range: what they do to their own instance, and that they do nothing to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import Backend
from calls import OPERATIONS
from kinds import compiled_dtypes
from knapgrad import reference
from knapgrad.regularizers import REGULARIZERS as CLASSES

WEIGHTS = np.array([2, 9, 1, 0, 3])
GROUPS = np.array([[0, 2, 9], [1, 0, 3]])
BATCH = 18  # a whole group of the kernels, and a part of one

#: constraint, and the item that is NaN: one that no selection has, that all have, or that is special otherwise
CASES: dict[str, tuple[Any, Any]] = {
    "too heavy": (kg.Knapsack(WEIGHTS, 6), 1),
    "too heavy, own weights": (kg.Knapsack(np.tile(WEIGHTS, (BATCH, 1)), np.full(BATCH, 6)), 1),
    "too heavy, at least": (kg.Knapsack(WEIGHTS, 6, at_least=3), 1),
    "too heavy, exactly": (kg.Knapsack(WEIGHTS, 6, at_least=6), 1),
    "all too heavy": (kg.Knapsack(WEIGHTS + 9, 6), 4),
    "capacity 0": (kg.Knapsack(WEIGHTS, 0), 0),
    "weight 0": (kg.Knapsack(WEIGHTS, 6), 3),
    "top 0": (kg.TopK(0), 2),
    "top n": (kg.TopK(5), 4),
    "top 0 to 2": (kg.TopK(2, at_least=0), 0),
    "option too heavy": (kg.MultipleChoice(GROUPS, 5), (0, 2)),
    "option too heavy, own weights": (kg.MultipleChoice(np.tile(GROUPS, (BATCH, 1, 1)), 5), (0, 2)),
    "option too heavy, at most one": (kg.MultipleChoice(GROUPS, 5, optional=True), (0, 2)),
    "option too heavy, at least": (kg.MultipleChoice(GROUPS, 5, at_least=2), (0, 2)),
    "options, capacity 0": (kg.MultipleChoice(GROUPS, 0), (1, 0)),
    "too heavy for a budget": (kg.MultiKnapsack([[1] * 5, WEIGHTS], [3, 6]), 1),
    "weight 0 in a budget": (kg.MultiKnapsack([[1] * 5, WEIGHTS], [3, 6]), 3),
}


def gradient_of(backend: Backend, function: Callable[[Any], Any], theta: Any) -> Any:
    if backend.is_jax:
        import jax

        return jax.grad(lambda theta: function(theta).sum())(theta)
    theta = theta.clone().requires_grad_()
    result = function(theta)
    result.where(~result.isneginf(), 0.0).sum().backward()
    return theta.grad


def mode_of(backend: Backend, theta: Any, *arguments: Any) -> Any:
    if backend.is_jax:
        return kg.jax.SubsetDistribution(theta, *arguments).mode
    return kg.torch.SubsetDistribution(theta, *arguments, validate_args=False).mode


#: and frontiers, and a divergence whose prior is bad
CALLS: dict[str, Callable[..., Any]] = {
    **{name: call for name, call in OPERATIONS.items() if "prior" not in name},
    "divergence of a prior": lambda theta, y, *problem, rng: kg.divergence(y, *problem, prior=theta),
    "frontier": lambda theta, y, *problem, rng: kg.frontier(theta, *problem),
    "hard frontier": lambda theta, y, limit, _, rng: kg.frontier(theta, limit),
}
GRADIENTS = [name for name in CALLS if name not in ("solve", "sample", "hard frontier", "divergence of a prior")]


def scores(case: str, seed: int = 0) -> np.ndarray:
    shape = GROUPS.shape if "option" in case else WEIGHTS.shape
    return np.random.default_rng(seed).standard_normal((BATCH, *shape))


def result(backend: Backend, dtype: str, operation: str, theta: np.ndarray, y: Any, *problem: Any) -> np.ndarray:
    """Of an operation, or the gradient of one."""
    given, name = backend.asarray(theta, dtype), operation.removeprefix("gradient of ")
    if operation == "mode":
        found = mode_of(backend, given, *problem)
    elif operation == name:
        found = CALLS[name](given, y, *problem, rng=backend.rng(0))
    else:
        found = gradient_of(backend, lambda theta: CALLS[name](theta, y, *problem, rng=None), given)
    return backend.to_numpy(found)


@pytest.mark.thinned_where_compiled(7)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operation", [*CALLS, "mode", *(f"gradient of {name}" for name in GRADIENTS)])
def test_a_nan_is_its_instance_and_no_other(operation, case, backend):
    if backend.name == "numpy" and operation not in CALLS:
        pytest.skip("NumPy has no derivatives, and no distributions")
    constraint, item = CASES[case]
    if "frontier" in operation and case.endswith("at least"):
        pytest.skip("no frontier of a least weight in between")
    kinds, number = list(CLASSES.values()), len(operation) + list(CASES).index(case)
    kind = kinds[number % 3]
    if not (dtypes := compiled_dtypes(backend, case, kind.name)):
        kind, dtypes = kg.Gini, ["float32"]
    dtype = dtypes[number // 3 % len(dtypes)]
    theta, smoothing = scores(case), kind(0.7)
    y = kg.solve(backend.asarray(theta, dtype), constraint)
    clean = result(backend, dtype, operation, theta, y, constraint, smoothing)
    assert not np.isnan(clean).any()
    for bad, others in ((np.nan, [0]), (np.inf, [0, BATCH - 1])):
        sick = np.isin(np.arange(BATCH), others)
        theta[(sick, *np.atleast_1d(item))] = bad
        dirty = result(backend, dtype, operation, theta, y, constraint, smoothing)
        assert np.isnan(dirty[sick]).all()
        np.testing.assert_array_equal(dirty[~sick], clean[~sick])


@pytest.mark.parametrize("case", [case for case in CASES if "own" not in case])
def test_the_reference_has_the_same_nan(case, regularizer):
    constraint, item = CASES[case]
    theta = scores(case)[0]
    theta[item] = np.nan
    theta = constraint.flat(kg.backends.load("numpy"), theta)
    lattice, smoothing = constraint.lattice(theta.size), CLASSES[regularizer]
    ones = np.ones(theta.size)
    value, y = reference.operator(theta, lattice, smoothing)
    entropy, slope = reference.entropy(theta, lattice, smoothing)
    found = [value, y, entropy, slope, reference.vjp(theta, ones, lattice, smoothing)]
    found += [reference.solve(theta, lattice), reference.sample(theta, 0.5 * ones, lattice, smoothing)]
    found += [reference.log_prob(theta, 0 * ones, lattice, smoothing), reference.frontier(theta, lattice, smoothing)]
    assert all(np.isnan(x).all() for x in found)


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_of_a_nan_in_a_large_batch(threads, torch_threads):
    """On several threads, with many groups."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    theta, weights = rng.standard_normal((3000, 30)), rng.integers(1, 9, 30)
    weights[7], sick = 200, rng.random(3000) < 0.1
    constraint, smoothing = kg.Knapsack(weights, 70), kg.Gini()
    clean = kg.relax(theta, constraint, smoothing)
    theta[sick, 7] = np.nan
    dirty = kg.relax(theta, constraint, smoothing)
    assert np.isnan(dirty[sick]).all()
    np.testing.assert_array_equal(dirty[~sick], clean[~sick])


HUGE = np.array([[1.7e308, 1.6e308, -1.7e308, 1.5e308, 1e292], [4.0, 3.0, 2.5, -1.0, 0.5]])


@pytest.mark.parametrize("constraint", [kg.Knapsack([4, 3, 2, 0, 5], 5), kg.TopK(2), kg.TopK(4, at_least=1)])
def test_solve_to_the_end_of_the_range(constraint, backend):
    """As it does with scores of an ordinary size."""
    if "float64" not in backend.dtypes:
        pytest.skip("no float64")
    masked = np.where([[False] * 4 + [True], [False] * 5], -np.inf, HUGE)
    for theta in (HUGE, HUGE[:1], HUGE[0], masked):
        small = np.where(abs(theta) > 1e290, theta / 2.0**1000, theta)
        found = backend.to_numpy(kg.solve(backend.asarray(theta, "float64"), constraint))
        np.testing.assert_array_equal(found, kg.solve(small, constraint))


def test_solve_among_options_to_the_end_of_the_range(backend):
    if "float64" not in backend.dtypes:
        pytest.skip("no float64")
    theta = np.array([[1.7e308, 1.1e308, -np.inf], [1.6e308, -1.7e308, 1.5e308]])
    for optional in (False, True):
        constraint = kg.MultipleChoice([[3, 1, 0], [2, 0, 1]], 3, optional=optional)
        found = backend.to_numpy(kg.solve(backend.asarray(theta, "float64"), constraint))
        np.testing.assert_array_equal(found, kg.solve(theta / 2.0**1000, constraint))


@pytest.mark.parametrize("constraint", [kg.Knapsack([2, 1, 3], 4), kg.TopK(2), kg.Knapsack([2, 1, 3], 4, at_least=3)])
@pytest.mark.parametrize(
    "size, gamma", [(1e300, 1.0), (-1e300, 1.0), (1.7e308, 1e-8), (-1.7e308, 1e-8), (1.0, 1e-300), (0.0, 1e-310)]
)
def test_what_is_out_of_range_says_so(size, gamma, constraint, backend, regularizer):
    if "float64" not in backend.dtypes:
        pytest.skip("no float64")
    theta = np.array([[1.0, 0.5, 0.2], [0.3, 0.5, 0.2]])
    theta[1, 0] = size
    smoothing, given = CLASSES[regularizer](np.array([1.0, gamma])), backend.asarray(theta, "float64")
    if backend.looks:
        for call in (kg.value, kg.relax, kg.entropy):
            with pytest.raises(ValueError, match=r"theta / gamma of instance 1 .* larger gamma"):
                call(given, constraint, smoothing)
        kg.value(given[:1], constraint, CLASSES[regularizer](1.0))  # nothing is left of it
        return
    for call in (kg.value, kg.relax, kg.entropy):
        found = backend.to_numpy(call(given, constraint, smoothing))
        assert np.isnan(found[1]).all() and np.isfinite(found[0]).all()


@pytest.mark.parametrize("gamma", [1e-280, 1.0, 1e280])
def test_what_is_just_in_range_is_right(gamma, backend, regularizer):
    if "float64" not in backend.dtypes or backend.is_jax:
        pytest.skip("XLA takes numbers below 1e-308 for 0")
    theta = 1e285 * gamma * np.array([[3.0, -1.0, 2.0]]) if gamma < 1e20 else np.array([[3.0, -1.0, 2.0]]) * gamma
    given = backend.asarray(theta, "float64")
    found = backend.to_numpy(kg.relax(given, kg.TopK(1, at_least=0), CLASSES[regularizer](gamma)))
    plain = kg.relax(theta / gamma, kg.TopK(1, at_least=0), CLASSES[regularizer](1.0))
    np.testing.assert_allclose(found, plain, rtol=1e-12)


@pytest.mark.parametrize("gamma, size", [(1e4, 1e4), (1.0, 1.0), (1.0, 1e4)])
def test_a_divergence_is_never_negative(gamma, size, backend, regularizer):
    rng = np.random.default_rng(3)
    theta = backend.asarray(size * rng.normal(size=(200, 20)), "float32")
    constraint, smoothing = kg.Knapsack(rng.integers(1, 6, 20), 25), CLASSES[regularizer](gamma)
    near = backend.asarray(backend.to_numpy(theta) * (1 + 1e-6), "float32")
    for prior in (theta, near):
        assert (backend.to_numpy(kg.divergence(theta, constraint, smoothing, prior=prior)) >= 0).all()


def test_a_divergence_of_0_keeps_its_gradient(backend):
    """Clamped or not, it is the Jacobian of relax times theta - prior."""
    if backend.name == "numpy":
        pytest.skip("no derivatives")
    rng = np.random.default_rng(4)
    theta = 1e4 * rng.normal(size=(100, 20))
    prior = theta + rng.normal(size=theta.shape) * np.logspace(-3, 1, 100)[:, None]
    problem = kg.TopK(5), kg.Gini(1e4)
    given = [backend.asarray(x, "float32") for x in (theta, prior)]
    gap = backend.to_numpy(given[0]) - backend.to_numpy(given[1])
    zero = backend.to_numpy(kg.divergence(given[0], *problem, prior=given[1])) == 0
    assert zero.any()
    found = backend.to_numpy(gradient_of(backend, lambda x: kg.divergence(x, *problem, prior=given[1]), given[0]))
    direction = backend.asarray(gap, "float32")
    product = gradient_of(backend, lambda x: (kg.relax(x, *problem) * direction).sum(-1), given[0])
    assert abs(found[zero]).max() > 1e-6
    np.testing.assert_allclose(found[zero], backend.to_numpy(product)[zero], atol=2e-7)


#: one path would leave its row by far, if nothing stopped it
FAR = 10**7
LEAST = kg.Knapsack([1, FAR], FAR + 1, at_least=FAR + 1)


def test_paths_without_a_selection_stay_in_their_row(backend):
    if "float64" not in backend.dtypes or not backend.looks:
        pytest.skip("the error is raised where results are looked at")
    dirty = backend.asarray(np.array([[0.0, np.nan]]), "float64")
    assert np.isnan(backend.to_numpy(kg.solve(dirty, LEAST))).all()
    masked = backend.asarray(np.array([[0.0, -np.inf]]), "float64")
    with pytest.raises(ValueError, match=r"instance 0 .* no feasible selection"):
        kg.solve(masked, LEAST)
    with pytest.raises(ValueError, match=r"instance 0 .* no feasible selection"):
        between = kg.Knapsack([FAR * 45 // 100, FAR + 1], FAR, at_least=FAR * 7 // 10)
        kg.sample(backend.asarray(np.zeros((1, 2)), "float64"), between, kg.Gini(), num_samples=2, rng=backend.rng(0))


def test_selections_that_are_not_feasible_stay_in_their_row(backend, regularizer):
    """No option of a group, two, or one that is too heavy."""
    constraint = kg.MultipleChoice([[0, 1], [0, FAR // 4]], FAR // 4 + 1)
    y = np.array(
        [[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]]
    )
    theta, y = backend.asarray(np.zeros((4, 2, 2)), "float64"), backend.asarray(y, "float64")
    found = backend.to_numpy(kg.log_prob(theta, y, constraint, CLASSES[regularizer]()))
    np.testing.assert_array_equal(np.isneginf(found), [True, True, False, True])
