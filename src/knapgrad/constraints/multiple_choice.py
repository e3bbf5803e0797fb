"""One option per group: MultipleChoice."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import LARGEST_TRACED, check_optional, integers
from knapgrad.constraints.limited import Widths
from knapgrad.constraints.weighted import Weighted, checked_scale
from knapgrad.lattice import as_array, largest, total_of
from knapgrad.real import Scale, convert
from knapgrad.values import read_only


class MultipleChoice(Weighted):
    """One option per group, whose total weight is at most the capacity, and at least ``at_least``.

    Scores and results have the shape (*batch, groups, options). Where groups have different numbers of options, the
    scores of those that are not there are -inf.

    Args:
        weights: non-negative integers (groups, options), or (options,) if they are the same for all groups, or
            broadcastable to theta. An option heavier than the capacity is out.
        capacity: a non-negative integer, or integers broadcastable to the batch of theta. Time and scratch memory grow
            with what it leaves beyond the lightest option of each group.
        at_least: the least total weight, in 0..capacity, with the same types and shapes as the capacity.
        optional: whether a group may stay without any option, which weighs nothing and scores 0.
        max_capacity: an upper bound of the capacity, as for :class:`Knapsack`.
        scale: what the integers stand for, set by :meth:`from_real`.

    For :class:`Gini` and :class:`Tsallis` the options of a group are compared two by two, in a balanced tree. Equal
    options get equal shares where their number (one more if optional) is a power of two; otherwise they are up to 1.21
    and 1.15 times apart. For :class:`Shannon` shares of equal options are always equal.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([[3.0, 5.0], [1.0, 2.0]]), kg.MultipleChoice([[1, 4], [1, 2]], capacity=5))
    array([[0., 1.],
           [1., 0.]])
    """

    event_dims = 2
    item_name = "option"
    optional: bool

    def __init__(
        self,
        weights: Any,
        capacity: Any,
        *,
        at_least: Any = 0,
        optional: bool = False,
        max_capacity: int | None = None,
        scale: Scale | None = None,
    ) -> None:
        is_known, weights = backends.has_numbers(weights), integers("weights", weights, "one weight per option")
        if weights.ndim == 0 or weights.shape[-1] == 0:
            raise ValueError(
                "weights must have one entry per option, of shape (groups, options) or (options,); got shape "
                f"{tuple(weights.shape)}"
            )
        check_optional(optional)
        count, moves, lightest = weights.shape[-1], weights, None
        is_repeated = weights.ndim == 1 or weights.shape[-2] == 1
        if not optional:  # the lightest option of a required group is used in any case
            lowest = as_array(-largest(-weights))
            moves, lightest = weights - lowest[..., None], lowest[None] if weights.ndim == 1 else lowest
        elif count > 1:  # one more, for picking none
            backend: Any = backends.backend_of(weights)
            moves = backend.concatenate([0 * weights[..., :1], weights], -1)
        columns = moves.shape[-1]
        if moves.ndim > 1:
            moves = moves.reshape((*moves.shape[:-2], moves.shape[-2] * columns))
        # an optional group of one option is an item of a knapsack
        self._keep(_columns=columns, _options=0 if optional and count == 1 else columns)
        self._keep(weights=read_only(weights), optional=bool(optional), scale=checked_scale(scale))
        self._keep_limits(
            weights, capacity, at_least, max_capacity, is_known=is_known, moves=moves, lightest=lightest,
            is_repeated=is_repeated,
        )  # fmt: skip

    @classmethod
    def from_real(
        cls,
        weights: Any,
        capacity: Any,
        *,
        at_least: Any = 0,
        optional: bool = False,
        resolution: int | None = None,
    ) -> MultipleChoice:
        """The constraint for real weights, exact or rounded safely, as :meth:`Knapsack.from_real`.

        Of required groups only the excess over the lightest option is rounded; :attr:`offset` is the sum of the
        lightest, so the lightest option of a group weighs 0 units, and ``unit = (capacity - offset) / resolution``.

        Args:
            weights: non-negative numbers (groups, options), or (*batch, groups, options). An option that is not
                there, whose score is -inf, may have any weight; that of another option of its group is best.
            capacity: a non-negative number, or numbers broadcastable to the batch of theta.
            at_least: the least total weight, with the same types and shapes as the capacity.
            optional: whether a group may stay without any option.
            resolution: as for :meth:`Knapsack.from_real`, by default 10,000, or 100 per group if that is more.

        >>> import numpy as np, knapgrad as kg
        >>> parameters, bits = np.array([[7.1e9], [2.3e9]]), np.array([2, 4, 8, 16])
        >>> memory = kg.MultipleChoice.from_real(parameters * bits, 7.6e10)
        >>> y = kg.solve(np.array([[0.0, 2.0, 3.0, 3.1], [0.0, 1.0, 4.0, 5.0]]), memory)
        >>> float((y * parameters * bits).sum()), memory.exact, memory.offset
        (75200000000.0, True, 18800000000.0)
        """
        check_optional(optional)
        converted = convert(weights, capacity, at_least, resolution, optional=bool(optional), per_item=False)
        return cls._from(converted, optional=optional)

    def check(self, shape: tuple[int, ...]) -> None:
        if len(shape) < 2:
            raise ValueError(f"theta must have the shape (*batch, groups, options), got {tuple(shape)}")
        if self.scale is not None and (groups := self._numbers.weights.shape[-2]) != shape[-2]:
            raise ValueError(
                f"weights must have one row per group: got {groups} for theta of shape {tuple(shape)}, which has "
                f"{shape[-2]} groups; a unit and an offset are for a number of groups"
            )
        super().check(shape)

    def widths(self) -> Widths:
        weights, capacity = self.weights, self.capacity
        if not self.optional and isinstance(weights, np.ndarray) and isinstance(capacity, np.ndarray):
            heaviest, most = total_of(np.atleast_2d(weights).max(-1)).max(initial=0), capacity.max(initial=0)
            if min(heaviest, most) > LARGEST_TRACED:  # an option that is as heavy may be picked, so none can be cut
                raise ValueError(
                    f"weights up to {weights.max()} and a capacity of {most} are beyond the 32-bit integers of "
                    "JAX, which the constraint gets as an argument; take the lightest option of each group off its "
                    "weights, and their sum off capacity and at_least, or divide all by a common factor"
                )
        return super().widths()

    def flat(self, backend: backends.Backend, x: Any, is_selection: bool = False) -> Any:
        if self._columns > x.shape[-1]:
            unpicked = 1 - x.sum(-1) if is_selection else backend.array(0.0, x, "theta")
            first = backend.broadcast_to(unpicked[..., None], (*x.shape[:-1], 1))
            x = backend.concatenate([backend.as_type(first, x), x], -1)
        return x.reshape((*x.shape[:-2], x.shape[-2] * x.shape[-1]))

    def whole(self, flat: Any, shape: tuple[int, ...]) -> Any:
        return flat.reshape((*flat.shape[:-1], shape[-2], self._columns))[..., self._columns - shape[-1] :]
