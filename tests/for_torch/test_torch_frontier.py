"""The frontier in torch: its gradient, and budgets that are learned by it."""

from __future__ import annotations

import numpy as np
import pytest

import knapgrad as kg
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import REGULARIZERS

torch = pytest.importorskip("torch")
from cases import PROBLEMS, leaf, noise  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import grad, gradcheck  # noqa: E402


def feasible_part(row: Tensor) -> Tensor:
    return torch.where(torch.isneginf(row), 0.0, row)


WITH_FRONTIER = [name for name in PROBLEMS if "at least" not in name]


@pytest.mark.parametrize("name", WITH_FRONTIER)
def test_gradcheck_in_theta_and_gamma(name, regularizer):
    """Gamma of each instance."""
    problem = PROBLEMS[name]
    gamma = 0.9 + 0.1 * np.arange(problem.size).reshape(problem.batch) / problem.size

    def call(theta, gamma):
        return feasible_part(kg.frontier(theta, problem.constraint, CLASSES[regularizer](gamma)))

    assert gradcheck(call, (leaf(problem.theta), leaf(gamma)))


def test_a_second_derivative_is_not_there():
    theta, limit = leaf(PROBLEMS["optional choices"].theta), PROBLEMS["optional choices"].constraint
    rows = kg.frontier(theta, limit, kg.Gini(0.9))
    (first,) = grad((rows * noise(*rows.shape)).sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="knapgrad has no second derivative"):
        grad((first * theta).sum(), theta)


@pytest.mark.parametrize("regularizer", [None, *REGULARIZERS])
@pytest.mark.parametrize("name", WITH_FRONTIER)
def test_the_gradient_of_an_entry_is_the_selection_at_its_capacity(name, regularizer):
    problem = PROBLEMS[name]
    theta, smoothing = leaf(problem.theta), None if regularizer is None else CLASSES[regularizer](0.9)
    rows = kg.frontier(theta, problem.constraint, smoothing)
    for c in np.ndindex(rows.shape[len(problem.batch) :]):
        entry = rows[(..., *c)]
        (gradient,) = grad(entry.sum(), theta, retain_graph=True)
        if entry.isneginf().any():
            assert not gradient[entry.isneginf()].any()
            continue
        limit = problem.at_capacity(*c).constraint
        expected = kg.solve(theta, limit) if smoothing is None else kg.relax(theta, limit, smoothing)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("regularizer", [None, *REGULARIZERS])
@pytest.mark.parametrize(
    ("constraint", "theta"),
    [
        (kg.Knapsack([2, 1, 3, 1], 6), [1.2, 0.4, 1.3, 0.7]),
        (kg.MultipleChoice([[1, 2], [0, 2]], 6), [[0.2, 1.0], [0.1, 0.9]]),
    ],
    ids=["knapsack", "choices"],
)
def test_a_budget_between_two_entries_is_learned_by_interpolation(constraint, theta, regularizer):
    theta, budget = leaf(theta), leaf(3.4)
    smoothing = None if regularizer is None else CLASSES[regularizer](0.5)
    row, whole = kg.frontier(theta, constraint, smoothing), budget.detach().floor().long()
    value = row[whole] + (budget - whole) * (row[whole + 1] - row[whole])
    by_budget, by_theta = grad(value, (budget, theta), retain_graph=True)
    price = (row[4] - row[3]).detach()
    assert price > 0.05
    torch.testing.assert_close(by_budget, price)
    selections = []
    for c in (3, 4):
        limit = type(constraint)(**{**constraint.arguments, "capacity": c})
        selections.append(kg.solve(theta, limit) if smoothing is None else kg.relax(theta, limit, smoothing))
    torch.testing.assert_close(by_theta, 0.6 * selections[0] + 0.4 * selections[1], rtol=1e-12, atol=1e-13)


def test_a_budget_that_is_learned_finds_its_price():
    """What is bought is worth more than 0.3 a unit up to a budget of 3, and less from there on."""
    theta, limit = torch.tensor([3.0, 0.7, 0.5, 0.2], dtype=torch.float64), kg.Knapsack([2, 1, 2, 1], 6)
    row, budget = kg.frontier(theta, limit), leaf(0.6)
    optimizer = torch.optim.SGD([budget], lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        whole = budget.detach().floor().long().clamp(0, 5)
        (0.3 * budget - row[whole] - (budget - whole) * (row[whole + 1] - row[whole])).backward()
        optimizer.step()
    assert budget.item() == pytest.approx(3.0, abs=0.2)


def test_the_frontier_needs_no_table_that_is_kept():
    """Between forward and backward theta is kept, and nothing as wide as a table."""
    theta, kept = leaf(noise(40, 3)), []
    limit = kg.MultipleChoice(np.random.default_rng(0).integers(0, 40, (40, 3)), 900)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        kg.frontier(theta, limit, kg.Gini()).sum()
    assert sum(kept) < 12 * 901
