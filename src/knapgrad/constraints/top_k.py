"""A number of items: TopK."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.arguments import check_broadcast, integers, is_exact, largest_of, marked, shown, sizes_of, slack_of
from knapgrad.constraints.base import Constraint
from knapgrad.lattice import Lattice


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
