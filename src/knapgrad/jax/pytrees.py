"""Constraints and regularizers as pytrees: arrays are leaves, all else is static.

They may be arguments of jitted functions, be scanned and vmapped over, and be parts of models. Nothing is checked when
JAX puts one together, since its leaves may be anything; on first use it is, as far as its values are known.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from knapgrad.real import hidden
from knapgrad.values import Aside, Value

_LARGEST = 2**31 - 1  # JAX has integers of 32 bits unless it is told otherwise; tables have fewer columns


def _narrow(x: Any) -> Any:
    """Integers that JAX would wrap: a heavier item does not fit either, and a larger capacity is no limit."""
    if isinstance(x, np.ndarray) and x.dtype == np.int64 and x.max(initial=0) > _LARGEST:
        return np.asarray(np.minimum(x, _LARGEST))
    return x


def register(cls: type[Value]) -> None:
    """Makes a class known to JAX."""

    def flatten_with_keys(value: Value) -> tuple[Any, Any]:
        leaves, static = value._parts()
        keys = [(jax.tree_util.GetAttrKey(name), _narrow(x)) for name, x in leaves.items()]
        return keys, (tuple(leaves), tuple(static.items()))

    def flatten(value: Value) -> tuple[Any, Any]:
        leaves, static = value._parts()
        return list(map(_narrow, leaves.values())), (tuple(leaves), tuple(static.items()))

    def unflatten(structure: Any, leaves: Any) -> Value:
        names, static = structure
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # what is compiled runs for other scales as well
            static = [(name, Aside(hidden(x.content)) if isinstance(x, Aside) else x) for name, x in static]
        return cls._assembled(dict(zip(names, leaves)), dict(static))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
