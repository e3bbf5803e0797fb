"""MultipleChoice: every operation x regularizer x backend against enumeration, its properties, its errors, and the same
optimum as an integer program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from test_operations import OPERATIONS, assert_close, assert_log_probs, check_solve, half_types, rounded_once

import knapgrad as kg
from backends import TOLERANCES, Backend
from choices import EDGES, KINDS, Choices, choice_problems
from oracles import LARGEST_ENTROPY, chi_square_p_value, gibbs, mp

EXACT = TOLERANCES["float64"]
CLASSES = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def value(problem: Choices, regularizer: str) -> np.ndarray:
    return kg.value(problem.theta, problem.constraint, problem.regularizer(regularizer))


def relax(problem: Choices, regularizer: str) -> np.ndarray:
    return kg.relax(problem.theta, problem.constraint, problem.regularizer(regularizer))


# Against enumeration.


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=8)
@given(data=st.data())
def test_operations_are_the_enumeration(dtype, backend, regularizer, kind, data):
    problem = data.draw(choice_problems(kind, one_shape=backend.is_jax))
    for name, operation in OPERATIONS.items():
        result, expected, error = operation.run(problem, regularizer, backend, dtype)
        assert_close(backend.to_numpy(result), expected, error, name)


@pytest.mark.thinned_where_compiled(9)
@pytest.mark.parametrize("edge", EDGES)
def test_operations_at_the_edges(edge, backend, regularizer):
    for name, operation in OPERATIONS.items():
        for dtype in backend.wide_dtypes:
            result, expected, error = operation.run(EDGES[edge], regularizer, backend, dtype)
            assert_close(backend.to_numpy(result), expected, error, name)


@pytest.mark.thinned_where_compiled(4)
@pytest.mark.parametrize("edge", ["no batch", "batch of rank 2", "masked, optional", "no groups"])
def test_results_have_the_type_and_shape_of_theta(edge, backend, regularizer):
    problem = EDGES[edge]
    for dtype in backend.dtypes:
        theta = backend.asarray(problem.theta, dtype)
        for name, operation in OPERATIONS.items():
            result, expected, _ = operation.run(problem, regularizer, backend, dtype)
            assert backend.describe(result) == backend.describe(theta), name
            assert tuple(result.shape) == expected.shape, name
        for num_samples, front in ((None, ()), (1, (1,)), (5, (5,)), (0, (0,))):
            y = kg.sample(
                theta,
                problem.constraint,
                problem.regularizer(regularizer),
                num_samples=num_samples,
                rng=backend.rng(0),
            )
            assert backend.describe(y) == backend.describe(theta)
            assert tuple(y.shape) == front + problem.theta.shape
            assert problem.allows(backend.to_numpy(y))


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("edge", ["batch of rank 2", "everything for each instance, optional"])
def test_half_precision_is_one_rounding_of_the_float32_answer(edge, backend, regularizer):
    for dtype in half_types(backend):
        problem = EDGES[edge].rounded(dtype)
        for name in ("value", "relax", "entropy"):

            def run(dtype: str) -> Any:
                return OPERATIONS[name].call(backend.asarray(problem.theta, dtype), problem, regularizer, None)

            expected = rounded_once(backend, run("float32"), dtype)
            np.testing.assert_array_equal(backend.to_numpy(run(dtype)), expected, err_msg=name)


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=5)
@given(data=st.data())
def test_log_prob_of_every_selection(dtype, backend, regularizer, kind, data):
    problem = data.draw(choice_problems(kind, one_shape=backend.is_jax)).rounded(dtype)
    y = problem.selections()
    theta, selections = backend.asarray(problem.theta, dtype), backend.asarray(y, dtype)
    actual = kg.log_prob(theta, selections, problem.constraint, problem.regularizer(regularizer))
    truths, rows = problem.truths(regularizer), y.reshape(len(y), problem.size, problem.n)
    expected = np.array([[one.log_prob(row) for one, row in zip(truths, each)] for each in rows])
    possible = problem.contains(y) & ~(y * np.isneginf(problem.theta) > 0).any((-2, -1))
    n, is_shannon = problem.n, regularizer == "shannon"
    assert_log_probs(backend.to_numpy(actual), expected.reshape(possible.shape), possible, dtype, n, is_shannon)


@settings(max_examples=8)
@given(data=st.data())
def test_solve_finds_an_optimum(backend, kind, data):
    problem = data.draw(choice_problems(kind, one_shape=backend.is_jax))
    check_solve(problem.rounded("float32"), backend, "float32")


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("edge", EDGES)
def test_solve_at_the_edges(edge, backend):
    for dtype in backend.dtypes:
        check_solve(EDGES[edge].rounded(dtype), backend, dtype)


def test_of_equal_options_solve_takes_the_first(backend):
    theta = backend.asarray(np.zeros((2, 2, 3)), backend.widest)
    y = backend.to_numpy(kg.solve(theta, kg.MultipleChoice([1, 1, 1], 9)))
    np.testing.assert_array_equal(y, np.broadcast_to([1.0, 0.0, 0.0], y.shape))
    assert not backend.to_numpy(kg.solve(theta, kg.MultipleChoice([1, 1, 1], 9, optional=True))).any()


DISTRIBUTIONS = {
    kind: replace(
        EDGES["no batch"],
        capacity=6,
        gamma=1.5,
        at_least=4 if kind.endswith("at least") else None,
        optional=kind.startswith("optional"),
    )
    for kind in KINDS
}


@pytest.mark.thinned_where_compiled(4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("many", [True, False], ids=["num_samples", "a batch"])
def test_sample_frequencies(many, dtype, backend, regularizer, kind):
    problem, draws = DISTRIBUTIONS[kind].rounded(dtype), 8_000
    theta = problem.theta if many else np.broadcast_to(problem.theta, (draws, *problem.event)).copy()
    y = kg.sample(
        backend.asarray(theta, dtype),
        problem.constraint,
        problem.regularizer(regularizer),
        num_samples=draws if many else None,
        rng=backend.rng(20240),
    )
    y, exact = backend.to_numpy(y), problem.truths(regularizer)[0]
    found, counts = np.unique(y.reshape(draws, -1), axis=0, return_counts=True)
    seen = {tuple(int(x) for x in row): int(count) for row, count in zip(found, counts)}
    assert len(exact.probabilities) > 5
    assert chi_square_p_value(seen, exact.probabilities) > 1e-4
    spread = np.sqrt(exact.relax * (1 - exact.relax) / draws).reshape(problem.event)
    assert (np.abs(y.mean(axis=0) - relax(problem, regularizer)) <= 5 * spread + TOLERANCES[dtype].relax).all()


@pytest.mark.thinned_where_compiled(2)
@settings(max_examples=5)
@given(data=st.data())
def test_samples_are_feasible(backend, regularizer, kind, data):
    problem = data.draw(choice_problems(kind, one_shape=backend.is_jax))
    theta, smoothing = backend.asarray(problem.theta, "float32"), problem.regularizer(regularizer)
    y = backend.to_numpy(kg.sample(theta, problem.constraint, smoothing, num_samples=20, rng=backend.rng(0)))
    assert problem.allows(y)


@settings(max_examples=8)
@given(data=st.data())
def test_shannon_is_the_gibbs_distribution(kind, data):
    problem = data.draw(choice_problems(kind))
    y = np.array(problem.possible(), dtype=float)
    many = np.broadcast_to(y[:, None], (len(y), problem.size, problem.n)).reshape(len(y), *problem.theta.shape)
    log_probs = kg.log_prob(problem.theta, many.copy(), problem.constraint, problem.regularizer("shannon"))
    values = value(problem, "shannon").reshape(-1)
    for b, (theta, weights, limits, gamma) in enumerate(problem.rows()):
        exact, distribution = gibbs(theta, weights, limits, gamma, problem.possible())
        assert values[b] == pytest.approx(exact, rel=EXACT.value, abs=EXACT.value)
        expected = [distribution.get(selection, mp.mpf(0)) for selection in problem.possible()]
        np.testing.assert_allclose(
            np.exp(log_probs.reshape(len(y), -1)[:, b]), [float(p) for p in expected], atol=EXACT.relax
        )


@settings(max_examples=8)
@given(data=st.data())
def test_contains_is_the_enumeration(backend, kind, data):
    problem = data.draw(choice_problems(kind, one_shape=backend.is_jax))
    y = problem.selections()
    found = problem.constraint.contains(backend.asarray(y, backend.widest))
    assert type(found) is type(backend.asarray(y, backend.widest))
    np.testing.assert_array_equal(backend.to_numpy(found), problem.contains(y))


def test_contains_needs_whole_picks_and_takes_samples_in_front(backend):
    for optional in (False, True):
        problem = replace(EDGES["batch of rank 2"], optional=optional, capacity=100)
        soft = backend.asarray(np.full(problem.theta.shape, 1 / 3), backend.widest)
        assert not backend.to_numpy(problem.constraint.contains(soft)).any()
        nothing = np.zeros((4, 1, *problem.theta.shape))
        found = problem.constraint.contains(backend.asarray(nothing, backend.widest))
        assert tuple(found.shape) == (4, 1, 2, 3)
        assert (backend.to_numpy(found) == optional).all()


# Properties.


@given(data=st.data())
def test_groups_sum_to_one_within_the_budget(regularizer, kind, data):
    problem = data.draw(choice_problems(kind))
    y = relax(problem, regularizer)
    assert (y >= 0).all() and (y <= 1).all()
    assert not y[np.isneginf(problem.theta)].any()
    sums = y.sum(-1)
    if problem.optional:
        assert (sums <= 1 + 1e-12).all()
    else:
        np.testing.assert_allclose(sums, 1.0, atol=1e-12)
    for row, (_, weights, limits, _) in zip(problem.flat(y), problem.rows()):
        assert limits.at_least - 1e-12 <= row @ weights <= limits.capacity + 1e-12


@given(data=st.data())
def test_probabilities_add_up_and_their_mean_is_relax(regularizer, kind, data):
    problem = data.draw(choice_problems(kind))
    y = problem.selections()
    log_probs = kg.log_prob(problem.theta, y, problem.constraint, problem.regularizer(regularizer))
    p = np.exp(log_probs)
    np.testing.assert_allclose(p.sum(axis=0), 1.0, rtol=EXACT.relax)
    np.testing.assert_allclose((p[..., None, None] * y).sum(axis=0), relax(problem, regularizer), atol=EXACT.relax)
    entropy = kg.entropy(problem.theta, problem.constraint, problem.regularizer(regularizer))
    plogp = np.where(p > 0, p * np.where(p > 0, log_probs, 0.0), 0.0)
    np.testing.assert_allclose(entropy, -plogp.sum(axis=0), rtol=EXACT.relax, atol=EXACT.relax)


@given(data=st.data())
def test_value_lies_between_the_optimum_and_its_bound(regularizer, kind, data):
    problem = data.draw(choice_problems(kind))
    depth = np.ceil(np.log2(problem.options + problem.optional))
    for found, (best, _), (*_, gamma) in zip(
        value(problem, regularizer).reshape(-1), problem.optima(), problem.rows(), strict=True
    ):
        error = 1e-13 * (1 + abs(best))
        assert best - error <= found <= best + problem.event[0] * depth * gamma * LARGEST_ENTROPY[regularizer] + error


@given(data=st.data())
def test_relax_is_the_gradient_of_value(regularizer, kind, data):
    problem = data.draw(choice_problems(kind, masked=False))
    y = relax(problem, regularizer)
    gamma = np.broadcast_to(np.asarray(problem.gamma, dtype=float), problem.batch)
    for place in np.ndindex(*problem.event):
        step = np.zeros_like(problem.theta)
        step[..., place[0], place[1]] = 1e-5 * gamma
        up, down = (value(replace(problem, theta=problem.theta + s * step), regularizer) for s in (1, -1))
        np.testing.assert_allclose((up - down) / (2e-5 * gamma), y[..., place[0], place[1]], atol=2e-5)


@given(data=st.data())
def test_a_vanishing_gamma_gives_the_hard_selection(regularizer, kind, data):
    problem = data.draw(choice_problems(kind))
    for (theta, *_), (_, tied), one in zip(problem.rows(), problem.optima(), problem.truths("shannon")):
        totals = sorted((theta[np.array(y) > 0].sum() for y in one.log_probs), reverse=True)
        assume(len(tied) == 1 and (len(totals) == 1 or totals[0] - totals[1] > 1e-3))
    soft = relax(replace(problem, gamma=1e-5), regularizer)
    np.testing.assert_allclose(soft, kg.solve(problem.theta, problem.constraint), atol=1e-12)


@given(data=st.data())
def test_shannon_sees_no_order_of_options_or_groups(kind, data):
    problem = data.draw(choice_problems(kind))
    weights = np.broadcast_to(np.asarray(problem.weights), problem.theta.shape)
    groups, options = (np.array(data.draw(st.permutations(range(size)))) for size in problem.event)
    order = (..., groups[:, None], options)
    moved = replace(problem, theta=problem.theta[order], weights=weights[order])
    np.testing.assert_allclose(relax(moved, "shannon"), relax(problem, "shannon")[order], atol=EXACT.relax)
    np.testing.assert_allclose(value(moved, "shannon"), value(problem, "shannon"), rtol=EXACT.value, atol=EXACT.value)


#: How many times the shares of equal options may be apart.
APART = {"shannon": 1.0, "gini": 1.21, "tsallis": 1.15}


@pytest.mark.parametrize("leaves", range(2, 18))
def test_equal_options_get_nearly_equal_shares(leaves, regularizer):
    y = kg.relax(np.zeros((1, leaves)), kg.MultipleChoice(np.ones(leaves, int), 1), CLASSES[regularizer]())[0]
    free = kg.MultipleChoice(np.zeros(leaves - 1, int), 1, optional=True)
    optional = kg.relax(np.zeros((1, leaves - 1)), free, CLASSES[regularizer]())[0]
    np.testing.assert_allclose(optional, y[1:], rtol=1e-14)
    if leaves in (2, 4, 8, 16):
        np.testing.assert_allclose(y, 1 / leaves, rtol=1e-14)
    else:
        assert y.max() <= APART[regularizer] * y.min() * (1 + 1e-12)
        if regularizer != "shannon":
            assert y.max() > 1.01 * y.min()


@given(data=st.data())
def test_equal_options_of_a_group_among_others(regularizer, data):
    """Their shares are equal in every state, so whatever the other groups are."""
    options = data.draw(st.sampled_from([2, 4, 8]))
    theta = np.array(data.draw(st.lists(st.floats(-2, 2), min_size=2 * options, max_size=2 * options)))
    weights = np.array(data.draw(st.lists(st.integers(0, 5), min_size=2 * options, max_size=2 * options)))
    theta, weights = theta.reshape(2, options), weights.reshape(2, options)
    place = data.draw(st.integers(0, 2))
    theta = np.insert(theta, place, data.draw(st.floats(-2, 2)), axis=0)
    weights = np.insert(weights, place, data.draw(st.integers(0, 3)), axis=0)
    capacity = int(weights.min(-1).sum()) + data.draw(st.integers(0, 6))
    y = relax(Choices(theta, weights, capacity, 0.7), regularizer)[place]
    np.testing.assert_allclose(y, 1 / options, rtol=1e-12)


@given(data=st.data())
def test_a_masked_option_is_left_out(regularizer, kind, data):
    """After each leaf of the tree there is one more, which is masked. Decisions are the same if the leaves are a power
    of two; for Shannon any number will do."""
    problem = data.draw(choice_problems(kind))
    assume(regularizer == "shannon" or problem.options + problem.optional in (1, 2, 4))
    weights = np.broadcast_to(np.asarray(problem.weights), problem.theta.shape)
    padded = replace(problem, theta=spread(problem, problem.theta, -np.inf), weights=spread(problem, weights, 1))
    there = slice(int(problem.optional), None, 2)
    y = relax(padded, regularizer)
    np.testing.assert_allclose(y[..., there], relax(problem, regularizer), atol=1e-13)
    assert y.sum() == pytest.approx(y[..., there].sum())
    np.testing.assert_allclose(value(padded, regularizer), value(problem, regularizer), rtol=1e-13, atol=1e-13)
    picked = kg.solve(padded.theta, padded.constraint)[..., there]
    np.testing.assert_array_equal(picked, kg.solve(problem.theta, problem.constraint))


def spread(problem: Choices, x: np.ndarray, fill: float) -> np.ndarray:
    """With one more entry after each, and before the first if that stands for no pick."""
    front = int(problem.optional)
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + front), fill, dtype=x.dtype)
    wide[..., front::2] = x
    return wide


@given(data=st.data())
def test_a_masked_option_is_one_that_is_too_heavy(regularizer, kind, data):
    problem = data.draw(choice_problems(kind))
    out = np.isneginf(problem.theta)
    heavy = np.where(out, 1000, np.broadcast_to(problem.weights, problem.theta.shape))
    other = replace(problem, theta=np.where(out, 0.5, problem.theta), weights=heavy)
    np.testing.assert_allclose(relax(other, regularizer), relax(problem, regularizer), atol=1e-13)


@given(data=st.data())
def test_a_weight_that_a_required_group_has_in_any_case_changes_nothing(regularizer, data):
    problem = data.draw(choice_problems(data.draw(st.sampled_from(["required", "required, at least"]))))
    more = np.array(data.draw(st.lists(st.integers(0, 9), min_size=problem.event[0], max_size=problem.event[0])))
    weights = np.broadcast_to(problem.weights, problem.theta.shape) + more[:, None]
    least = None if problem.at_least is None else problem.at_least + more.sum()
    shifted = replace(problem, weights=weights, capacity=problem.capacity + more.sum(), at_least=least)
    np.testing.assert_array_equal(relax(shifted, regularizer), relax(problem, regularizer))
    np.testing.assert_array_equal(value(shifted, regularizer), value(problem, regularizer))
    columns = problem.n
    assert shifted.constraint.lattice(columns).reach == problem.constraint.lattice(columns).reach


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("at_least", [0, 4, 9])
def test_optional_groups_of_one_option_are_a_knapsack_to_the_last_bit(at_least, backend, regularizer):
    rng = np.random.default_rng(0)
    theta, weights, smoothing = rng.standard_normal((3, 7)), [2, 0, 3, 1, 12, 4, 2], CLASSES[regularizer](0.8)
    items = kg.Knapsack(weights, 9, at_least=at_least)
    groups = kg.MultipleChoice(np.reshape(weights, (7, 1)), 9, at_least=at_least, optional=True)
    y = backend.to_numpy(kg.solve(backend.asarray(theta, backend.widest), items))
    calls: dict[str, Callable[[Any, Any, Any], Any]] = {
        "value": lambda theta, _, limit: kg.value(theta, limit, smoothing),
        "relax": lambda theta, _, limit: kg.relax(theta, limit, smoothing),
        "entropy": lambda theta, _, limit: kg.entropy(theta, limit, smoothing),
        "log_prob": lambda theta, y, limit: kg.log_prob(theta, y, limit, smoothing),
        "divergence": lambda theta, y, limit: kg.divergence(theta, limit, smoothing, prior=y),
        "sample": lambda theta, _, limit: kg.sample(theta, limit, smoothing, num_samples=9, rng=backend.rng(3)),
        "solve": lambda theta, _, limit: kg.solve(theta, limit),
    }
    for name, call in calls.items():
        plain, grouped = (backend.asarray(x, backend.widest) for x in (theta, theta[..., None]))
        plain_y, grouped_y = (backend.asarray(x, backend.widest) for x in (y, y[..., None]))
        expected, found = (
            backend.to_numpy(call(*arguments)) for arguments in ((plain, plain_y, items), (grouped, grouped_y, groups))
        )
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, err_msg=name)


@pytest.mark.parametrize("edge", ["everything for each instance", "masked, optional"])
def test_max_capacity_changes_no_result(edge, regularizer):
    problem = EDGES[edge]
    wide = kg.MultipleChoice(**{**problem.constraint.arguments, "max_capacity": 40})
    smoothing = problem.regularizer(regularizer)
    for call in (kg.relax, kg.value, kg.entropy):
        plain = call(problem.theta, problem.constraint, smoothing)
        np.testing.assert_allclose(call(problem.theta, wide, smoothing), plain, rtol=1e-14, atol=1e-14)
    np.testing.assert_array_equal(kg.solve(problem.theta, wide), kg.solve(problem.theta, problem.constraint))


@pytest.mark.thinned_where_compiled(2)
def test_nan_makes_its_instance_nan_alone(backend, regularizer):
    problem = EDGES["weights for each instance, optional"]
    theta = problem.theta.copy()
    theta[1, 2, 0] = np.nan
    smoothing = problem.regularizer(regularizer)
    given = backend.asarray(theta, backend.widest)
    for call in (
        lambda: kg.relax(given, problem.constraint, smoothing),
        lambda: kg.value(given, problem.constraint, smoothing),
        lambda: kg.solve(given, problem.constraint),
        lambda: kg.sample(given, problem.constraint, smoothing, rng=backend.rng(0)),
    ):
        result = backend.to_numpy(call())
        assert np.isnan(result[1]).any() and np.isfinite(result[[0, 2]]).all()


# The same optimum as an integer program.


def random_choices(rng: np.random.Generator, kind: str) -> Choices:
    """6 to 12 groups of 3 to 6 options, with a budget around what some selection weighs."""
    groups, options = int(rng.integers(6, 13)), int(rng.integers(3, 7))
    weights = rng.integers(0, 31, (groups, options))
    load = int(weights[np.arange(groups), rng.integers(0, options, groups)].sum())
    optional, with_least = kind.startswith("optional"), kind.endswith("at least")
    more, less = (int(x) for x in rng.integers(0, 9, 2))
    theta = weights / 20 - 0.5 * optional + 0.5 * rng.standard_normal((groups, options))
    if with_least:
        return Choices(theta, weights, load + more, 1.0, max(load - less, 0), optional)
    return Choices(theta, weights, max(load - 3 * less, int(weights.min(-1).sum())), 1.0, None, optional)


def best_by_integer_program(problem: Choices) -> float:
    groups, options = problem.event
    rows = np.kron(np.eye(groups), np.ones(options))
    picks = LinearConstraint(rows, 0 if problem.optional else 1, 1)
    load = LinearConstraint(problem.weights.reshape(1, -1), problem.at_least or 0, problem.capacity)
    result = milp(
        -problem.theta.reshape(-1),
        integrality=np.ones(problem.n),
        bounds=Bounds(0, 1),
        constraints=[picks, load],
        options={"mip_rel_gap": 0.0},
    )
    assert result.success, result.message
    return -result.fun


def test_the_optimum_is_that_of_an_integer_program(kind):
    """50 random instances of each kind, and the last entry of the frontier where it is the same number."""
    rng = np.random.default_rng(len(kind))
    for _ in range(50):
        problem = random_choices(rng, kind)
        y = kg.solve(problem.theta, problem.constraint)
        sums, load = y.sum(-1), (y * problem.weights).sum()
        assert np.isin(y, (0.0, 1.0)).all() and ((sums <= 1) if problem.optional else (sums == 1)).all()
        assert (problem.at_least or 0) <= load <= problem.capacity
        best = best_by_integer_program(problem)
        assert (y * problem.theta).sum() == pytest.approx(best, rel=1e-7, abs=1e-7)
        if problem.at_least is None:
            assert kg.frontier(problem.theta, problem.constraint)[-1] == pytest.approx(best, rel=1e-7, abs=1e-7)


# Errors.


def scores(backend: Backend, *shape: int) -> Any:
    return backend.asarray(np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape), backend.widest)


def make(*arguments: Any, **more: Any) -> Callable[[Backend], Any]:
    return lambda backend: kg.MultipleChoice(*arguments, **more)


def relaxed(weights: Any, capacity: Any, *shape: int, gamma: Any = 1.0, **more: Any) -> Callable[[Backend], Any]:
    return lambda backend: kg.relax(
        scores(backend, *shape), kg.MultipleChoice(weights, capacity, **more), kg.Gini(gamma)
    )


def with_selection(call: Any, *shape: int, fill: float = 0.0) -> Callable[[Backend], Any]:
    limit = kg.MultipleChoice([1, 2, 3], 9)
    return lambda backend: call(scores(backend, 2, 3), backend.asarray(np.full(shape, fill), backend.widest), limit)


LOG_PROB = lambda theta, y, limit: kg.log_prob(theta, y, limit, kg.Gini())  # noqa: E731
LOSS = lambda theta, y, limit: kg.fenchel_young_loss(theta, y, limit, kg.Gini())  # noqa: E731
DIVERGENCE = lambda theta, y, limit: kg.divergence(theta, limit, kg.Gini(), prior=y)  # noqa: E731

#: what is wrong -> the call, and a pattern of the message: the argument, what came, and where there is one, the remedy
CASES: dict[str, tuple[Callable[[Backend], Any], str]] = {
    "theta of one dimension": (relaxed([1, 2, 3], 4, 3), r"theta.*\(\*batch, groups, options\).*\(3,\)"),
    "too few options": (relaxed([1, 2], 9, 2, 3), r"weights.*one entry per option.*got 2.*\(2, 3\).*3 options"),
    "one weight to broadcast": (relaxed([[1], [2]], 9, 2, 3), r"weights.*one entry per option.*got 1.*3 options"),
    "weights of other groups": (
        relaxed(np.ones((4, 3), int), 9, 2, 3),
        r"weights of shape \(4, 3\).*broadcast.*\(2, 3\); give it",
    ),
    "weights of a batch that theta lacks": (
        relaxed(np.ones((5, 2, 3), int), 9, 2, 3),
        r"weights of shape \(5, 2, 3\).*\(2, 3\)",
    ),
    "capacity of another batch": (
        relaxed([1, 2, 3], [9, 8], 5, 2, 3),
        r"capacity of shape \(2,\).*batch.*\(5,\); give",
    ),
    "capacity per group": (relaxed([1, 2, 3], [9, 8], 2, 3), r"capacity of shape \(2,\).*batch.*\(\)"),
    "at_least of another batch": (
        relaxed([1, 2, 3], 9, 5, 2, 3, at_least=[1, 2]),
        r"at_least of shape \(2,\).*batch.*\(5,\); give",
    ),
    "gamma per group": (relaxed([1, 2, 3], 9, 5, 2, 3, gamma=np.ones(2)), r"gamma of shape \(2,\).*\(5,\); give"),
    "a single weight": (make(2, 4), r"weights.*one entry per option.*\(groups, options\).*\(\)"),
    "no options": (make(np.ones((3, 0), int), 4), r"weights.*one entry per option.*\(3, 0\)"),
    "negative weight": (make([[1, -2]], 4), r"weights.*negative.*-2 at index \(0, 1\)"),
    "fractional weight": (make([1, 2.5], 4), r"weights.*whole.*2\.5 at index 1; .*from_real"),
    "weights of text": (make(["a", "b"], 4), r"weights.*integers"),
    "negative capacity": (make([1, 2], -4), r"capacity.*negative.*-4"),
    "fractional capacity": (make([1, 2], 4.5), r"capacity.*whole.*4\.5"),
    "at_least above the capacity": (
        make([1, 2], 4, at_least=5),
        r"at_least must not be above the capacity: it is 5.*capacity is 4; lower it, or raise the capacity",
    ),
    "one at_least above the capacity": (
        make([1, 2], [4, 3], at_least=[4, 4]),
        r"at_least.*4 at index 1.*capacity is 3",
    ),
    "at_least that does not go with the capacity": (
        make([1, 2], [4, 3], at_least=[1, 1, 1]),
        r"at_least of shape \(3,\).*capacity of shape \(2,\)",
    ),
    "optional that is a number": (make([1, 2], 4, optional=1), r"optional must be True or False, got 1"),
    "optional that is None": (make([1, 2], 4, optional=None), r"optional must be True or False, got None"),
    "optional per group": (make([1, 2], 4, optional=[True, False]), r"optional must be True or False"),
    "max_capacity below the capacity": (make([1, 2], 4, max_capacity=3), r"max_capacity is 3.*capacity has 4"),
    "selection of another shape": (with_selection(LOG_PROB, 2, 2), r"y .*shape.*\(2, 3\).*\(2, 2\)"),
    "flat selection": (with_selection(LOG_PROB, 6), r"y .*shape.*\(2, 3\).*\(6,\)"),
    "target of another shape": (with_selection(LOSS, 3), r"target.*shape.*\(2, 3\).*\(3,\)"),
    "prior of another shape": (with_selection(DIVERGENCE, 3, 3), r"prior.*\(2, 3\).*\(3, 3\)"),
    "contains of one dimension": (
        lambda backend: kg.MultipleChoice([1, 2, 3], 4).contains(scores(backend, 3)),
        r"\(\*batch, groups, options\).*\(3,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, backend):
    call, pattern = CASES[case]
    with pytest.raises((TypeError, ValueError), match=pattern):
        call(backend)


def test_a_soft_selection_has_no_probability(backend):
    if backend.on_gpu:
        pytest.skip("looking at values would make the device wait")
    with pytest.raises(ValueError, match=r"y .*zeros and ones.*fenchel_young_loss"):
        with_selection(LOG_PROB, 2, 3, fill=0.5)(backend)


def _masked(theta: np.ndarray) -> np.ndarray:
    theta = theta.copy()
    theta[1, 2] = -np.inf
    return theta


_SCORES = EDGES["batch of rank 2"].theta[0]
_WEIGHTS = EDGES["no batch"].weights
INFEASIBLE: dict[str, tuple[np.ndarray, kg.MultipleChoice]] = {
    "less than the lightest options": (_SCORES, kg.MultipleChoice(_WEIGHTS, [2, 1, 2])),
    "a group without options": (_masked(_SCORES), kg.MultipleChoice(_WEIGHTS, 9)),
    "more than the heaviest options": (_SCORES, kg.MultipleChoice(_WEIGHTS, 20, at_least=[0, 10, 9])),
    "more than one of each, optional": (_SCORES, kg.MultipleChoice(_WEIGHTS, 20, at_least=[0, 10, 9], optional=True)),
    "a sum that none has": (
        _SCORES,
        kg.MultipleChoice(np.stack([_WEIGHTS, 2 * _WEIGHTS, _WEIGHTS]), 5, at_least=5, optional=True),
    ),
}


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("what", INFEASIBLE)
def test_an_infeasible_instance_is_named(what, backend, regularizer):
    """Or NaN in that instance alone where nobody looks."""
    given, constraint = INFEASIBLE[what]
    theta, smoothing = backend.asarray(given, backend.widest), CLASSES[regularizer]()
    for call in (
        lambda: kg.relax(theta, constraint, smoothing),
        lambda: kg.value(theta, constraint, smoothing),
        lambda: kg.solve(theta, constraint),
        lambda: kg.entropy(theta, constraint, smoothing),
        lambda: kg.sample(theta, constraint, smoothing, rng=backend.rng(0)),
    ):
        if backend.looks:
            with pytest.raises(
                ValueError, match=r"instance 1 .*no feasible selection.*lower k or at_least.*raise the capacity"
            ):
                call()
        else:
            result = backend.to_numpy(call())
            assert np.isnan(result[1]).all() and np.isfinite(result[[0, 2]]).all()


def test_integers_of_every_kind_are_welcome():
    theta, weights, capacity = EDGES["no batch"].theta, _WEIGHTS.tolist(), 6
    plain = kg.relax(theta, kg.MultipleChoice(weights, capacity), kg.Gini())
    kinds = itertools.product([np.int8, np.uint16, np.int64, np.float64], [int, np.int32, np.array, float])
    for of_weights, of_capacity in kinds:
        given = kg.MultipleChoice(np.array(weights, of_weights), of_capacity(capacity))
        assert given == kg.MultipleChoice(weights, capacity)
        np.testing.assert_array_equal(kg.relax(theta, given, kg.Gini()), plain)
