"""frontier: the values at all capacities from one table, against one call per capacity and against enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_operations import assert_close, half_types, rounded_once

import boxes
import choices
import instances
import knapgrad as kg
from backends import TOLERANCES, Backend
from choices import Choices
from instances import INF, Problem
from kinds import problems

EXACT = TOLERANCES["float64"]
SMOOTHED: list[str | None] = [None, "shannon", "gini", "tsallis"]
_THETA, _CHOICES = instances.EDGES["no batch"].theta, choices.EDGES["no batch"].theta
_BATCH, _WEIGHTS = choices.EDGES["batch of rank 2"].theta[0], choices.EDGES["batch of rank 2"].weights

PROBLEMS: dict[str, Problem] = {
    "knapsack": Problem(_THETA, [2, 1, 3, 1], 6, 0.8),
    "knapsack, capacity above the total weight": Problem(_THETA, [2, 1, 3, 1], 9),
    "knapsack, some weigh nothing": Problem(_THETA, [2, 0, 3, 0], 4),
    "knapsack, some too heavy": Problem(_THETA, [2, 9, 3, 1], 4),
    "knapsack, capacity 0": Problem(_THETA, [2, 0, 3, 1], 0),
    "knapsack, all of a batch its own": Problem(
        np.stack([_THETA, _THETA[::-1], -_THETA]),
        np.array([[2, 1, 3, 1], [1, 1, 1, 1], [0, 4, 2, 5]]),
        np.array([5, 2, 7]),
        np.array([0.2, 1.0, 5.0]),
    ),
    "knapsack, batch of rank 2": Problem(np.stack([np.stack([_THETA, -_THETA])] * 3), [2, 1, 3, 1], 5),
    "exactly": Problem(_THETA, [2, 2, 3, 2], 6, at_least=6),
    "exactly, above the total weight": Problem(_THETA, [2, 1, 3, 1], 9, at_least=9),
    "exactly, per instance": Problem(
        np.stack([_THETA, -_THETA]), [2, 1, 4, 1], np.array([3, 5]), at_least=np.array([3, 5])
    ),
    "top-k": Problem(_THETA, None, 3),
    "top-k, per instance": Problem(np.stack([_THETA, -_THETA, _THETA]), None, np.array([0, 4, 2])),
    "at most k": Problem(_THETA, None, 3, at_least=0),
    "masked": Problem(np.array([0.75, -INF, 1.5, 0.25]), [2, 1, 3, 1], 5),
    "masked, top-k": Problem(np.array([0.75, -INF, 1.5, 0.25]), None, 4),
    "choices": Choices(_CHOICES, _WEIGHTS, 7, 0.8),
    "choices, capacity above the total weight": Choices(_CHOICES, _WEIGHTS, 12),
    "choices, less than the lightest": Choices(_CHOICES, 1 + _WEIGHTS, 3),
    "choices, optional": Choices(_CHOICES, _WEIGHTS, 6, optional=True),
    "choices, optional, one option": Choices(_CHOICES[:, :1], _WEIGHTS[:, :1], 3, optional=True),
    "choices, one option": Choices(_CHOICES[:, :1], _WEIGHTS[:, :1], 5),
    "choices, exactly": Choices(_CHOICES, 2 * _WEIGHTS + 1, 15, at_least=15),
    "choices, optional, exactly": Choices(_CHOICES, 2 * _WEIGHTS, 9, at_least=9, optional=True),
    "choices, weights of all groups": Choices(_BATCH, [2, 1, 3], 8),
    "choices, all of a batch its own": Choices(
        _BATCH, np.stack([_WEIGHTS, _WEIGHTS[::-1] + 2, 4 - _WEIGHTS]), np.array([3, 11, 9]), np.array([0.2, 1.0, 5.0])
    ),
    "choices, exactly, per instance": Choices(
        _BATCH,
        np.stack([_WEIGHTS, _WEIGHTS[::-1] + 2, 4 - _WEIGHTS]),
        np.array([3, 11, 9]),
        at_least=np.array([3, 11, 9]),
    ),
    "choices, masked": Choices(np.where(np.eye(3) > 0, -INF, _BATCH), _WEIGHTS, 7),
    "choices, a group masked": Choices(np.array([[0.5, 0.25], [-INF, -INF]]), [1, 2], 4),
    "no groups": Choices(np.zeros((2, 0, 3)), [2, 1, 3], 2),
    "no items": Problem(np.zeros((2, 0)), [], 2),
    "empty batch": Choices(np.zeros((0, 2, 3)), [2, 1, 3], 4),
    "more instances than lanes": Problem(np.cos(np.arange(44.0)).reshape(11, 4), [2, 1, 3, 1], 6),
    "more instances than lanes, choices": choices.EDGES["more instances than lanes"],
    "budgets": boxes.EDGES["at most k items"],
    "budgets, three": replace(boxes.EDGES["three budgets"], capacity=[2, 3, 2]),
    "budgets, one capacity above its total": replace(boxes.EDGES["one capacity above its total"], capacity=[2, 9]),
    "budgets, masked": boxes.EDGES["masked"],
}


def largest(problem: Problem) -> int:
    return int(np.max(problem.capacity, initial=0))


def smoothing(problem: Problem, regularizer: str | None) -> Any:
    return None if regularizer is None else problem.regularizer(regularizer)


@pytest.mark.few_where_compiled(
    6, kept=["choices-gini", "choices, exactly-shannon", "choices, optional-tsallis", "choices, optional, exactly-None"]
)
@pytest.mark.parametrize("regularizer", SMOOTHED)
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_the_enumeration(name, regularizer, backend):
    problem = PROBLEMS[name]
    for dtype in backend.wide_dtypes:
        theta = backend.asarray(problem.theta, dtype)
        found = kg.frontier(theta, problem.constraint, smoothing(problem, regularizer))
        assert backend.describe(found) == backend.describe(theta)
        expected = problem.rounded(dtype).frontier(regularizer)
        finite = np.where(np.isinf(expected), 0.0, np.abs(expected))
        scale = problem.scale().reshape(*problem.batch, *[1] * len(problem.capacities))
        error = TOLERANCES[dtype].value * np.maximum(finite, scale)
        assert_close(backend.to_numpy(found), expected, error)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "empty" not in name])
def test_every_entry_is_a_value_of_its_own(name, regularizer):
    problem = PROBLEMS[name]
    row, best = (kg.frontier(problem.theta, problem.constraint, smoothing(problem, r)) for r in (regularizer, None))
    for c in np.ndindex(row.shape[len(problem.batch) :]):
        limit = problem.at_capacity(*c).constraint
        if np.isneginf(row[(..., *c)]).any():
            continue  # an error
        one = kg.value(problem.theta, limit, problem.regularizer(regularizer))
        np.testing.assert_allclose(row[(..., *c)], one, rtol=1e-14, atol=1e-14)
        score = problem.flat(np.where(kg.solve(problem.theta, limit) > 0, problem.theta, 0.0)).sum(-1)
        np.testing.assert_allclose(best[(..., *c)], score.reshape(problem.batch), rtol=1e-14, atol=1e-14)
    assert np.array_equal(np.isneginf(row), np.isneginf(best)) and not np.isnan(row).any()


@settings(max_examples=10)
@given(data=st.data())
def test_random_frontiers(kind, regularizer, data):
    """Of at most a capacity, or of exactly it."""
    problem = data.draw(problems(kind, max_n=5))
    if "at least" in kind:
        problem = replace(problem, at_least=problem.capacity)
    for name in (regularizer, None):
        found = kg.frontier(problem.theta, problem.constraint, smoothing(problem, name))
        np.testing.assert_allclose(found, problem.frontier(name), rtol=EXACT.value, atol=1e-9)


@given(data=st.data())
def test_a_larger_budget_is_never_worse(regularizer, data):
    problem = data.draw(problems("knapsack"))
    best, row = (kg.frontier(problem.theta, problem.constraint, smoothing(problem, r)) for r in (None, regularizer))
    for each in (best, row):
        assert (np.diff(each) >= -1e-12 * (1 + np.abs(each[..., 1:]))).all()
        assert np.isfinite(each).all()
    assert (row >= best - 1e-12 * (1 + np.abs(best))).all()


def test_differences_are_shadow_prices():
    theta, weights = np.array([3.0, 4.0, 1.0, 2.5]), [2, 3, 1, 2]
    for regularizer in (None, kg.Shannon(0.5), kg.Gini(0.5), kg.Tsallis(0.5)):
        prices = np.diff(kg.frontier(theta, kg.Knapsack(weights, 7), regularizer))

        def best(c: int) -> float:
            limit = kg.Knapsack(weights, c)
            return float(theta @ kg.solve(theta, limit) if regularizer is None else kg.value(theta, limit, regularizer))

        np.testing.assert_allclose(prices, [best(c + 1) - best(c) for c in range(7)], atol=1e-13)
        assert prices.max() > 0.5


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("name", ["knapsack, all of a batch its own", "choices, optional", "choices, exactly"])
def test_half_precision_is_one_rounding_of_the_float32_answer(name, backend, regularizer):
    for dtype in half_types(backend):
        problem = PROBLEMS[name].rounded(dtype)
        rows = [
            kg.frontier(backend.asarray(problem.theta, x), problem.constraint, problem.regularizer(regularizer))
            for x in (dtype, "float32")
        ]
        np.testing.assert_array_equal(backend.to_numpy(rows[0]), rounded_once(backend, rows[1], dtype))


def test_max_capacity_is_where_it_ends(regularizer):
    """As long as where the capacity is traced; what it begins with stays the same."""
    for name in ("knapsack", "exactly", "choices", "choices, exactly", "top-k", "choices, all of a batch its own"):
        problem = PROBLEMS[name]
        limit = problem.constraint
        wide = type(limit)(**{**limit.arguments, "max_capacity": largest(problem) + 5})
        for reduced in (problem.regularizer(regularizer), None):
            row = kg.frontier(problem.theta, limit, reduced)
            assert row.shape == (*problem.batch, largest(problem) + 1)
            longer = kg.frontier(problem.theta, wide, reduced)
            assert longer.shape == (*problem.batch, largest(problem) + 6)
            np.testing.assert_allclose(longer[..., :-5], row, rtol=1e-14, atol=1e-14)
            if hasattr(wide, "budgets"):
                assert wide.budgets.shape[-1] == longer.shape[-1]


def test_one_frontier_is_as_good_as_many_calls_where_there_are_many_capacities():
    """Wider than a vector, and a narrow budget in the same batch."""
    rng = np.random.default_rng(1)
    theta, weights = rng.standard_normal((3, 5, 4)), rng.integers(0, 12, (5, 4))
    limit = kg.MultipleChoice(weights, [9, 57, 30])
    for regularizer in (None, kg.Gini(0.7), kg.Shannon(0.7)):
        row = kg.frontier(theta, limit, regularizer)
        assert row.shape == (3, 58)
        for c in np.flatnonzero(np.isfinite(row[0]))[::7]:
            one = kg.MultipleChoice(weights, int(c))
            if regularizer is None:
                best = (theta * kg.solve(theta, one)).sum((-2, -1))
            else:
                best = kg.value(theta, one, regularizer)
            np.testing.assert_allclose(row[:, c], best, rtol=1e-13, atol=1e-13)


# Errors.

Call = Callable[[Backend], Any]


def frontier(constraint: Any, *shape: int, regularizer: Any = None) -> Call:
    return lambda backend: kg.frontier(backend.asarray(np.zeros(shape), backend.widest), constraint, regularizer)


CASES: dict[str, tuple[Call, str]] = {
    "a least weight in between": (
        frontier(kg.Knapsack([1, 2, 3], 5, at_least=2), 3),
        r"at_least = 0 .*at most c.*at_least = capacity.*exactly c.*got at_least = 2.*knapgrad\.value for each",
    ),
    "a least weight of one instance in between": (
        frontier(kg.Knapsack([1, 2, 3], [5, 4], at_least=[5, 3]), 2, 3),
        r"at_least = capacity.*got at_least = \[5 3\].*knapgrad\.value",
    ),
    "a least weight of one instance alone": (
        frontier(kg.Knapsack([1, 2, 3], 5, at_least=[5, 0]), 2, 3),
        r"at_least = capacity.*got at_least = \[5 0\]",
    ),
    "a least number in between": (frontier(kg.TopK(3, at_least=1), 4), r"at_least = k \(exactly c\), got at_least = 1"),
    "choices with a least weight in between": (
        frontier(kg.MultipleChoice([1, 2, 3], 5, at_least=2), 2, 3),
        r"at_least = capacity.*got at_least = 2",
    ),
    "theta of one dimension": (frontier(kg.MultipleChoice([1, 2, 3], 5), 3), r"theta.*groups, options.*\(3,\)"),
    "k above n": (frontier(kg.TopK(4), 3), r"k must be in 0\.\.n, got 4"),
    "weights of another shape": (frontier(kg.Knapsack([1, 2], 3), 3), r"weights.*got 2.*\(3,\)"),
    "not a constraint": (frontier("budget", 3), r"constraint.*str"),
    "not a regularizer": (frontier(kg.TopK(1), 3, regularizer="gini"), r"regularizer.*'gini'"),
    "gamma of another batch": (
        frontier(kg.TopK(1), 5, 3, regularizer=kg.Gini([0.5, 1.0])),
        r"gamma of shape \(2,\).*\(5,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, backend):
    call, pattern = CASES[case]
    with pytest.raises((TypeError, ValueError), match=pattern):
        call(backend)


def test_a_traced_capacity_needs_a_length():
    jax = pytest.importorskip("jax")
    for make, name in (
        (lambda c: kg.Knapsack([1, 2, 3], c), "capacity"),
        (lambda c: kg.TopK(c), "k"),
        (lambda c: kg.MultipleChoice([[1], [2], [3]], c, optional=True), "capacity"),
    ):
        theta = jax.numpy.zeros((3, 1) if name == "capacity" and make(1).event_dims == 2 else 3)
        with pytest.raises(ValueError, match=rf"{name} is traced.*length.*max_capacity="):
            jax.jit(lambda c: kg.frontier(theta, make(c)))(2)


@pytest.mark.parametrize("at_least", [0, 9])
def test_beyond_the_capacity_up_to_its_bound(at_least):
    theta, weights = np.cos(np.arange(10.0)).reshape(2, 5), [1, 2, 3, 4, 5]
    limits = kg.Knapsack(weights, [4, 9] if not at_least else 9, at_least=at_least, max_capacity=12)
    rows = kg.frontier(theta, limits, kg.Gini(0.5))
    for c in range(13):
        own = kg.Knapsack(weights, c, at_least=c if at_least else 0)
        np.testing.assert_allclose(rows[:, c], kg.value(theta, own, kg.Gini(0.5)), rtol=1e-12)


def test_capacities_of_a_batch_that_theta_has_not():
    """A frontier is of all capacities: only the largest counts."""
    theta = np.array([[3.0, 5.0], [1.0, 2.0]])
    for make in (
        lambda c: kg.MultipleChoice([[1, 4], [1, 2]], c),
        lambda c: kg.Knapsack([2, 3], c),
        lambda c: kg.TopK(c),
    ):
        scores = theta if make(1).event_dims == 2 else theta[0]
        np.testing.assert_array_equal(kg.frontier(scores, make([1, 2, 2])), kg.frontier(scores, make(2)))


@pytest.mark.parametrize("of", [lambda x: x, lambda x: [x], lambda x: [x, x]], ids=["number", "array", "batch"])
@pytest.mark.parametrize("kind", ["knapsack", "choices", "top-k"])
def test_a_least_weight_of_0_is_none_where_the_capacity_is_0_too(kind, of):
    """A frontier of such a batch, and one of exactly c, which larger capacities ask for."""
    theta = np.array([[-3.0, 4.0], [5.0, -6.0]])
    theta = theta[0] if isinstance(of(0), int) else theta[: len(of(0))]
    theta = theta[..., None] if kind == "choices" else theta

    def row(capacity: Any, at_least: Any) -> np.ndarray:
        limits = {"at_least": at_least, "max_capacity": 2}
        if kind == "knapsack":
            return kg.frontier(theta, kg.Knapsack([1, 2], capacity, **limits))
        if kind == "choices":
            return kg.frontier(theta, kg.MultipleChoice([[1], [2]], capacity, optional=True, **limits))
        return kg.frontier(theta, kg.TopK(capacity, **limits))

    most, exactly = ([0, 4, 4], [0, 4, 1]) if kind == "top-k" else ([0, 0, 4], [0, -3, 4])
    np.testing.assert_array_equal(row(of(0), of(0)).reshape(-1, 3)[0], most)
    np.testing.assert_array_equal(row(of(0), 0).reshape(-1, 3)[0], most)
    np.testing.assert_array_equal(row(of(1), of(1)).reshape(-1, 3)[0], exactly)
    if kind == "top-k":
        np.testing.assert_array_equal(row(of(0), None).reshape(-1, 3)[0], exactly)


def test_a_constraint_that_is_an_argument_of_a_jitted_function_has_its_length():
    jax = pytest.importorskip("jax")
    theta = np.cos(np.arange(6.0)).reshape(2, 3).astype("float32")
    for limit in (kg.Knapsack.from_real([0.5, 0.25, 1.0], 1.5), kg.Knapsack([1, 2, 3], 4, max_capacity=7), kg.TopK(2)):
        found = jax.jit(kg.frontier)(jax.numpy.asarray(theta), limit)
        np.testing.assert_allclose(found, kg.frontier(theta, limit), rtol=1e-6)
