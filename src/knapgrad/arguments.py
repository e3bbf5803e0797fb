"""The arguments of constraints: checked, and made integers of our own. Errors name the argument and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.real import offender
from knapgrad.values import frozen


def sizes_of(reach: int, heaviest: int) -> Any:
    """As an array, see Lattice."""
    if backends.is_compiling():
        return backends.load("torch").integers((reach, heaviest))
    return np.array([reach, heaviest])


def shown(x: Any) -> Any:
    """What users see of an array: a copy that nobody can write to. Kernels have another, whose numbers they trust."""
    return frozen(x) if isinstance(x, np.ndarray) else x


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


def largest_of(name: str, capacity: Any, max_capacity: Any, given: Any, bound: str = "max_capacity") -> int | None:
    """The largest entry of a capacity, which must not exceed the given bound; None if it is traced, and was not given
    as a number."""
    if max_capacity is not None and (isinstance(max_capacity, bool) or not isinstance(max_capacity, (int, np.integer))):
        raise TypeError(f"{bound} must be an integer or None, got {max_capacity!r}")
    if max_capacity is not None and max_capacity < 0:
        raise ValueError(f"{bound} must not be negative, got {max_capacity}")
    if isinstance(capacity, np.ndarray):
        largest = int(capacity.max(initial=0))
    elif isinstance(given, int):
        largest = given
    else:
        return None
    if max_capacity is not None and max_capacity < largest:
        raise ValueError(f"{bound} is {max_capacity}, and {name} has {largest}; give at least the largest {name}")
    return largest


def limits(capacity: Any, at_least: Any, max_capacity: Any) -> tuple[Any, Any, Any, int | None]:
    """Capacity, least weight, slack and the largest capacity, of a constraint on weight."""
    is_free = isinstance(at_least, int) and at_least == 0
    given, capacity = capacity, integers("capacity", capacity, "the largest total weight")
    at_least = integers("at_least", at_least, "the least total weight")
    largest = largest_of("capacity", capacity, max_capacity, given)
    return capacity, at_least, None if is_free else slack_of("capacity", capacity, at_least), largest


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
    return np.asarray(slack) if isinstance(slack, np.integer) else slack


def is_exact(slack: Any) -> bool | None:
    """Whether nothing may stay unused; None if something but not all of it may, or if the slack is traced."""
    if slack is None:
        return False
    return True if isinstance(slack, np.ndarray) and not slack.any() else None


def marked(capacity: Any, max_capacity: int | None, at_least: Any, weights: Any = None) -> Any:
    """The capacity, and -1 in instances where a traced argument turns out to be invalid at run time."""
    traced = [not (x is None or isinstance(x, np.ndarray)) for x in (capacity, at_least, weights)]
    valid: Any = True
    if traced[0]:
        most = _LARGEST_TRACED if max_capacity is None else min(max_capacity, _LARGEST_TRACED)
        valid = capacity >= 0 if most == _LARGEST_TRACED else (capacity >= 0) & (capacity <= most)
    if traced[1]:
        valid = valid & (at_least >= 0)
    if traced[2]:
        valid = valid & (weights >= 0).all(-1)
    return (capacity + 1) * valid - 1 if any(traced) else capacity


_LIMIT = 2**60  # sums of two stay within int64
_LARGEST_TRACED = 2**31 - 1  # no table has more columns


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
        array = backends.numbers(value)
    except Exception as error:
        raise TypeError(
            f"{name} must be integers with values to look at ({meaning}), got {type(value).__name__}: {error}"
        ) from None
    if not isinstance(array, np.ndarray):
        return _traced(name, array, meaning, backends.backend_of(array))
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
    if array.size and array.max() >= _LIMIT:
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
