"""What may be selected: TopK and Knapsack, and every check of their arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np


class Constraint(ABC):
    """A set of feasible selections: integer weights, a capacity, and whether the capacity must be used up exactly.

    Attributes:
        exactly: True if a selection must have just that weight, False if at most.
        capacity: int64 array, broadcastable to the batch of theta.
        max_capacity: its largest entry, a plain number that is known without looking at a device.
        reach: the largest capacity that matters, since no more than all items can be picked.
    """

    exactly: ClassVar[bool]
    reach: int

    def __init__(self, capacity: np.ndarray) -> None:
        self.capacity = capacity
        self.max_capacity = self.reach = int(capacity.max()) if capacity.size else 0
        self.copies: dict[Any, Any] = {}  # of weights and capacity, where a framework wants them on a device

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"copies": {}}  # a pickle may be read where there is no such device

    @abstractmethod
    def weights_of(self, n: int) -> np.ndarray:
        """The weights as int64, (..., n), broadcastable to theta."""

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the constraint fits a theta of that shape."""


class TopK(Constraint):
    """Exactly k items.

    Args:
        k: an integer, or integers broadcastable to the batch of theta, in 0..n.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([0.3, 2.0, 1.0]), kg.TopK(2))
    array([0., 1., 1.])
    """

    exactly = True

    def __init__(self, k: Any) -> None:
        super().__init__(_integers("k", k, "the number of items to pick"))

    @property
    def k(self) -> np.ndarray:
        return self.capacity

    def weights_of(self, n: int) -> np.ndarray:
        return np.ones(n, np.int64)

    def check(self, shape: tuple[int, ...]) -> None:
        n = shape[-1]
        if self.max_capacity > n:
            raise ValueError(f"k must be in 0..n, got {self.max_capacity} for n = {n} items; lower k, or add items")
        _check_broadcast("k", self.capacity.shape, shape[:-1], "the batch shape of theta")

    def __repr__(self) -> str:
        return f"TopK({self.capacity.tolist()})"


class Knapsack(Constraint):
    """Items of a total weight of at most the capacity.

    Args:
        weights: non-negative integers, (n,) or broadcastable to theta. Zero is fine; an item heavier than the
            capacity is out.
        capacity: a non-negative integer, or integers broadcastable to the batch of theta. Time and scratch memory
            grow with it (at most with the total weight), so divide weights and capacity by a common factor if there
            is one.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([3.0, 2.0, 2.0]), kg.Knapsack([3, 2, 2], 4))
    array([0., 1., 1.])
    """

    exactly = False

    def __init__(self, weights: Any, capacity: Any) -> None:
        super().__init__(_integers("capacity", capacity, "the largest total weight"))
        self.weights = _integers("weights", weights, "one weight an item")
        if self.weights.ndim == 0:
            raise ValueError(
                "weights must have one entry an item, got a single number; for equal weights use np.full(n, weight)"
            )
        if self.weights.size:
            self.reach = int(min(self.max_capacity, self.weights.sum(-1, dtype=np.float64).max()))

    def weights_of(self, n: int) -> np.ndarray:
        return self.weights

    def check(self, shape: tuple[int, ...]) -> None:
        if self.weights.shape[-1] != shape[-1]:
            raise ValueError(
                f"weights must have one entry an item: got {self.weights.shape[-1]} for theta of shape {tuple(shape)}, "
                f"which has n = {shape[-1]} items"
            )
        _check_broadcast("weights", self.weights.shape, shape, "theta")
        _check_broadcast("capacity", self.capacity.shape, shape[:-1], "the batch shape of theta")

    def __repr__(self) -> str:
        def short(array: np.ndarray) -> Any:
            return array.tolist() if array.size <= 8 else f"<integers {array.shape}>"

        return f"Knapsack(weights={short(self.weights)}, capacity={short(self.capacity)})"


def check_constraint(constraint: Any) -> None:
    if not isinstance(constraint, Constraint):
        raise TypeError(
            f"constraint must be a knapgrad.TopK or a knapgrad.Knapsack, got {type(constraint).__name__}; "
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


def _integers(name: str, value: Any, meaning: str) -> np.ndarray:
    """A non-negative int64 array that nobody else holds, from a list, NumPy, torch or JAX."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value  # NumPy does not know bfloat16
    try:
        array = np.asarray(value)
    except Exception as error:
        raise TypeError(f"{name} must be integers ({meaning}), got {type(value).__name__}: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "biuf":
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
