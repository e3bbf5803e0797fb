"""What may be selected: TopK, Knapsack and MultipleChoice, the checks of their arguments, and their lattices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import (
    check_broadcast,
    check_optional,
    integers,
    is_exact,
    largest_of,
    limits,
    marked,
    shown,
    sizes_of,
    slack_of,
)
from knapgrad.lattice import Lattice, lattice_of, moduli_of
from knapgrad.real import Converted, Scale, convert
from knapgrad.values import Aside, Value

_NO_LEAST = shown(np.zeros((), np.int64))


class Constraint(Value, ABC):
    """A set of feasible selections. It is a value: it can be compared, hashed, pickled and copied, but not changed."""

    event_dims = 1  # how many of the last dimensions of theta belong to one instance
    max_capacity: int | None
    copies: dict[Any, Any]  # of its lattice on devices, kept by the backend of a framework
    _fitting: dict[Any, backends.Backend]  # types and shapes of theta that were checked
    _largest: int | None  # capacity, or k, of all instances; None if they are traced
    _exactly: bool | None  # whether all of it must be used; None if a least weight is something else, or traced

    def __new__(cls, *_: Any, **__: Any) -> Any:
        constraint = super().__new__(cls)
        constraint._keep(copies={}, _fitting={})
        return constraint

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the constraint fits a theta of that shape, (*batch, *event)."""

    @abstractmethod
    def lattice(self, n: int) -> Lattice:
        """What the kernels need to know, for n items: NumPy arrays, or arrays that JAX traces."""

    def lightest(self, event: tuple[int, ...]) -> Any:
        """What every selection weighs at least, 0 or integers that broadcast to the batch; the lattice is without
        it."""
        return 0

    def flat(self, backend: backends.Backend, x: Any, is_selection: bool = False) -> Any:
        """Scores or selections (*batch, *event) as the kernels take them, (*batch, n), with those of picking no option
        where that is an item of the kernels."""
        return x

    def whole(self, flat: Any, shape: tuple[int, ...]) -> Any:
        """The reverse, for a theta of that shape, without those of picking no option."""
        return flat

    def contains(self, y: Any) -> Any:
        """Whether selections are feasible: zeros and ones that obey the constraint.

        Args:
            y: selections of theta's shape, or with dimensions of samples in front; of any framework.

        Returns:
            Truth values (*batch,) or (*samples, *batch), in y's framework.

        >>> import numpy as np, knapgrad as kg
        >>> y = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0.5, 0.5, 1]])
        >>> kg.TopK(2).contains(y)
        array([False,  True,  True, False])
        >>> kg.Knapsack([3, 2, 2], capacity=4).contains(y)
        array([ True, False,  True, False])
        >>> kg.MultipleChoice([3, 2, 2], capacity=5).contains(np.array([[1, 0, 0], [0, 1, 0]]))
        np.True_
        """
        y = backends.plain("y", y)
        backend = backends.check_array("y", y)
        self.check(y.shape)
        y = self.flat(backend, y, is_selection=True)
        lattice = backend.lattice(self, y)
        with backend.exact():
            weights = backend.array(lattice.weights, y, "weights")
            capacity = backend.array(lattice.capacity, y, "capacity")
            used = backend.sum_double(backend.double(y) * weights)
            inside = ((y == 0) | (y == 1)).all(-1) & (used <= capacity)
            for modulus in moduli_of(lattice.box):
                inside = inside & (backend.sum_double(backend.double(y) * (weights % modulus)) <= capacity % modulus)
            if lattice.options:
                groups = y.shape[-1] // lattice.options  # not -1, which an empty batch leaves open
                inside = inside & (y.reshape((*y.shape[:-1], groups, lattice.options)).sum(-1) == 1).all(-1)
            if lattice.slack is None:
                return inside
            return inside & (used >= capacity - backend.array(lattice.slack, y, "slack"))


class TopK(Constraint):
    """Exactly k items; with ``at_least``, from ``at_least`` to k items.

    Args:
        k: an integer, or integers broadcastable to the batch of theta, in 0..n.
        at_least: the least number of items, in 0..k, with the same types and shapes as k. None means k.
        max_capacity: an upper bound of k, which fixes the width of the tables, so that nothing is compiled again when k
            changes from call to call or is traced by JAX. A traced k above it gives NaN. None means the largest k,
            or n if k is traced.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([0.3, 2.0, 1.0]), kg.TopK(2))
    array([0., 1., 1.])
    >>> kg.solve(np.array([-0.3, 2.0, -1.0]), kg.TopK(2, at_least=1))
    array([0., 1., 0.])
    """

    k: Any
    at_least: Any
    max_capacity: int | None
    _marked: Any
    _slack: Any
    _sizes: Any  # reach and heaviest for any n

    def __init__(self, k: Any, *, at_least: Any = None, max_capacity: int | None = None) -> None:
        given, k = k, integers("k", k, "the number of items to pick")
        largest = largest_of("k", k, max_capacity, given)
        if at_least is None:
            slack: Any = np.zeros((), np.int64)
            exactly: bool | None = True
        else:
            at_least = integers("at_least", at_least, "the least number of items to pick")
            slack = slack_of("k", k, at_least)
            exactly = is_exact(slack)
        limit, bound = max_capacity, largest if max_capacity is None else max_capacity
        if self._static is not None and largest is None:  # put together by JAX
            limit = bound = self._static["_limit"]
        self._keep(k=shown(k), at_least=shown(at_least), max_capacity=max_capacity, _largest=largest, _limit=bound)
        self._keep(_marked=marked(k, limit, at_least), _slack=slack, _exactly=exactly)
        self._keep(_sizes=None if bound is None else sizes_of(bound, 1))

    def _fixed_parts(self) -> dict[str, Any]:
        static = {"max_capacity": self.max_capacity, "_limit": self._limit}
        return static | {"at_least": None} if self.at_least is None else static

    def check(self, shape: tuple[int, ...]) -> None:
        n = shape[-1]
        if not backends.is_compiling() and self._largest is not None and self._largest > n:
            raise ValueError(f"k must be in 0..n, got {self._largest} for n = {n} items; lower k, or add items")
        check_broadcast("k", self._marked.shape, shape[:-1], "the batch shape of theta")
        least = self._slack if backends.is_compiling() else self.at_least
        if least is not None:
            check_broadcast("at_least", least.shape, shape[:-1], "the batch shape of theta")

    def lattice(self, n: int) -> Lattice:
        if backends.is_compiling():
            torch: Any = backends.load("torch")
            k = torch.integers(self._marked)
            k = (k + 1) * (k <= n) - 1  # -1 is not valid
            sizes = sizes_of(n, 1) if self._sizes is None else torch.integers(self._sizes).clamp(max=n)
            return Lattice(np.ones(n, np.int64), k, self._slack, None, None, sizes=sizes)
        if n in self.copies:
            return self.copies[n]
        reach = n if self._sizes is None else min(int(self._sizes[0]), n)
        lattice = Lattice(np.ones(n, np.int64), self._marked, self._slack, reach=reach, heaviest=min(n, 1))
        if isinstance(self._marked, np.ndarray) and isinstance(self._slack, (np.ndarray, type(None))):  # not traced
            self.copies[n] = lattice
        return lattice


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
        return self if self.scale is None or self.scale.optimistic is None else self.scale.optimistic

    @property
    def budgets(self) -> np.ndarray:
        """The real budgets ``offset + unit * c`` that c = 0..C units stand for, C being the largest capacity: (C + 1,),
        or (*batch, C + 1) if units differ. They are the horizontal axis of :func:`frontier`."""
        known = isinstance(self.capacity, np.ndarray)
        largest = int(self.capacity.max(initial=0)) if known else self.max_capacity
        if largest is None:
            raise ValueError("capacity is traced by JAX, and there are no budgets to list; give max_capacity=...")
        return (self.scale or Scale()).budgets(largest)


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

    _lattice: Lattice

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
        if weights.ndim == 0:
            raise ValueError(
                "weights must have one entry per item, got a single number; for equal weights use np.full(n, weight)"
            )
        capacity, at_least, slack, largest = limits(capacity, at_least, max_capacity)
        limit, bound = max_capacity, largest if max_capacity is None else max_capacity
        most = bound
        if bound is None and is_known and not isinstance(weights, np.ndarray):  # torch compiles
            bound = weights.sum(-1).max()
        if self._static is not None and not (isinstance(weights, np.ndarray) and isinstance(capacity, np.ndarray)):
            limit = most = self._static["_limit"]  # put together by JAX
            bound = self._static["_reach"]
        lattice = lattice_of(weights, marked(capacity, limit, at_least, weights), slack, bound)
        self._keep(_writeable=weights, _marked=lattice.capacity, _slack=lattice.slack)
        self._keep(weights=shown(weights), capacity=shown(capacity), at_least=shown(at_least))
        self._keep(max_capacity=max_capacity, scale=_checked_scale(scale), _lattice=lattice)
        self._keep(_largest=largest, _exactly=is_exact(slack), _limit=most)

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

    def check(self, shape: tuple[int, ...]) -> None:
        if self._writeable.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry per item: got {self._writeable.shape[-1]} for theta of shape "
                f"{tuple(shape)}, which has n = {shape[-1]} items"
            )
        self._check_broadcasts(shape)

    def lattice(self, n: int) -> Lattice:
        return self._lattice

    def _fixed_parts(self) -> dict[str, Any]:
        return super()._fixed_parts() | {"_reach": self._lattice.reach}


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
        self._keep(optional=bool(optional), max_capacity=max_capacity, scale=_checked_scale(scale))
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
    lowest = weights.min(-1)
    return getattr(lowest, "values", lowest)  # torch gives the places too


def check_constraint(constraint: Any) -> None:
    if not isinstance(constraint, Constraint):
        is_class = isinstance(constraint, type)
        given = f"{constraint.__name__} (a class: call it)" if is_class else type(constraint).__name__
        raise TypeError(
            f"constraint must be a knapgrad.TopK, Knapsack, MultiKnapsack or MultipleChoice, got {given}; "
            "for example knapgrad.TopK(3) or knapgrad.Knapsack(weights, capacity)"
        )


def _checked_scale(scale: Any) -> Scale | None:
    if scale is not None and not isinstance(scale, Scale):
        raise TypeError(f"scale must be a Scale or None, got {scale!r}; for real weights use from_real(...)")
    return scale
