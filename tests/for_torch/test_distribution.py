"""SubsetDistribution against enumeration, and as a torch distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import choices
import knapgrad as kg
from choices import Choices
from instances import Problem
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import REGULARIZERS, Truth, chi_square_p_value, mp

torch = pytest.importorskip("torch")
import cases  # noqa: E402
from cases import WEIGHTS, leaf, noise  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import grad, gradcheck  # noqa: E402
from torch.distributions import Independent, kl_divergence  # noqa: E402

from knapgrad.torch import SubsetDistribution, backend, operators  # noqa: E402

THETA = np.array([[0.8, -0.45, 1.3, 0.2, -0.1], [-1.0, 1.9, 0.55, 1.2, 0.35]])

PROBLEMS: dict[str, Problem] = {
    "top-k": Problem(THETA, None, 2, 0.9),
    "knapsack": Problem(THETA, [2, 0, 3, 1, 9], 4, 0.9),
    "k and gamma for each instance": Problem(THETA, None, np.array([1, 4]), np.array([0.5, 2.0])),
    "all for each instance": Problem(
        THETA, np.array([[2, 1, 3, 1, 2], [1, 0, 2, 2, 1]]), np.array([5, 2]), np.array([0.5, 2.0])
    ),
    "no batch": Problem(THETA[0], [2, 1, 3, 1, 2], 5, 0.7),
    "masked": Problem(np.where(THETA == 0.2, -np.inf, THETA), [2, 1, 3, 1, 2], 5, 0.7),
    "batch of rank 2": Problem(np.stack([THETA, THETA[::-1] - 0.3]), None, 3, 1.1),
    **{name: replace(x, gamma=0.9) for name, x in cases.PROBLEMS.items() if "choices" in name or name == "budgets"},
}
CERTAIN = {f"choices, {name}": choices.EDGES[name] for name in ("masked", "one option", "one option, optional")}
SHARED = [name for name in PROBLEMS if "each instance" not in name and "masked" not in name]  # limits, and gamma
FEW = ["top-k", "knapsack", "all for each instance", "choices", "optional choices", "budgets"]


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request: pytest.FixtureRequest) -> Problem:
    return request.param


@pytest.fixture(params=[*PROBLEMS, *CERTAIN])
def edge(request: pytest.FixtureRequest) -> Problem:
    """Also those that leave little to choose."""
    return {**PROBLEMS, **CERTAIN}[request.param]


def distribution(
    problem: Problem,
    regularizer: str,
    theta: Tensor | None = None,
    validate_args: bool | None = None,
    dtype: torch.dtype = torch.float64,
) -> SubsetDistribution:
    theta = torch.tensor(problem.theta, dtype=dtype) if theta is None else theta
    return SubsetDistribution(theta, problem.constraint, problem.regularizer(regularizer), validate_args)


def close(result: Tensor, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(result.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_moments_and_entropy(edge, regularizer):
    problem = edge
    one, truths = distribution(problem, regularizer), problem.truths(regularizer)
    mean = problem.batched([truth.relax for truth in truths], problem.n)
    close(one.mean, mean)
    close(one.variance, mean * (1 - mean))
    close(one.stddev, np.sqrt(mean * (1 - mean)), 1e-6)
    close(one.entropy(), problem.batched([truth.entropy for truth in truths]))


def test_mode_has_the_highest_probability(edge, regularizer):
    mode = edge.flat(distribution(edge, regularizer).mode.numpy())
    for y, truth in zip(mode, edge.truths(regularizer)):
        best = max(truth.log_probs.values())
        assert truth.log_probs[tuple(y.astype(int))] == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    ("regularizer", "problem", "mode"),
    [
        ("gini", Problem(np.array([0.4, 0.3, 0.7, -0.3]), [2, 2, 3, 3], 4), [0.0, 0.0, 1.0, 0.0]),
        ("tsallis", Problem(np.array([0.6, -2.2, 0.1, 0.7]), [2, 1, 2, 3], 4), [0.0, 0.0, 0.0, 1.0]),
        ("gini", Choices(np.array([[0.0, 0.02, 0.01]]), [0, 0, 0], 0), [[1.0, 0.0, 0.0]]),
        ("tsallis", Choices(np.array([[0.0, 0.02, 0.01]]), [0, 0, 0], 0), [[1.0, 0.0, 0.0]]),
    ],
)
def test_the_mode_of_a_sparse_distribution_may_differ_from_the_best_selection(regularizer, problem, mode):
    """Two options share what one of them would have."""
    one = distribution(problem, regularizer)
    assert one.mode.tolist() == mode
    assert kg.solve(one.theta, one.constraint).tolist() != mode


def test_the_mode_of_shannon_is_the_best_selection(problem):
    one = distribution(problem, "shannon")
    assert torch.equal(one.mode, kg.solve(one.theta, problem.constraint))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_of_every_selection(dtype, edge, regularizer):
    problem = edge.rounded(str(dtype).removeprefix("torch."))
    y = problem.selections()
    result = distribution(problem, regularizer, validate_args=False, dtype=dtype).log_prob(torch.tensor(y, dtype=dtype))
    assert result.dtype == dtype
    flat = y.reshape(len(y), problem.size, problem.n)
    truths = problem.truths(regularizer)
    expected = np.array([[truth.log_prob(row) for truth, row in zip(truths, rows)] for rows in flat])
    close(result, expected.reshape(result.shape), 1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", ["top-k", "choices"])
def test_log_prob_of_a_selection_for_the_whole_batch(name, regularizer):
    one = distribution(PROBLEMS[name], regularizer, validate_args=False)
    y = kg.solve(one.theta, one.constraint)[0]
    assert torch.equal(one.log_prob(y), one.log_prob(y.expand(one.theta.shape)))


@pytest.mark.parametrize("name", FEW)
def test_sample_frequencies(name, regularizer):
    problem = PROBLEMS[name]
    generator = torch.Generator().manual_seed(0)
    y = distribution(problem, regularizer).sample((4000,), generator=generator).numpy().astype(int)
    y = y.reshape(4000, problem.size, problem.n)
    for b, truth in enumerate(problem.truths(regularizer)):
        counts = Counter(map(tuple, y[:, b].tolist()))
        assert chi_square_p_value(counts, truth.probabilities) > 1e-3


@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3), (0,)])
def test_shapes_of_samples(sample_shape, problem, regularizer):
    one = distribution(problem, regularizer)
    for draw in (one.sample, one.rsample):
        y = draw(sample_shape)
        assert y.shape == torch.Size(sample_shape) + one.theta.shape
        assert y.dtype == one.theta.dtype
        assert one.log_prob(y).shape == torch.Size(sample_shape) + one.batch_shape
        assert one.log_prob(y).isfinite().all()


def test_samples_repeat_for_a_generator_and_a_seed(problem):
    one = distribution(problem, "shannon")
    first, again, other = (one.sample((20,), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    first = one.sample((20,))
    torch.manual_seed(5)
    assert torch.equal(one.rsample((20,)), first)


@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3)])
def test_the_gradient_of_rsample_is_that_of_the_mean(sample_shape, problem, regularizer):
    theta = leaf(problem.theta)
    y = distribution(problem, regularizer, theta).rsample(sample_shape)
    z = noise(*y.shape, seed=2)
    (gradient,) = grad(y, theta, z)
    total = z.sum(tuple(range(len(sample_shape)))) if sample_shape else z
    relaxed = kg.relax(theta, problem.constraint, problem.regularizer(regularizer))
    (expected,) = grad(relaxed, theta, total)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_samples_are_detached(problem):
    assert not distribution(problem, "gini", leaf(problem.theta)).sample((2,)).requires_grad


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("what", ["mean", "entropy", "log_prob"])
def test_gradcheck(what, name, regularizer):
    problem = PROBLEMS[name]
    y = distribution(problem, regularizer).sample((2,), torch.Generator().manual_seed(0))

    def call(theta, gamma):
        one = SubsetDistribution(theta, problem.constraint, CLASSES[regularizer](gamma), validate_args=False)
        return {"mean": lambda: one.mean, "entropy": one.entropy, "log_prob": lambda: one.log_prob(y)}[what]()

    assert gradcheck(call, (leaf(problem.theta), leaf(problem.gamma)))


def test_two_backward_passes_through_one_distribution(problem, regularizer):
    theta, gamma = leaf(problem.theta), leaf(problem.gamma)
    one = SubsetDistribution(theta, problem.constraint, CLASSES[regularizer](gamma), validate_args=False)
    y = one.sample()
    for call in (lambda: one.mean.square().sum(), one.rsample, one.entropy, lambda: one.log_prob(y)):
        gradients = []
        for _ in range(2):
            theta.grad = None
            call().sum().backward()
            gradients.append(theta.grad)
        assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("name", FEW)
def test_one_table_serves_mean_samples_and_log_probs(name, regularizer, monkeypatch):
    calls = Counter()

    def count(module, name):
        original = getattr(module, name)

        def call(*arguments):
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(module, name, call)

    count(operators, "tabulate")
    count(backend, "operator")
    one = distribution(PROBLEMS[name], regularizer)
    assert not calls
    y = one.sample()
    one.log_prob(torch.stack([y, one.sample(), one.rsample()]))
    assert one.mean.shape == y.shape
    assert one.variance.shape == y.shape
    assert calls == {"tabulate": 1}


@pytest.mark.parametrize("name", SHARED)
def test_enumerate_support(name, regularizer):
    problem = PROBLEMS[name]
    one = distribution(problem, regularizer)
    support, possible = one.enumerate_support(), problem.feasible(0)
    assert support.shape == (len(possible), *one.theta.shape)
    assert support.dtype == one.theta.dtype
    rows = {tuple(row.int().tolist()) for row in support.reshape(len(support), -1, problem.n)[:, 0]}
    assert rows == set(possible)
    torch.testing.assert_close(one.log_prob(support).exp().sum(0), torch.ones_like(one.entropy()))
    narrow = one.enumerate_support(expand=False)
    assert narrow.shape == (len(support), *[1] * len(problem.batch), *problem.event)
    assert torch.equal(narrow.expand(support.shape), support)


def test_enumerate_support_has_its_limits():
    for name in ("all for each instance", "choices, all for each instance"):
        with pytest.raises(NotImplementedError, match="same weights and limits"):
            distribution(PROBLEMS[name], "gini").enumerate_support()
    for theta, limit in ((torch.zeros(21), kg.TopK(2)), (torch.zeros(7, 3), kg.MultipleChoice([1, 1, 1], 9))):
        with pytest.raises(ValueError, match="n = 21 is above 20"):
            SubsetDistribution(theta, limit, kg.Gini()).enumerate_support()


def test_support_checks_every_selection(problem):
    one, y = distribution(problem, "gini"), problem.selections()
    np.testing.assert_array_equal(one.support.check(torch.tensor(y)).numpy(), problem.contains(y))
    assert not one.support.check(torch.full_like(one.theta, 0.5)).any()
    assert one.support.is_discrete
    assert one.support.event_dim == problem.event_dims


def test_validation_of_a_selection(regularizer, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns the default off
    problem = PROBLEMS["top-k"]
    infeasible = torch.ones(2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="support"):
        distribution(problem, regularizer, validate_args=True).log_prob(infeasible)
    with pytest.raises(ValueError, match="support"):
        distribution(problem, regularizer).log_prob(infeasible)
    assert distribution(problem, regularizer, validate_args=False).log_prob(infeasible).isneginf().all()
    with pytest.raises(ValueError, match=r"shape|match"):
        distribution(problem, regularizer, validate_args=True).log_prob(torch.zeros(2, 4))


def test_validation_of_a_group_without_a_pick(regularizer):
    required, optional = PROBLEMS["choices"], replace(PROBLEMS["choices"], optional=True)
    nothing = torch.zeros(required.theta.shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="support"):
        distribution(required, regularizer, validate_args=True).log_prob(nothing)
    assert distribution(required, regularizer, validate_args=False).log_prob(nothing).isneginf().all()
    assert distribution(optional, regularizer, validate_args=True).log_prob(nothing).isfinite().all()


def test_validation_of_theta():
    nan = torch.tensor([0.0, torch.nan, 1.0])
    with pytest.raises(ValueError, match="theta"):
        SubsetDistribution(nan, kg.TopK(1), kg.Gini(), validate_args=True)
    assert SubsetDistribution(nan, kg.TopK(1), kg.Gini(), validate_args=False).mean.isnan().any()
    masked = torch.tensor([0.0, -torch.inf, 1.0])
    assert SubsetDistribution(masked, kg.TopK(1), kg.Gini(), validate_args=True).mean[1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, dtype=torch.int64), kg.TopK(1), kg.Gini()), "theta must hold floating-point"),
        ((torch.zeros(3), kg.TopK(4), kg.Gini()), r"k must be in 0\.\.n"),
        ((torch.zeros(3), 2, kg.Gini()), "constraint must be"),
        ((torch.zeros(3), kg.TopK(1), "gini"), "regularizer must be one of"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SubsetDistribution(*arguments)


def test_shapes_and_flags(problem):
    one = distribution(problem, "gini")
    assert one.batch_shape == torch.Size(problem.batch)
    assert one.event_shape == problem.event
    assert one.has_rsample
    assert one.has_enumerate_support
    assert "SubsetDistribution(" in repr(one)


@pytest.mark.parametrize("batch_shape", [(4, 2), (3, 4, 2)])
@pytest.mark.parametrize("name", FEW)
def test_expand(batch_shape, name, regularizer):
    one, event = distribution(PROBLEMS[name], regularizer), PROBLEMS[name].event
    wide = one.expand(batch_shape)
    assert isinstance(wide, SubsetDistribution)
    assert wide.batch_shape == batch_shape
    assert wide.event_shape == one.event_shape
    y = wide.sample((3,))
    assert y.shape == (3, *batch_shape, *event)
    torch.testing.assert_close(wide.mean, one.mean.expand(*batch_shape, *event), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wide.log_prob(y), one.log_prob(y), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wide.entropy(), one.entropy().expand(batch_shape), rtol=1e-12, atol=1e-14)
    assert len(y.flatten(0, len(batch_shape)).unique(dim=0)) > 2


@pytest.mark.parametrize("name", ["top-k", "optional choices"])
def test_inside_independent(name, regularizer):
    one = distribution(PROBLEMS[name], regularizer)
    whole = Independent(one, 1)
    y = whole.sample((3,))
    torch.testing.assert_close(whole.log_prob(y), one.log_prob(y).sum(-1))


# Kullback-Leibler divergences.


def other(problem: Problem) -> np.ndarray:
    return 0.6 * np.cos(np.arange(problem.theta.size)).reshape(problem.theta.shape)


def truth_of_kl(p: Truth, q: Truth) -> float:
    if any(y not in q.log_probs for y in p.log_probs):
        return np.inf
    return float(sum((mp.exp(log_p) * (log_p - q.log_probs[y]) for y, log_p in p.log_probs.items()), mp.mpf(0)))


COMPARED = ["k and gamma for each instance", "choices, at least", "choices, all for each instance"]


@pytest.mark.parametrize("of", REGULARIZERS)
@pytest.mark.parametrize("relative_to", REGULARIZERS)
@pytest.mark.parametrize("name", [*FEW, *COMPARED])
@pytest.mark.parametrize("scale", [1.0, 0.2], ids=["apart", "close"])
def test_kl_divergence_against_enumeration(of, relative_to, name, scale):
    p = replace(PROBLEMS[name], theta=scale * PROBLEMS[name].theta)
    q = replace(p, theta=scale * other(p), gamma=1.4)
    result = kl_divergence(distribution(p, of), distribution(q, relative_to))
    expected = p.batched([truth_of_kl(a, b) for a, b in zip(p.truths(of), q.truths(relative_to))])
    close(result, expected)


@pytest.mark.parametrize("relative_to", ["gini", "tsallis"])
@pytest.mark.parametrize("of", REGULARIZERS)
@pytest.mark.parametrize("kind", ["top-k", "choices"])
def test_an_infinite_kl_divergence(kind, of, relative_to):
    shape, theta = (2, 3) if kind == "top-k" else (2, 1, 3), np.array([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    p = Problem(np.zeros(shape), None, 1) if kind == "top-k" else Choices(np.zeros(shape), [0, 0, 0], 0)
    q = replace(p, theta=theta.reshape(shape))
    theta = leaf(q.theta)
    result = kl_divergence(distribution(p, of), distribution(q, relative_to, theta))
    assert result[0] == torch.inf
    assert result[1].isfinite()
    (gradient,) = grad(result.sum(), theta)
    assert not gradient[0].any()
    assert gradient[1].any()
    assert gradient[1].isfinite().all()


def test_kl_divergence_from_itself_is_zero(problem, regularizer):
    one = distribution(problem, regularizer)
    close(kl_divergence(one, one), np.zeros(problem.batch), 1e-12)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("of", REGULARIZERS)
@pytest.mark.parametrize("relative_to", REGULARIZERS)
@pytest.mark.parametrize("name", ["top-k", "knapsack", "choices", "optional choices"])
def test_gradcheck_of_the_kl_divergence(of, relative_to, name):
    problem = PROBLEMS[name]

    def call(theta_p, theta_q, gamma_p, gamma_q):
        p, q = (
            SubsetDistribution(theta, problem.constraint, CLASSES[kind](gamma))
            for theta, kind, gamma in ((theta_p, of, gamma_p), (theta_q, relative_to, gamma_q))
        )
        return kl_divergence(p, q)

    assert gradcheck(call, (leaf(0.2 * problem.theta), leaf(0.2 * other(problem)), leaf(1.0), leaf(1.3)))


MASKED, OPEN = PROBLEMS["masked"], replace(PROBLEMS["masked"], theta=THETA, gamma=2.0)


@pytest.mark.parametrize("of", REGULARIZERS)
@pytest.mark.parametrize(
    ("p", "q"),
    [(MASKED, replace(MASKED, gamma=2.0)), (MASKED, OPEN), (OPEN, MASKED)],
    ids=["both", "the first", "the second"],
)
def test_kl_divergence_with_masks(p, q, of):
    thetas = [leaf(x.theta) for x in (p, q)]
    result = kl_divergence(distribution(p, of, thetas[0]), distribution(q, "shannon", thetas[1]))
    expected = p.batched([truth_of_kl(a, b) for a, b in zip(p.truths(of), q.truths("shannon"))])
    close(result, expected)
    for theta, gradient in zip(thetas, grad(result[expected < np.inf].sum(), thetas)):
        assert gradient.isfinite().all()
        assert not gradient[torch.isneginf(theta)].any()


_CHOICES = kg.MultipleChoice(WEIGHTS, 6)
DIFFERENT = {
    "k": (kg.TopK(2), kg.TopK(3)),
    "kind": (kg.TopK(2), kg.Knapsack([1, 1, 1, 1, 1], 2)),
    "weights": (kg.Knapsack([1, 1, 1, 1, 1], 2), kg.Knapsack([1, 1, 1, 1, 2], 2)),
    "capacity of one instance": (kg.Knapsack([1, 1, 1, 1, 1], 2), kg.Knapsack([1, 1, 1, 1, 1], [2, 3])),
    "optional": (_CHOICES, kg.MultipleChoice(WEIGHTS, 6, optional=True)),
    "capacity of choices": (_CHOICES, kg.MultipleChoice(WEIGHTS, 7)),
    "weights of choices": (_CHOICES, kg.MultipleChoice(WEIGHTS[::-1], 6)),
    "least weight of choices": (_CHOICES, kg.MultipleChoice(WEIGHTS, 6, at_least=5)),
    "optional, of equal weights": (kg.MultipleChoice([[0]] * 3, 0), kg.MultipleChoice([[0]] * 3, 0, optional=True)),
}


@pytest.mark.parametrize("difference", DIFFERENT)
@pytest.mark.parametrize("regularizer", ["shannon", "gini"])
def test_kl_divergence_between_different_constraints_raises(difference, regularizer):
    limits = DIFFERENT[difference]
    shape = (2, 5) if limits[0].event_dims == 1 else (2, 3, limits[0].weights.shape[-1])
    p, q = (SubsetDistribution(torch.zeros(shape), limit, CLASSES[regularizer]()) for limit in limits)
    with pytest.raises(ValueError, match="same constraint"):
        kl_divergence(p, q)


@pytest.mark.parametrize(
    "limits",
    [
        (kg.Knapsack([2, 1, 3, 1, 2], 4), kg.Knapsack(np.array([[2, 1, 3, 1, 2]] * 2), [4, 4])),
        (_CHOICES, kg.MultipleChoice(np.stack([WEIGHTS, WEIGHTS]), [6, 6])),
    ],
    ids=["knapsack", "choices"],
)
def test_kl_divergence_between_equal_constraints_that_are_written_differently(limits):
    theta = noise(2, *((5,) if limits[0].event_dims == 1 else (3, 3)))
    p, q = (SubsetDistribution(theta, limit, kg.Tsallis()) for limit in limits)
    close(kl_divergence(p, q), np.zeros(2), 1e-12)


def test_the_mode_of_shannon_is_the_best_selection_even_if_unlikely_at_every_step():
    budget = kg.Knapsack([80] + [1] * 80 + [40], 80)
    theta = torch.tensor([40.5] + [0.0] * 80 + [40.0], dtype=torch.float64)
    distribution = kg.torch.SubsetDistribution(theta, budget, kg.Shannon())
    assert torch.equal(distribution.mode, kg.solve(theta, budget))


@pytest.mark.parametrize("smoothing", [kg.Shannon(), kg.Gini(), kg.Tsallis()])
def test_log_prob_of_more_selections_than_the_batch_has(smoothing):
    theta, values = torch.zeros(1, 4), torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    many = kg.torch.SubsetDistribution(theta, kg.TopK(2), smoothing).log_prob(values)
    each = [kg.torch.SubsetDistribution(theta[0], kg.TopK(2), smoothing).log_prob(value) for value in values]
    torch.testing.assert_close(many, torch.stack(each))


def test_a_capacity_without_limit_costs_nothing_in_the_divergence():
    p, q = (
        kg.torch.SubsetDistribution(torch.tensor([0.1, 0.2]), kg.Knapsack([2, 3], 2**59), r)
        for r in (kg.Gini(), kg.Shannon())
    )
    near = [kg.torch.SubsetDistribution(x.theta, kg.Knapsack([2, 3], 5), x.regularizer) for x in (p, q)]
    torch.testing.assert_close(kl_divergence(p, q), kl_divergence(*near))


def test_a_finite_kl_divergence_has_a_finite_gradient():
    """Also where the other one never reaches states that this one does not reach either."""
    rng = np.random.default_rng
    theta = torch.tensor(rng(0).normal(size=(3, 5)), requires_grad=True)
    limit = kg.Knapsack([3, 1, 2, 2, 4], 6)
    p = kg.torch.SubsetDistribution(theta, limit, kg.Shannon(0.7))
    q = kg.torch.SubsetDistribution(torch.tensor(rng(1).normal(size=(3, 5))), limit, kg.Gini(1.5))
    divergence = torch.distributions.kl_divergence(p, q)
    finite = divergence.isfinite()
    assert finite.tolist() == [False, True, True]
    assert torch.autograd.grad(divergence[finite].sum(), theta)[0].isfinite().all()
