"""A number of items: TopK."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.constraints.limited import Limited
from knapgrad.lattice import Lattice


class TopK(Limited):
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

    limit_name = "k"
    total_name = "number of items"
    _counts = True
    k: Any

    def __init__(self, k: Any, *, at_least: Any = None, max_capacity: int | None = None) -> None:
        self._keep_limits(np.ones(1, np.int64), k, at_least, max_capacity, is_known=True, is_repeated=True)

    def check(self, shape: tuple[int, ...]) -> None:
        n, k = shape[-1], self.k
        if not backends.is_compiling() and isinstance(k, np.ndarray) and k.max(initial=0) > n:
            raise ValueError(f"k must be in 0..n, got {k.max()} for n = {n} items; lower k, or add items")
        super().check(shape)

    def _lattice(self, repeats: int) -> Lattice:
        _, ones, k, slack, _, bound = self._numbers
        if backends.is_compiling() or not isinstance(k, np.ndarray):
            return super()._lattice(repeats)
        return Lattice(ones.repeat(repeats), k, slack, min(int(bound), repeats), min(repeats, 1), counts=True)
