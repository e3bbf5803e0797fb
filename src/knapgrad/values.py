"""Constraints and regularizers are values: equal if they were made from equal arguments, and never changed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from knapgrad import backends

_SHOWN = 32  # a repr lists an array of up to so many numbers


class Aside:
    """A static part that no result depends on. JAX takes all of them for equal, so that another one compiles nothing
    again; in what it compiles they are hidden."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Aside) and (self.content is None) == (other.content is None)

    def __hash__(self) -> int:
        return hash(self.content is None)


class Value:
    """An object that is defined by its arguments: a subclass keeps every argument of ``__init__`` under its name."""

    _parameters: ClassVar[dict[str, inspect.Parameter]]
    _is_pytree: ClassVar[bool] = False
    _static: dict[str, Any] | None = None  # of one that JAX put together
    _is_complete = True
    _placed: Mapping[str, Any] = MappingProxyType({})  # its arrays, where JAX has them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
        cls._is_pytree = False

    def __new__(cls, *_: Any, **__: Any) -> Any:
        if not backends.is_compiling() and not cls._is_pytree and "jax" in sys.modules:
            register(cls)
        return super().__new__(cls)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays, and what else it is made from, both by name, for JAX."""
        arguments, static = self.arguments, self._static
        if static is None or (self._is_complete and self._has_known_numbers()):
            static = self._fixed_parts()
        return {name: self._placed.get(name, x) for name, x in arguments.items() if name not in static}, static

    def _fixed_parts(self) -> dict[str, Any]:
        """What is no array, by name, and what follows from numbers that are known."""
        return {}

    def _has_known_numbers(self) -> bool:
        """Whether its numbers can be looked at."""
        return all(backends.unchanging(x) is not None for x in self.arguments.values() if backends.backend_of(x))

    @classmethod
    def _assembled(cls, leaves: dict[str, Any], static: dict[str, Any]) -> Any:
        """The reverse, without any check."""
        value = cls.__new__(cls)
        fixed = {name: x.content if isinstance(x, Aside) else x for name, x in static.items()}
        value._keep(**leaves, **fixed, _static=static, _is_complete=False)
        return value

    def _complete(self) -> None:
        """Checks one that JAX put together, as far as its values are known, and works out what follows from them."""
        if not self._is_complete:
            given = self.arguments
            self.__init__(**given)  # type: ignore[misc]
            placed = {name: x for name, x in given.items() if backends.backend_of(x) and not isinstance(x, np.ndarray)}
            self._keep(_is_complete=True, _placed=placed)

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is missing: one that JAX put together is completed when it is first used."""
        if name.startswith("__") or self._is_complete:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._complete()
        return getattr(self, name)

    def _keep(self, **attributes: Any) -> None:
        """Sets attributes, which cannot be set otherwise."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        raise AttributeError(f"{name} cannot be set: a {kind} does not change, others may hold it; make a new {kind}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was made from, by name: ``type(x)(**x.arguments) == x``."""
        return {name: getattr(self, name) for name in self._parameters}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        return type(self) is type(other) and self._compared() == other._compared()

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._keep(_hash=hash((type(self), self._compared())))
        return self.__dict__["_hash"]

    def _compared(self) -> tuple[Any, ...]:
        with suppress(TypeError, ValueError):  # what is no valid value is compared as it is
            self._complete()
        return tuple(map(_comparable, self.arguments.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.arguments)

    def __repr__(self) -> str:
        shown = {name: _shown(x) for name, x in self.arguments.items()}
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and shown[name] == repr(parameter.default):
                del shown[name]
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def frozen(x: np.ndarray) -> np.ndarray:
    """A read-only copy, to be shown: kernels read another one, so that nothing breaks if somebody makes it writeable.
    (torch.compile does, for a moment.)"""
    copy = np.array(x)
    copy.flags.writeable = False
    return copy


def _made_again(cls: type[Value], arguments: dict[str, Any]) -> Value:
    return cls(**arguments)


def _comparable(x: Any) -> Any:
    """An array by its numbers; a tensor, whose numbers change, by itself."""
    if isinstance(x, tuple):
        return tuple(map(_comparable, x))
    numbers = backends.unchanging(x)
    if numbers is not None:
        return numbers.shape, numbers.dtype.str, numbers.tobytes()
    return x if x is None or isinstance(x, (int, float, Value)) else id(x)


def _shown(x: Any) -> str:
    if isinstance(x, (np.ndarray, np.integer)):
        return repr(x.tolist()) if x.size <= _SHOWN else f"<{x.dtype} of shape {x.shape}>"
    return repr(x)


def register(cls: type[Value]) -> None:
    """Makes a class a pytree of JAX, once."""
    cls._is_pytree = True
    with suppress(ImportError):  # an older version of JAX: that is said when it is used
        from knapgrad.jax import pytrees

        pytrees.register(cls)
