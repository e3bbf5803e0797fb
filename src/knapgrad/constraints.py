"""What may be selected: TopK and Knapsack, and every check of their arguments."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np


class Constraint(ABC):
    """A set of feasible selections: integer weights, a capacity, and whether the capacity must be used up exactly.

    Attributes:
        exactly: True if a selection must have just that weight, False if at most.
        capacity: int64 array, broadcastable to the batch of theta.
        max_capacity: its largest entry, a plain number that is known without looking at a device. None if the capacity
            is traced by JAX, and the user did not give one.
    """

    exactly: ClassVar[bool]

    def __init__(self, capacity: Any, max_capacity: int | None) -> None:
        self.capacity = capacity
        self.max_capacity = max_capacity
        if isinstance(capacity, np.ndarray):
            largest = int(capacity.max()) if capacity.size else 0
            if max_capacity is not None and max_capacity < largest:
                raise ValueError(f"max_capacity is {max_capacity}, and a capacity is {largest}; it must be the largest")
            self.max_capacity = largest
        self.copies: dict[Any, Any] = {}  # of weights and capacity, where a framework wants them on a device

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"copies": {}}  # a pickle may be read where there is no such device

    @abstractmethod
    def weights_of(self, n: int) -> Any:
        """The weights as int64, (..., n), broadcastable to theta."""

    @abstractmethod
    def reach_of(self, n: int) -> int:
        """The largest capacity that matters, since no more than all items can be picked: a plain number."""

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the constraint fits a theta of that shape."""


class TopK(Constraint):
    """Exactly k items.

    Args:
        k: an integer, or integers broadcastable to the batch of theta, in 0..n.
        max_capacity: an upper bound of a k that is traced by JAX (else n is used); more than that gives NaN.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([0.3, 2.0, 1.0]), kg.TopK(2))
    array([0., 1., 1.])
    """

    exactly = True

    def __init__(self, k: Any, *, max_capacity: int | None = None) -> None:
        super().__init__(_integers("k", k, "the number of items to pick"), max_capacity)

    @property
    def k(self) -> Any:
        return self.capacity

    def weights_of(self, n: int) -> np.ndarray:
        return np.ones(n, np.int64)

    def reach_of(self, n: int) -> int:
        return n if self.max_capacity is None else self.max_capacity

    def check(self, shape: tuple[int, ...]) -> None:
        n = shape[-1]
        if self.max_capacity is not None and self.max_capacity > n:
            raise ValueError(f"k must be in 0..n, got {self.max_capacity} for n = {n} items; lower k, or add items")
        _check_broadcast("k", self.capacity.shape, shape[:-1], "the batch shape of theta")

    def __repr__(self) -> str:
        return f"TopK({_short(self.capacity)})"


class Knapsack(Constraint):
    """Items of a total weight of at most the capacity.

    Args:
        weights: non-negative integers, (n,) or broadcastable to theta. Zero is fine; an item heavier than the
            capacity is out.
        capacity: a non-negative integer, or integers broadcastable to the batch of theta. Time and scratch memory
            grow with it (at most with the total weight), so divide weights and capacity by a common factor if there
            is one.
        max_capacity: an upper bound of a capacity that is traced by JAX: tables get that width, and a larger capacity
            gives NaN. Not needed if the weights are known; then their sum is used.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([3.0, 2.0, 2.0]), kg.Knapsack([3, 2, 2], 4))
    array([0., 1., 1.])
    """

    exactly = False

    def __init__(self, weights: Any, capacity: Any, *, max_capacity: int | None = None) -> None:
        super().__init__(_integers("capacity", capacity, "the largest total weight"), max_capacity)
        self.weights = _integers("weights", weights, "one weight an item")
        if self.weights.ndim == 0:
            raise ValueError(
                "weights must have one entry an item, got a single number; for equal weights use np.full(n, weight)"
            )
        limits = [self.max_capacity] if self.max_capacity is not None else []
        if isinstance(self.weights, np.ndarray) and self.weights.size:
            limits.append(int(self.weights.sum(-1, dtype=np.float64).max()))
        if not limits:
            raise ValueError(
                "weights and capacity are traced by JAX, and a table must have a width when it is compiled; give "
                "Knapsack(weights, capacity, max_capacity=...) an upper bound of the capacity"
            )
        self._reach = min(limits)

    def weights_of(self, n: int) -> Any:
        return self.weights

    def reach_of(self, n: int) -> int:
        return self._reach

    def check(self, shape: tuple[int, ...]) -> None:
        if self.weights.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry an item: got {self.weights.shape[-1]} for theta of shape {tuple(shape)}, "
                f"which has n = {shape[-1]} items"
            )
        _check_broadcast("weights", self.weights.shape, shape, "theta")
        _check_broadcast("capacity", self.capacity.shape, shape[:-1], "the batch shape of theta")

    def __repr__(self) -> str:
        return f"Knapsack(weights={_short(self.weights)}, capacity={_short(self.capacity)})"


def _short(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return "<traced>"
    return array.tolist() if array.size <= 8 else f"<integers {array.shape}>"


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


_LIMIT = 2**60  # sums of two stay within int64


def is_traced(value: Any) -> bool:
    """Whether JAX is tracing: then there are no values to look at."""
    return "jax" in sys.modules and isinstance(value, sys.modules["jax"].core.Tracer)


def _integers(name: str, value: Any, meaning: str) -> Any:
    """A non-negative int64 array that nobody else holds, from a list, NumPy, torch or JAX; unless JAX is tracing it."""
    if is_traced(value):
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers ({meaning}), got {value.dtype}; convert it by .astype(int)")
        return value
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{name} requires a gradient, and selections have none for it; pass {name}.detach()")
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.double() if value.is_floating_point() else value  # NumPy does not know bfloat16
        array = np.asarray(value)
    except Exception as error:
        remedy = "; in torch.func.vmap give them a batch dimension instead" if hasattr(value, "detach") else ""
        raise TypeError(
            f"{name} must be integers with values to look at ({meaning}), got {type(value).__name__}: {error}{remedy}"
        ) from None
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
            f"{name} must be whole numbers ({meaning}), got {_offender(array, array != np.rint(array))}; "
            "scale weights and capacity by a common factor, for example by 100 for two decimals, and round"
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
