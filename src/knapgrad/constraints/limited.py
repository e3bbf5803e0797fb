"""What constraints on one total share: its limits, as arguments and as kernels take them."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from knapgrad import backends
from knapgrad.arguments import (
    LARGEST_TRACED,
    check_broadcast,
    integers,
    is_exact,
    minus_one_where_invalid,
    most_of,
    narrow,
    slack_of,
)
from knapgrad.constraints.base import Constraint, Frontier
from knapgrad.lattice import Lattice, at_most, largest_total, lattice_of, total_of, valid_where
from knapgrad.values import read_only


class Numbers(NamedTuple):
    """The arguments as kernels take them: arrays of their own, or traced ones."""

    weights: Any  # as they were given
    moves: Any  # (..., n) or, if all groups have the same, of one of them
    capacity: Any  # -1 where a traced argument turns out to be invalid
    slack: Any  # how much of it may stay unused; None if all of it may
    lightest: Any  # (..., groups) or (..., 1): what each uses in any case, and moves are without; None if nothing is
    bound: Any  # of the capacity, as an array: torch.compile makes a new graph for each new number


class Widths(NamedTuple):
    """What is known of a table whose arrays are traced."""

    most: int | None  # how far the capacity goes
    lightest: int  # the least of those in Numbers
    total: int | None  # the largest sum of moves

    def bound(self, repeats: int) -> int | None:
        bounds = [] if self.most is None else [max(self.most - repeats * self.lightest, 0)]
        return min(bounds + ([] if self.total is None else [repeats * self.total]), default=None)


def _used(lightest: Any, repeats: int) -> Any:
    """The sum of the lightest options of all groups, as integers of 64 bits."""
    if repeats != 1:
        backend = cast(backends.Backend, backends.backend_of(lightest))
        lightest = backend.broadcast_to(lightest, (*lightest.shape[:-1], repeats))
    return total_of(lightest)


class Limited(Constraint):
    """A constraint on a total, of weights or of picked items: at most a limit, and at least another.

    A subclass checks and keeps the arguments that its weights follow from, and calls ``_keep_limits`` with them.
    """

    total_name: ClassVar[str] = "total weight"
    item_name: ClassVar[str] = "item"
    at_least: Any
    _columns: int = 1  # how many items of the kernels a group is; an item is a group of its own
    _options: int = 0  # as in a lattice
    _counts: ClassVar[bool] = False  # items, which weigh 1, so that a limit above their number is not valid
    _numbers: Numbers
    _is_known: bool  # whether the weights were given as numbers, which torch.compile traces too
    _fixed: Lattice | None  # None if groups are repeated
    _lattices: dict[int, Lattice]  # then, by the number of groups
    _frontier: Frontier

    def _keep_limits(
        self, weights: Any, limit: Any, at_least: Any, max_capacity: int | None, *, is_known: bool = False,
        moves: Any = None, lightest: Any = None, is_repeated: bool = False,
    ) -> None:  # fmt: skip
        """Checks the limits, and keeps them as arguments and as kernels take them.

        Args:
            weights: integers, as :func:`knapgrad.arguments.integers` makes them.
            limit, at_least: the largest and the least total; None for the same.
            max_capacity: an upper bound of the limit, or None.
            is_known: ``backends.has_numbers`` of the weights.
            moves, lightest: see Numbers; by default all of the weights, and nothing.
            is_repeated: whether these are of one group, and all others have the same.
        """
        if weights.ndim == 0:
            raise ValueError(
                f"weights must have one entry per {self.item_name}, got a single number; for equal weights use "
                "np.full(n, weight)"
            )
        name, widths = self.limit_name, self._widths
        capacity = integers(name, limit, f"the largest {self.total_name}")
        most, largest = most_of(name, capacity, limit, max_capacity), max_capacity  # that a traced one may be
        if widths is not None:
            most, largest = (widths.most if x is None else x for x in (most, largest))
        slack: Any = np.zeros((), np.int64)
        exactly: bool | None = True
        if at_least is not None:
            is_free = isinstance(at_least, int) and at_least == 0
            at_least = integers("at_least", at_least, f"the least {self.total_name}")
            if not (isinstance(capacity, np.ndarray) and isinstance(at_least, np.ndarray)):
                capacity, at_least = narrow(capacity), narrow(at_least)
            slack = None if is_free else slack_of(name, capacity, at_least)
            exactly = is_exact(slack)
        arguments = {name: read_only(capacity), "at_least": read_only(at_least), "max_capacity": max_capacity}
        capacity = minus_one_where_invalid(capacity, largest, at_least, weights, self.event_dims)
        bound = None if most is None else backends.open_number(most)
        numbers = Numbers(weights, weights if moves is None else moves, capacity, slack, lightest, bound)
        frontier = Frontier((most,), exactly)
        self._keep(**arguments, _numbers=numbers, _is_known=is_known, _frontier=frontier, _lattices={}, _fixed=None)
        if not is_repeated:
            self._keep(_fixed=self._lattice(1))

    def check(self, shape: tuple[int, ...]) -> None:
        batch, numbers = shape[: len(shape) - self.event_dims], self._numbers
        count = numbers.weights.shape[-1]
        if count != shape[-1] and not self._counts:
            raise ValueError(
                f"weights must have one entry per {self.item_name}: got {count} for theta of shape {tuple(shape)}, "
                f"which has {shape[-1]} {self.item_name}s"
            )
        check_broadcast("weights", numbers.weights.shape, shape, "theta")
        check_broadcast(self.limit_name, numbers.capacity.shape, batch, "the batch shape of theta")
        least = numbers.slack if backends.is_compiling() else self.at_least
        if least is not None:
            check_broadcast("at_least", least.shape, batch, "the batch shape of theta")

    def lattice(self, n: int) -> Lattice:
        if self._fixed is not None:
            return self._fixed
        groups = n // self._columns
        if backends.is_compiling():
            return self._lattice(groups)
        if groups not in self._lattices:
            lattice = self._lattice(groups)
            if not isinstance(lattice.capacity, np.ndarray):
                return lattice  # traced
            self._lattices[groups] = lattice
        return self._lattices[groups]

    def _lattice(self, repeats: int) -> Lattice:
        numbers, widths = self._numbers, self._widths
        if backends.is_compiling():  # tensors, whose numbers are not looked at
            of = backends.load("torch").integers
            numbers = Numbers(*(None if x is None else of(x) for x in numbers))
        _, moves, capacity, slack, lightest, bound = numbers
        known, backend = isinstance(moves, np.ndarray), cast(backends.Backend, backends.backend_of(moves))
        if repeats != 1:
            rows, shape = moves[..., None, :], (*moves.shape[:-1], repeats, moves.shape[-1])
            rows = rows.repeat(repeats, -2) if known else backend.broadcast_to(rows, shape)
            moves = rows.reshape((*shape[:-2], repeats * shape[-1]))
        if self._counts and not isinstance(capacity, np.ndarray):
            capacity = valid_where(capacity <= repeats, capacity)
        if lightest is not None:
            used = _used(lightest, repeats)
            like = moves if isinstance(capacity, np.ndarray) else capacity
            backend = cast(backends.Backend, backends.backend_of(like))
            with backend.exact():
                rest = capacity - used
                capacity = backend.as_type(valid_where((capacity >= 0) & (rest >= 0), rest), like)
            if isinstance(capacity, np.ndarray) and (capacity < 0).any():
                slack = np.where(capacity < 0, -1, capacity if slack is None else slack)
                capacity = np.asarray(np.maximum(capacity, 0))
            if known and bound is not None:
                bound = np.maximum(bound - used.min(initial=int(bound)), 0)
        if not known:
            bound = bound if widths is None else widths.bound(repeats)
            bound = largest_total(moves, self._options).max() if bound is None and self._is_known else bound
        heaviest = 1 if self._counts else None
        return lattice_of(moves, capacity, slack, bound, self._options, heaviest, self._counts)

    def lightest(self, event: tuple[int, ...]) -> Any:
        lightest = self._numbers.lightest
        if lightest is None:
            return 0
        used, backend = _used(lightest, event[0] if self._fixed is None else 1), backends.backend_of(lightest)
        if backend is None or isinstance(used, np.ndarray):
            return used
        with backend.exact():
            return backend.as_type(at_most(used, LARGEST_TRACED), lightest)

    def widths(self) -> Widths:
        most, numbers = self._frontier.most[0], self._numbers
        if self._fixed is not None:
            return Widths(most, 0, self._fixed.reach)
        if not isinstance(numbers.moves, np.ndarray):
            return self._widths or Widths(most, 0, None)
        lightest = 0 if numbers.lightest is None else int(numbers.lightest.min(initial=2**60))
        return Widths(most, lightest, int(largest_total(numbers.moves, self._options).max(initial=0)))

    def frontier_of(self, n: int) -> Frontier:
        return self._frontier

    @property
    def widest(self) -> Any:
        capacity, ((most,), exactly) = self._numbers.capacity, self._frontier
        if not isinstance(capacity, np.ndarray) or capacity.ndim == 0 or exactly is None:
            return self
        if "_widest" not in self.__dict__:
            limits = {self.limit_name: most, "at_least": most if exactly else 0}
            self._keep(_widest=type(self)(**{**self.arguments, **limits}))
        return self.__dict__["_widest"]
