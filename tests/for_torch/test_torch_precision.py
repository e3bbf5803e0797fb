"""Which precision results and gradients have: under autocast, and of gamma."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.distributions import kl_divergence  # noqa: E402

import knapgrad as kg  # noqa: E402
from knapgrad.regularizers import REGULARIZERS as CLASSES  # noqa: E402

LIMIT = kg.Knapsack([1, 2, 3, 1, 2], 4)


def distribution(theta: Tensor) -> kg.torch.SubsetDistribution:
    return kg.torch.SubsetDistribution(theta, LIMIT, kg.Gini(), validate_args=False)


TOTALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "value": lambda theta, y: kg.value(theta, LIMIT, kg.Gini()),
    "entropy": lambda theta, y: kg.entropy(theta, LIMIT, kg.Gini()),
    "log_prob": lambda theta, y: kg.log_prob(theta, y, LIMIT, kg.Gini()),
    "divergence": lambda theta, y: kg.divergence(theta, LIMIT, kg.Gini()),
    "fenchel_young_loss": lambda theta, y: kg.fenchel_young_loss(theta, y, LIMIT, kg.Gini()),
    "FenchelYoungLoss": lambda theta, y: kg.torch.FenchelYoungLoss(LIMIT, kg.Gini())(theta, y),
    "frontier": lambda theta, y: kg.frontier(theta, LIMIT, kg.Gini()),
    "log_prob of a distribution": lambda theta, y: distribution(theta).log_prob(y),
    "entropy of a distribution": lambda theta, y: distribution(theta).entropy(),
    "kl_divergence": lambda theta, y: kl_divergence(distribution(theta), distribution(-theta)),
}
SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relax": lambda theta, y: kg.relax(theta, LIMIT, kg.Gini()),
    "sample": lambda theta, y: kg.sample(theta, LIMIT, kg.Gini()),
    "mean": lambda theta, y: distribution(theta).mean,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*TOTALS, *SELECTIONS])
def test_under_autocast_totals_are_float32_and_selections_keep_their_type(name, dtype):
    theta = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y, call = kg.solve(theta, LIMIT), (TOTALS | SELECTIONS)[name]
    assert call(theta, y).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(theta, y)
    wide = name in TOTALS and dtype.itemsize == 2
    assert found.dtype == (torch.float32 if wide else dtype)
    if wide:  # not a half number made wide
        exact = call(theta.detach().double(), y.double())
        torch.testing.assert_close(found.double().detach(), exact, rtol=2e-5, atol=2e-5)
        (gradient,) = torch.autograd.grad(found.sum(), theta)
        assert gradient.dtype == dtype


@pytest.mark.parametrize("operation", ["relax", "value", "rsample", "frontier"])
@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_by_gamma_are_those_of_float64(kind, operation):
    """Scores of 1e4 gamma, with many near-ties: the terms of the gradient are 1e4 times as large as their sum."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randint(0, 3, (50, 100), generator=generator) * 1e4 + torch.randn(50, 100, generator=generator)
    z, limit = torch.randn(50, 100, generator=generator), kg.Knapsack(torch.arange(100) % 9 + 1, 100)

    def gradient(dtype: torch.dtype) -> Tensor:
        gamma = torch.ones(50, dtype=dtype, requires_grad=True)
        regularizer, scores = CLASSES[kind](gamma), theta.to(dtype)
        if operation == "relax":
            result = kg.relax(scores, limit, regularizer) * z
        elif operation == "rsample":
            result = kg.torch.SubsetDistribution(scores, limit, regularizer).rsample() * z
        else:
            result = getattr(kg, operation)(scores, limit, regularizer)
            result = result if operation == "value" else result[..., -1]
        return torch.autograd.grad(result.sum(), gamma)[0].double()

    exact, found = gradient(torch.float64), gradient(torch.float32)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
