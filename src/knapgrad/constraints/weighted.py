"""What constraints on one total weight share: shapes of limits, and the real numbers that integers may stand for."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import check_broadcast, shown
from knapgrad.constraints.base import Constraint
from knapgrad.real import Converted, Scale
from knapgrad.values import Aside

_NO_LEAST = shown(np.zeros((), np.int64))


class Weighted(Constraint):
    """A constraint on total weight, which may stand for real numbers: a weight of c units means ``offset + unit * c``.

    The integers of ``Knapsack(...)`` and ``MultipleChoice(...)`` stand for themselves. Those of ``from_real`` have a
    ``unit`` and an ``offset``.
    """

    weights: Any
    capacity: Any
    at_least: Any
    max_capacity: int | None
    scale: Scale | None
    _writeable: Any  # the weights, as kernels take them
    _marked: Any  # the capacity
    _slack: Any

    @classmethod
    def _from(cls, converted: Converted, **arguments: Any) -> Any:
        scale = Scale(converted.unit, converted.offset, exact=converted.optimistic is None)
        if converted.optimistic is not None:
            optimistic = cls(**converted.optimistic._asdict(), **arguments, scale=scale)
            scale = Scale(scale.unit, scale.offset, exact=False, optimistic=optimistic)
        return cls(**converted.integers._asdict(), **arguments, scale=scale)

    @classmethod
    def _assembled(cls, leaves: dict[str, Any], static: dict[str, Any]) -> Any:
        constraint = super()._assembled(leaves, static)
        if "at_least" in static:
            constraint._keep(at_least=_NO_LEAST)
        return constraint

    def _fixed_parts(self) -> dict[str, Any]:
        static = {"max_capacity": self.max_capacity, "scale": Aside(self.scale), "_limit": self._limit}
        is_free = isinstance(self.at_least, np.ndarray) and self.at_least.ndim == 0 and self.at_least == 0
        return static | {"at_least": 0} if is_free else static

    def _check_broadcasts(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless all arrays broadcast to a theta of that shape, or to its batch."""
        batch = shape[: len(shape) - self.event_dims]
        check_broadcast("weights", self._writeable.shape, shape, "theta")
        check_broadcast("capacity", self._marked.shape, batch, "the batch shape of theta")
        least = self._slack if backends.is_compiling() else self.at_least
        if least is not None:
            check_broadcast("at_least", least.shape, batch, "the batch shape of theta")

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
        if self._limit is None:
            raise ValueError("capacity is traced, and there are no budgets to list; give max_capacity=...")
        return (self.scale or Scale()).budgets(self._limit)


def checked_scale(scale: Any) -> Scale | None:
    if scale is not None and not isinstance(scale, Scale):
        raise TypeError(f"scale must be a Scale or None, got {scale!r}; for real weights use from_real(...)")
    return scale
