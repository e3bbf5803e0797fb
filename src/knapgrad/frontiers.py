"""``frontier``: the optimum as a function of the budget."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

import numpy as np

from knapgrad import ops
from knapgrad.backends import scores_of
from knapgrad.constraints import Constraint, check_constraint
from knapgrad.lattice import as_array
from knapgrad.regularizers import Regularizer

Array = TypeVar("Array", bound=Any)  # a NumPy array, a torch tensor or a JAX array


def frontier(theta: Array, constraint: Constraint, regularizer: Regularizer | None = None) -> Array:
    """The best score for every budget at once: the value at the capacities 0..C, from one table.

    Entry c is the value of using at most c, or exactly c if the constraint asks for exactly its capacity
    (``at_least=capacity``, and :class:`TopK`). A least weight of 0 in all instances is none, also if all capacities
    are 0: entries do not depend on the capacity, so ``capacity=1, at_least=1`` asks for exactly c there.
    A constraint of ``from_real`` counts in units: plot the entries against
    ``constraint.budgets``, which are real numbers.

    The difference of two neighbours is what one more unit of budget is worth; divided by ``constraint.unit``, it is a
    price per real unit, such as a byte. The exact curve is a staircase: if units are small compared with the weights,
    it is flat nearly everywhere, and most differences are 0. The slope of its concave envelope is a price that does not
    depend on where the steps are; the recipe "Bits per layer" computes it. A regularizer rounds the steps off, the more
    the larger gamma, but neighbours still differ only where some selection weighs just that much; so with small units
    take the difference over a wider range of budgets.

    Between two entries the curve can be interpolated, which gives a gradient to a budget that is learned.

    Args:
        theta: scores, as for :func:`value`.
        constraint: a constraint without a least weight or with ``at_least=capacity``. In a batch with different
            capacities, C is the largest; with ``max_capacity``, C is that.
        regularizer: None for the exact optimum, or :class:`Shannon`, :class:`Gini` or :class:`Tsallis`.

    Returns:
        (*batch, C + 1), of theta's type; -inf where nothing is feasible. With several budgets the whole box,
        (*batch, C1 + 1, C2 + 1). Time O(n C) per instance, as for one value.
        Differentiable once in theta and gamma in torch and JAX; entries of -inf have no gradient.

    >>> import numpy as np, torch, knapgrad as kg
    >>> values = kg.frontier(np.array([3.0, 4.0, 1.0]), kg.Knapsack([2, 3, 1], capacity=5))
    >>> values, np.diff(values)  # the second: what one more unit is worth
    (array([0., 1., 3., 4., 5., 7.]), array([1., 2., 1., 1., 2.]))

    A budget that is learned, here 3.4, between the entries:

    >>> budget = torch.tensor(3.4, requires_grad=True)
    >>> whole = budget.detach().floor().long()
    >>> row = torch.as_tensor(values)
    >>> value = row[whole] + (budget - whole) * (row[whole + 1] - row[whole])
    >>> value.backward()
    >>> round(value.item(), 3), budget.grad
    (4.4, tensor(1.))
    """
    theta = scores_of(theta)
    call = ops.prepare(theta, check_constraint(constraint).widest, regularizer)
    backend, constraint, lattice = call.backend, call.constraint, call.problem.lattice
    most, exactly = _checked(constraint, call.theta.shape[-1])
    if not isinstance(lattice.reach, int):  # while torch compiles, numbers are tensors; a row must have a length
        reach = most[0]
        lattice = lattice.replace(reach=reach, heaviest=reach + 1, capacity=0 * lattice.capacity + reach)
    if exactly or lattice.slack is not None:
        slack = as_array(0 * lattice.slack) if exactly else None  # at any capacity, also beyond the sum
        lattice = lattice.replace(slack=slack)
    problem = call.problem._replace(lattice=lattice)
    rows = _scaled(call, backend.frontier(backend.computable(call.theta), *problem))
    sides, lightest = lattice.box or (lattice.reach + 1,), constraint.lightest(call.event)
    if any(side != last + 1 for side, last in zip(sides, most)) or not isinstance(lightest, int):
        rows = _up_to(most, sides, lightest, exactly, rows, backend)
    if lattice.box:
        rows = rows.reshape((*theta.shape[:-1], *(last + 1 for last in most)))
    return backend.as_total(rows, theta)


def _checked(constraint: Constraint, n: int) -> tuple[tuple[int, ...], bool]:
    """The last capacity of each budget, and whether all of a capacity must be used."""
    (most, exactly), name = constraint.frontier_of(n), constraint.limit_name
    if exactly is None:
        raise ValueError(
            f"a frontier needs at_least = 0 (entries: at most c) or at_least = {name} (exactly c), got "
            f"at_least = {constraint.arguments.get('at_least')}; one table cannot serve a least weight in between, so "
            "call knapgrad.value for each capacity"
        )
    known = tuple(last for last in most if last is not None)
    if len(known) < len(most):
        raise ValueError(f"{name} is traced, and a frontier must have a length; give max_capacity=...")
    return known, exactly


def _up_to(most: tuple[int, ...], sides: tuple[int, ...], lightest: Any, exactly: bool, rows: Any, backend: Any) -> Any:
    """The entries for all combinations of capacities. Of tables that end at a sum of weights the last entry stands for
    all beyond, unless all of a capacity must be used."""
    state: Any = 0
    inside: Any = True
    place = 1
    for later, (side, last) in enumerate(zip(sides[::-1], most[::-1])):
        c: Any = np.arange(last + 1)
        if not isinstance(lightest, int):
            c = (c if isinstance(lightest, np.ndarray) else backend.array(c, rows, "theta")) - lightest[..., None]
        at = (..., *[None] * later)
        inside = inside & ((c >= 0) & (c < side) if exactly else c >= 0)[at]
        state = state + (c.clip(0, side - 1) * place)[at]
        place *= side
    flat = (*state.shape[: state.ndim - len(most)], -1)
    rows = backend.take(rows, state.reshape(flat))
    return backend.where(backend.array(inside.reshape(flat), rows, "theta") | (rows != rows), rows, -inf)


def _scaled(call: ops.Call, rows: Any) -> Any:
    """Rows of theta / gamma in the units of theta."""
    infeasible = rows == -inf
    gamma = call.gamma if isinstance(call.gamma, float) or call.gamma.ndim == 0 else call.gamma[..., None]
    return call.backend.where(infeasible, -inf, gamma * call.backend.where(infeasible, 0.0, rows))
