"""The propositions of the paper and what follows from them, as properties of the library."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import knapgrad as kg
from backends import TOLERANCES
from instances import Problem, lattice, problems
from oracles import LARGEST_ENTROPY, THRESHOLD, feasible, gibbs, mp, optimum, subsets

EXACT = TOLERANCES["float64"]


def value(problem: Problem, regularizer: str) -> np.ndarray:
    return kg.value(problem.theta, problem.constraint, problem.regularizer(regularizer))


def relax(problem: Problem, regularizer: str) -> np.ndarray:
    return kg.relax(problem.theta, problem.constraint, problem.regularizer(regularizer))


def permuted(problem: Problem, order: np.ndarray) -> Problem:
    weights = None if problem.is_top_k else np.asarray(problem.weights, dtype=int)[..., order]
    return replace(problem, theta=problem.theta[..., order], weights=weights)


# Proposition 1: equivariance


@given(data=st.data())
def test_shannon_does_not_see_the_order_of_items(constraint, data):
    problem = data.draw(problems(constraint))
    order = np.array(data.draw(st.permutations(range(problem.n))), dtype=int)
    np.testing.assert_allclose(
        relax(permuted(problem, order), "shannon"), relax(problem, "shannon")[..., order], atol=EXACT.relax
    )
    np.testing.assert_allclose(
        value(permuted(problem, order), "shannon"), value(problem, "shannon"), rtol=EXACT.value, atol=EXACT.value
    )


def largest_change(problem: Problem, regularizer: str) -> float:
    """Over all orders of the items: how far relax is from being permuted with them."""
    orders = np.array(list(itertools.permutations(range(problem.n))))
    weights = None if problem.is_top_k else np.asarray(problem.weights)[orders]
    changed = relax(replace(problem, theta=problem.theta[orders], weights=weights), regularizer)
    return np.abs(changed - relax(problem, regularizer)[orders]).max()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(np.arange(1.0, 7.0), [6, 5, 4, 3, 2, 1], 10, 4.0),  # the paper's figure
        Problem(np.array([0.0, 0.4, 0.9, 1.3]), None, 2, 1.0),
    ],
    ids=["knapsack", "top-k"],
)
def test_only_shannon_is_equivariant(problem):
    assert largest_change(problem, "shannon") < 1e-13
    assert largest_change(problem, "gini") > 1e-3
    assert largest_change(problem, "tsallis") > 1e-3


# Proposition 2: sparsity


@given(data=st.data())
def test_an_item_beyond_the_threshold_everywhere_is_never_picked(constraint, data):
    regularizer = data.draw(st.sampled_from(["gini", "tsallis"]))
    problem = data.draw(problems(constraint, masked=False))
    assume(problem.n > 0)
    problem = first_instance(problem)
    poor = data.draw(st.integers(0, problem.n - 1))
    problem.theta[poor] = -THRESHOLD[regularizer] * problem.gamma - data.draw(st.floats(0, 2))
    exact = problem.truths(regularizer)[0]
    y = relax(problem, regularizer)
    for i in range(1, problem.n + 1):
        w = exact.weights[i - 1]
        skips = [exact.state(i - 1, c).value for c in range(w, exact.capacity + 1)]
        picks = [exact.theta[i - 1] + exact.state(i - 1, c - w).value for c in range(w, exact.capacity + 1)]
        beyond = all(
            s > -mp.inf and s - p >= THRESHOLD[regularizer] * exact.gamma * (1 + 1e-12) for s, p in zip(skips, picks)
        )
        if beyond:
            assert y[i - 1] == 0


def first_instance(problem: Problem) -> Problem:
    theta, weights, limits, gamma = problem.rows()[0]
    own = None if problem.is_top_k else weights
    return Problem(theta.copy(), own, limits.capacity, float(gamma), limits.at_least)


@pytest.mark.parametrize("gamma", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_threshold_is_gamma_for_gini_and_two_gamma_for_tsallis(gamma, others):
    """With room for all, an item stands alone: picked sometimes just inside the threshold, never at or beyond it."""
    for regularizer, threshold in (("gini", 1.0), ("tsallis", 2.0)):
        for factor, sign in ((1.0, 0), (1.01, 0), (0.99, 1)):
            theta = np.concatenate([np.full(others, 100.0 * gamma), [-factor * threshold * gamma]])
            y = relax(Problem(theta, np.ones(others + 1, dtype=int), others + 1, gamma), regularizer)
            assert np.sign(y[-1]) == sign
            np.testing.assert_array_equal(y[:-1], 1.0)


@given(data=st.data())
def test_sparse_regularizers_reach_every_vertex(constraint, data):
    regularizer = data.draw(st.sampled_from(["gini", "tsallis"]))
    problem = data.draw(problems(constraint, masked=False))
    problem = first_instance(problem)
    for y in subsets(problem.n):
        _, weights, limits, _ = problem.rows()[0]
        if feasible(y, weights, limits):
            sharp = replace(problem, theta=(2.0 * np.array(y) - 1.0) * 20.0 * problem.gamma * max(problem.n, 1))
            np.testing.assert_array_equal(relax(sharp, regularizer), np.array(y, dtype=float))


@given(data=st.data())
def test_shannon_stays_inside_the_polytope(constraint, data):
    problem = data.draw(problems(constraint, masked=False))
    y = problem.flat(relax(problem, "shannon"))
    for row, (_, weights, limits, _) in zip(y, problem.rows()):
        possible = [s for s in subsets(problem.n) if feasible(s, weights, limits)]
        sometimes, always = np.any(possible, axis=0), np.all(possible, axis=0)
        assert (row[sometimes] > 0).all() and (row[~sometimes] == 0).all()
        assert (row[~always] < 1).all()
        np.testing.assert_allclose(row[always], 1.0, rtol=1e-14)


# Proposition 3: the distribution


@given(data=st.data())
def test_probabilities_add_up_and_their_mean_is_relax(regularizer, constraint, data):
    problem = data.draw(problems(constraint))
    y = problem.selections()
    log_probs = kg.log_prob(problem.theta, y, problem.constraint, problem.regularizer(regularizer))
    p = np.exp(log_probs)
    np.testing.assert_allclose(p.sum(axis=0), 1.0, rtol=EXACT.relax)
    np.testing.assert_allclose((p[..., None] * y).sum(axis=0), relax(problem, regularizer), atol=EXACT.relax)
    entropy = kg.entropy(problem.theta, problem.constraint, problem.regularizer(regularizer))
    plogp = np.where(p > 0, p * np.where(p > 0, log_probs, 0.0), 0.0)
    np.testing.assert_allclose(entropy, -plogp.sum(axis=0), rtol=EXACT.relax, atol=EXACT.relax)
    for drawn, (theta, weights, limits, _) in zip(p.reshape(len(y), problem.size).T > 0, problem.rows(), strict=True):
        for subset in itertools.compress(subsets(problem.n), drawn):
            assert feasible(subset, weights, limits)
            assert not np.isneginf(theta[np.array(subset, dtype=bool)]).any()


@given(data=st.data())
def test_shannon_is_the_gibbs_distribution(constraint, data):
    problem = data.draw(problems(constraint, max_n=5))
    y = problem.selections()
    log_probs = kg.log_prob(problem.theta, y, problem.constraint, problem.regularizer("shannon")).reshape(len(y), -1)
    values = value(problem, "shannon").reshape(-1)
    for b, (theta, weights, limits, gamma) in enumerate(problem.rows()):
        exact, distribution = gibbs(theta, weights, limits, gamma)
        assert values[b] == pytest.approx(exact, rel=EXACT.value, abs=EXACT.value)
        for s, subset in enumerate(subsets(problem.n)):
            p = distribution.get(subset, mp.mpf(0))
            if p == 0:
                assert log_probs[s, b] == -np.inf
            else:
                assert log_probs[s, b] == pytest.approx(float(mp.log(p)), rel=EXACT.log_prob, abs=EXACT.log_prob)


# Properties of the relaxed values and operators


@given(data=st.data())
def test_value_is_convex(regularizer, constraint, data):
    problem = data.draw(problems(constraint, masked=False))
    other = np.sin(1.0 + np.arange(problem.theta.size)).reshape(problem.theta.shape) * data.draw(st.floats(0.1, 10))
    share = data.draw(st.floats(0, 1))
    here, there = value(problem, regularizer), value(replace(problem, theta=other), regularizer)
    between = value(replace(problem, theta=share * problem.theta + (1 - share) * other), regularizer)
    assert (between <= share * here + (1 - share) * there + 1e-12 * (1 + np.abs(here) + np.abs(there))).all()


@given(data=st.data())
def test_relax_is_a_subgradient_of_value(regularizer, constraint, data):
    problem = data.draw(problems(constraint, masked=False))
    step = data.draw(st.floats(-2, 2)) * np.cos(np.arange(problem.theta.size)).reshape(problem.theta.shape)
    here, there = value(problem, regularizer), value(replace(problem, theta=problem.theta + step), regularizer)
    slope = (relax(problem, regularizer) * step).sum(axis=-1)
    assert (there >= here + slope - 1e-12 * (1 + np.abs(here) + np.abs(there))).all()


@given(data=st.data())
def test_relax_is_the_gradient_of_value(regularizer, constraint, data):
    problem = data.draw(problems(constraint, masked=False))
    y = relax(problem, regularizer)
    gamma = np.broadcast_to(np.asarray(problem.gamma, dtype=float), problem.batch)
    for i in range(problem.n):
        step = np.zeros_like(problem.theta)
        step[..., i] = 1e-5 * gamma
        up = value(replace(problem, theta=problem.theta + step), regularizer)
        down = value(replace(problem, theta=problem.theta - step), regularizer)
        np.testing.assert_allclose((up - down) / (2e-5 * gamma), y[..., i], atol=2e-5)


@given(data=st.data())
def test_value_lies_between_the_optimum_and_its_bound(regularizer, constraint, data):
    problem = data.draw(problems(constraint))
    smoothed = value(problem, regularizer).reshape(-1)
    for b, (theta, weights, limits, gamma) in enumerate(problem.rows()):
        best, _ = optimum(theta, weights, limits)
        slack = 1e-13 * (1 + abs(best))
        assert best - slack <= smoothed[b] <= best + problem.n * gamma * LARGEST_ENTROPY[regularizer] + slack
        if regularizer == "shannon":
            possible = sum(feasible(y, weights, limits) for y in subsets(problem.n))
            assert smoothed[b] <= best + gamma * np.log(possible) + slack


@given(data=st.data())
def test_a_vanishing_gamma_gives_the_hard_selection(regularizer, constraint, data):
    problem = data.draw(problems(constraint))
    rows = problem.rows()
    for theta, weights, limits, _ in rows:
        scores = sorted(
            (sum(t for t, p in zip(theta, y) if p) for y in subsets(problem.n) if feasible(y, weights, limits)),
            reverse=True,
        )
        assume(len(scores) == 1 or scores[0] - scores[1] > 1e-3)
    hard = kg.solve(problem.theta, problem.constraint)
    soft = relax(replace(problem, gamma=1e-5), regularizer)
    np.testing.assert_allclose(soft, hard, atol=1e-12)


@given(data=st.data())
def test_a_growing_gamma_spreads_shannon_over_all_subsets(constraint, data):
    problem = replace(data.draw(problems(constraint, masked=False)), gamma=1e12)
    y = problem.flat(relax(problem, "shannon"))
    for row, (_, weights, limits, _) in zip(y, problem.rows()):
        possible = [s for s in subsets(problem.n) if feasible(s, weights, limits)]
        np.testing.assert_allclose(row, np.mean(np.array(possible, dtype=float), axis=0), atol=1e-9)


@given(data=st.data())
def test_relax_lies_in_the_polytope(regularizer, constraint, data):
    problem = data.draw(problems(constraint, max_n=8))
    y = relax(problem, regularizer)
    assert (y >= 0).all() and (y <= 1).all()
    for row, (theta, weights, limits, _) in zip(problem.flat(y), problem.rows()):
        assert limits.at_least - 1e-12 <= row @ weights <= limits.capacity + 1e-12
        assert (row[np.isneginf(theta)] == 0).all()


@given(data=st.data())
def test_gamma_only_scales(regularizer, constraint, data):
    """``relax(theta; gamma) = relax(theta/gamma; 1)`` and ``value(theta; gamma) = gamma value(theta/gamma; 1)``."""
    problem = data.draw(problems(constraint))
    gamma = np.broadcast_to(np.asarray(problem.gamma, dtype=float), problem.batch)
    unit = replace(problem, theta=problem.theta / gamma[..., None], gamma=1.0)
    np.testing.assert_allclose(relax(problem, regularizer), relax(unit, regularizer), atol=1e-13)
    np.testing.assert_allclose(value(problem, regularizer), gamma * value(unit, regularizer), rtol=1e-13, atol=1e-13)


@given(data=st.data())
def test_jacobian_is_symmetric_and_positive(regularizer, constraint, data):
    kernels = pytest.importorskip("knapgrad.kernels.numba")
    problem = data.draw(problems(constraint, masked=False))
    theta, weights, limits, gamma = problem.rows()[0]
    n = problem.n
    assume(n > 0)
    jacobian = kernels.vjp(
        np.broadcast_to(theta / gamma, (n, n)).copy(),
        np.eye(n),
        lattice(weights, limits),
        np.ones(1),
        regularizer,
    )
    np.testing.assert_allclose(jacobian, jacobian.T, atol=1e-13)
    assert np.linalg.eigvalsh((jacobian + jacobian.T) / 2).min() >= -1e-13
    if problem.is_top_k and limits.at_least == limits.capacity:
        np.testing.assert_allclose(jacobian.sum(axis=0), 0.0, atol=1e-13)
