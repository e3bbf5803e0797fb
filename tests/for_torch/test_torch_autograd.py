"""Derivatives in torch: gradcheck, the identities between them, and the orders that are not there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from instances import Problem
from oracles import REGULARIZERS

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402

CLASSES = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}


def _scores(*shape: int, seed: int = 0) -> np.ndarray:
    """Scores without ties, where the sparse regularizers have no kinks."""
    return np.random.default_rng(seed).normal(scale=0.6, size=shape)


PROBLEMS: dict[str, Problem] = {
    "top-k": Problem(_scores(3, 4), None, 2),
    "k for each instance": Problem(_scores(3, 4, seed=1), None, np.array([0, 3, 1])),
    "knapsack": Problem(_scores(2, 5, seed=2), [2, 3, 1, 2, 1], 5),
    "weights of 0 and above the capacity": Problem(_scores(2, 5, seed=3), [0, 2, 9, 1, 3], 4),
    "weights and capacity for each instance": Problem(
        _scores(2, 1, 4, seed=4), np.array([[[2, 0, 3, 1]], [[1, 7, 2, 2]]]), np.array([[4], [3]])
    ),
    "no batch": Problem(_scores(5, seed=5), [1, 2, 2, 1, 3], 6),
}


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request: pytest.FixtureRequest) -> Problem:
    return request.param


def leaf(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, requires_grad=True)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prior_of(theta: Tensor) -> Tensor:
    return 0.4 * noise(*theta.shape, seed=8)


def target_of(theta: Tensor, problem: Problem) -> Tensor:
    return kg.relax(noise(*theta.shape, seed=9), problem.constraint, kg.Shannon())


def selections_of(problem: Problem, regularizer: str, num_samples: int | None) -> Tensor:
    """Selections that have a probability above 0."""
    theta, rng = torch.tensor(problem.theta), torch.Generator().manual_seed(3)
    return kg.sample(theta, problem.constraint, CLASSES[regularizer](0.9), num_samples=num_samples, rng=rng)


Call = Callable[[Tensor, Any, Problem, str], Tensor]

#: operation -> a call with theta, gamma, the problem and the regularizer's name
OPERATIONS: dict[str, Call] = {
    "value": lambda theta, gamma, p, r: kg.value(theta, p.constraint, CLASSES[r](gamma)),
    "relax": lambda theta, gamma, p, r: kg.relax(theta, p.constraint, CLASSES[r](gamma)),
    "log_prob": lambda theta, gamma, p, r: kg.log_prob(
        theta, selections_of(p, r, None), p.constraint, CLASSES[r](gamma)
    ),
    "log_prob of samples in front": lambda theta, gamma, p, r: kg.log_prob(
        theta, selections_of(p, r, 3), p.constraint, CLASSES[r](gamma)
    ),
    "entropy": lambda theta, gamma, p, r: kg.entropy(theta, p.constraint, CLASSES[r](gamma)),
    "fenchel_young_loss": lambda theta, gamma, p, r: kg.fenchel_young_loss(
        theta, target_of(theta, p), p.constraint, CLASSES[r](gamma)
    ),
    "divergence": lambda theta, gamma, p, r: kg.divergence(
        theta, p.constraint, CLASSES[r](gamma), prior=prior_of(theta)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("own_gamma", [False, True], ids=["scalar gamma", "gamma for each instance"])
def test_gradcheck_in_theta_and_gamma(operation, own_gamma, problem, regularizer):
    gamma = 0.9 + 0.1 * np.arange(problem.size).reshape(problem.batch) / problem.size if own_gamma else 0.9
    assert gradcheck(
        lambda theta, gamma: OPERATIONS[operation](theta, gamma, problem, regularizer),
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
    def call(theta):
        return OPERATIONS[operation](theta, 0.9, problem, regularizer)

    one_by_one, at_once = (
        torch.autograd.functional.jacobian(call, leaf(problem.theta), vectorize=vectorize)
        for vectorize in (False, True)
    )
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 4.0])
def test_the_gradient_of_value_is_relax_exactly(gamma, problem, regularizer):
    theta, smoothing = leaf(problem.theta), CLASSES[regularizer](gamma)
    (gradient,) = grad(kg.value(theta, problem.constraint, smoothing).sum(), theta)
    assert torch.equal(gradient, kg.relax(theta, problem.constraint, smoothing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_the_loss_is_relax_minus_target_exactly(dtype, problem, regularizer):
    theta, smoothing = leaf(problem.theta, dtype), CLASSES[regularizer](0.5)
    target = kg.solve(noise(*theta.shape).to(dtype), problem.constraint)
    (gradient,) = grad(kg.fenchel_young_loss(theta, target, problem.constraint, smoothing).sum(), theta)
    assert torch.equal(gradient, kg.relax(theta, problem.constraint, smoothing) - target)


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
    inner = (from_u * v).sum(-1)
    assert inner.abs().max() > 1e-3
    torch.testing.assert_close(inner, (from_v * u).sum(-1), rtol=1e-11, atol=1e-13)


def test_float32_vjp_against_float64(constraint, regularizer):
    n, batch = 60, 20
    random = np.random.default_rng(4)
    weights = random.integers(3, 9, n)
    limit = kg.TopK(20) if constraint == "top-k" else kg.Knapsack(weights, int(weights.sum()) // 2)
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
def test_half_precision_gradients_have_its_dtype(dtype, regularizer):
    theta = leaf(_scores(3, 6), dtype)
    limit, smoothing = kg.Knapsack([2, 1, 3, 2, 1, 2], 6), CLASSES[regularizer](1.0)
    (gradient,) = grad(kg.value(theta, limit, smoothing).sum(), theta)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, kg.relax(theta, limit, smoothing))


SECOND = {
    "relax": lambda theta, p, r: (kg.relax(theta, p.constraint, CLASSES[r](0.9)) * noise(*theta.shape)).sum(),
    "entropy": lambda theta, p, r: kg.entropy(theta, p.constraint, CLASSES[r](0.9)).sum(),
    "divergence": lambda theta, p, r: kg.divergence(theta, p.constraint, CLASSES[r](0.9)).sum(),
}


@pytest.mark.parametrize("operation", SECOND)
@pytest.mark.parametrize("name", ["top-k", "knapsack"])
def test_second_derivatives_that_are_not_there_raise(operation, name, regularizer):
    theta = leaf(PROBLEMS[name].theta)
    (first,) = grad(SECOND[operation](theta, PROBLEMS[name], regularizer), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="knapgrad has no second derivative"):
        grad((first * theta).sum(), theta)


@pytest.mark.parametrize("regularizer", ["gini", "tsallis"])
def test_the_second_derivative_of_a_sparse_log_prob_raises(regularizer):
    theta = leaf(PROBLEMS["knapsack"].theta)
    log_prob = OPERATIONS["log_prob"](theta, 0.9, PROBLEMS["knapsack"], regularizer)
    (first,) = grad(log_prob.sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of log_prob"):
        grad((first * theta).sum(), theta)


def test_the_second_derivative_of_a_shannon_log_prob_is_there():
    problem = PROBLEMS["knapsack"]
    assert gradgradcheck(lambda theta: OPERATIONS["log_prob"](theta, 0.9, problem, "shannon"), (leaf(problem.theta),))


@pytest.mark.parametrize("name", ["top-k", "knapsack"])
def test_the_third_derivative_of_value_raises(name, regularizer):
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


@pytest.mark.parametrize("operation", ["value", "relax"])
@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_is_the_directional_derivative(operation, grad_mode, regularizer):
    problem = PROBLEMS["knapsack"]
    theta, direction = torch.tensor(problem.theta), noise(*problem.theta.shape)
    gamma = torch.tensor(0.9, dtype=torch.float64)
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        duals = forward_ad.make_dual(theta, direction), forward_ad.make_dual(gamma, torch.tensor(0.3).double())
        tangent = forward_ad.unpack_dual(OPERATIONS[operation](*duals, problem, regularizer)).tangent

    def moved(step: float) -> torch.Tensor:
        return OPERATIONS[operation](theta + step * direction, gamma + step * 0.3, problem, regularizer)

    torch.testing.assert_close(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("operation", ["entropy", "log_prob"])
@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_raises_and_does_not_lose_the_tangent(operation, grad_mode):
    problem = PROBLEMS["knapsack"]
    theta = torch.tensor(problem.theta)
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        dual = forward_ad.make_dual(theta, torch.ones_like(theta))
        with pytest.raises(NotImplementedError, match=r"jvp|forward"):
            OPERATIONS[operation](dual, 0.9, problem, "gini")


@pytest.mark.parametrize("name", ["solve", "sample"])
def test_selections_are_detached(name):
    theta = leaf(_scores(3, 4))
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


MASKABLE = {
    "value": lambda theta, gamma, p, r, z: kg.value(theta, p.constraint, CLASSES[r](gamma)),
    "relax": lambda theta, gamma, p, r, z: (kg.relax(theta, p.constraint, CLASSES[r](gamma)) * z).sum(-1),
    "log_prob": lambda theta, gamma, p, r, z: kg.log_prob(
        theta, kg.solve(theta, p.constraint), p.constraint, CLASSES[r](gamma)
    ),
    "entropy": lambda theta, gamma, p, r, z: kg.entropy(theta, p.constraint, CLASSES[r](gamma)),
    "fenchel_young_loss": lambda theta, gamma, p, r, z: kg.fenchel_young_loss(
        theta, kg.solve(theta, p.constraint), p.constraint, CLASSES[r](gamma)
    ),
    # the value of the prior, which knows no mask, is taken off again
    "divergence": lambda theta, gamma, p, r, z: (
        kg.divergence(theta, p.constraint, CLASSES[r](gamma))
        - kg.value(torch.zeros_like(theta), p.constraint, CLASSES[r](gamma))
    ),
    "divergence from a masked prior": lambda theta, gamma, p, r, z: kg.divergence(
        theta, p.constraint, CLASSES[r](gamma), prior=torch.where(theta == -torch.inf, theta, z).detach()
    ),
}


@pytest.mark.parametrize("operation", MASKABLE)
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
            value = MASKABLE[operation](theta, gamma if learn_gamma else 0.8, one, regularizer, direction)
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
    theta, kept = leaf(_scores(batch, n), torch.float32), []
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


def test_every_regularizer_is_here():
    assert tuple(CLASSES) == REGULARIZERS


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
