"""The oracles against each other: subsets, paths, long-double tables and differences are four roads to one truth."""

from __future__ import annotations

import numpy as np
import pytest

from oracles import (
    LONG,
    REGULARIZERS,
    ChoiceTruth,
    Limits,
    chi_square_p_value,
    choices,
    feasible,
    gibbs,
    long_table,
    long_vjp,
    mp,
    optimum,
    truth,
)

THETA = [0.7, -0.37, 1.9, 0.2, -1.1, 0.6]
CASES = {
    "knapsack": ([2, 3, 1, 0, 2, 4], Limits(0, 6)),
    "knapsack, nothing fits but weight 0": ([2, 3, 1, 0, 2, 4], Limits(0, 0)),
    "knapsack, at least": ([2, 3, 1, 0, 2, 4], Limits(4, 6)),
    "knapsack, exactly": ([2, 3, 1, 0, 2, 4], Limits(6, 6)),
    "top-k": ([1] * 6, Limits(3, 3)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


def test_shannon_paths_are_the_gibbs_distribution(case):
    exact = truth(THETA, *case, "shannon", 0.7)
    value, distribution = gibbs(THETA, *case, gamma=0.7)
    assert exact.value == pytest.approx(value, rel=1e-14)
    assert exact.probabilities.keys() == distribution.keys()
    assert all(abs(exact.probabilities[y] - p) < 1e-30 for y, p in distribution.items())


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_paths_are_a_distribution_on_feasible_subsets(case, regularizer):
    exact = truth(THETA, *case, regularizer, 0.7)
    assert abs(sum(exact.probabilities.values()) - 1) < 1e-30
    assert all(feasible(y, *case) for y in exact.probabilities)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_mean_is_the_gradient_of_the_value(case, regularizer):
    exact = truth(THETA, *case, regularizer, 0.7)
    step = mp.mpf(10) ** -12
    for i, y in enumerate(exact.mean()):
        theta = [mp.mpf(t) for t in THETA]
        theta[i] += step
        up = type(exact)(theta, *case, regularizer, 0.7)
        theta[i] -= 2 * step
        down = type(exact)(theta, *case, regularizer, 0.7)
        difference = up.state(exact.n, exact.capacity).value - down.state(exact.n, exact.capacity).value
        assert abs(difference / (2 * step) - y) < 1e-11


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_long_table_is_the_enumeration(case, regularizer):
    exact = truth(THETA, *case, regularizer, 0.7)
    value, y = long_table(THETA, *case, regularizer, 0.7)
    assert float(value) == pytest.approx(exact.value, rel=1e-14)
    np.testing.assert_allclose(y.astype(float), exact.relax, atol=1e-14)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_long_table_leaves_masked_items_out(regularizer):
    theta = [0.7, -np.inf, 1.9, -np.inf, 0.3, 0.6]
    for case in CASES.values():
        exact = truth(theta, *case, regularizer)
        value, y = long_table(theta, *case, regularizer)
        assert float(value) == pytest.approx(exact.value, rel=1e-14)
        np.testing.assert_allclose(y.astype(float), exact.relax, atol=1e-14)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_finite_differences_agree(case, regularizer):
    z = [0.3, -1.2, 0.8, 0.1, 2.0, -0.7]
    exact = truth(THETA, *case, regularizer)
    np.testing.assert_allclose(long_vjp(THETA, z, *case, regularizer), exact.vjp(z), atol=1e-9)


def test_shannon_entropy_and_divergence_have_their_closed_forms(case):
    exact = truth(THETA, *case, "shannon")
    assert exact.entropy == pytest.approx(exact.value - exact.score(exact.relax), rel=1e-12)
    prior = [0.1, 0.4, -0.2, 0.9, 0.0, 1.0]
    _, other = gibbs(prior, *case)
    relative = sum(p * (mp.log(p) - mp.log(other[y])) for y, p in exact.probabilities.items())
    assert exact.divergence(prior) == pytest.approx(float(relative), rel=1e-12)


def test_optimum_finds_every_tie():
    assert optimum([1.0, 1.0, 0.5], [1, 1, 1], Limits(0, 1)) == (1.0, [(0, 1, 0), (1, 0, 0)])
    assert optimum([1.0, -np.inf, 0.5], [1, 1, 1], Limits(2, 2)) == (1.5, [(1, 0, 1)])


def test_chi_square_tells_distributions_apart():
    fair, loaded = {(0,): mp.mpf(0.5), (1,): mp.mpf(0.5)}, {(0,): mp.mpf(0.45), (1,): mp.mpf(0.55)}
    counts = {(0,): 4990, (1,): 5010}
    assert chi_square_p_value(counts, fair) > 0.5
    assert chi_square_p_value(counts, loaded) < 1e-6
    assert chi_square_p_value(counts, {(0,): mp.mpf(1)}) == 0.0
    assert LONG(1) + np.finfo(LONG).eps > 1


# Choices.


def choice_truth(theta, weights, limits, regularizer, gamma=1.0, *, options, optional=False):
    return truth(theta, weights, limits, regularizer, gamma, ChoiceTruth, options, optional)


GROUPED = {"two groups": 3, "three groups": 2, "one group": 6, "groups of one option": 1}


@pytest.mark.parametrize("options", GROUPED.values(), ids=GROUPED.keys())
@pytest.mark.parametrize("optional", [False, True])
def test_shannon_choices_are_the_gibbs_distribution(options, optional):
    weights, limits = [2, 3, 1, 0, 2, 4], Limits(3, 12 if options == 1 else 6)
    exact = choice_truth(THETA, weights, limits, "shannon", 0.7, options=options, optional=optional)
    among = choices(6 // options, options, optional)
    assert len(among) == (options + optional) ** (6 // options)
    value, distribution = gibbs(THETA, weights, limits, 0.7, among)
    assert exact.value == pytest.approx(value, rel=1e-14)
    assert exact.probabilities.keys() == distribution.keys()
    assert all(abs(exact.probabilities[y] - p) < 1e-30 for y, p in distribution.items())
    assert optimum(THETA, weights, limits, among)[0] <= exact.value


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_optional_groups_of_one_option_are_items(case, regularizer):
    items = truth(THETA, *case, regularizer, 0.7)
    groups = choice_truth(THETA, *case, regularizer, 0.7, options=1, optional=True)
    assert groups.log_probs == items.log_probs and groups.value == items.value


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_choices_are_a_distribution_whose_mean_is_the_gradient(regularizer):
    weights, limits, step = [2, 3, 1, 0, 2, 4], Limits(2, 6), mp.mpf(10) ** -12
    exact = choice_truth(THETA, weights, limits, regularizer, 0.7, options=3, optional=True)
    assert abs(sum(exact.probabilities.values()) - 1) < 1e-30
    assert all(feasible(y, weights, limits) and max(sum(y[:3]), sum(y[3:])) <= 1 for y in exact.probabilities)
    for i, y in enumerate(exact.mean()):
        up, down = (
            exact.of([mp.mpf(t) + sign * step * (i == j) for j, t in enumerate(THETA)]).state(2, 6).value
            for sign in (1, -1)
        )
        assert abs((up - down) / (2 * step) - y) < 1e-11


def test_the_tree_of_three_leaves_has_the_first_against_the_others():
    """Under Gini the two are worth a quarter more together, and are picked with q = 5/8."""
    exact = choice_truth([0.0] * 3, [0] * 3, Limits(0, 0), "gini", options=3)
    np.testing.assert_allclose(exact.relax, [6 / 16, 5 / 16, 5 / 16], rtol=1e-15)
    assert exact.value == pytest.approx(0.25 + (3 / 8) ** 2, rel=1e-15)
