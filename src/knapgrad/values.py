"""Constraints and regularizers are values: equal if they were made from equal arguments, and never changed."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from knapgrad import backends
from knapgrad.forks import imported

_SHOWN = 32  # a repr lists an array of up to so many numbers


class Value:
    """An object that is defined by its arguments: a subclass keeps every argument of ``__init__`` under its name.

    JAX takes values apart and puts them together again, with anything in place of their arrays (see
    :mod:`knapgrad.jax.pytrees`). What it puts together has its arguments and nothing else, and is not checked;
    ``checked`` is the value that those arguments make.
    """

    _parameters: ClassVar[dict[str, inspect.Parameter]]
    _is_pytree: ClassVar[bool] = False
    _structure: Any = None  # of one that JAX put together
    _widths: Any = None  # of its tables, if arrays are traced now that were known when JAX took it apart

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
        cls._is_pytree = False

    def __new__(cls, *_: Any, **__: Any) -> Any:
        if not backends.is_compiling() and not cls._is_pytree and "jax" in sys.modules:
            register(cls)
        return super().__new__(cls)

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was made from, by name: ``type(x)(**x.arguments) == x``."""
        return {name: getattr(self, name) for name in self._parameters}

    @property
    def checked(self) -> Any:
        """The value itself. One that JAX put together is made again, with all checks."""
        if self._structure is None:
            return self
        if "_made" not in self.__dict__:
            made = type(self).__new__(type(self))
            made._keep(_widths=self._widths)
            made.__init__(**self.arguments)
            self._keep(_made=made)
        return self.__dict__["_made"]

    def widths(self) -> Any:
        """What is known of the widths of its tables and must not be forgotten when JAX traces its arrays."""
        return None

    def is_default(self, name: str) -> bool:
        """Whether an optional argument, which goes by its name, is what it is if it is not given."""
        parameter = self._parameters[name]
        return parameter.kind is parameter.KEYWORD_ONLY and _shown(getattr(self, name)) == repr(parameter.default)

    def _keep(self, **attributes: Any) -> None:
        """Sets attributes, which cannot be set otherwise."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        raise AttributeError(f"{name} cannot be set: a {kind} does not change, others may hold it; make a new {kind}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        return type(self) is type(other) and self._compared() == other._compared()

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._keep(_hash=hash((type(self), self._compared())))
        return self.__dict__["_hash"]

    def _compared(self) -> tuple[Any, ...]:
        value = self
        with suppress(TypeError, ValueError):  # what is no valid value is compared as it is
            value = self.checked
        return tuple(map(_comparable, value.arguments.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.arguments), ()

    def __repr__(self) -> str:
        shown = [f"{name}={_shown(x)}" for name, x in self.arguments.items() if not self.is_default(name)]
        return f"{type(self).__name__}({', '.join(shown)})"


def read_only(x: Any) -> Any:
    """An array as users see it: a copy that nobody can write to. Kernels read another one, so that nothing breaks if
    somebody makes it writeable. (torch.compile does, for a moment.) Anything else as it is."""
    if isinstance(x, np.ndarray):
        x = np.array(x)
        x.flags.writeable = False
    return x


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
        imported("knapgrad.jax.pytrees").register(cls)
