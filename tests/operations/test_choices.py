"""MultipleChoice: its properties, its errors, and the same optimum as an integer program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

import knapgrad as kg
from backends import Backend
from choices import EDGES, Choices
from kinds import KINDS, problems
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import APART


@pytest.fixture(params=[name for name in KINDS if "choices" in name])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def value(problem: Choices, regularizer: str) -> np.ndarray:
    return kg.value(problem.theta, problem.constraint, problem.regularizer(regularizer))


def relax(problem: Choices, regularizer: str) -> np.ndarray:
    return kg.relax(problem.theta, problem.constraint, problem.regularizer(regularizer))


def test_of_equal_options_solve_takes_the_first(backend):
    theta = backend.asarray(np.zeros((2, 2, 3)), backend.widest)
    y = backend.to_numpy(kg.solve(theta, kg.MultipleChoice([1, 1, 1], 9)))
    np.testing.assert_array_equal(y, np.broadcast_to([1.0, 0.0, 0.0], y.shape))
    assert not backend.to_numpy(kg.solve(theta, kg.MultipleChoice([1, 1, 1], 9, optional=True))).any()


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
def test_groups_sum_to_one(regularizer, kind, data):
    problem = data.draw(problems(kind))
    sums = relax(problem, regularizer).sum(-1)
    if problem.optional:
        assert (sums <= 1 + 1e-12).all()
    else:
        np.testing.assert_allclose(sums, 1.0, atol=1e-12)


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
    problem = data.draw(problems(kind))
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
    problem = data.draw(problems(kind))
    out = np.isneginf(problem.theta)
    heavy = np.where(out, 1000, np.broadcast_to(problem.weights, problem.theta.shape))
    other = replace(problem, theta=np.where(out, 0.5, problem.theta), weights=heavy)
    np.testing.assert_allclose(relax(other, regularizer), relax(problem, regularizer), atol=1e-13)


@given(data=st.data())
def test_a_weight_that_a_required_group_has_in_any_case_changes_nothing(regularizer, data):
    problem = data.draw(problems(data.draw(st.sampled_from(["choices", "choices, at least"]))))
    more = np.array(data.draw(st.lists(st.integers(0, 9), min_size=problem.event[0], max_size=problem.event[0])))
    problem = replace(problem, weights=np.broadcast_to(problem.weights, problem.theta.shape))  # both of each instance
    weights = problem.weights + more[:, None]
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
    if at_least in (0, 9):
        calls["frontier"] = lambda theta, _, limit: kg.frontier(theta, limit, smoothing)
        calls["hard frontier"] = lambda theta, _, limit: kg.frontier(theta, limit)
    for name, call in calls.items():
        plain, grouped = (backend.asarray(x, backend.widest) for x in (theta, theta[..., None]))
        plain_y, grouped_y = (backend.asarray(x, backend.widest) for x in (y, y[..., None]))
        expected, found = (
            backend.to_numpy(call(*arguments)) for arguments in ((plain, plain_y, items), (grouped, grouped_y, groups))
        )
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, err_msg=name)


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
