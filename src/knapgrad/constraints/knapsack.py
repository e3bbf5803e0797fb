"""One budget: Knapsack."""

from __future__ import annotations

from typing import Any

from knapgrad import backends
from knapgrad.arguments import integers
from knapgrad.constraints.weighted import Weighted, checked_scale
from knapgrad.real import Scale, convert
from knapgrad.values import read_only


class Knapsack(Weighted):
    """Items whose total weight is at most the capacity, and at least ``at_least``.

    Args:
        weights: non-negative integers, (n,) or broadcastable to theta. Zero is fine; an item heavier than the
            capacity is out.
        capacity: a non-negative integer, or integers broadcastable to the batch of theta. Time and scratch memory
            grow with it (at most with the total weight), so divide weights and capacity by a common factor if there
            is one; :meth:`from_real` does that.
        at_least: the least total weight, in 0..capacity, with the same types and shapes as the capacity.
            ``at_least=capacity`` means exactly that weight.
        max_capacity: an upper bound of the capacity, which fixes the width of the tables, so that nothing is compiled
            again when the capacity changes from call to call or is traced by JAX. A traced capacity above it gives
            NaN. Not needed if the weights are known: no table is wider than their sum.
        scale: what the integers stand for, set by :meth:`from_real`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([3.0, 2.0, 2.0]), kg.Knapsack([3, 2, 2], 4))
    array([0., 1., 1.])
    >>> kg.solve(np.array([-3.0, -2.0, -2.0]), kg.Knapsack([3, 2, 2], 4, at_least=3))
    array([1., 0., 0.])
    """

    def __init__(
        self,
        weights: Any,
        capacity: Any,
        *,
        at_least: Any = 0,
        max_capacity: int | None = None,
        scale: Scale | None = None,
    ) -> None:
        is_known, weights = backends.has_numbers(weights), integers("weights", weights, "one weight per item")
        self._keep(weights=read_only(weights), scale=checked_scale(scale))
        self._keep_limits(weights, capacity, at_least, max_capacity, is_known=is_known)

    @classmethod
    def from_real(cls, weights: Any, capacity: Any, *, at_least: Any = 0, resolution: int | None = None) -> Knapsack:
        """The constraint for real weights, such as prices or sizes.

        If the weights are decimals with a common unit, of which the capacity has at most ``resolution``, it is exact:
        it accepts the same selections. Numbers count as they are printed: three times 0.1 is 0.3.

        Otherwise ``unit = capacity / resolution`` (one per instance) and weights are rounded up to whole units, so
        that what fits in units fits in truth: the sum of the weights, as given and in any order, does not exceed the
        capacity, to the last float. A least weight is raised by what rounding can overstate, below one unit per
        item, so that it holds too. :attr:`optimistic` tells what rounding costs.

        Args:
            weights: non-negative numbers, (n,) or broadcastable to theta; NumPy, torch, JAX or lists.
            capacity: a non-negative number, or numbers broadcastable to the batch of theta.
            at_least: the least total weight, with the same types and shapes as the capacity.
            resolution: how many units the capacity is cut into at most; time and memory grow with it. None means
                10,000, or 100 per item if that is more.

        >>> import numpy as np, knapgrad as kg
        >>> prices, theta = np.array([3.57, 2.1, 2.94]), np.array([3.0, 2.0, 2.5])
        >>> budget = kg.Knapsack.from_real(prices, 5.1)
        >>> budget.weights, budget.capacity, budget.unit, budget.exact
        (array([17, 10, 14]), array(24), 0.21, True)
        >>> kg.solve(theta, budget), float(budget.budgets[-1])
        (array([0., 1., 1.]), 5.04)
        >>> sizes = np.array([np.pi, np.e, np.sqrt(2.0)])
        >>> limit = kg.Knapsack.from_real(sizes, 4.5)
        >>> y, bound = kg.solve(theta, limit), kg.solve(theta, limit.optimistic)
        >>> limit.exact, bool(y @ sizes <= 4.5), float(theta @ bound - theta @ y)
        (False, True, 0.0)
        """
        return cls._from(convert(weights, capacity, at_least, resolution, optional=True, per_item=True))
