"""What may be selected: TopK and Knapsack, the checks of their arguments, and their lattices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.lattice import Lattice, lattice_of
from knapgrad.values import Value


class Constraint(Value, ABC):
    """A set of feasible selections. It is a value: it can be compared, hashed, pickled and copied, but not changed."""

    copies: dict[Any, Any]  # of its lattice on devices, kept by the backend of a framework

    def __new__(cls, *_: Any, **__: Any) -> Any:
        constraint = super().__new__(cls)
        constraint._keep(copies={})
        return constraint

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the constraint fits a theta of that shape, (*batch, n)."""

    @abstractmethod
    def lattice(self, n: int) -> Lattice:
        """What the kernels need to know, for n items: NumPy arrays, or arrays that JAX traces."""

    def contains(self, y: Any) -> Any:
        """Whether selections are feasible: zeros and ones whose weight, or number, is within the limits.

        Args:
            y: selections (*batch, n), or with dimensions of samples in front; of any framework.

        Returns:
            Truth values (*batch,) or (*samples, *batch), in y's framework.

        >>> import numpy as np, knapgrad as kg
        >>> kg.Knapsack([3, 2, 2], 4, at_least=3).contains(np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0.5, 1, 0]]))
        array([ True, False, False, False])
        """
        backend = backends.backend_of(y)
        if backend is None:
            raise TypeError(f"y must be a NumPy array, a torch tensor or a JAX array, got {type(y).__name__}")
        self.check(y.shape)
        lattice = backend.lattice(self, y)
        with backend.exact():
            weights = backend.array(lattice.weights, y, "weights")
            capacity = backend.array(lattice.capacity, y, "capacity")
            used = backend.sum_double(backend.double(y) * weights)
            inside = ((y == 0) | (y == 1)).all(-1) & (used <= capacity)
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
    _largest: int | None

    def __init__(self, k: Any, *, at_least: Any = None, max_capacity: int | None = None) -> None:
        k = _integers("k", k, "the number of items to pick")
        largest = _largest("k", k, max_capacity)
        if at_least is None:
            slack: Any = np.zeros((), np.int64)
        else:
            at_least = _integers("at_least", at_least, "the least number of items to pick")
            slack = _slack("k", k, at_least)
        self._keep(k=_shown(k), at_least=_shown(at_least), max_capacity=max_capacity, _largest=largest)
        self._keep(_marked=_marked(k, max_capacity, at_least), _slack=slack)

    def check(self, shape: tuple[int, ...]) -> None:
        n = shape[-1]
        if self._largest is not None and self._largest > n:
            raise ValueError(f"k must be in 0..n, got {self._largest} for n = {n} items; lower k, or add items")
        _check_broadcast("k", self.k.shape, shape[:-1], "the batch shape of theta")
        if self.at_least is not None:
            _check_broadcast("at_least", self.at_least.shape, shape[:-1], "the batch shape of theta")

    def lattice(self, n: int) -> Lattice:
        largest = self._largest if self.max_capacity is None else self.max_capacity
        reach = n if largest is None else min(largest, n)
        return Lattice(np.ones(n, np.int64), self._marked, self._slack, reach=reach, heaviest=min(n, 1))


class Knapsack(Constraint):
    """Items whose total weight is at most the capacity, and at least ``at_least``.

    Args:
        weights: non-negative integers, (n,) or broadcastable to theta. Zero is fine; an item heavier than the
            capacity is out.
        capacity: a non-negative integer, or integers broadcastable to the batch of theta. Time and scratch memory
            grow with it (at most with the total weight), so divide weights and capacity by a common factor if there
            is one.
        at_least: the least total weight, in 0..capacity, with the same types and shapes as the capacity.
            ``at_least=capacity`` means exactly that weight.
        max_capacity: an upper bound of the capacity, which fixes the width of the tables, so that nothing is compiled
            again when the capacity changes from call to call or is traced by JAX. A traced capacity above it gives
            NaN. Not needed if the weights are known: no table is wider than their sum.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([3.0, 2.0, 2.0]), kg.Knapsack([3, 2, 2], 4))
    array([0., 1., 1.])
    >>> kg.solve(np.array([-3.0, -2.0, -2.0]), kg.Knapsack([3, 2, 2], 4, at_least=3))
    array([1., 0., 0.])
    """

    weights: Any
    capacity: Any
    at_least: Any
    max_capacity: int | None
    _lattice: Lattice

    def __init__(self, weights: Any, capacity: Any, *, at_least: Any = 0, max_capacity: int | None = None) -> None:
        weights = _integers("weights", weights, "one weight per item")
        if weights.ndim == 0:
            raise ValueError(
                "weights must have one entry per item, got a single number; for equal weights use np.full(n, weight)"
            )
        capacity = _integers("capacity", capacity, "the largest total weight")
        at_least = _integers("at_least", at_least, "the least total weight")
        largest = _largest("capacity", capacity, max_capacity)
        slack = _slack("capacity", capacity, at_least)
        marked = _marked(capacity, max_capacity, at_least, weights)
        lattice = lattice_of(weights, marked, slack, largest if max_capacity is None else max_capacity)
        self._keep(weights=_shown(weights), capacity=_shown(capacity), at_least=_shown(at_least))
        self._keep(max_capacity=max_capacity, _lattice=lattice)

    def check(self, shape: tuple[int, ...]) -> None:
        if self.weights.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry per item: got {self.weights.shape[-1]} for theta of shape "
                f"{tuple(shape)}, which has n = {shape[-1]} items"
            )
        _check_broadcast("weights", self.weights.shape, shape, "theta")
        _check_broadcast("capacity", self.capacity.shape, shape[:-1], "the batch shape of theta")
        _check_broadcast("at_least", self.at_least.shape, shape[:-1], "the batch shape of theta")

    def lattice(self, n: int) -> Lattice:
        return self._lattice


def _shown(x: Any) -> Any:
    """A read-only view, for users. Kernels keep the writeable array: they would copy a read-only one in each call."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


def check_constraint(constraint: Any) -> None:
    if not isinstance(constraint, Constraint):
        is_class = isinstance(constraint, type)
        given = f"{constraint.__name__} (a class: call it)" if is_class else type(constraint).__name__
        raise TypeError(
            f"constraint must be a knapgrad.TopK or a knapgrad.Knapsack, got {given}; "
            "for example knapgrad.TopK(3) or knapgrad.Knapsack(weights, capacity)"
        )


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Sizes equal or 1, aligned at the right; the target itself is never enlarged."""
    if len(shape) == 0 or shape == target:
        return True
    return len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1]))


def _check_broadcast(name: str, shape: tuple[int, ...], target: tuple[int, ...], what: str) -> None:
    if not broadcasts(shape, target):
        raise ValueError(
            f"{name} of shape {tuple(shape)} does not broadcast to {what}, which is {tuple(target)}; "
            "give it one entry in all, or just that shape"
        )


def _largest(name: str, capacity: Any, max_capacity: Any) -> int | None:
    """The largest entry of a capacity, which must not exceed the given bound; None if it is traced."""
    if max_capacity is not None and (isinstance(max_capacity, bool) or not isinstance(max_capacity, (int, np.integer))):
        raise TypeError(f"max_capacity must be an integer or None, got {max_capacity!r}")
    if max_capacity is not None and max_capacity < 0:
        raise ValueError(f"max_capacity must not be negative, got {max_capacity}")
    if not isinstance(capacity, np.ndarray):
        return None
    largest = int(capacity.max(initial=0))
    if max_capacity is not None and max_capacity < largest:
        raise ValueError(f"max_capacity is {max_capacity}, and {name} is {largest} somewhere; give the largest {name}")
    return largest


def _slack(name: str, capacity: Any, at_least: Any) -> Any:
    """How much of the capacity may stay unused; None if all of it may."""
    known = isinstance(at_least, np.ndarray)
    if known and not at_least.any():
        return None
    try:
        slack = capacity - at_least
    except (TypeError, ValueError):
        raise ValueError(
            f"at_least of shape {at_least.shape} and {name} of shape {capacity.shape} do not broadcast; "
            "both must broadcast to the batch of theta"
        ) from None
    if known and isinstance(capacity, np.ndarray) and (slack < 0).any():
        least, limit = (np.broadcast_to(x, slack.shape) for x in (at_least, capacity))
        raise ValueError(
            f"at_least must not be above the {name}: it is {_offender(least, slack < 0)}, where the {name} is "
            f"{limit[slack < 0][0]}; lower it, or raise the {name}"
        )
    return np.asarray(slack) if isinstance(slack, np.integer) else slack


def _marked(capacity: Any, max_capacity: int | None, at_least: Any, weights: Any = None) -> Any:
    """The capacity, and -1 in instances where a traced argument turns out to be invalid at run time."""
    traced = [not (x is None or isinstance(x, np.ndarray)) for x in (capacity, at_least, weights)]
    valid: Any = True
    if traced[0]:
        valid = capacity >= 0 if max_capacity is None else (capacity >= 0) & (capacity <= max_capacity)
    if traced[1]:
        valid = valid & (at_least >= 0)
    if traced[2]:
        valid = valid & (weights >= 0).all(-1)
    return (capacity + 1) * valid - 1 if any(traced) else capacity


_LIMIT = 2**60  # sums of two stay within int64


def _integers(name: str, value: Any, meaning: str) -> Any:
    """A non-negative int64 array of our own, from a list or any framework; a traced array is returned as it is."""
    backend = backends.backend_of(value)
    if backend is not None and backend.requires_grad(value):
        raise ValueError(f"{name} requires a gradient, and selections have none for it; pass {name}.detach()")
    try:
        array = backends.numbers(value)
    except Exception as error:
        raise TypeError(
            f"{name} must be integers with values to look at ({meaning}), got {type(value).__name__}: {error}"
        ) from None
    if not isinstance(array, np.ndarray):  # traced
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers ({meaning}), got {array.dtype}; convert it by .astype(int)")
        return (
            array if array.dtype in (np.int32, np.int64) else array.astype(np.int32)
        )  # with room for a bound, and a sign
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be integers ({meaning}), got {array.dtype} from {type(value).__name__}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(
            f"{name} must be finite whole numbers ({meaning}), got {_offender(array, ~np.isfinite(array))}"
        )
    if array.dtype.kind == "f" and not np.array_equal(array, np.rint(array)):
        raise ValueError(
            f"{name} must be whole numbers ({meaning}), got {_offender(array, array != np.rint(array))}; scale weights "
            "and capacity by a common factor, for example by 100 for two decimals; if they are not whole then, round "
            "the weights up and the capacity down, so that what fits in whole numbers fits in truth"
        )
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative ({meaning}), got {_offender(array, array < 0)}")
    if array.size and array.max() >= _LIMIT:
        raise ValueError(
            f"{name} must be below 2**60, got {array.max()}; a capacity above the total weight is no limit at all"
        )
    return np.array(array, dtype=np.int64, order="C")


def _offender(array: np.ndarray, bad: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{array[index]}" + (f" at index {index if len(index) > 1 else index[0]}" if index else "")
