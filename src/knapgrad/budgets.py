"""The optimum as a function of the budget."""

from __future__ import annotations

from math import inf, prod
from typing import Any, TypeVar

import numpy as np

from knapgrad import ops
from knapgrad.backends import is_compiling
from knapgrad.constraints import Constraint, MultiKnapsack, check_constraint
from knapgrad.regularizers import Regularizer

Array = TypeVar("Array", bound=Any)  # a NumPy array, a torch tensor or a JAX array


def frontier(theta: Array, constraint: Constraint, regularizer: Regularizer | None = None) -> Array:
    """The best score for every budget at once: the value at the capacities 0..C, from one table.

    Entry c is the value of using at most c, or exactly c if the constraint asks for exactly its capacity
    (``at_least=capacity``, and :class:`TopK`). A constraint of ``from_real`` counts in units: plot the entries against
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
    check_constraint(constraint)
    if isinstance(constraint, MultiKnapsack):
        return _of_box(theta, constraint, regularizer)
    widest, exactly, largest = _widest(constraint, getattr(theta, "shape", None) or (0,))
    call = ops.prepare(theta, widest, regularizer)
    backend, (lattice, *smoothing) = call.backend, call.problem
    if not isinstance(lattice.reach, int):  # while torch compiles, numbers are tensors; a row must have a length
        known = (min(largest, call.event[-1]), 1) if lattice.reach is None else (largest, largest + 1)
        lattice = lattice.replace(reach=known[0], heaviest=known[1])
    reach, slack = lattice.reach, None
    if exactly and lattice.slack is not None:  # none at any capacity, also beyond the sum
        slack = 0 * lattice.slack
        slack = np.asarray(slack) if isinstance(slack, np.integer) else slack
    rows = _scaled(call, backend.frontier(backend.computable(call.theta), lattice.replace(slack=slack), *smoothing))
    lightest = widest.lightest(call.event)
    if reach != largest or not isinstance(lightest, int):
        index: Any = np.arange(largest + 1)
        if not isinstance(lightest, int):
            is_known = isinstance(lightest, np.ndarray)
            index = (index if is_known else backend.array(index, rows, "theta")) - lightest[..., None]
        inside = index >= 0
        if exactly:
            inside = inside & (index <= reach)
        rows = backend.take(rows, index.clip(0, reach))
        rows = backend.where(backend.array(inside, rows, "theta") | (rows != rows), rows, -inf)
    return backend.as_total(rows, theta)


def _scaled(call: ops.Call, rows: Any) -> Any:
    """By gamma."""
    infeasible = rows == -inf
    gamma = call.gamma if isinstance(call.gamma, float) or call.gamma.ndim == 0 else call.gamma[..., None]
    return call.backend.where(infeasible, -inf, gamma * call.backend.where(infeasible, 0.0, rows))


def _of_box(theta: Any, constraint: MultiKnapsack, regularizer: Regularizer | None) -> Any:
    """The values at all combinations of capacities. A side that ends at a sum of weights is constant beyond."""
    call = ops.prepare(theta, constraint, regularizer)
    backend, (lattice, *smoothing), box = call.backend, call.problem, constraint._box
    if lattice.reach is None:  # while torch compiles
        lattice = lattice.replace(reach=prod(box) - 1, heaviest=prod(box))
    rows = _scaled(call, backend.frontier(backend.computable(call.theta), lattice, *smoothing))
    state: Any = 0
    for side, most in zip(box, constraint._most):
        state = np.asarray(state)[..., None] * side + np.arange(most + 1).clip(max=side - 1)
    rows = rows if state.size == prod(box) else backend.take(rows, state.reshape(-1))
    return backend.as_total(rows.reshape((*theta.shape[:-1], *state.shape)), theta)


def _widest(constraint: Constraint, shape: tuple[int, ...]) -> tuple[Constraint, bool, int]:
    """For a theta of that shape: the constraint with the largest capacity for every instance, whether all of it must
    be used, and how far its frontier goes. It is kept with the constraint, since its arrays may be copied to
    devices."""
    exactly, largest = constraint._exactly, constraint._limit
    name = "k" if "k" in constraint._parameters else "capacity"
    if exactly is None:
        raise ValueError(
            f"a frontier needs at_least = 0 (entries: at most c) or at_least = {name} (exactly c), got "
            f"at_least = {constraint.arguments['at_least']}; one table cannot serve a least weight in between, so call "
            "knapgrad.value for each capacity"
        )
    if largest is None:
        raise ValueError(f"{name} is traced, and a frontier must have a length; give max_capacity=...")
    most = largest
    if name == "k":  # its bound may be above the number of items, k itself may not
        most = max(min(largest, shape[-1]), constraint._largest or 0)
    is_kept = constraint._largest is not None and not is_compiling()
    if constraint._largest == most and constraint._marked.ndim == 0:
        return constraint, exactly, largest
    if is_kept and ("widest", most) in constraint.copies:
        return constraint.copies["widest", most], exactly, largest
    limits = {name: most, "at_least": (None if name == "k" else most) if exactly else 0}
    widest = type(constraint)(**{**constraint.arguments, **limits})
    if is_kept:
        constraint.copies["widest", most] = widest
    return widest, exactly, largest
