"""Every operation x regularizer x backend x kind of constraint against enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import knapgrad as kg
from backends import BACKENDS, TOLERANCES, Backend
from calls import SMOOTHED
from instances import Problem
from kinds import EDGES, KINDS, compiled_dtypes, problems
from oracles import Truth, chi_square_p_value


def target_of(problem: Problem) -> np.ndarray:
    """A best selection of each instance."""
    return problem.batched([best[0] for _, best in problem.optima()], problem.n)


def prior_of(problem: Problem) -> np.ndarray:
    return np.cos(np.arange(problem.theta.size)).reshape(problem.theta.shape).astype(np.float32).astype(np.float64)


#: operation -> what it should give for one instance, and how large its error may be
EXPECTED: dict[str, tuple[Callable[[Truth, np.ndarray], Any], str]] = {
    "value": (lambda truth, _: truth.value, "value"),
    "relax": (lambda truth, _: truth.relax, "relax"),
    "entropy": (lambda truth, _: truth.entropy, "value"),
    "log_prob": (lambda truth, target: truth.log_prob(target), "log_prob"),
    "fenchel_young_loss": (lambda truth, target: truth.fenchel_young_loss(target), "value"),
    "divergence": (lambda truth, _: truth.divergence([0.0] * truth.n), "value"),
    "divergence from a prior": (lambda truth, prior: truth.divergence(prior), "value"),
}


def call(name: str, problem: Problem, regularizer: str, array: Callable[[np.ndarray], Any]) -> Any:
    extra = (prior_of if "prior" in name else target_of)(problem)
    return SMOOTHED[name](array(problem.theta), array(extra), problem.constraint, problem.regularizer(regularizer))


def arrays(backend: Backend, dtype: str) -> Callable[[np.ndarray], Any]:
    return lambda x: backend.asarray(x, dtype)


def run(name: str, problem: Problem, regularizer: str, backend: Backend, dtype: str) -> tuple[Any, np.ndarray]:
    """The result, and its truth for theta as the dtype rounds it."""
    problem, (expect, _) = problem.rounded(dtype), EXPECTED[name]
    extra = problem.flat((prior_of if "prior" in name else target_of)(problem))
    exact = [expect(one, row) for one, row in zip(problem.truths(regularizer), extra)]
    expected = problem.batched(exact, *[problem.n] * (name == "relax"))
    return call(name, problem, regularizer, arrays(backend, dtype)), expected


def check(name: str, problem: Problem, regularizer: str, backend: Backend, dtype: str) -> None:
    result, expected = run(name, problem, regularizer, backend, dtype)
    error = getattr(TOLERANCES[dtype], EXPECTED[name][1])
    if name != "relax":
        error = error * np.maximum(np.abs(expected), problem.rounded(dtype).scale())
    assert_close(backend.to_numpy(result), expected, np.broadcast_to(error, expected.shape), name)


def assert_close(actual: np.ndarray, expected: np.ndarray, error: np.ndarray, what: str = "it") -> None:
    assert actual.shape == expected.shape, what
    with np.errstate(invalid="ignore"):  # of two infinities
        wrong = ~(np.abs(actual - expected) <= error) & (actual != expected)
    assert not wrong.any(), f"{what} gave {actual[wrong]} instead of {expected[wrong]}, allowed {error[wrong]}"


OFTEN = [f"{regularizer}-{kind}-float64" for regularizer in ("shannon", "tsallis") for kind in ("choices", "budgets")]


@pytest.mark.few_where_compiled(
    24, kept=[*OFTEN, "shannon-at least-float32", "gini-at least-float64"]
)  # every kind meets every regularizer
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_operations_are_the_enumeration(dtype, backend, regularizer, kind, data):
    problem = data.draw(problems(kind, one_shape=backend.is_jax))
    for name in SMOOTHED:
        check(name, problem, regularizer, backend, dtype)


@pytest.mark.thinned_where_compiled(9)
@pytest.mark.parametrize("edge", EDGES)
def test_operations_at_the_edges(edge, backend, regularizer):
    for name in SMOOTHED:
        for dtype in compiled_dtypes(backend, edge, regularizer):
            check(name, EDGES[edge], regularizer, backend, dtype)


SHAPES = (
    "no batch", "no batch, top-k", "batch of rank 2", "batch of rank 3", "everything for each instance",
    "masked, top-k", "masked, weight 0", "empty batch", "no items", "choices, no batch", "choices, batch of rank 2",
    "choices, masked, optional", "choices, no groups", "budgets, no batch", "budgets, batch of rank 2",
    "budgets, empty batch", "budgets, no items",
)  # fmt: skip


@pytest.mark.thinned_where_compiled(4)
@pytest.mark.parametrize("edge", SHAPES)
def test_results_have_the_type_dtype_and_batch_of_theta(edge, backend, regularizer):
    problem = EDGES[edge]
    for dtype in backend.dtypes:
        theta = backend.asarray(problem.theta, dtype)
        for name in SMOOTHED:
            result, expected = run(name, problem, regularizer, backend, dtype)
            assert backend.describe(result) == backend.describe(theta), name
            assert tuple(result.shape) == expected.shape, name
        for num_samples, front in ((None, ()), (1, (1,)), (5, (5,)), (0, (0,))):
            smoothing, rng = problem.regularizer(regularizer), backend.rng(0)
            y = kg.sample(theta, problem.constraint, smoothing, num_samples=num_samples, rng=rng)
            assert backend.describe(y) == backend.describe(theta)
            assert tuple(y.shape) == front + problem.theta.shape
            assert problem.allows(backend.to_numpy(y))


def rounded_once(backend: Backend, array: Any, dtype: str) -> np.ndarray:
    return backend.to_numpy(backend.asarray(backend.to_numpy(array), dtype))


def half_types(backend: Backend) -> list[str]:
    found = sorted(set(backend.dtypes) - {"float32", "float64"})
    return found or pytest.skip(f"{backend.name} has no half types in its row")


HALVED = (
    "batch of rank 2", "gamma for each instance", "masked, top-k", "k for each instance", "choices, batch of rank 2",
    "choices, everything for each instance, optional", "budgets, everything for each instance",
)  # fmt: skip


@pytest.mark.thinned_where_compiled(4)
@pytest.mark.parametrize("edge", HALVED)
def test_half_precision_is_one_rounding_of_the_float32_answer(edge, backend, regularizer):
    for dtype in half_types(backend):
        problem = EDGES[edge].rounded(dtype)
        for name in SMOOTHED:
            half = arrays(backend, dtype)
            wide = call(name, problem, regularizer, lambda x: backend.asarray(backend.to_numpy(half(x)), "float32"))
            result = backend.to_numpy(call(name, problem, regularizer, half))
            np.testing.assert_array_equal(result, rounded_once(backend, wide, dtype), err_msg=name)


@pytest.mark.few_where_compiled(4, kept=["tsallis-top-k"])
def test_half_precision_against_enumeration(backend, regularizer, kind):
    for dtype in half_types(backend):
        for name in ("value", "relax", "entropy"):
            check(name, KINDS[kind].typical, regularizer, backend, dtype)


@pytest.mark.parametrize(
    "name, layout", [(name, layout) for name, row in BACKENDS.items() for layout in row.layouts], ids=lambda x: x
)
@pytest.mark.parametrize("operation", SMOOTHED)
def test_memory_layout_does_not_matter(operation, name, layout, regularizer):
    backend, problem = BACKENDS[name], EDGES["batch of rank 2"]
    theta = backend.layouts[layout](problem.theta)
    before = backend.to_numpy(theta).copy()
    np.testing.assert_array_equal(before, problem.theta)
    result = call(
        operation, problem, regularizer, lambda x: theta if x is problem.theta else backend.layouts[layout](x)
    )
    plain = call(operation, problem, regularizer, arrays(backend, "float64"))
    np.testing.assert_array_equal(backend.to_numpy(result), backend.to_numpy(plain))
    np.testing.assert_array_equal(backend.to_numpy(theta), before)


def test_integers_of_every_kind_are_welcome(backend):
    theta = np.array([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25]])
    plain = backend.to_numpy(kg.relax(backend.asarray(theta, backend.widest), kg.Knapsack([2, 1, 3, 1], 4), kg.Gini()))
    top, choices = (
        backend.to_numpy(kg.relax(backend.asarray(theta, backend.widest), limit, kg.Gini()))
        for limit in (kg.TopK(2), kg.MultipleChoice([2, 1, 3, 1], 4))
    )
    forms: list[Callable[[Any], Any]] = [
        tuple,
        np.array,
        *(lambda x, d=d: np.array(x, dtype=d) for d in ("int8", "uint16", "int32", "uint64")),
    ]
    if BACKENDS["torch"].available:
        import torch

        forms += [
            torch.tensor,
            lambda x: torch.tensor(x, dtype=torch.int32),
            lambda x: torch.tensor(x, dtype=torch.uint8),
        ]
    for form in forms:
        given_theta = backend.asarray(theta, backend.widest)
        for constraint in (kg.Knapsack(form([2, 1, 3, 1]), 4), kg.Knapsack([2, 1, 3, 1], form([4, 4]))):
            np.testing.assert_array_equal(backend.to_numpy(kg.relax(given_theta, constraint, kg.Gini())), plain)
        np.testing.assert_array_equal(backend.to_numpy(kg.relax(given_theta, kg.TopK(form([2, 2])), kg.Gini())), top)
        constraint = kg.MultipleChoice(form([2, 1, 3, 1]), 4)
        np.testing.assert_array_equal(backend.to_numpy(kg.relax(given_theta, constraint, kg.Gini())), choices)
    for four in (np.int64(4), np.uint8(4), np.array(4)):
        constraint = kg.Knapsack([2, 1, 3, 1], four)
        np.testing.assert_array_equal(
            backend.to_numpy(kg.relax(backend.asarray(theta, backend.widest), constraint, kg.Gini())), plain
        )


def test_gamma_of_every_kind_is_welcome(backend, regularizer):
    problem = EDGES["batch of rank 2"]
    theta = backend.asarray(problem.theta, backend.widest)

    def relax(gamma: Any) -> np.ndarray:
        smoothing = replace(problem, gamma=gamma).regularizer(regularizer)
        return backend.to_numpy(kg.relax(theta, problem.constraint, smoothing))

    plain = relax(0.5)
    for gamma in (
        np.float32(0.5),
        np.array(0.5),
        np.full((2, 1), 0.5),
        np.full(3, 0.5),
        backend.asarray([0.5] * 3, backend.widest),
    ):
        np.testing.assert_array_equal(relax(gamma), plain)
    assert not np.array_equal(relax(1), plain)


def assert_log_probs(
    actual: np.ndarray, expected: np.ndarray, possible: np.ndarray, dtype: str, n: int, shannon: bool
) -> None:
    """-inf exactly for what is infeasible. A sparse decision near its threshold is a small difference of large numbers,
    so there the error is measured on the probability."""
    assert np.isneginf(actual[~possible]).all()
    actual, expected = actual[possible], expected[possible]
    tolerance = TOLERANCES[dtype].log_prob
    allowed = tolerance * np.maximum(1.0, np.abs(expected))
    if not shannon:
        rounding = 16 * max(n, 1) * np.finfo(dtype).eps
        with np.errstate(over="ignore"):
            allowed = np.where(np.isinf(expected), 0.0, allowed + rounding * np.exp(-expected))
        unlikely = np.exp(expected) <= rounding
        assert (np.exp(actual[unlikely]) <= 2 * rounding).all()
        actual, expected, allowed = actual[~unlikely], expected[~unlikely], allowed[~unlikely]
    assert_close(actual, expected, allowed)


@pytest.mark.few_where_compiled(8, kept=OFTEN)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_log_prob_of_every_selection(dtype, backend, regularizer, kind, data):
    problem = data.draw(problems(kind, max_n=5, one_shape=backend.is_jax)).rounded(dtype)
    y = problem.selections()
    theta, selections = backend.asarray(problem.theta, dtype), backend.asarray(y, dtype)
    actual = kg.log_prob(theta, selections, problem.constraint, problem.regularizer(regularizer))
    truths, rows = problem.truths(regularizer), y.reshape(len(y), problem.size, problem.n)
    expected = np.array([[one.log_prob(row) for one, row in zip(truths, each)] for each in rows])
    masked = (rows * np.isneginf(problem.flat(problem.theta)) > 0).any(-1)
    possible = problem.contains(y) & ~masked.reshape(len(y), *problem.batch)
    n, is_shannon = problem.n, regularizer == "shannon"
    assert_log_probs(backend.to_numpy(actual), expected.reshape(possible.shape), possible, dtype, n, is_shannon)


@given(data=st.data())
def test_contains_is_the_enumeration(backend, kind, data):
    problem = data.draw(problems(kind, max_n=4, one_shape=backend.is_jax))
    y = problem.selections()
    given = backend.asarray(y, backend.widest)
    found = problem.constraint.contains(given)
    assert type(found) is type(given) and tuple(found.shape) == (len(y), *problem.batch)
    np.testing.assert_array_equal(backend.to_numpy(found), problem.contains(y))


@pytest.mark.thinned_where_compiled(3)
def test_log_prob_takes_samples_in_front_of_the_batch(backend, regularizer):
    edges = ["no batch", "batch of rank 2", "k for each instance", "empty batch", "no items"]
    for edge in edges[1:2] if backend.is_jax else edges:
        problem = EDGES[edge]
        theta = backend.asarray(problem.theta, backend.widest)
        arguments = problem.constraint, problem.regularizer(regularizer)
        target = target_of(problem)
        one = backend.to_numpy(kg.log_prob(theta, backend.asarray(target, backend.widest), *arguments))
        for front in ((3,), (2, 3), (0,)):
            many = backend.asarray(np.broadcast_to(target, (*front, *target.shape)).copy(), backend.widest)
            np.testing.assert_array_equal(
                backend.to_numpy(kg.log_prob(theta, many, *arguments)), np.broadcast_to(one, (*front, *one.shape))
            )


@pytest.mark.thinned(1)
@given(data=st.data())
def test_solve_finds_an_optimum(backend, kind, data):
    problem = data.draw(problems(kind, one_shape=backend.is_jax))
    for dtype in backend.dtypes:
        check_solve(problem.rounded(dtype), backend, dtype)


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("edge", EDGES)
def test_solve_at_the_edges(edge, backend):
    for dtype in backend.dtypes:
        check_solve(EDGES[edge].rounded(dtype), backend, dtype)


def check_solve(problem: Problem, backend: Backend, dtype: str) -> None:
    theta = backend.asarray(problem.theta, dtype)
    y = kg.solve(theta, problem.constraint)
    assert backend.describe(y) == backend.describe(theta)
    assert tuple(y.shape) == problem.theta.shape
    y = backend.to_numpy(y)
    assert problem.allows(y)
    for (scores, *_), (best, _), picked in zip(problem.rows(), problem.optima(), problem.flat(y)):
        assert scores[picked == 1].sum() == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.few_where_compiled(3)
@given(data=st.data())
def test_samples_are_feasible(backend, regularizer, kind, data):
    problem = data.draw(problems(kind, one_shape=backend.is_jax))
    theta = backend.asarray(problem.theta, "float32")
    y = kg.sample(theta, problem.constraint, problem.regularizer(regularizer), num_samples=20, rng=backend.rng(0))
    assert problem.allows(backend.to_numpy(y))


@pytest.mark.parametrize(
    "name, generator",
    [(name, generator) for name, row in BACKENDS.items() for generator in row.generators],
    ids=lambda x: x,
)
def test_samples_repeat_for_a_seed(name, generator, regularizer):
    backend, problem = BACKENDS[name], EDGES["batch of rank 2"]

    def draw(rng: Any) -> np.ndarray:
        with backend.active():
            theta = backend.asarray(problem.theta, backend.widest)
            return backend.to_numpy(
                kg.sample(theta, problem.constraint, problem.regularizer(regularizer), num_samples=40, rng=rng)
            )

    make = backend.generators[generator]
    first = draw(make(7))
    np.testing.assert_array_equal(draw(make(7)), first)
    assert not np.array_equal(draw(make(8)), first)
    rng = make(7)
    if not isinstance(rng, int) and not backend.is_jax:
        np.testing.assert_array_equal(draw(rng), first)
        assert not np.array_equal(draw(rng), first), "a generator moves on"


def test_samples_without_rng_follow_the_global_generator(backend, regularizer):
    if backend.is_jax:
        pytest.skip("JAX has no global generator")
    problem = EDGES["batch of rank 2"]

    def draw() -> np.ndarray:
        theta = backend.asarray(problem.theta, backend.widest)
        return backend.to_numpy(kg.sample(theta, problem.constraint, problem.regularizer(regularizer), num_samples=40))

    backend.seed_global(3)
    first, second = draw(), draw()
    assert not np.array_equal(first, second)
    backend.seed_global(3)
    np.testing.assert_array_equal(draw(), first)


def test_a_uniform_number_that_rounds_up_to_one_breaks_nothing(monkeypatch, regularizer):
    """NumPy's global generator draws float64: just below 1 is 1 in float32, and a certain pick must still be made."""
    problem = EDGES["masked to exactly k"]
    monkeypatch.setattr(np.random, "random_sample", lambda shape=None: np.full(shape, np.nextafter(1.0, 0.0)))
    monkeypatch.setattr(np.random, "random", np.random.random_sample)
    for dtype in ("float16", "float32", "float64"):
        y = kg.sample(problem.theta.astype(dtype), problem.constraint, problem.regularizer(regularizer), num_samples=3)
        assert problem.allows(y)


@pytest.mark.few_where_compiled(8, kept=["shannon-choices-num_samples-", "shannon-budgets-num_samples-"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("many", [True, False], ids=["num_samples", "a batch"])
def test_sample_frequencies(many, dtype, backend, regularizer, kind):
    problem, draws = replace(KINDS[kind].typical, gamma=1.5).rounded(dtype), 20_000
    theta = problem.theta if many else np.broadcast_to(problem.theta, (draws, *problem.event)).copy()
    y = kg.sample(
        backend.asarray(theta, dtype),
        problem.constraint,
        problem.regularizer(regularizer),
        num_samples=draws if many else None,
        rng=backend.rng(20240),
    )
    y, exact = backend.to_numpy(y).reshape(draws, problem.n), problem.truths(regularizer)[0]
    assert len(exact.probabilities) > 5
    assert chi_square_p_value(counts_of(y), exact.probabilities) > 1e-4
    spread = np.sqrt(exact.relax * (1 - exact.relax) / draws)
    assert (np.abs(y.mean(axis=0) - exact.relax) <= 5 * spread + TOLERANCES[dtype].relax).all()


def counts_of(y: np.ndarray) -> dict[tuple[int, ...], int]:
    """How often each selection is among rows of them."""
    found, counts = np.unique(y, axis=0, return_counts=True)
    return {tuple(int(x) for x in row): int(count) for row, count in zip(found, counts)}


@pytest.mark.parametrize("pair", ["samples", "instances"])
def test_samples_are_independent(pair, backend, regularizer):
    problem = replace(KINDS["top-k"].typical, gamma=1.5).rounded(backend.widest)
    theta = np.broadcast_to(problem.theta, (2, problem.n)).copy()
    y = kg.sample(
        backend.asarray(theta, backend.widest),
        problem.constraint,
        problem.regularizer(regularizer),
        num_samples=20_000,
        rng=backend.rng(11),
    )
    y = backend.to_numpy(y)
    left, right = (y[::2, 0], y[1::2, 0]) if pair == "samples" else (y[:, 0], y[:, 1])
    exact = problem.truths(regularizer)[0].probabilities
    joint = {a + b: p * q for a, p in exact.items() for b, q in exact.items()}
    assert chi_square_p_value(counts_of(np.concatenate([left, right], axis=1)), joint) > 1e-4


@pytest.mark.few_where_compiled(3)
@given(data=st.data())
def test_divergence_is_zero_at_the_prior_and_positive_elsewhere(backend, regularizer, kind, data):
    problem = data.draw(problems(kind, masked=False, one_shape=backend.is_jax))
    theta = backend.asarray(problem.theta, backend.widest)
    smoothing = problem.regularizer(regularizer)
    error = TOLERANCES[backend.widest].value * np.maximum(problem.scale(), np.abs(prior_of(problem)).max(initial=0.0))
    at_prior = backend.to_numpy(kg.divergence(theta, problem.constraint, smoothing, prior=theta))
    assert (np.abs(at_prior) <= error).all()
    prior = backend.asarray(prior_of(problem), backend.widest)
    assert (backend.to_numpy(kg.divergence(theta, problem.constraint, smoothing, prior=prior)) >= -error).all()


@given(data=st.data())
def test_shannon_divergence_is_the_kullback_leibler_divergence(backend, kind, data):
    problem = replace(data.draw(problems(kind, one_shape=backend.is_jax)), gamma=1.0).rounded(backend.widest)
    theta = backend.asarray(problem.theta, backend.widest)
    prior = prior_of(problem)
    actual = backend.to_numpy(
        kg.divergence(theta, problem.constraint, kg.Shannon(), prior=backend.asarray(prior, backend.widest))
    )
    others = replace(problem, theta=prior).truths("shannon")
    relative = []
    for one, other in zip(problem.truths("shannon"), others):
        relative.append(float(sum(p * (one.log_probs[y] - other.log_probs[y]) for y, p in one.probabilities.items())))
    assert_close(actual, problem.batched(relative), TOLERANCES[backend.widest].value * np.maximum(problem.scale(), 1.0))


@pytest.mark.few_where_compiled(3)
@given(data=st.data())
def test_fenchel_young_loss_vanishes_where_relax_is_the_target(backend, regularizer, kind, data):
    """For a sharp score a sparse relax is its own target; the loss of any feasible target is positive."""
    problem = data.draw(problems(kind, masked=False, one_shape=backend.is_jax))
    target = target_of(problem)
    sharp = replace(problem, theta=(2 * target - 1) * 50.0 * problem.beside(problem.gamma))
    loss = backend.to_numpy(
        kg.fenchel_young_loss(
            backend.asarray(sharp.theta, backend.widest),
            backend.asarray(target, backend.widest),
            problem.constraint,
            problem.regularizer(regularizer),
        )
    )
    assert (np.abs(loss) <= TOLERANCES[backend.widest].value * sharp.scale()).all()
    other = backend.to_numpy(
        kg.fenchel_young_loss(
            backend.asarray(prior_of(problem), backend.widest),
            backend.asarray(target, backend.widest),
            problem.constraint,
            problem.regularizer(regularizer),
        )
    )
    assert (other >= -TOLERANCES[backend.widest].value).all()


@pytest.mark.parametrize("rng", [None, 3])
def test_random_numbers_are_the_same_however_many_are_drawn_at_a_time(rng, monkeypatch):
    """NumPy draws millions in parts, so that it can be interrupted."""
    theta, few = np.zeros((5, 7), np.float32), kg.TopK(3)

    def draw() -> np.ndarray:
        np.random.seed(3)  # noqa: NPY002
        return kg.sample(theta, few, kg.Gini(), num_samples=11, rng=rng)

    at_once = draw()
    monkeypatch.setattr("knapgrad.numpy.backend._AT_A_TIME", 37)
    np.testing.assert_array_equal(draw(), at_once)
