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
from instances import Problem, lattice
from kinds import problems
from oracles import LARGEST_ENTROPY, THRESHOLD, gibbs, mp

EXACT = TOLERANCES["float64"]


def value(problem: Problem, regularizer: str) -> np.ndarray:
    return kg.value(problem.theta, problem.constraint, problem.regularizer(regularizer))


def relax(problem: Problem, regularizer: str) -> np.ndarray:
    return kg.relax(problem.theta, problem.constraint, problem.regularizer(regularizer))


# Proposition 1: equivariance


@given(data=st.data())
def test_shannon_does_not_see_the_order_of_items_options_or_groups(kind, data):
    problem = data.draw(problems(kind))
    order = problem.order(data.draw)
    moved = problem.moved(order)
    np.testing.assert_allclose(relax(moved, "shannon"), relax(problem, "shannon")[order], atol=EXACT.relax)
    np.testing.assert_allclose(value(moved, "shannon"), value(problem, "shannon"), rtol=EXACT.value, atol=EXACT.value)


def largest_change(problem: Problem, regularizer: str) -> float:
    """Over all orders of the items: how far relax is from being permuted with them."""
    orders = np.array(list(itertools.permutations(range(problem.n))))
    changed = relax(problem.moved(orders), regularizer)
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
    problem = problem.one(0)
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
def test_sparse_regularizers_reach_every_vertex(kind, data):
    regularizer = data.draw(st.sampled_from(["gini", "tsallis"]))
    problem = data.draw(problems(kind, masked=False)).one(0)
    for y in problem.feasible(0):
        vertex = np.array(y, dtype=float).reshape(problem.event)
        sharp = replace(problem, theta=(2 * vertex - 1) * 20.0 * problem.gamma * max(problem.n, 1))
        np.testing.assert_array_equal(relax(sharp, regularizer), vertex)


@given(data=st.data())
def test_shannon_stays_inside_the_polytope(kind, data):
    problem = replace(data.draw(problems(kind, masked=False)), gamma=3.0)  # no probability is below a rounding error
    for b, row in enumerate(problem.flat(relax(problem, "shannon"))):
        sometimes, always = np.any(problem.feasible(b), axis=0), np.all(problem.feasible(b), axis=0)
        assert (row[sometimes] > 0).all() and (row[~sometimes] == 0).all()
        assert (row[~always] < 1).all()
        np.testing.assert_allclose(row[always], 1.0, rtol=1e-14)


# Proposition 3: the distribution


@given(data=st.data())
def test_probabilities_add_up_and_their_mean_is_relax(regularizer, kind, data):
    problem = data.draw(problems(kind))
    y = problem.selections()
    log_probs = kg.log_prob(problem.theta, y, problem.constraint, problem.regularizer(regularizer))
    p = np.exp(log_probs)
    np.testing.assert_allclose(p.sum(axis=0), 1.0, rtol=EXACT.relax)
    mean = (p.reshape(*p.shape, *[1] * problem.event_dims) * y).sum(axis=0)
    np.testing.assert_allclose(mean, relax(problem, regularizer), atol=EXACT.relax)
    entropy = kg.entropy(problem.theta, problem.constraint, problem.regularizer(regularizer))
    plogp = np.where(p > 0, p * np.where(p > 0, log_probs, 0.0), 0.0)
    np.testing.assert_allclose(entropy, -plogp.sum(axis=0), rtol=EXACT.relax, atol=EXACT.relax)
    assert not (p[~problem.contains(y)] > 0).any()
    assert not (y * np.isneginf(problem.theta))[p > 0].any()


@given(data=st.data())
def test_shannon_is_the_gibbs_distribution(kind, data):
    problem = data.draw(problems(kind, max_n=5))
    possible = problem.possible()
    y = problem.repeated(np.array(possible, dtype=float))
    log_probs = kg.log_prob(problem.theta, y, problem.constraint, problem.regularizer("shannon"))
    for b, (theta, weights, limits, gamma) in enumerate(problem.rows()):
        exact, distribution = gibbs(theta, weights, limits, gamma, possible)
        assert value(problem, "shannon").reshape(-1)[b] == pytest.approx(exact, rel=EXACT.value, abs=EXACT.value)
        logs = [float(mp.log(distribution[s])) if distribution.get(s) else -np.inf for s in possible]
        found = log_probs.reshape(len(possible), -1)[:, b]
        np.testing.assert_allclose(found, logs, rtol=EXACT.log_prob, atol=EXACT.log_prob)


# Properties of the relaxed values and operators


@given(data=st.data())
def test_value_is_convex(regularizer, kind, data):
    problem = data.draw(problems(kind, masked=False))
    other = np.sin(1.0 + np.arange(problem.theta.size)).reshape(problem.theta.shape) * data.draw(st.floats(0.1, 10))
    share = data.draw(st.floats(0, 1))
    here, there = value(problem, regularizer), value(replace(problem, theta=other), regularizer)
    between = value(replace(problem, theta=share * problem.theta + (1 - share) * other), regularizer)
    assert (between <= share * here + (1 - share) * there + 1e-12 * (1 + np.abs(here) + np.abs(there))).all()


@given(data=st.data())
def test_relax_is_a_subgradient_of_value(regularizer, kind, data):
    problem = data.draw(problems(kind, masked=False))
    step = data.draw(st.floats(-2, 2)) * np.cos(np.arange(problem.theta.size)).reshape(problem.theta.shape)
    here, there = value(problem, regularizer), value(replace(problem, theta=problem.theta + step), regularizer)
    slope = problem.flat(relax(problem, regularizer) * step).sum(axis=-1).reshape(problem.batch)
    assert (there >= here + slope - 1e-12 * (1 + np.abs(here) + np.abs(there))).all()


@given(data=st.data())
def test_relax_is_the_gradient_of_value(regularizer, kind, data):
    problem = data.draw(problems(kind, masked=False))
    y = relax(problem, regularizer)
    gamma = np.broadcast_to(np.asarray(problem.gamma, dtype=float), problem.batch)
    for place in np.ndindex(*problem.event):
        step = np.zeros_like(problem.theta)
        step[(..., *place)] = 1e-5 * gamma
        up, down = (value(replace(problem, theta=problem.theta + sign * step), regularizer) for sign in (1, -1))
        np.testing.assert_allclose((up - down) / (2e-5 * gamma), y[(..., *place)], atol=2e-5)


@given(data=st.data())
def test_value_lies_between_the_optimum_and_its_bound(regularizer, kind, data):
    problem = data.draw(problems(kind))
    smoothed = value(problem, regularizer).reshape(-1)
    for b, ((best, _), (*_, gamma)) in enumerate(zip(problem.optima(), problem.rows())):
        slack = 1e-13 * (1 + abs(best))
        assert best - slack <= smoothed[b] <= best + problem.decisions * gamma * LARGEST_ENTROPY[regularizer] + slack
        if regularizer == "shannon":
            assert smoothed[b] <= best + gamma * np.log(len(problem.feasible(b))) + slack


@given(data=st.data())
def test_a_vanishing_gamma_gives_the_hard_selection(regularizer, kind, data):
    problem = data.draw(problems(kind))
    for b, theta in enumerate(problem.flat(problem.theta)):
        scores = sorted((theta[np.array(y, dtype=bool)].sum() for y in problem.feasible(b)), reverse=True)
        assume(len(scores) == 1 or scores[0] - scores[1] > 1e-3)
    soft = relax(replace(problem, gamma=1e-5), regularizer)
    np.testing.assert_allclose(soft, kg.solve(problem.theta, problem.constraint), atol=1e-12)


@given(data=st.data())
def test_a_growing_gamma_spreads_shannon_over_all_selections(kind, data):
    problem = replace(data.draw(problems(kind, masked=False)), gamma=1e12)
    for b, row in enumerate(problem.flat(relax(problem, "shannon"))):
        np.testing.assert_allclose(row, np.mean(np.array(problem.feasible(b), dtype=float), axis=0), atol=1e-9)


@given(data=st.data())
def test_relax_lies_in_the_polytope(regularizer, kind, data):
    problem = data.draw(problems(kind, max_n=8))
    y = relax(problem, regularizer)
    assert (y >= 0).all() and (y <= 1).all() and not y[np.isneginf(problem.theta)].any()
    for row, (_, weights, limits, _) in zip(problem.flat(y), problem.rows()):
        load = np.tensordot(row, np.asarray(weights, dtype=float), (0, 0))
        assert (load >= limits.at_least - 1e-12).all() and (load <= np.asarray(limits.capacity) + 1e-12).all()


@given(data=st.data())
def test_gamma_only_scales(regularizer, kind, data):
    """``relax(theta; gamma) = relax(theta/gamma; 1)`` and ``value(theta; gamma) = gamma value(theta/gamma; 1)``."""
    problem = data.draw(problems(kind))
    gamma = np.broadcast_to(np.asarray(problem.gamma, dtype=float), problem.batch)
    unit = replace(problem, theta=problem.theta / problem.beside(problem.gamma), gamma=1.0)
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
