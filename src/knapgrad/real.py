"""Real weights in integers: in a unit that divides them all, or rounded so that what fits in integers fits in truth.

A selection picks one option per group, or at most one if groups are optional; an item is an optional group of one
option. Of required groups only the excess over the lightest option counts. With ``e`` for the excess, and ``room`` and
``least`` for the limits less the lightest options:

    exact:    weight = e / unit          capacity = floor(room / unit)    at_least = ceil(least / unit)
    rounded:  weight = ceil(e / unit)    capacity = room / unit           at_least = ceil(least / unit + overstated)

``overstated`` is by how much rounding can raise the weight of a selection, below one unit per group.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, lcm
from numbers import Rational
from typing import Any, NamedTuple

import numpy as np

from knapgrad import backends
from knapgrad.values import Value, read_only

LEAST_RESOLUTION, PER_GROUP = 10_000, 100
_LONG = 100_000  # so many numbers are looked at one by one, if they are not decimals of a few digits
_LARGE = 2**61


class Scale(Value):
    """What the integers of a constraint stand for: a total weight of c means ``offset + unit * c``.

    Args:
        unit: a number, or one per instance.
        offset: what the lightest options of required groups weigh, with the same types and shapes.
        exact: whether the integers accept the same selections as the real numbers.
        optimistic: the constraint that is rounded in the other direction.
    """

    unit: Any
    offset: Any
    exact: bool
    optimistic: Any

    def __init__(self, unit: Any = 1, offset: Any = 0, *, exact: bool = True, optimistic: Any = None) -> None:
        self._keep(unit=_frozen(unit), offset=_frozen(offset), exact=exact, optimistic=optimistic)

    def budgets(self, largest: int) -> np.ndarray:
        """What total weights 0..largest mean, (*batch, largest + 1)."""
        unit, offset, count = (
            np.asarray(self.unit)[..., None],
            np.asarray(self.offset)[..., None],
            np.arange(largest + 1),
        )
        found = _decimals(np.append(unit, offset).astype(np.float64)) if self.exact else None
        if found is None or float(found[0].max()) * (largest + 1) >= 2**53:
            return offset + unit * count
        numbers, denominator = found  # 3 * 0.1 is 0.3 then
        units, offsets = numbers[: unit.size].reshape(unit.shape), numbers[unit.size :].reshape(offset.shape)
        return (offsets + units * count) / float(denominator)


class UnreadableScale(Scale):
    """In place of a scale inside of a function that JAX compiles, which runs for other scales as well."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in Scale._parameters:
            raise ValueError(
                f"{name} cannot be read inside of a function that JAX compiles, which runs for constraints with other "
                "units too; read it outside, and pass it as an argument"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def unreadable(scale: Any) -> Any:
    """A scale, or one per budget, without its numbers."""
    return tuple(map(unreadable, scale)) if isinstance(scale, tuple) else None if scale is None else UnreadableScale()


class Integers(NamedTuple):
    """The arguments of a constraint."""

    weights: np.ndarray
    capacity: np.ndarray
    at_least: np.ndarray


class Converted(NamedTuple):
    integers: Integers
    unit: Any
    offset: Any
    optimistic: Integers | None  # None if exact


class _Reals(NamedTuple):
    """Weights (..., groups, options), and limits that broadcast to the batch."""

    weights: np.ndarray
    capacity: np.ndarray
    at_least: np.ndarray
    optional: bool

    @property
    def floats(self) -> _Reals:
        weights, capacity, at_least = (x.astype(np.float64, copy=False) for x in self[:3])
        return _Reals(weights, capacity, at_least, self.optional)

    def lightest(self, weights: np.ndarray) -> Any:
        return 0 * weights[..., 0] if self.optional else weights.min(-1)


def convert(weights: Any, capacity: Any, at_least: Any, resolution: Any, optional: bool, per_item: bool) -> Converted:
    """Weights (*batch, n) if ``per_item``, else (*batch, groups, options), and limits, as integers."""
    if backends.is_compiling():
        raise TypeError(
            "from_real looks at values, and torch.compile has none; call it outside of the function that is compiled, "
            "and pass the constraint to that function"
        )
    weights = _reals("weights", weights, "for an item or option that is not there, give any weight and a score of -inf")
    if weights.ndim < (1 if per_item else 2) or (not per_item and weights.shape[-1] == 0):
        shapes = "one entry per item, (*batch, n)" if per_item else "the shape (groups, options), or a batch of it"
        raise ValueError(
            f"weights must have {shapes}; got shape {weights.shape}; for equal weights use np.broadcast_to: the unit "
            "depends on how many there are"
        )
    weights = weights[..., None] if per_item else weights
    capacity = _reals("capacity", capacity, "for no limit, give the sum of the weights")
    at_least = _reals("at_least", at_least, "for no lower limit, give 0")
    try:
        np.broadcast_shapes(weights.shape[:-2], capacity.shape, at_least.shape)
    except ValueError:
        raise ValueError(
            f"capacity of shape {capacity.shape}, at_least of shape {at_least.shape} and weights of batch shape "
            f"{weights.shape[:-2]} do not broadcast; give each one entry per instance, or one in all"
        ) from None
    reals = _Reals(weights, capacity, at_least, optional)
    resolution = _checked_resolution(resolution, weights.shape[-2])
    converted = _exactly(reals, resolution) or _rounded(reals, resolution)
    if not per_item:
        return converted
    one, other = converted.integers, converted.optimistic
    return converted._replace(
        integers=one._replace(weights=one.weights[..., 0]),
        optimistic=None if other is None else other._replace(weights=other.weights[..., 0]),
    )


def _checked_resolution(resolution: Any, groups: int) -> int:
    if resolution is None:
        return max(LEAST_RESOLUTION, PER_GROUP * groups)
    if isinstance(resolution, bool) or not isinstance(resolution, (int, np.integer)):
        raise TypeError(f"resolution must be an integer, the number of units, or None; got {resolution!r}")
    if not 1 <= resolution < 2**53:
        raise ValueError(f"resolution must be at least 1 and below 2**53, got {resolution}; for example 10_000")
    return int(resolution)


# A unit that divides every weight


def _exactly(reals: _Reals, resolution: int) -> Converted | None:
    """None if there is no unit in which the capacity has at most so many units."""
    weights, capacity, at_least, _ = reals
    likely = reals.floats
    with np.errstate(over="ignore"):
        room = np.minimum(likely.capacity, likely.weights.max(-1, initial=0).sum(-1))
        room = (room - likely.lightest(likely.weights).sum(-1)).max(initial=0)
    if weights.size > _LONG // 100:  # the unit of all divides that of some
        some = weights.reshape(-1, weights.shape[-1])[:64]
        if not _few(some, reals, room, resolution):
            return None
    found = _few(weights, reals, room, resolution)
    if found is None:
        return None
    numbers, unit, denominator = found
    lightest, kept = reals.lightest(numbers), numbers.dtype
    offset, excess = lightest.sum(-1), (numbers - lightest[..., None]) // unit
    limit = (_in_parts(capacity, denominator, floor, kept) - offset) // unit
    least = -((offset - _in_parts(at_least, denominator, ceil, kept)) // unit)
    units = np.asarray(np.minimum(limit, excess.max(-1, initial=0).sum(-1), dtype=kept), kept)
    least = np.asarray(np.maximum(least, 0, dtype=kept), kept)
    if units.min(initial=0) < 0 or units.max(initial=0) > resolution:
        return None
    size = float(Fraction(unit, denominator))
    if np.any(least > units):
        _raise_too_much(likely, least > units, f"all weights are multiples of {size:g}")
    integers = (np.asarray(np.minimum(x, 2**53, dtype=kept), np.int64) for x in (excess, units, least))
    true_offset = np.asarray(offset / (denominator if kept.kind == "O" else float(denominator)), np.float64)
    return Converted(Integers(*integers), size, 0.0 if reals.optional else true_offset, None)


def _few(weights: np.ndarray, reals: _Reals, room: float, resolution: int) -> tuple[np.ndarray, int, int] | None:
    """Weights as integers over a denominator, the largest number that divides what counts of them, and the
    denominator; None if the room has surely more units than the resolution."""
    found = _decimals(weights)
    if found is None or float(found[0].max(initial=0)) * weights.shape[-2] >= _LARGE:
        if weights.size > _LONG:
            return None
        found = _long_decimals(weights)
    numbers, denominator = found
    unit = int(np.gcd.reduce((numbers - reals.lightest(numbers)[..., None]).ravel())) or 1
    if room > 1.001 * resolution * float(Fraction(unit, denominator)):
        return None
    return numbers, unit, denominator


def _decimals(x: np.ndarray) -> tuple[np.ndarray, int] | None:
    """x as integers over a power of ten, if that is how it would be printed; None if it has many digits."""
    if x.dtype.kind in "iu":
        return (x.astype(np.int64), 1) if x.max(initial=0) < _LARGE else None
    places, limit = 0, 10.0 ** np.finfo(x.dtype).precision  # so many digits, and no fewer, tell all numbers apart
    for part in (x.ravel()[:64], x):
        while True:
            numbers = np.rint(part.astype(np.float64) * 10.0**places)
            if numbers.max(initial=0) >= limit or places > 22:  # 10**22 is the last that floats hold
                return None
            if np.array_equal((numbers / 10.0**places).astype(x.dtype), part):
                break
            places += 1
    return numbers.astype(np.int64), 10**places


def _long_decimals(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The same for any numbers, one by one, in integers of any length."""
    exact = [Fraction(str(number)) for number in x.ravel()]
    denominator = lcm(*(number.denominator for number in exact))
    numbers = np.empty(x.size, object)
    numbers[:] = [int(number * denominator) for number in exact]
    return numbers.reshape(x.shape), denominator


def _in_parts(x: np.ndarray, denominator: int, rounded: Callable[[Fraction], int], dtype: np.dtype) -> np.ndarray:
    """x, as it would be printed, in parts of one. What does not fit into the type is above every weight."""
    numbers = [rounded(Fraction(str(number)) * denominator) for number in x.ravel()]
    if dtype.kind == "i":
        numbers = [min(number, _LARGE) for number in numbers]
    return np.array(numbers, dtype).reshape(x.shape)


# Rounding


def _rounded(reals: _Reals, resolution: int) -> Converted:
    """Weights up, and down for the optimistic constraint. ``margin`` is the relative error of a sum of floats in any
    order, and of the steps below; it is on the safe side everywhere."""
    weights, capacity, at_least, optional = reals.floats
    groups, precision = weights.shape[-2], np.finfo(reals.weights.dtype if reals.weights.dtype.kind == "f" else float)
    margin = groups * min(float(precision.eps), 2.0**-23) + (groups + 16) * 2.0**-52
    more, less = 1 + margin, 1 - margin
    with np.errstate(over="ignore", under="ignore"):
        lightest = reals.lightest(weights)
        offset, total = lightest.sum(-1), weights.max(-1, initial=0).sum(-1)
        excess = weights - lightest[..., None]
        doubtful = offset * more > capacity  # whether the lightest options fit
        if np.any(doubtful):
            _check_lightest(reals, lightest, capacity, doubtful)
        all_fit = total * more <= capacity
        room = np.where(offset > 0, capacity * less - offset * more, capacity)
        room = np.where(all_fit, total - offset, np.maximum(room, 0))
        unit = room / resolution
        unit = np.where(unit * resolution > room, np.nextafter(unit, 0), unit)
        units = np.where(unit > 0, resolution, 0)  # none if the room is nothing but the error of a sum
        unit = np.where(unit > 0, unit, np.where(capacity > 0, margin * capacity, 1.0))
        in_units = excess / unit[..., None, None]

        up = np.minimum(np.ceil(in_units * more), resolution + 1)
        heaviest = up.max(-1, initial=0).sum(-1)
        limit = np.where(all_fit, heaviest, np.minimum(units, heaviest))
        overstated = _sum_of_largest(up - in_units, up <= limit[..., None, None])
        error = margin * (resolution + groups)
        needed = at_least * more - offset * less
        least = np.where(needed > 0, np.ceil(needed * more / unit + overstated + error), 0) * (at_least > 0)
        if np.any(least > limit):
            why = f"in {resolution:,} units, rounding overstates weights by up to {overstated.max():.3g} of them; "
            _raise_too_much(reals.floats, least > limit, why + "give a larger resolution, or lower at_least", "surely ")

        down = np.floor(in_units * less)
        heaviest = down.max(-1, initial=0).sum(-1)
        most = np.where(all_fit, heaviest, np.floor((capacity * more - offset * less) * more / unit))
        most = np.minimum(np.minimum(most, heaviest), 2.0**53)
        down = np.minimum(down, most[..., None, None] + 1)
        understated = _sum_of_largest(in_units - down, down <= most[..., None, None])
        needed = (at_least * less - offset * more) * less / unit - understated - error
        fewest = np.minimum(np.maximum(np.ceil(needed), 0), most) * (at_least > 0)
    safe, optimistic = (
        Integers(*(np.asarray(x).astype(np.int64) for x in numbers))
        for numbers in ((up, limit, least), (down, most, fewest))
    )
    return Converted(safe, unit, 0.0 if optional else offset, optimistic)


def _check_lightest(reals: _Reals, lightest: np.ndarray, capacity: np.ndarray, doubtful: np.ndarray) -> None:
    """Raises unless floats add up to at most the capacity, whatever the order of addition."""
    rows, needed = np.broadcast_to(lightest, (*doubtful.shape, lightest.shape[-1])), np.zeros(doubtful.shape)
    is_narrow = reals.weights.dtype.kind == "f" and reals.weights.dtype.itemsize < 8
    for index in map(tuple, np.argwhere(doubtful)):
        needed[index] = _largest_sum(rows[index], np.float32 if is_narrow else np.float64)
    if np.any(needed > capacity):
        _raise_too_light(reals.floats, needed > capacity, needed)


def _largest_sum(numbers: np.ndarray, dtype: Any) -> float:
    """A bound of the sum of floats, computed in that type or a wider one, in any order."""
    parts, bits = [Fraction(float(x)) for x in numbers if x > 0], np.finfo(dtype).nmant + 1
    if len(parts) == 2:  # there is one order
        one, other = numbers[numbers > 0]
        return max(float(one + other), float(dtype(one) + dtype(other)))
    exact = sum(parts, Fraction(0))
    if exact * max((x.denominator for x in parts), default=1) > 2**bits:  # else no sum of them is rounded
        exact *= (1 + Fraction(1, 2**bits)) ** (len(parts) - 1)
    largest = float(exact) if exact < np.finfo(float).max else np.inf
    return largest if largest >= exact else float(np.nextafter(largest, np.inf))


def _sum_of_largest(by: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """The most that a selection, one option per group, can sum up to."""
    return np.where(fits, by, 0).max(-1, initial=0).sum(-1)


# Arguments


def _reals(name: str, value: Any, remedy: str) -> np.ndarray:
    """A non-negative array of integers or floats."""
    backend = backends.backend_of(value)
    if backend is not None and backend.requires_grad(value):
        raise ValueError(f"{name} requires a gradient, and selections have none for it; pass {name}.detach()")
    value = backends.plain(name, value)
    try:
        array = backends.numbers(value)
    except Exception as error:
        raise TypeError(f"{name} must be numbers with values to look at, got {type(value).__name__}: {error}") from None
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be numbers with values to look at, and is traced by JAX; call from_real outside of the "
            "function that is compiled, and pass the constraint to that function"
        )
    if array.dtype.kind == "O" and all(isinstance(number, (Rational, Decimal)) for number in array.ravel()):
        array = array.astype(np.float64)
    elif array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be real numbers, got {array.dtype} from {type(value).__name__}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {offender(array, ~np.isfinite(array))}; {remedy}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {offender(array, array < 0)}; {_WHERE_NEGATIVE[name]}")
    return array


_WHERE_NEGATIVE = {
    "weights": "a weight says how much of the capacity an item takes; of required groups, the same number may be added "
    "to all options and to the capacity",
    "capacity": "with a capacity of 0 only items without weight are picked",
    "at_least": "0 means that there is no least weight",
}


def _raise_too_light(reals: _Reals, bad: np.ndarray, needed: np.ndarray) -> None:
    capacity, least = np.broadcast_to(reals.capacity, bad.shape), float(needed[bad][0])
    is_near = capacity[bad][0] > (1 - 1e-5) * least
    total = f"{least!r} in some order of addition" if is_near else f"{least:g}"
    raise ValueError(
        f"capacity must not be below the sum of the lightest options, {total}; got {offender(capacity, bad)}; raise "
        "it, or say optional=True if a group may stay without any option"
    )


def _raise_too_much(reals: _Reals, bad: np.ndarray, why: str, surely: str = "") -> None:
    heaviest = reals.weights.max(-1, initial=0).sum(-1)
    at_least, capacity, heaviest = (np.broadcast_to(x, bad.shape) for x in (reals.at_least, reals.capacity, heaviest))
    least, most, total = at_least[bad][0], capacity[bad][0], heaviest[bad][0]
    if least > min(most, total):
        raise ValueError(
            f"at_least must not be above the capacity, {most:g}, nor above the heaviest selection, {total:g}; got "
            f"{offender(at_least, bad, 'g')}; lower at_least"
        )
    raise ValueError(f"no selection {surely}weighs from {least:g} to {most:g}: {why}")


def offender(array: np.ndarray, bad: np.ndarray, form: str = "") -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{array[index]:{form}}" + (f" at index {index if len(index) > 1 else index[0]}" if index else "")


def _frozen(x: Any) -> Any:
    """A number, or an array that nobody can write to."""
    if np.ndim(x) == 0:
        return x if isinstance(x, int) else float(x)
    return read_only(np.asarray(x, np.float64))
