"""Several budgets in PyTorch: gradients, torch.compile, modules and the distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import knapgrad as kg
from oracles import chi_square_p_value

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

LIMIT = kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 3, 1]], [2, 4])
THETA = torch.tensor([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25]], dtype=torch.float64)


def smoothing(regularizer: str, gamma: float = 0.7) -> kg.Regularizer:
    return getattr(kg, regularizer.capitalize())(gamma)


def test_gradients(regularizer):
    theta, r, y = THETA.clone().requires_grad_(), smoothing(regularizer), kg.solve(THETA, LIMIT)
    assert gradcheck(lambda x: kg.value(x, LIMIT, r), theta)
    assert gradcheck(lambda x: kg.relax(x, LIMIT, r), theta)
    assert gradgradcheck(lambda x: kg.value(x, LIMIT, r), theta)
    assert gradcheck(lambda x: kg.entropy(x, LIMIT, r), theta)
    assert gradcheck(lambda x: kg.log_prob(x, y, LIMIT, r), theta)
    assert gradcheck(lambda x: kg.frontier(x, LIMIT, r), theta)


def test_compiled_with_other_capacities_without_compiling_again():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(theta, cost, budget):
        limit = kg.MultiKnapsack([torch.ones_like(cost), cost], budget, max_capacities=[3, 9])
        return kg.relax(theta, limit, kg.Gini())

    for seed in range(4):
        rng = np.random.default_rng(seed)
        cost, budget = torch.tensor(rng.integers(0, 5, 4)), torch.tensor(rng.integers(0, 4, 2))
        theta = THETA.clone().requires_grad_()
        y = layer(theta, cost, budget)
        expected = kg.relax(THETA, kg.MultiKnapsack([np.ones(4, int), cost.numpy()], budget.numpy()), kg.Gini())
        torch.testing.assert_close(y.detach(), expected)
        y.sum().backward()
    assert counter.frame_count == 1


def test_compiled_with_a_constraint_from_outside():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kg.relax(x, LIMIT, kg.Shannon(0.5)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(THETA), kg.relax(THETA, LIMIT, kg.Shannon(0.5)))
    with pytest.raises(Exception, match="max_capacities"):
        torch.compile(
            lambda x, w: kg.relax(x, kg.MultiKnapsack([w, w], w[:2]), kg.Gini()), fullgraph=True, backend="aot_eager"
        )(THETA, torch.tensor([1, 2, 3, 1]))


def test_vmap_over_capacities():
    def one(theta, budget):
        return kg.relax(theta, LIMIT, kg.Shannon(0.5)) + 0 * budget.sum()

    mapped = torch.func.vmap(one)(THETA, torch.tensor([[1, 4], [2, 3]]))
    torch.testing.assert_close(mapped, kg.relax(THETA, LIMIT, kg.Shannon(0.5)))


def test_modules_keep_their_arrays():
    layer = kg.torch.Relax(LIMIT, kg.Gini(0.5))
    assert {name for name, _ in layer.named_buffers()} == {"weights", "capacities"}
    other = kg.torch.Relax(kg.MultiKnapsack([[2, 2, 2, 2], [1, 1, 1, 1]], [4, 3]), kg.Gini(0.5))
    other.load_state_dict(layer.state_dict())
    assert other.constraint == LIMIT
    torch.testing.assert_close(other(THETA), kg.relax(THETA, LIMIT, kg.Gini(0.5)))


def test_the_distribution(regularizer):
    law = kg.torch.SubsetDistribution(THETA[0], LIMIT, smoothing(regularizer))
    every = torch.tensor(np.array(np.meshgrid(*[[0.0, 1.0]] * 4)).reshape(4, -1).T)
    chances = law.log_prob(every[LIMIT.contains(every)]).exp()
    assert chances.sum().item() == pytest.approx(1.0)
    torch.testing.assert_close((chances[:, None] * every[LIMIT.contains(every)]).sum(0), law.mean)
    assert LIMIT.contains(law.mode)
    assert law.log_prob(law.mode).exp() >= chances.max() - 1e-9
    torch.manual_seed(0)
    seen = Counter(map(tuple, law.sample((3000,)).int().tolist()))
    exact = {tuple(y.int().tolist()): p.item() for y, p in zip(every[LIMIT.contains(every)], chances)}
    assert chi_square_p_value(seen, exact) > 1e-4
    same = kg.torch.SubsetDistribution(THETA[1], LIMIT, smoothing(regularizer))
    divergence = torch.distributions.kl_divergence(law, same)
    other = same.log_prob(every[LIMIT.contains(every)])
    expected = torch.where(chances > 0, chances * (chances.log() - other), 0.0).sum()
    torch.testing.assert_close(divergence, expected)
