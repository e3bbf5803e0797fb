"""One option per group: MultipleChoice."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import check_optional, integers, is_exact, limits, marked, shown, sizes_of
from knapgrad.constraints.weighted import Weighted, checked_scale
from knapgrad.lattice import Lattice, lattice_of
from knapgrad.real import Scale, convert


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
    optional: bool
    _bound: int | None
    _sizes: Any  # the bound as an array
    _is_known: bool  # whether the weights are
    _fixed: Lattice | None  # for as many groups as the weights have

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
        capacity, at_least, slack, largest = limits(capacity, at_least, max_capacity)
        flat = weights if isinstance(weights, np.ndarray) else weights.reshape((*weights.shape[:-2], -1))
        limit, bound = max_capacity, largest if max_capacity is None else max_capacity
        is_fixed = isinstance(weights, np.ndarray) and isinstance(capacity, np.ndarray)
        if self._static is not None and not is_fixed:
            limit = bound = self._static["_limit"]  # put together by JAX
        self._keep(_marked=marked(capacity, limit, at_least, flat), _slack=slack, _bound=bound, _limit=bound)
        self._keep(_writeable=weights, _largest=largest, _exactly=is_exact(slack))
        self._keep(weights=shown(weights), capacity=shown(capacity), at_least=shown(at_least))
        self._keep(optional=bool(optional), max_capacity=max_capacity, scale=checked_scale(scale))
        self._keep(_sizes=None if bound is None else sizes_of(bound, bound), _is_known=is_known)
        self._keep(_fixed=self._lattice(weights.shape[-2]).copied() if is_fixed and weights.ndim > 1 else None)

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

    @property
    def _columns(self) -> int:
        """How many items of the kernels a group has."""
        options = self._writeable.shape[-1]
        return options + 1 if self.optional and options > 1 else options

    @property
    def _is_knapsack(self) -> bool:
        """An optional group of one option is an item of a knapsack."""
        return self.optional and self._writeable.shape[-1] == 1

    def check(self, shape: tuple[int, ...]) -> None:
        if len(shape) < 2:
            raise ValueError(f"theta must have the shape (*batch, groups, options), got {tuple(shape)}")
        if self._writeable.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry per option: got {self._writeable.shape[-1]} for theta of shape "
                f"{tuple(shape)}, which has {shape[-1]} options per group"
            )
        if self.scale is not None and self._writeable.shape[-2] != shape[-2]:
            raise ValueError(
                f"weights must have one row per group: got {self._writeable.shape[-2]} for theta of shape "
                f"{tuple(shape)}, which has {shape[-2]} groups; a unit and an offset are for a number of groups"
            )
        self._check_broadcasts(shape)

    def lattice(self, n: int) -> Lattice:
        """Without the lightest option of each required group: it is used in any case."""
        if self._fixed is not None and self._fixed.weights.shape[-1] == n:
            return self._fixed
        if n not in self.copies:
            lattice = self._lattice(n // self._columns)
            if not isinstance(lattice.weights, np.ndarray) or not isinstance(lattice.capacity, np.ndarray):
                return lattice  # traced
            self.copies[n] = lattice
        return self.copies[n]

    def lightest(self, event: tuple[int, ...]) -> Any:
        """The lightest option of every required group."""
        return super().lightest(event) if self.optional else self._lightest(self.weights, event[0])

    def _lightest(self, weights: Any, groups: int) -> Any:
        lowest = _lowest(weights)
        total = lowest * groups if lowest.ndim == 0 else lowest.sum(-1) * (groups // max(lowest.shape[-1], 1))
        return np.asarray(total) if isinstance(weights, np.ndarray) else total

    def _fixed_parts(self) -> dict[str, Any]:
        weights, reach, spread = self.weights, None, None
        if isinstance(weights, np.ndarray) and weights.size:
            lowest = np.zeros((), np.int64) if self.optional else _lowest(weights)
            spread = int(lowest.min()), int((weights.max(-1) - lowest).max())
        if self._fixed is not None:
            reach = self._fixed.reach
        return super()._fixed_parts() | {"optional": self.optional, "_reach": reach, "_spread": spread}

    def _fixed_reach(self, groups: int) -> Any:
        """Of one that JAX put together, of arrays that were known before."""
        static = self._static or {}
        if static["_reach"] is not None and self._writeable.shape[-2] == groups:
            return static["_reach"]
        if static["_spread"] is None:
            return self._bound
        lightest, excess = static["_spread"]
        most = groups * excess
        return most if self._bound is None else min(max(self._bound - groups * lightest, 0), most)

    def _lattice(self, groups: int) -> Lattice:
        weights, capacity, slack, bound = self.weights, self._marked, self._slack, self._bound
        if backends.is_compiling():  # tensors, whose numbers are not looked at
            torch = backends.load("torch")
            weights, capacity = torch.integers(self._writeable), torch.integers(capacity)
            slack = None if slack is None else torch.integers(slack)
            bound = None if self._sizes is None else self._sizes[0]
        backend: Any = backends.backend_of(weights)
        lightest: Any = 0 if self.optional else self._lightest(weights, groups)
        if not self.optional:
            weights = weights - _lowest(weights)[..., None]
        elif self._columns > 1:
            weights = backend.concatenate([0 * weights[..., :1], weights], -1)
        if weights.ndim == 1 or weights.shape[-2] != groups:
            rows = weights[None] if weights.ndim == 1 else weights
            weights = backend.broadcast_to(rows, (*rows.shape[:-2], groups, rows.shape[-1]))
        if bound is None and self._is_known and not isinstance(weights, np.ndarray):  # torch compiles
            bound = weights.amax(-1).sum(-1).max()
        weights = weights.reshape((*weights.shape[:-2], weights.shape[-2] * weights.shape[-1]))
        if not self.optional:
            is_valid, capacity = capacity >= 0, capacity - lightest
            known = isinstance(capacity, (np.ndarray, np.integer))
            if not known:  # a negative weight makes the rest larger, but not valid
                capacity = (capacity + 1) * is_valid - 1
            if bound is not None and known:
                bound = max(bound - int(lightest.min(initial=bound)), 0)
            if known:
                capacity = np.asarray(capacity)
                if (capacity < 0).any():  # nothing is feasible
                    slack = np.where(capacity < 0, -1, capacity if slack is None else slack)
                    capacity = np.asarray(np.maximum(capacity, 0))
        if self._static is not None and not (isinstance(weights, np.ndarray) and isinstance(capacity, np.ndarray)):
            bound = self._fixed_reach(groups)
        return lattice_of(weights, capacity, slack, bound, 0 if self._is_knapsack else self._columns)

    def flat(self, backend: backends.Backend, x: Any, is_selection: bool = False) -> Any:
        if self._columns > x.shape[-1]:
            unpicked = 1 - x.sum(-1) if is_selection else backend.array(0.0, x, "theta")
            first = backend.broadcast_to(unpicked[..., None], (*x.shape[:-1], 1))
            x = backend.concatenate([backend.as_type(first, x), x], -1)
        return x.reshape((*x.shape[:-2], x.shape[-2] * x.shape[-1]))

    def whole(self, flat: Any, shape: tuple[int, ...]) -> Any:
        return flat.reshape((*flat.shape[:-1], shape[-2], self._columns))[..., self._columns - shape[-1] :]


def _lowest(weights: Any) -> Any:
    """Of the options."""
    return weights.min(-1) if isinstance(weights, np.ndarray) or not hasattr(weights, "amin") else weights.amin(-1)
