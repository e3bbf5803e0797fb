"""What constraints on one total weight share: the real numbers that integers may stand for."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad.constraints.limited import Limited
from knapgrad.real import Converted, Scale


class Weighted(Limited):
    """A constraint on total weight, which may stand for real numbers: a weight of c units means ``offset + unit * c``.

    The integers of ``Knapsack(...)`` and ``MultipleChoice(...)`` stand for themselves. Those of ``from_real`` have a
    ``unit`` and an ``offset``.
    """

    weights: Any
    capacity: Any
    scale: Scale | None

    @classmethod
    def _from(cls, converted: Converted, **arguments: Any) -> Any:
        scale = Scale(converted.unit, converted.offset, exact=converted.optimistic is None)
        if converted.optimistic is not None:
            optimistic = cls(**converted.optimistic._asdict(), **arguments, scale=scale)
            scale = Scale(scale.unit, scale.offset, exact=False, optimistic=optimistic)
        return cls(**converted.integers._asdict(), **arguments, scale=scale)

    @property
    def unit(self) -> Any:
        """The real weight of one unit, which :meth:`from_real` has chosen: an array if it differs by instance, and 1
        for a constraint that was made of integers."""
        return 1 if self.scale is None else self.scale.unit

    @property
    def offset(self) -> Any:
        """The real weight of a total of 0 units: that of the lightest options of required groups, which ``from_real``
        leaves out of the integers. 0 for a :class:`Knapsack`, and for a constraint that was made of integers."""
        return 0 if self.scale is None else self.scale.offset

    @property
    def exact(self) -> bool:
        """Whether the integers accept the same selections as the real numbers. If not, weights were rounded up."""
        return self.scale is None or self.scale.exact

    @property
    def optimistic(self) -> Any:
        """The same constraint with weights rounded down, so that its optimum is an upper bound of the true one; itself
        if it is exact."""
        if self.scale is None or self.exact:
            return self
        if self.scale.optimistic is None:
            raise ValueError(
                "optimistic is not saved with the state of a module; make the constraint by from_real again"
            )
        return self.scale.optimistic

    @property
    def budgets(self) -> np.ndarray:
        """The real budgets ``offset + unit * c`` that c = 0..C units stand for, C being the largest capacity, or
        ``max_capacity`` if that was given: (C + 1,),
        or (*batch, C + 1) if units differ. They are the horizontal axis of :func:`frontier`."""
        most = self.checked._frontier.most[0]
        if most is None:
            raise ValueError("capacity is traced, and there are no budgets to list; give max_capacity=...")
        return (self.scale or Scale()).budgets(most)


def checked_scale(scale: Any) -> Scale | None:
    if scale is not None and not isinstance(scale, Scale):
        raise TypeError(f"scale must be a Scale or None, got {scale!r}; for real weights use from_real(...)")
    return scale
