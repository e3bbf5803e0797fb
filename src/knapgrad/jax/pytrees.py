"""Constraints and regularizers as pytrees: arrays are leaves, all else is static.

They may be arguments of jitted functions, be scanned and vmapped over, and be parts of models. Nothing is checked when
JAX puts one together, since its leaves may be anything; on first use it is, as far as its values are known.
"""

from __future__ import annotations

from typing import Any

import jax

from knapgrad import backends
from knapgrad.arguments import narrow
from knapgrad.real import Scale, unreadable
from knapgrad.values import Value


class NotCompared:
    """A static argument that no result depends on. JAX takes all of them for equal, so that another one compiles
    nothing again."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotCompared)

    def __hash__(self) -> int:
        return hash(NotCompared)


def _structure(value: Value) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The names of its leaves, and what is static. That of one that JAX put together stays; unless it was used since,
    and its numbers are known, which may be other ones."""
    made = value if value._structure is None else value.__dict__.get("_made")
    if made is None or (made is not value and any(isinstance(x, jax.core.Tracer) for x in made.arguments.values())):
        return value._structure
    if "_parts" not in made.__dict__:
        static: dict[str, Any] = {}
        for name, x in made.arguments.items():
            if made.is_default(name):
                static[name] = made._parameters[name].default
            elif not isinstance(x, float) and backends.backend_of(x) is None:
                is_scale = isinstance(x[0] if isinstance(x, tuple) and x else x, Scale)
                static[name] = NotCompared(x) if is_scale else x
        leaves = tuple(name for name in made._parameters if name not in static)
        made._keep(_parts=(leaves, (*static.items(), ("_widths", made.widths()))))
    return made.__dict__["_parts"]


def register(cls: type[Value]) -> None:
    """Makes a class known to JAX."""

    def flatten_with_keys(value: Value) -> tuple[Any, Any]:
        names, static = _structure(value)
        return [(jax.tree_util.GetAttrKey(name), narrow(getattr(value, name))) for name in names], (names, static)

    def flatten(value: Value) -> tuple[Any, Any]:
        names, static = _structure(value)
        return [narrow(getattr(value, name)) for name in names], (names, static)

    def unflatten(structure: Any, leaves: Any) -> Value:
        names, static = structure
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # what is compiled runs for other scales as well
            static = tuple(
                (name, NotCompared(unreadable(x.content)) if isinstance(x, NotCompared) else x) for name, x in static
            )
        value, parts = cls.__new__(cls), (*static, *zip(names, leaves))
        value._keep(**{name: x.content if isinstance(x, NotCompared) else x for name, x in parts})
        value._keep(_structure=(names, static))
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
