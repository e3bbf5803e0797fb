"""Derivatives in torch: gradcheck, the identities between them, and the orders that are not there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from calls import SMOOTHED
from choices import Choices
from instances import Problem
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import REGULARIZERS

torch = pytest.importorskip("torch")
from cases import PROBLEMS, leaf, noise  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request: pytest.FixtureRequest) -> Problem:
    return request.param


def prior_of(theta: Tensor, *_: Any) -> Tensor:
    return 0.4 * noise(*theta.shape, seed=8)


def target_of(theta: Tensor, problem: Problem, *_: Any) -> Tensor:
    scores = torch.where(theta == -torch.inf, theta, noise(*theta.shape, seed=9)).detach()
    return kg.relax(scores, problem.constraint, kg.Shannon())


def selections_of(theta: Tensor, problem: Problem, regularizer: str, num_samples: int | None = None) -> Tensor:
    """Selections that have a probability above 0."""
    rng, smoothing = torch.Generator().manual_seed(3), CLASSES[regularizer](0.9)
    return kg.sample(torch.tensor(problem.theta), problem.constraint, smoothing, num_samples=num_samples, rng=rng)


#: operation -> its further argument
EXTRA: dict[str, Callable[..., Tensor]] = {
    "log_prob": selections_of,
    "log_prob of samples in front": lambda *given: selections_of(*given, num_samples=3),
    "fenchel_young_loss": target_of,
    "divergence": prior_of,
}
OPERATIONS = ["value", "relax", "entropy", *EXTRA]


def call(name: str, theta: Tensor, gamma: Any, problem: Problem, regularizer: str) -> Tensor:
    extra = EXTRA[name](theta, problem, regularizer) if name in EXTRA else None
    operation = SMOOTHED["divergence from a prior" if name == "divergence" else name.partition(" ")[0]]
    return operation(theta, extra, problem.constraint, CLASSES[regularizer](gamma))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("own_gamma", [False, True], ids=["scalar gamma", "gamma for each instance"])
def test_gradcheck_in_theta_and_gamma(operation, own_gamma, problem, regularizer):
    gamma = 0.9 + 0.1 * np.arange(problem.size).reshape(problem.batch) / problem.size if own_gamma else 0.9
    assert gradcheck(
        lambda theta, gamma: call(operation, theta, gamma, problem, regularizer),
        (leaf(problem.theta), leaf(gamma)),
    )


def test_gradcheck_of_the_loss_in_its_target(problem, regularizer):
    def loss(theta, target):
        return kg.fenchel_young_loss(theta, target, problem.constraint, CLASSES[regularizer](0.9))

    theta = leaf(problem.theta)
    assert gradcheck(loss, (theta, target_of(theta, problem).requires_grad_()))


def test_gradcheck_of_the_divergence_in_its_prior(problem, regularizer):
    def divergence(theta, prior):
        return kg.divergence(theta, problem.constraint, CLASSES[regularizer](0.9), prior=prior)

    assert gradcheck(divergence, (leaf(problem.theta), prior_of(leaf(problem.theta)).requires_grad_()))


def test_gradgradcheck_of_value(problem, regularizer):
    def value(theta, gamma):
        return kg.value(theta, problem.constraint, CLASSES[regularizer](gamma))

    assert gradgradcheck(value, (leaf(problem.theta), leaf(0.9)))


def test_gradgradcheck_of_the_loss(problem, regularizer):
    def loss(theta):
        return kg.fenchel_young_loss(theta, target_of(theta, problem), problem.constraint, CLASSES[regularizer](0.9))

    assert gradgradcheck(loss, (leaf(problem.theta),))


@pytest.mark.parametrize("operation", ["value", "relax", "entropy", "divergence"])
def test_batched_cotangents_give_the_same_jacobian(operation, problem, regularizer):
    def of(theta):
        return call(operation, theta, 0.9, problem, regularizer)

    one_by_one, at_once = (
        torch.autograd.functional.jacobian(of, leaf(problem.theta), vectorize=vectorize) for vectorize in (False, True)
    )
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("regularizer", "dtype"), [*((name, "float64") for name in REGULARIZERS), ("tsallis", "float32")]
)
def test_the_product_with_the_jacobian_is_that_of_the_enumeration(regularizer, dtype, problem):
    problem, z = problem.rounded(dtype), noise(*problem.theta.shape)
    theta = leaf(problem.theta, getattr(torch, dtype))
    y = kg.relax(theta, problem.constraint, problem.regularizer(regularizer))
    (product,) = grad(y, theta, z.to(theta.dtype))
    truths = zip(problem.truths(regularizer), problem.flat(z.numpy()))
    expected = problem.batched([one.vjp(row) for one, row in truths], problem.n)
    assert product.dtype == theta.dtype and np.abs(expected).max() > 1e-2
    assert np.abs(product.numpy() - expected).max() <= TOLERANCES[dtype].vjp * np.abs(expected).max()


def assert_exact(actual: Tensor, expected: Tensor, problem: Problem) -> None:
    """To the last bit of items; the tournaments of choices are summed in another order."""
    error = 1e-14 if isinstance(problem, Choices) and actual.dtype == torch.float64 else 0.0
    torch.testing.assert_close(actual, expected, rtol=error, atol=0.1 * error)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 4.0])
def test_the_gradient_of_value_is_relax_exactly(gamma, problem, regularizer):
    theta, smoothing = leaf(problem.theta), CLASSES[regularizer](gamma)
    (gradient,) = grad(kg.value(theta, problem.constraint, smoothing).sum(), theta)
    assert_exact(gradient, kg.relax(theta, problem.constraint, smoothing), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_the_loss_is_relax_minus_target_exactly(dtype, problem, regularizer):
    theta, smoothing = leaf(problem.theta, dtype), CLASSES[regularizer](0.5)
    target = kg.solve(noise(*theta.shape).to(dtype), problem.constraint)
    (gradient,) = grad(kg.fenchel_young_loss(theta, target, problem.constraint, smoothing).sum(), theta)
    assert_exact(gradient, kg.relax(theta, problem.constraint, smoothing) - target, problem)


def test_the_gradient_of_the_divergence_is_the_jacobian_times_the_difference(problem, regularizer):
    theta, smoothing = leaf(problem.theta), CLASSES[regularizer](0.9)
    prior = prior_of(theta)
    (gradient,) = grad(kg.divergence(theta, problem.constraint, smoothing, prior=prior).sum(), theta)
    (expected,) = grad(kg.relax(theta, problem.constraint, smoothing), theta, theta.detach() - prior)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


def test_the_jacobian_of_relax_is_symmetric(problem, regularizer):
    theta, smoothing = leaf(problem.theta), CLASSES[regularizer](0.9)
    u, v = noise(*theta.shape, seed=1), noise(*theta.shape, seed=2)
    y = kg.relax(theta, problem.constraint, smoothing)
    (from_u,), (from_v,) = grad(y, theta, u, retain_graph=True), grad(y, theta, v)
    one, other = ((x * y).reshape(*problem.batch, -1).sum(-1) for x, y in ((from_u, v), (from_v, u)))
    assert one.abs().max() > 1e-3
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_float32_vjp_against_float64(constraint, regularizer):
    n, batch = 60, 20
    random = np.random.default_rng(4)
    weights = random.integers(3, 9, n)
    capacity = int(weights.sum()) // 2
    limit = kg.Knapsack(weights, capacity, at_least=capacity - 20 if constraint == "at least" else 0)
    limit = kg.TopK(20) if constraint == "top-k" else limit
    theta = (weights + random.normal(size=(batch, n))).astype(np.float32)
    z = noise(batch, n).float()
    single, double = (
        grad(kg.relax(x, limit, CLASSES[regularizer](0.7)), x, z.to(x.dtype))[0]
        for x in (leaf(theta, torch.float32), leaf(theta, torch.float64))
    )
    assert single.dtype == torch.float32
    error = (single - double).abs().amax(-1) / double.abs().amax(-1)
    assert error.max() <= TOLERANCES["float32"].vjp


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["knapsack", "optional choices", "budgets"])
def test_half_precision_gradients_have_its_dtype(name, dtype, regularizer):
    limit, theta = PROBLEMS[name].constraint, leaf(PROBLEMS[name].theta, dtype)
    for operation in (kg.value, kg.relax, kg.entropy):
        (gradient,) = grad(operation(theta, limit, CLASSES[regularizer]()).sum(), theta)
        assert gradient.dtype == dtype and gradient.isfinite().all()
        if operation is kg.value:
            torch.testing.assert_close(gradient, kg.relax(theta, limit, CLASSES[regularizer]()))


@pytest.mark.parametrize("operation", ["relax", "entropy", "divergence"])
@pytest.mark.parametrize("name", ["top-k", "knapsack", "optional choices", "budgets"])
def test_second_derivatives_that_are_not_there_raise(operation, name, regularizer):
    if name == "top-k" and operation != "entropy":
        regularizer = "gini"  # under Shannon they are there
    theta = leaf(PROBLEMS[name].theta)
    result = call(operation, theta, 0.9, PROBLEMS[name], regularizer)
    (first,) = grad((result * noise(*result.shape)).sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="knapgrad has no second derivative"):
        grad((first * theta).sum(), theta)


@pytest.mark.parametrize("regularizer", ["gini", "tsallis"])
def test_the_second_derivative_of_a_sparse_log_prob_raises(regularizer):
    theta = leaf(PROBLEMS["knapsack"].theta)
    log_prob = call("log_prob", theta, 0.9, PROBLEMS["knapsack"], regularizer)
    (first,) = grad(log_prob.sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of log_prob"):
        grad((first * theta).sum(), theta)


def test_the_second_derivative_of_a_shannon_log_prob_is_there():
    problem = PROBLEMS["knapsack"]
    assert gradgradcheck(lambda theta: call("log_prob", theta, 0.9, problem, "shannon"), (leaf(problem.theta),))


@pytest.mark.parametrize("k, at_least", [(2, None), (3, 1), (4, 0), (5, None), (0, None), ([1, 3], [1, 2])])
@pytest.mark.parametrize("operation", ["relax", "divergence", "value"])
def test_a_number_of_items_under_shannon_has_one_derivative_more(operation, k, at_least):
    problem = replace(PROBLEMS["top-k"], theta=PROBLEMS["knapsack"].theta, capacity=k, at_least=at_least)
    theta, gamma = leaf(problem.theta), leaf(0.8)

    def called(theta, gamma):
        result = call(operation, theta, gamma, problem, "shannon")
        if operation != "value":
            return result
        return grad(result.sum(), theta, create_graph=True)[0]

    assert gradgradcheck(called, (theta, gamma))


@pytest.mark.parametrize("k, at_least", [(7, 7), (40, 3), (59, 0)])
def test_the_third_cumulants_of_many_items(k, at_least):
    """With masked items, items that are certain, and an instance that is NaN, next to differences of the VJP."""
    limit = kg.TopK(k, at_least=at_least)
    theta, z = noise(4, 60), noise(4, 60, seed=1)
    theta[0, ::4], theta[1, :5], theta[2, 3] = -torch.inf, 60.0, torch.nan
    x, step = theta.clone().requires_grad_(), noise(4, 60, seed=2)
    (product,) = grad(kg.relax(x, limit, kg.Shannon()), x, z, create_graph=True)
    (found,) = grad(product, x, step, retain_graph=True)

    def moved(size: float) -> torch.Tensor:
        x = torch.where(theta.isinf(), theta, theta + size * step).requires_grad_()
        return grad(kg.relax(x, limit, kg.Shannon()), x, z)[0]

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert found[2].isnan().all()
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]], rtol=0, atol=1e-9)
    with pytest.raises(NotImplementedError, match="third derivative of relax"):
        (found,) = grad(product, x, step, create_graph=True)
        grad(found.nansum(), x)


@pytest.mark.parametrize("name", ["top-k", "knapsack"])
def test_the_third_derivative_of_value_raises(name, regularizer):
    if name == "top-k" and regularizer == "shannon":
        pytest.skip("it is there")
    problem = PROBLEMS[name]
    theta = leaf(problem.theta)
    value = kg.value(theta, problem.constraint, CLASSES[regularizer](0.9)).sum()
    (first,) = grad(value, theta, create_graph=True)
    (second,) = grad((first * noise(*theta.shape)).sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="third of value"):
        grad((second * theta).sum(), theta)


def test_the_second_derivative_of_the_kullback_leibler_divergence_raises():
    theta = leaf(PROBLEMS["knapsack"].theta)
    budget = PROBLEMS["knapsack"].constraint
    p, q = (
        kgt.SubsetDistribution(theta, budget, kg.Tsallis()),
        kgt.SubsetDistribution(0.5 * theta, budget, kg.Shannon()),
    )
    (first,) = grad(torch.distributions.kl_divergence(p, q).sum(), theta, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|second derivative"):
        grad((first * theta).sum(), theta)


@pytest.mark.parametrize("name", ["knapsack", "optional choices", "budgets"])
@pytest.mark.parametrize("operation", ["value", "relax"])
@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_is_the_directional_derivative(operation, grad_mode, name, regularizer):
    problem = PROBLEMS[name]
    theta, direction = torch.tensor(problem.theta), noise(*problem.theta.shape)
    gamma = torch.tensor(0.9, dtype=torch.float64)
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        duals = forward_ad.make_dual(theta, direction), forward_ad.make_dual(gamma, torch.tensor(0.3).double())
        tangent = forward_ad.unpack_dual(call(operation, *duals, problem, regularizer)).tangent

    def moved(step: float) -> torch.Tensor:
        return call(operation, theta + step * direction, gamma + step * 0.3, problem, regularizer)

    torch.testing.assert_close(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("operation", ["entropy", "log_prob"])
@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_raises_and_does_not_lose_the_tangent(operation, grad_mode):
    problem = PROBLEMS["knapsack"]
    theta = torch.tensor(problem.theta)
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        dual = forward_ad.make_dual(theta, torch.ones_like(theta))
        with pytest.raises(NotImplementedError, match=r"jvp|forward"):
            call(operation, dual, 0.9, problem, "gini")


@pytest.mark.parametrize("name", ["solve", "sample"])
def test_selections_are_detached(name):
    theta = leaf(PROBLEMS["top-k"].theta)
    y = kg.solve(theta, kg.TopK(2)) if name == "solve" else kg.sample(theta, kg.TopK(2), kg.Gini(), num_samples=2)
    assert not y.requires_grad


MASKED = {
    "top-k": Problem(np.array([[0.3, -np.inf, 0.1, 0.5], [-0.2, 0.4, -np.inf, 0.7]]), None, 2),
    "knapsack": Problem(np.array([[0.3, -np.inf, 0.1, 0.5], [-0.2, 0.4, -np.inf, 0.7]]), [2, 1, 2, 0], 3),
    "all but k": Problem(np.array([[0.3, -np.inf, -np.inf, 0.5], [-np.inf, 0.4, -np.inf, 0.7]]), None, 2),
}


def without_masked_items(row: int, problem: Problem) -> Problem:
    kept = np.isfinite(problem.theta[row])
    weights = None if problem.is_top_k else np.asarray(problem.weights)[kept]
    return Problem(problem.theta[row][kept], weights, problem.capacity)


def maskable(name: str, theta: Tensor, gamma: Any, problem: Problem, regularizer: str, z: Tensor) -> Tensor:
    limit, smoothing = problem.constraint, CLASSES[regularizer](gamma)
    extra = kg.solve(theta, limit) if "prior" not in name else torch.where(theta == -torch.inf, theta, z).detach()
    result = SMOOTHED[name](theta, extra, limit, smoothing)
    if name == "divergence":  # the value of the prior, which knows no mask, is taken off again
        result = result - kg.value(torch.zeros_like(theta), limit, smoothing)
    return (result * z).sum(-1) if name == "relax" else result


@pytest.mark.parametrize("operation", SMOOTHED)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("learn_gamma", [False, True], ids=["into theta", "into gamma"])
def test_masked_items_have_no_gradient_and_leave_that_of_the_others(operation, name, learn_gamma, regularizer):
    problem, z = MASKED[name], noise(2, 4)
    for row in range(2):
        small = without_masked_items(row, problem)
        kept = torch.isfinite(torch.tensor(problem.theta[row]))
        whole = Problem(problem.theta[row], problem.weights, problem.capacity)
        results = []
        for one, direction in ((whole, z[row]), (small, z[row][kept])):
            theta, gamma = leaf(one.theta), leaf(0.8)
            value = maskable(operation, theta, gamma if learn_gamma else 0.8, one, regularizer, direction)
            results.append(grad(value, (theta, gamma) if learn_gamma else theta))
        (gradient, *rest), (expected, *expected_rest) = results
        assert torch.equal(gradient[~kept], torch.zeros_like(gradient[~kept]))
        torch.testing.assert_close(gradient[kept], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(rest, expected_rest, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_an_impossible_selection_is_zero(regularizer):
    theta, gamma = leaf([[9.0, 0.0, 0.3], [0.1, 0.2, 0.3]]), leaf(1.0)
    y = torch.tensor([[[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]])
    log_prob = kg.log_prob(theta, y, kg.TopK(1), CLASSES[regularizer](gamma))
    assert log_prob.isneginf().tolist() == [[True, False], [False, True]]
    from_both = grad(log_prob.sum(), (theta, gamma), retain_graph=True)
    from_the_possible = grad(log_prob[0, 1] + log_prob[1, 0], (theta, gamma), retain_graph=True)
    from_the_impossible = grad(log_prob[0, 0] + log_prob[1, 1], (theta, gamma))
    torch.testing.assert_close(from_both, from_the_possible, rtol=0, atol=0)
    assert not any(gradient.any() for gradient in from_the_impossible)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_masked_options_have_no_gradient(operation, optional, regularizer):
    problem = replace(PROBLEMS["choices"], optional=optional, capacity=7)
    masked = np.where(np.eye(3) > 0, -np.inf, problem.theta)
    inputs = leaf(masked), leaf(0.9)
    problem = replace(problem, theta=masked)
    result = call(operation, *inputs, problem, regularizer)
    gradient, by_gamma = grad(result, inputs, noise(*result.shape))
    assert gradient.isfinite().all() and by_gamma.isfinite() and gradient.any()
    assert not gradient[torch.tensor(masked) == -torch.inf].any()


def test_a_selection_of_too_heavy_or_no_options_has_no_gradient(regularizer):
    problem = PROBLEMS["choices"]
    y = torch.zeros(problem.theta.shape, dtype=torch.float64)
    y[0, [0, 1, 2], [2, 1, 1]] = 1.0  # too heavy, and no picks in the other
    theta = leaf(problem.theta)
    log_prob = kg.log_prob(theta, y, problem.constraint, problem.regularizer(regularizer))
    assert log_prob.isneginf().all()
    assert not grad(log_prob.sum(), theta)[0].any()


@pytest.mark.parametrize("regularizer", ["gini", "tsallis"])
def test_the_gradient_of_a_selection_that_is_never_drawn_is_zero(regularizer):
    theta = leaf([[9.0, 0.0, 0.3]])
    log_prob = kg.log_prob(theta, torch.tensor([[0.0, 0.0, 1.0]]), kg.TopK(1), CLASSES[regularizer]())
    assert log_prob.isneginf().all()
    assert not grad(log_prob.sum(), theta)[0].any()


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def bytes_kept(call: Callable[[], Tensor]) -> int:
    """The size of the storages that the result's graph keeps for the backward pass, each counted once."""
    everything: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        everything.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        result = call()
    assert result.requires_grad
    storages = [kept.tensor.untyped_storage() for kept in everything]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("operation", ["value", "relax", "fenchel_young_loss", "entropy"])
def test_what_is_kept_for_backward_does_not_grow_with_the_capacity(operation, regularizer):
    batch, n = 64, 20
    theta, kept = leaf(noise(batch, n), torch.float32), []
    target = torch.zeros(batch, n)
    for capacity in (10, 1000):
        budget, smoothing = kg.Knapsack(np.full(n, capacity // 5), capacity), CLASSES[regularizer](0.5)
        call = {
            "value": lambda: kg.value(theta, budget, smoothing),
            "relax": lambda: kg.relax(theta, budget, smoothing),
            "fenchel_young_loss": lambda: kg.fenchel_young_loss(theta, target, budget, smoothing),
            "entropy": lambda: kg.entropy(theta, budget, smoothing),
        }[operation]
        kept.append(bytes_kept(call))
    assert kept[0] == kept[1]
    of_theta = theta.untyped_storage().nbytes()
    # theta / gamma and the result; the loss has its target as well, and both it and the entropy are float64
    assert of_theta <= kept[0] <= (2.1 if operation in ("value", "relax") else 4.5) * of_theta


@pytest.mark.parametrize("y", [[1.0, 1, 0], [1, 1, 1], [1, 0, 1]])
def test_gradients_of_impossible_selections_of_masked_items(y, regularizer):
    theta, gamma = torch.tensor([0.0, -torch.inf, 1.0], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    log_prob = kg.log_prob(theta, torch.tensor(y), kg.TopK(2), CLASSES[regularizer](gamma))
    log_prob.backward()
    assert torch.isfinite(theta.grad).all() and torch.isfinite(gamma.grad)
    if y[1]:
        assert log_prob == -torch.inf and (theta.grad == 0).all() and gamma.grad == 0


def test_a_gamma_that_has_become_negative_raises():
    gamma = torch.tensor(1.0)
    smoothing = kg.Gini(gamma)
    gamma -= 2
    with pytest.raises(ValueError, match="gamma must be positive"):
        kg.relax(torch.zeros(3), kg.TopK(1), smoothing)
