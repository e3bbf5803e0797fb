"""The arguments of constraints: checked, and made integers of our own. Errors name the argument and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.lattice import as_array
from knapgrad.real import offender


def check_optional(optional: Any) -> None:
    if not isinstance(optional, (bool, np.bool_)):
        raise TypeError(f"optional must be True or False, got {optional!r}")


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Sizes equal or 1, aligned at the right; the target itself is never enlarged."""
    return len(shape) <= len(target) and all(a == 1 or a == b for a, b in zip(shape[::-1], target[::-1]))


def check_broadcast(name: str, shape: tuple[int, ...], target: tuple[int, ...], what: str) -> None:
    if not broadcasts(shape, target):
        raise ValueError(
            f"{name} of shape {tuple(shape)} does not broadcast to {what}, which is {tuple(target)}; "
            "give it that shape, or one that broadcasts to it"
        )


def most_of(name: str, capacity: Any, given: Any, bound: int | None, bound_name: str = "max_capacity") -> int | None:
    """How far a capacity goes: the bound, or the largest entry, which must not exceed it; None if there is no bound and
    the capacity is traced, and was not given as a number."""
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, np.integer))):
        raise TypeError(f"{bound_name} must be an integer or None, got {bound!r}")
    if bound is not None and bound < 0:
        raise ValueError(f"{bound_name} must not be negative, got {bound}")
    if isinstance(capacity, np.ndarray):
        largest = int(capacity.max(initial=0))
    elif isinstance(given, int):
        largest = given
    else:
        return bound
    if bound is not None and bound < largest:
        raise ValueError(f"{bound_name} is {bound}, and {name} has {largest}; give at least the largest {name}")
    return largest if bound is None else bound


def narrow(x: Any) -> Any:
    """Known integers for JAX, which would wrap those beyond 32 bits: a heavier item does not fit either, and a larger
    capacity is no limit."""
    if isinstance(x, np.ndarray) and x.dtype == np.int64 and x.max(initial=0) > LARGEST_TRACED:
        return np.asarray(np.minimum(x, LARGEST_TRACED))
    return x


def slack_of(name: str, capacity: Any, at_least: Any) -> Any:
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
            f"at_least must not be above the {name}: it is {offender(least, slack < 0)}, where the {name} is "
            f"{limit[slack < 0][0]}; lower it, or raise the {name}"
        )
    return as_array(slack)


def is_exact(slack: Any) -> bool | None:
    """Whether nothing may stay unused; None if something but not all of it may, or if the slack is traced."""
    if slack is None:
        return False
    return True if isinstance(slack, np.ndarray) and not slack.any() else None


def minus_one_where_invalid(capacity: Any, most: int | None, at_least: Any, weights: Any, event_dims: int = 1) -> Any:
    """The capacity, and -1 in instances where a traced argument turns out to be invalid at run time."""
    traced = [not (x is None or isinstance(x, np.ndarray)) for x in (capacity, at_least, weights)]
    valid: Any = True
    if traced[0]:
        most = LARGEST_TRACED if most is None else min(most, LARGEST_TRACED)
        valid = capacity >= 0 if most == LARGEST_TRACED else (capacity >= 0) & (capacity <= most)
    if traced[1]:
        valid = valid & (at_least >= 0)
    if traced[2]:
        fine = weights >= 0
        for _ in range(min(event_dims, fine.ndim)):
            fine = fine.all(-1)
        valid = valid & fine
    return (capacity + 1) * valid - 1 if any(traced) else capacity


_LIMIT = 2**60  # sums of two stay within int64
LARGEST_TRACED = 2**31 - 1  # JAX has integers of 32 bits unless it is told otherwise; no table has more columns


def integers(name: str, value: Any, meaning: str) -> Any:
    """A non-negative int64 array of our own, from a list or any framework; a traced array is returned as it is."""
    backend = backends.backend_of(value)
    if backend is not None and backend.requires_grad(value):
        raise ValueError(f"{name} requires a gradient, and selections have none for it; pass {name}.detach()")
    if backends.is_compiling():
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{name} must not be negative ({meaning}), got {value}")
        return _traced(name, value, meaning, backends.load("torch"))
    value = backends.plain(name, value)
    try:
        array = np.asarray(value) if backend is None else backend.numbers(value)
    except Exception as error:
        raise TypeError(
            f"{name} must be integers with values to look at ({meaning}), got {type(value).__name__}: {error}"
        ) from None
    if not isinstance(array, np.ndarray):
        return _traced(name, array, meaning, backend)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be integers ({meaning}), got {array.dtype} from {type(value).__name__}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite whole numbers ({meaning}), got {offender(array, ~np.isfinite(array))}")
    if array.dtype.kind == "f" and not np.array_equal(array, np.rint(array)):
        raise ValueError(
            f"{name} must be whole numbers ({meaning}), got {offender(array, array != np.rint(array))}; for real "
            "costs use from_real of the constraint, which finds a common unit, or rounds so that what "
            "fits in whole numbers fits in truth"
        )
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative ({meaning}), got {offender(array, array < 0)}")
    if array.size and int(array.max()) >= _LIMIT:  # as an integer: float16 has no such limit
        remedy = "an item heavier than the capacity is out" if name == "weights" else "no total weight is as large"
        raise ValueError(f"{name} must be below 2**60, got {array.max()}; {remedy}, so give a smaller number")
    return np.array(array, dtype=np.int64, order="C")


def _traced(name: str, value: Any, meaning: str, backend: Any) -> Any:
    """Values that will be known when the call is run."""
    integers = backend.integers(value)
    if integers is None:
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{name} must be integers ({meaning}), got {kind}, whose values cannot be looked at here; whole numbers "
            "are converted by .long() in torch and .astype(int) in JAX; for real costs call from_real outside of the "
            "function that is compiled, since truncating them would break the budget"
        )
    return integers
