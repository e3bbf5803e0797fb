"""Constraints and regularizers are values: equal if they were made from equal arguments, and never changed."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import numpy as np

from knapgrad import backends

_SHOWN = 32  # a repr lists an array of up to so many numbers


class Value:
    """An object that is defined by its arguments: a subclass keeps every argument of ``__init__`` under its name."""

    _parameters: ClassVar[dict[str, inspect.Parameter]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])

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
        return tuple(map(_comparable, self.arguments.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.arguments)

    def __repr__(self) -> str:
        shown = {name: _shown(x) for name, x in self.arguments.items()}
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and shown[name] == repr(parameter.default):
                del shown[name]
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def _made_again(cls: type[Value], arguments: dict[str, Any]) -> Value:
    return cls(**arguments)


def _comparable(x: Any) -> Any:
    """An array by its numbers; a tensor, whose numbers change, by itself."""
    numbers = backends.unchanging(x)
    if numbers is not None:
        return numbers.shape, numbers.dtype.str, numbers.tobytes()
    return x if x is None or isinstance(x, (int, float, Value)) else id(x)


def _shown(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return repr(x.tolist()) if x.size <= _SHOWN else f"<{x.dtype} of shape {x.shape}>"
    return repr(x)
