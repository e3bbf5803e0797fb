"""All that a kernel knows about a constraint.

A selection is a path through states (i, c), where c is the capacity that is left for items 1..i. It starts at
(n, capacity), picking item i lowers c by its weight, and the path must end at some (0, c) with ``0 <= c <= slack``. A
knapsack may leave all of its capacity unused, top-k none of it; a knapsack with a least weight is between the two.

With options, items come in choices of so many, and a step from (k, c) to (k - 1, c - weight) picks one option of
choice k. Staying without any is an option of weight 0, whose score is 0.

With several budgets, a state is a box of capacities, written as one number: the digits of a number system whose bases
are the sizes of the box. Weights are written alike, so a pick is a subtraction still, if no digit has to borrow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from knapgrad import backends

INFEASIBLE = -1e300  # finite, so that differences of infeasible values are numbers; any theta vanishes beside it
LARGEST = 1e290  # of abs(theta) / gamma: sums over all items stay far from that
FEASIBLE = 0.5 * INFEASIBLE  # a value below it has an infeasible state or a masked item in it
_LARGEST_TRACED = 2**31 - 2  # JAX has integers of 32 bits; no table has as many columns


@dataclass(frozen=True, eq=False)
class Lattice:
    """The states of a batch of instances, and the moves between them.

    Attributes:
        weights: integers (..., n), broadcastable to theta: how far a pick moves down.
        capacity: integers, broadcastable to the batch: the state at which the path of a selection starts.
        slack: integers, broadcastable to the batch: how much of the capacity may stay unused; below 0, nothing is
            feasible. None if all of the capacity may stay unused, in every instance.
        reach: an upper bound of all capacities; tables have ``reach + 1`` columns.
        heaviest: an upper bound of the weights; items that never fit may count as ``reach + 1``.
        options: how many items in a row make one choice, of which exactly one is picked; 0 if each is picked or not.
        sizes: reach, heaviest and box once more, as an array: torch.compile, which makes a new graph for each new
            number, passes arrays. There the numbers may be None, and the box empty.
        counts: whether all weights are known to be 1, so that the capacity is a number of items.
        box: the number of capacities of each budget, if there are several; states are numbered in the order of an
            array of that shape. Slack is None then, and an item that never fits weighs ``reach + 1``.
    """

    weights: Any
    capacity: Any
    slack: Any
    reach: Any
    heaviest: Any
    options: int = 0
    sizes: Any = None
    box: tuple[int, ...] = ()
    counts: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what kernels have worked out about it

    def replace(self, **changes: Any) -> Lattice:
        fields = {"weights": self.weights, "capacity": self.capacity, "slack": self.slack}
        numbers = {"reach": self.reach, "heaviest": self.heaviest, "options": self.options, "box": self.box}
        numbers["counts"] = self.counts
        return Lattice(**{**fields, **numbers, **changes})

    @property
    def resolved(self) -> Lattice:
        """With its numbers, for kernels."""
        if self.reach is not None:
            return self
        reach, heaviest, *box = self.sizes.tolist()
        return self.replace(reach=reach, heaviest=heaviest, box=tuple(box))


def lattice_of(
    weights: Any, capacity: Any, slack: Any, bound: Any, options: int = 0, heaviest: int | None = None,
    counts: bool = False,
) -> Lattice:  # fmt: skip
    """The lattice of NumPy arrays, or of arrays that JAX or torch.compile traces.

    A capacity above the total weight is cut to it, here and nowhere else, and the slack is reduced by the same amount.
    One that is traced is cut to the reach too, and is -1 where nothing is feasible. Limits are copied: torch.compile
    guards which arrays are the same.

    Args:
        weights: (..., n), as in the lattice, and so are the others.
        bound: of the capacity, a number or an array of one; None if it follows from what is known.
        heaviest: a bound of weights that are traced.
        counts: as in the lattice.
    """
    total = largest_total(weights, options) if isinstance(weights, np.ndarray) else None
    bounds = [] if total is None else [total.max(initial=0)]
    if bound is not None:
        bounds.append(bound)
    elif isinstance(capacity, np.ndarray):
        bounds.append(capacity.max(initial=0))
    if not bounds:
        raise ValueError(
            "weights and capacity are traced (by jax.jit or torch.compile), and a table must have a width when it is "
            "compiled; give max_capacity=..., an upper bound of the capacity"
        )
    reach = min(bounds)
    reach = int(reach) if isinstance(reach, (np.ndarray, np.integer)) else reach  # torch.compile has tensors
    if total is not None:
        heaviest = min(int(weights.max(initial=0)), reach + 1)
    if total is not None and isinstance(capacity, np.ndarray):
        given, capacity, slack = capacity, capacity.copy(), None if slack is None else slack.copy()
        if (given > total).any():
            capacity = np.asarray(np.minimum(given, total))
            slack = None if slack is None else np.asarray(slack - (given - capacity))
        sizes = np.array([reach, heaviest])
        return Lattice(weights, capacity, slack, reach, heaviest, options, sizes, counts=counts)
    most = min(reach, _LARGEST_TRACED) if isinstance(reach, int) else reach
    weights, given, capacity = at_most(weights * (weights > 0), most + 1), capacity, at_most(capacity, most)
    valid = capacity >= 0
    backend: Any = next(backends.backend_of(x) for x in (weights, capacity, slack) if not isinstance(x, np.ndarray))
    with backend.exact():
        total = largest_total(weights, options)
        if not (isinstance(total, np.ndarray) and isinstance(most, int) and total.min(initial=most) >= most):
            like, capacity = weights if isinstance(capacity, np.ndarray) else capacity, at_most(capacity, total)
            capacity = capacity if isinstance(capacity, np.ndarray) else backend.as_type(capacity, like)
    if slack is not None:
        slack = as_array(slack - (given - capacity))
        with backend.exact():
            valid = valid & (capacity - slack <= total)  # all items are not too light
    capacity = valid_where(valid, capacity)
    heaviest = reach + 1 if heaviest is None else heaviest
    return Lattice(weights, capacity, slack, reach, heaviest, options, counts=counts)


# In arithmetic that the arrays of every framework have.


def at_most(x: Any, limit: Any) -> Any:
    """The smaller one."""
    return as_array(x - (x - limit) * (x > limit))


def valid_where(is_valid: Any, capacity: Any) -> Any:
    """The capacity, and -1 where it is not valid."""
    return as_array((capacity + 1) * is_valid - 1)


def as_array(x: Any) -> Any:
    """Arithmetic of NumPy makes numbers of arrays without dimensions."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def moduli_of(box: tuple[int, ...]) -> list[int]:
    """Where a digit could borrow: the number of states of the last budget, of the last two, and so on."""
    return [prod(box[-k:]) for k in range(1, len(box))]


def fits(c: Any, weight: Any, box: tuple[int, ...]) -> Any:
    """Whether an item can be picked in state c, in arrays of any framework.

    >>> fits(np.arange(6), 4, box=(2, 3)).tolist()  # 1 of the first budget and 1 of the second
    [False, False, False, False, True, True]
    """
    inside = c >= weight
    for modulus in moduli_of(box):
        inside = inside & (c % modulus >= weight % modulus)
    return inside


def largest(x: Any) -> Any:
    """Of the last dimension. (In torch, max returns places as well.)"""
    return x.max(-1) if isinstance(x, np.ndarray) or not hasattr(x, "amax") else x.amax(-1)


def largest_total(weights: Any, options: int) -> Any:
    """The largest total weight per instance, as integers of 64 bits."""
    if options:
        weights = largest(weights.reshape((*weights.shape[:-1], weights.shape[-1] // options, options)))
    return total_of(weights)


def total_of(x: Any) -> Any:
    """Sums over the last axis, as integers of 64 bits in every framework; ``backend.exact()`` keeps them so in JAX.
    Where integers would overflow they are 2**62, which is above any capacity."""
    if isinstance(x, np.ndarray) and (backends.is_compiling() or int(x.max(initial=0)) * x.shape[-1] < 2**62):
        return as_array(x.sum(-1))
    backend: Any = backends.backend_of(x)
    with backend.exact():
        return backend.where(backend.sum_double(x) < 2.0**62, x.sum(-1), 2**62)


def tournament(options: int) -> np.ndarray:
    """How the options of a choice are compared: a balanced tree of decisions between two, children before parents.

    Rows (low, middle, high): options low..middle-1, which are skipped, against middle..high-1, which are picked.

    >>> tournament(3).tolist()
    [[1, 2, 3], [0, 1, 3]]
    """

    def nodes(low: int, high: int) -> list[tuple[int, int, int]]:
        if high - low < 2:
            return []
        middle = low + (high - low) // 2
        return [*nodes(low, middle), *nodes(middle, high), (low, middle, high)]

    return np.array(nodes(0, options), np.int64).reshape(-1, 3)
