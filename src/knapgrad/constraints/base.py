"""What every constraint has: a check of shapes, `contains`, and its lattice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from knapgrad import backends
from knapgrad.arguments import is_exact
from knapgrad.lattice import Lattice, moduli_of
from knapgrad.values import Value

_REMEMBERED = 64, 1 << 14  # constraints, and their numbers at most


class Frontier(NamedTuple):
    """What the entries of a frontier are."""

    most: tuple[int | None, ...]  # the last capacity of each budget; None if it is traced
    exactly: bool | None  # whether all of a capacity must be used; None if a part of it, which one table cannot serve


class Constraint(Value, ABC):
    """A set of feasible selections. It is a value: it can be compared, hashed, pickled and copied, but not changed."""

    event_dims: ClassVar[int] = 1  # how many of the last dimensions of theta belong to one instance
    limit_name: ClassVar[str] = "capacity"  # of the argument that is the largest total
    max_capacity: int | None = None
    copies: dict[Any, Any]  # of its lattice on devices, kept by the backend of a framework
    _fitting: dict[Any, backends.Backend]  # types and shapes of theta that were checked

    def __new__(cls, *_: Any, **__: Any) -> Any:
        constraint = super().__new__(cls)
        constraint._keep(copies={}, _fitting={})
        return constraint

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the constraint fits a theta of that shape, (*batch, *event)."""

    @abstractmethod
    def lattice(self, n: int) -> Lattice:
        """What the kernels need to know, for n items: NumPy arrays, or arrays that JAX or torch.compile traces."""

    def frontier_of(self, n: int) -> Frontier:
        """What its frontier is, for n items."""
        lattice = self.lattice(n)
        return Frontier(tuple(side - 1 for side in lattice.box or (lattice.reach + 1,)), is_exact(lattice.slack))

    @property
    def widest(self) -> Any:
        """The same with the largest capacity for every instance: a frontier is of all capacities, whatever their
        batch."""
        return self

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
        y, constraint = backends.plain("y", y), self.checked
        backend = backends.check_array("y", y)
        constraint.check(y.shape)
        y = constraint.flat(backend, y, is_selection=True)
        lattice = backend.lattice(constraint, y)
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


def first_equal(constraint: Constraint, n: int, place: Any) -> Constraint:
    """The first constraint at a place that was equal to this one, so that what was worked out for it is found again.
    The constraint itself, if its numbers for n items are not known, are many, or would grow with a batch."""
    lattice = constraint.lattice(n)
    arrays = [x for x in (lattice.weights, lattice.capacity, lattice.slack) if x is not None]
    if not all(isinstance(x, np.ndarray) for x in arrays) or lattice.weights.ndim > 1:
        return constraint
    return constraint if sum(x.size for x in arrays) > _REMEMBERED[1] else _first_equal(constraint, place)


@lru_cache(maxsize=_REMEMBERED[0])
def _first_equal(constraint: Constraint, place: Any) -> Constraint:
    return constraint


def check_constraint(constraint: Any) -> Constraint:
    """The constraint, checked if JAX has put it together."""
    if not isinstance(constraint, Constraint):
        is_class = isinstance(constraint, type)
        given = f"{constraint.__name__} (a class: call it)" if is_class else type(constraint).__name__
        raise TypeError(
            f"constraint must be a knapgrad.TopK(k), knapgrad.Knapsack(weights, capacity) or another, got {given}"
        )
    return constraint.checked
