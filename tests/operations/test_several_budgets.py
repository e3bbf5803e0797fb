"""MultiKnapsack: its properties and its errors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import knapgrad as kg
from backends import TOLERANCES
from boxes import Boxes, box_problems

EXACT = TOLERANCES["float64"]
CLOSE = {"float32": 1e-5, "float64": 1e-9}


def test_jax_runs_the_kernels_on_a_cpu():
    jax = pytest.importorskip("jax")
    limit = kg.MultiKnapsack([[1, 2, 1], [2, 1, 1]], [2, 3])
    if jax.default_backend() == "cpu":
        assert "knapgrad_boxes" in jax.jit(lambda x: kg.solve(x, limit)).lower(jax.numpy.zeros((1, 3))).as_text()


@settings(max_examples=15)
@given(data=st.data())
def test_a_budget_that_never_binds_changes_nothing(regularizer, data):
    problem = data.draw(box_problems())
    *weights, last = problem.weights
    *limits, _ = problem.capacity
    loose = Boxes(problem.theta, [*weights, last], [*limits, 1000], problem.gamma)
    if weights:
        fewer = kg.MultiKnapsack(weights, limits)
        expected = kg.relax(problem.theta, fewer, problem.regularizer(regularizer))
        actual = kg.relax(problem.theta, loose.constraint, problem.regularizer(regularizer))
        np.testing.assert_allclose(actual, expected, atol=EXACT.relax)


@settings(max_examples=15)
@given(data=st.data())
def test_the_order_of_budgets_does_not_matter(regularizer, data):
    problem = data.draw(box_problems())
    turned = Boxes(problem.theta, problem.weights[::-1], problem.capacity[::-1], problem.gamma)
    one, other = (kg.relax(x.theta, x.constraint, x.regularizer(regularizer)) for x in (problem, turned))
    np.testing.assert_allclose(one, other, atol=EXACT.relax)


def test_one_budget_is_a_knapsack_to_the_last_digits(backend, regularizer):
    theta = backend.asarray(np.cos(np.arange(60.0)).reshape(3, 20), backend.widest)
    weights = np.arange(20) % 7
    smoothing = getattr(kg, regularizer.capitalize())(0.3)
    one = kg.relax(theta, kg.MultiKnapsack([weights], [31]), smoothing)
    expected = kg.relax(theta, kg.Knapsack(weights, 31), smoothing)
    np.testing.assert_allclose(backend.to_numpy(one), backend.to_numpy(expected), atol=CLOSE[backend.widest])


def test_at_most_k_items_is_a_list_of_top_k(regularizer):
    theta = np.cos(np.arange(24.0)).reshape(4, 6)
    smoothing = getattr(kg, regularizer.capitalize())(0.5)
    limit = kg.MultiKnapsack([np.ones(6, int), np.zeros(6, int)], [3, 5])
    expected = kg.relax(theta, kg.TopK(3, at_least=0), smoothing)
    np.testing.assert_allclose(kg.relax(theta, limit, smoothing), expected, atol=EXACT.relax)


# A value.


def test_it_is_a_value():
    limit = kg.MultiKnapsack([[1, 1, 1], [4, 2, 3]], [2, 5])
    assert (
        limit
        == kg.MultiKnapsack(np.array([[1, 1, 1], [4, 2, 3]]), np.array([2, 5]))
        != kg.MultiKnapsack([[1, 1, 1], [4, 2, 3]], [2, 6])
    )
    assert hash(limit) == hash(pickle.loads(pickle.dumps(limit)))
    assert pickle.loads(pickle.dumps(limit)) == limit
    assert repr(limit) == "MultiKnapsack(weights=[[1, 1, 1], [4, 2, 3]], capacities=[2, 5])"
    with pytest.raises(ValueError, match="read-only"):
        limit.weights[0, 0] = 7


def test_real_weights_are_exact_in_a_common_unit_or_rounded_safely():
    rng = np.random.default_rng(0)
    prices, hours = rng.uniform(0.5, 3.0, 12), rng.integers(1, 20, 12) / 4
    limit = kg.MultiKnapsack.from_real([prices, hours], [7.3, 9.5], resolution=[200, 100])
    assert not limit.exact
    assert limit.units[1] == 0.25
    theta = rng.uniform(0.1, 1.0, (50, 12))
    y, bound = kg.solve(theta, limit), kg.solve(theta, limit.optimistic)
    assert (y @ prices <= 7.3).all()
    assert (y @ hours <= 9.5).all()
    assert ((theta * y).sum(-1) <= (theta * bound).sum(-1) + 1e-12).all()
    np.testing.assert_allclose(limit.budgets[1], np.arange(39) / 4)
    assert kg.MultiKnapsack.from_real([hours, hours], [5.0, 9.5]).exact
    assert limit == pickle.loads(pickle.dumps(limit))


def test_a_budget_that_needs_few_units_leaves_the_rest_to_the_others():
    """At most four items within 100 euros, to the cent."""
    prices = [33.33, 33.33, 33.34, 20.0, 10.0]
    basket = kg.MultiKnapsack.from_real([np.ones(5), prices], [4, 100])
    assert basket.exact and basket.capacities.tolist() == [4, 10_000]
    assert kg.solve(np.array([3.0, 3.0, 3.0, 1.0, 1.0]), basket).tolist() == [1, 1, 1, 0, 0]
    odd = kg.MultiKnapsack.from_real([[0.21, 0.42, 0.63], prices[:3]], [0.5, 70.0])  # 0.5 is 2.4 units
    assert odd.exact and odd.capacities.tolist() == [2, 7000]
    rounded = kg.MultiKnapsack.from_real([np.ones(5), np.sqrt(prices), np.cbrt(prices)], [4, 12.0, 6.0])
    assert rounded.capacities[0] == 4 and (rounded.capacities[1:] > 1300).all(), "what is left is shared"
    assert np.prod(rounded.capacities + 1) <= 1.01e7


BAD: dict[str, tuple[Any, str]] = {
    "four budgets": (lambda: kg.MultiKnapsack([[1]] * 4, [1] * 4), "1 to 3 budgets, got 4"),
    "no budget": (lambda: kg.MultiKnapsack([], []), "1 to 3 budgets, got 0"),
    "as many": (lambda: kg.MultiKnapsack([[1, 2], [1, 2]], [3]), "same number of budgets, got 2 and 1"),
    "a number": (lambda: kg.MultiKnapsack(3, [3]), "weights must have an entry per budget"),
    "a number of a budget": (lambda: kg.MultiKnapsack([3, 4], [3, 4]), "one entry per item and budget"),
    "other lengths": (lambda: kg.MultiKnapsack([[1, 2], [1, 2, 3]], [3, 4]), r"in every budget, got \[2, 3\]"),
    "negative": (lambda: kg.MultiKnapsack([[1, 2], [1, -2]], [3, 4]), r"weights\[1\] must not be negative"),
    "real": (lambda: kg.MultiKnapsack([[1, 2], [1, 2.5]], [3, 4]), r"weights\[1\] must be whole numbers"),
    "negative capacity": (lambda: kg.MultiKnapsack([[1, 2], [1, 2]], [3, -4]), r"capacities\[1\] must not be neg"),
    "bounds": (lambda: kg.MultiKnapsack([[1], [1]], [1, 1], max_capacities=[1]), "must be 2 non-negative integers"),
    "bound too low": (
        lambda: kg.MultiKnapsack([[1], [1]], [1, 5], max_capacities=[1, 4]),
        r"max_capacities\[1\] is 4, and capacities\[1\] has 5",
    ),
    "a box too large": (
        lambda: kg.MultiKnapsack([[10**5] * 9] * 2, [10**5, 10**5]),
        "100,001 x 100,001 capacities has 10,000,200,001 states.*from_real",
    ),
    "items": (lambda: kg.relax(np.zeros(3), kg.MultiKnapsack([[1, 2]], [3]), kg.Gini()), "one entry per item: got 2"),
    "a batch": (
        lambda: kg.relax(np.zeros((2, 1)), kg.MultiKnapsack([[1]], [[1, 2, 3]]), kg.Gini()),
        "capacities of shape",
    ),
    "scales": (lambda: kg.MultiKnapsack([[1]], [1], scales=3), "scales must be a tuple"),
    "real budgets": (lambda: kg.MultiKnapsack.from_real([[1.5]], [1.0, 2.0]), "per budget each, got 1, 2 and 1"),
    "a real number": (lambda: kg.MultiKnapsack.from_real([[1.5]], 1.0), "capacities must have one entry per budget"),
    "resolutions": (
        lambda: kg.MultiKnapsack.from_real([[1.5, 2]] * 2, [3.0, 2.0], resolution=[100]),
        "per budget each, got 2, 2 and 1",
    ),
    "batches of weights": (lambda: kg.MultiKnapsack([np.ones((2, 3), int), np.ones((3, 3), int)], [1, 1]), "together"),
    "batches of capacities": (
        lambda: kg.MultiKnapsack([[1], [1]], [[1, 2], [1, 2, 3]]),
        r"together, got shapes \[\(2,",
    ),
    "truth values": (
        lambda: kg.MultiKnapsack([[1], [1]], [1, 1], max_capacities=[True, True]),
        "must be 2 non-negative integers",
    ),
    "negative real": (lambda: kg.MultiKnapsack.from_real([[1.5], [-1.0]], [1.0, 2.0]), "how much of the capacity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
