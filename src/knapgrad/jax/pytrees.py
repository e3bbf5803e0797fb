"""Constraints and regularizers as pytrees: arrays are leaves, all else is static.

They may be arguments of jitted functions, be scanned and vmapped over, and be parts of models. Nothing is checked when
JAX puts one together, since its leaves may be anything; on first use it is, as far as its values are known.
"""

from __future__ import annotations

from typing import Any

import jax

from knapgrad.real import hidden
from knapgrad.values import Aside, Value


def register(cls: type[Value]) -> None:
    """Makes a class known to JAX."""

    def flatten_with_keys(value: Value) -> tuple[Any, Any]:
        leaves, static = value._parts()
        keys = [(jax.tree_util.GetAttrKey(name), x) for name, x in leaves.items()]
        return keys, (tuple(leaves), tuple(static.items()))

    def flatten(value: Value) -> tuple[Any, Any]:
        leaves, static = value._parts()
        return list(leaves.values()), (tuple(leaves), tuple(static.items()))

    def unflatten(structure: Any, leaves: Any) -> Value:
        names, static = structure
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # what is compiled runs for other scales as well
            static = [(name, Aside(hidden(x.content)) if isinstance(x, Aside) else x) for name, x in static]
        return cls._assembled(dict(zip(names, leaves)), dict(static))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
