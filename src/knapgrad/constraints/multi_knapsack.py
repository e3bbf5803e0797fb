"""Several budgets at once: MultiKnapsack, and how its states are numbered."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import check_broadcast, integers, minus_one_where_invalid, most_of
from knapgrad.constraints.base import Constraint, Frontier
from knapgrad.constraints.knapsack import Knapsack
from knapgrad.lattice import Lattice, as_array, at_most, largest_total, valid_where
from knapgrad.real import Scale
from knapgrad.values import Value, read_only

MOST_BUDGETS = 3
_MOST_STATES = 2**31 - 2  # numbers of states have 32 bits on devices
_FEW_STATES = 10**7  # that rounded budgets may have by default


class MultiKnapsack(Constraint):
    """Items that keep within several budgets at once, such as a number of items and a sum of money.

    A table has one column per combination of capacities, ``prod(capacities + 1)`` in all, so this is for two or three
    small budgets. A budget whose weights are all 1 is a largest number of items.

    Args:
        weights: non-negative integers, one array per budget, (n,) or broadcastable to theta; or one array whose first
            dimension is the budget. An item that is heavier than a capacity is out.
        capacities: the largest total weight of each budget, a non-negative integer, or integers broadcastable to the
            batch of theta; or one array whose first dimension is the budget.
        max_capacities: upper bounds of the capacities, one per budget, which fix the size of the tables, as
            ``max_capacity`` of :class:`Knapsack` does. Not needed if the weights or the capacities are known.
        scales: what the integers of each budget stand for, set by :meth:`from_real`.

    Attributes:
        weights: (budgets, ..., n).
        capacities: (budgets, ...).

    At most 2 items, at most 5 euros:

    >>> import numpy as np, knapgrad as kg
    >>> both = kg.MultiKnapsack([[1, 1, 1, 1], [4, 3, 2, 1]], [2, 5])
    >>> kg.solve(np.array([5.0, 3.0, 2.5, 2.0]), both)
    array([1., 0., 0., 1.])
    >>> kg.relax(np.array([5.0, 3.0, 2.5, 2.0]), both, kg.Shannon(0.5)).round(2)
    array([0.93, 0.06, 0.05, 0.94])
    """

    weights: Any
    capacities: Any
    max_capacities: tuple[int, ...] | None
    scales: tuple[Scale, ...] | None
    _lattice: Lattice
    _most: tuple[int, ...]  # the bound of each budget, or its largest capacity

    def __init__(
        self,
        weights: Any,
        capacities: Any,
        *,
        max_capacities: Any = None,
        scales: tuple[Scale, ...] | None = None,
    ) -> None:
        loads = _per_budget("weights", weights, "one weight per item")
        limits = _per_budget("capacities", capacities, "the largest total weight")
        if len(loads) != len(limits):
            raise ValueError(
                f"weights and capacities must have the same number of budgets, got {len(loads)} and {len(limits)}"
            )
        if not 1 <= len(loads) <= MOST_BUDGETS:
            raise ValueError(
                f"weights must be of 1 to {MOST_BUDGETS} budgets, got {len(loads)}: a table has a column for every "
                "combination of capacities; for another budget, penalize theta by a price per unit"
            )
        if any(x.ndim == 0 for x in loads):
            raise ValueError(
                "weights must have one entry per item and budget; for equal weights use np.full(n, weight)"
            )
        sizes = {x.shape[-1] for x in loads}
        if len(sizes) > 1:
            raise ValueError(f"weights must have one entry per item in every budget, got {sorted(sizes)} entries")
        for name, parts in (("weights", loads), ("capacities", limits)):
            shapes = [tuple(x.shape) for x in parts]
            try:
                np.broadcast_shapes(*shapes)
            except ValueError:
                raise ValueError(f"{name} of the budgets must broadcast together, got shapes {shapes}") from None
        bounds = _bounds(max_capacities, len(loads))
        if self._widths is not None and not all(isinstance(x, np.ndarray) for x in (*loads, *limits)):
            most, box = self._widths
        else:
            most, box = _box_of(loads, limits, bounds, capacities)
        self._keep(weights=read_only(_together(loads)), capacities=read_only(_together(limits)))
        self._keep(max_capacities=bounds, scales=_checked_scales(scales, len(loads)))
        self._keep(_lattice=_encoded(loads, limits, bounds, box), _most=most)

    @classmethod
    def from_real(cls, weights: Any, capacities: Any, *, resolution: Any = None) -> MultiKnapsack:
        """The constraint for real weights, exact or rounded safely, budget by budget, as :meth:`Knapsack.from_real`.

        Args:
            weights: non-negative numbers, one array per budget, (n,) or broadcastable to theta.
            capacities: a non-negative number per budget, or numbers broadcastable to the batch of theta.
            resolution: how many units each capacity is cut into at most, a number or one per budget. None means as
                many as make a box of 10,000,000 states. Budgets that are exact in fewer units leave the rest to the
                others; if none is, they get 3162 each, or 215 of three.

        >>> import numpy as np, knapgrad as kg
        >>> basket = kg.MultiKnapsack.from_real([[1, 1, 1], [33.33, 33.33, 33.34]], [5, 100.0])
        >>> basket.capacities, basket.exact
        (array([   3, 10000]), True)
        >>> prices, hours = [3.57, 2.1, 2.94], [0.5, 1.5, 1.0]
        >>> limit = kg.MultiKnapsack.from_real([prices, hours], [6.6, 2.0])
        >>> limit.capacities, limit.units, limit.exact
        (array([31,  4]), (0.21, 0.5), True)
        >>> kg.solve(np.array([3.0, 2.0, 2.5]), limit)
        array([1., 0., 1.])
        """
        for name, x in (("weights", weights), ("capacities", capacities)):
            if not hasattr(x, "__len__") or not 1 <= len(x) <= MOST_BUDGETS:
                raise ValueError(f"{name} must have one entry per budget, for 1 to {MOST_BUDGETS} budgets, got {x!r}")
        count = len(weights)
        if resolution is None:
            units = _shares(weights, capacities)
        else:
            units = [resolution] * count if np.ndim(resolution) == 0 else list(resolution)
        if len({count, len(capacities), len(units)}) > 1:
            raise ValueError(
                "weights, capacities and resolution must have one entry per budget each, got "
                f"{count}, {len(capacities)} and {len(units)}"
            )
        each = [Knapsack.from_real(*x[:2], resolution=x[2]) for x in zip(weights, capacities, units)]
        return cls(
            [x.weights for x in each],
            [x.capacity for x in each],
            scales=tuple(Scale(x.unit, exact=x.exact, optimistic=None if x.exact else x.optimistic) for x in each),
        )

    @property
    def units(self) -> tuple[Any, ...]:
        """The real weight of one unit of each budget; arrays where it differs by instance."""
        return tuple(1 if scale is None else scale.unit for scale in self._scales)

    @property
    def exact(self) -> bool:
        """Whether the integers accept the same selections as the real numbers."""
        return all(scale is None or scale.exact for scale in self._scales)

    @property
    def optimistic(self) -> MultiKnapsack:
        """The same constraint with weights rounded down, so that its optimum is an upper bound of the true one; itself
        if it is exact."""
        if self.exact:
            return self
        rounded = [None if scale is None else scale.optimistic for scale in self._scales]
        weights = [own if x is None else x.weights for own, x in zip(self.weights, rounded)]
        limits = [own if x is None else x.capacity for own, x in zip(self.capacities, rounded)]
        return MultiKnapsack(weights, limits)

    @property
    def budgets(self) -> tuple[np.ndarray, ...]:
        """For each budget the real capacities that 0..C units stand for, C being its largest capacity."""
        return tuple((scale or Scale()).budgets(most) for scale, most in zip(self._scales, self.checked._most))

    @property
    def _scales(self) -> tuple[Scale | None, ...]:
        return (None,) * len(self.capacities) if self.scales is None else self.scales

    def widths(self) -> Any:
        return self._most, self._lattice.box

    def frontier_of(self, n: int) -> Frontier:
        return Frontier(self._most, exactly=False)

    def check(self, shape: tuple[int, ...]) -> None:
        lattice = self._lattice
        if lattice.weights.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry per item: got {lattice.weights.shape[-1]} for theta of shape "
                f"{tuple(shape)}, which has n = {shape[-1]} items"
            )
        check_broadcast("weights", lattice.weights.shape, shape, "theta")
        check_broadcast("capacities", lattice.capacity.shape, shape[:-1], "the batch shape of theta")

    def lattice(self, n: int) -> Lattice:
        return self._lattice


def _shares(weights: Any, capacities: Any) -> list[int]:
    """How many units each capacity may be cut into. Those that need the fewest to be exact come first, and what they do
    not need is left to the others."""
    finest = [Knapsack.from_real(*x, resolution=_FEW_STATES) for x in zip(weights, capacities)]
    needed = [int(x.capacity.max(initial=0)) + 1 if x.exact else _FEW_STATES for x in finest]  # 1: the last in part
    shares, left = needed.copy(), float(_FEW_STATES)
    for rank, budget in enumerate(sorted(range(len(needed)), key=needed.__getitem__)):
        shares[budget] = max(min(needed[budget], int(left ** (1 / (len(needed) - rank)))), 1)
        left /= shares[budget]
    return shares


def _per_budget(name: str, given: Any, meaning: str) -> list[Any]:
    """Integers of each budget."""
    if isinstance(given, (list, tuple)):
        return [integers(f"{name}[{budget}]", x, meaning) for budget, x in enumerate(given)]
    whole = integers(name, given, meaning)
    if whole.ndim == 0:
        raise ValueError(f"{name} must have an entry per budget, got a single number; for one budget use Knapsack")
    return [whole[budget] if whole.ndim > 1 else whole[budget : budget + 1].reshape(()) for budget in range(len(whole))]


def _bounds(max_capacities: Any, count: int) -> tuple[int, ...] | None:
    if max_capacities is None:
        return None
    bounds = list(max_capacities) if isinstance(max_capacities, (list, tuple, np.ndarray)) else []
    is_integer = all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x >= 0 for x in bounds)
    if len(bounds) != count or not is_integer:
        raise ValueError(f"max_capacities must be {count} non-negative integers, one per budget, got {max_capacities}")
    return tuple(map(int, bounds))


def _box_of(loads: list[Any], limits: list[Any], bounds: tuple[int, ...] | None, given: Any) -> tuple[Any, Any]:
    """How far each budget goes, and the sizes of the box, whose sides are no longer than sums of weights."""
    most, box = [], []
    for budget, (weights, capacity) in enumerate(zip(loads, limits)):
        bound = None if bounds is None else bounds[budget]
        written = given[budget] if isinstance(given, (list, tuple)) else None  # numbers in compiled code
        limit = most_of(f"capacities[{budget}]", capacity, written, bound, f"max_capacities[{budget}]")
        total = int(largest_total(weights, 0).max(initial=0)) if isinstance(weights, np.ndarray) else None
        limit = total if limit is None else limit
        if limit is None:
            raise ValueError(
                f"weights and capacities of budget {budget} are traced (by jax.jit or torch.compile), and a table must "
                "have a size when it is compiled; give max_capacities=..., upper bounds of the capacities"
            )
        most.append(limit)
        box.append(1 + (limit if total is None else min(limit, total)))
    if prod(box) > _MOST_STATES:
        raise ValueError(
            f"the box of {' x '.join(f'{size:,}' for size in box)} capacities has {prod(box):,} states, beyond what a "
            "table can have; divide weights and capacity of a budget by a common factor, or round them by "
            "MultiKnapsack.from_real(weights, capacities, resolution=...), or give fewer budgets"
        )
    return tuple(most), tuple(box)


def _encoded(loads: list[Any], limits: list[Any], bounds: Any, box: tuple[int, ...]) -> Lattice:
    """Weights and capacities as numbers of states. Arithmetic alone, so that it does for arrays of any framework."""
    code: Any = 0
    goal: Any = 0
    never: Any = False
    valid: Any = True
    for budget, (weights, capacity) in enumerate(zip(loads, limits)):
        top, step = box[budget] - 1, prod(box[budget + 1 :])
        capacity = minus_one_where_invalid(capacity, bounds[budget] if bounds else None, None, weights)
        code, never = code + weights * (weights > 0) * step, never | (weights > top)
        goal, valid = goal + at_most(capacity, top) * step, valid & (capacity >= 0)
    reach = prod(box) - 1
    code, goal = as_array(code + (reach + 1 - code) * never), valid_where(valid, goal)
    heaviest = int(code.max(initial=0)) if isinstance(code, np.ndarray) else reach + 1  # which is what never fits
    sizes = None if backends.is_compiling() else np.array([reach, heaviest, *box])
    return Lattice(code, goal, None, reach, heaviest, box=box, sizes=sizes)


def _together(parts: list[Any]) -> Any:
    """One array, whose first dimension is the budget."""
    shape = np.broadcast_shapes(*(tuple(x.shape) for x in parts))
    backend: Any = next((backends.backend_of(x) for x in parts if not isinstance(x, np.ndarray)), None)
    if backend is None:
        return np.stack([np.broadcast_to(x, shape) for x in parts])
    return backend.concatenate([backend.broadcast_to(x, shape)[None] for x in parts], 0)


def _checked_scales(scales: Any, count: int) -> tuple[Scale, ...] | None:
    is_valid = isinstance(scales, tuple) and len(scales) == count and all(isinstance(x, Value) for x in scales)
    if scales is not None and not is_valid:
        raise TypeError(f"scales must be a tuple of a Scale per budget, or None, got {scales!r}; use from_real(...)")
    return scales
