"""Shannon, Gini and 1.5-Tsallis: the scalar maths, written once for every backend.

Smoothing replaces ``max(pick, skip)`` by ``max_Omega(pick, skip) = max_q q pick + (1 - q) skip - Omega(q, 1 - q)``.
With ``delta = pick - skip`` and unit strength, all that a sweep needs of Omega is

======== ==================================================================================
value    what ``max_Omega`` adds to the larger branch; a function of ``abs(delta)``
prob     the maximising ``q``: the probability of picking
dprob    the derivative of ``prob``, as a function of ``q``; 0 where the decision is certain
======== ==================================================================================

The strength gamma never enters: ``max_{gamma Omega}(x) = gamma max_Omega(x / gamma)``, so kernels divide theta by it as
they read it.

A tangent sweep follows what each decision adds to a sum along the path: :func:`linear` for derivatives in a direction,
:func:`entropy` for the entropy. They return what is added on average, and the derivative of that by ``q``.

All these functions use NumPy under the name ``xp``, and only ``exp, log, log1p, sqrt, abs, where``: another backend
runs the same code with its own ``xp`` (:func:`rebind`). They branch by ``where``, since ``clip`` and ``minimum`` lose
NaN in some backends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np

from knapgrad import backends
from knapgrad.values import Value, read_only

xp: Any = np


class Regularizer(Value):
    """A smoothing of strength ``gamma > 0``.

    A larger gamma spreads the selection over more items; as gamma goes to 0 it hardens to :func:`knapgrad.solve`. It
    is a value: it can be compared, hashed, pickled and copied, but not changed. (Two with tensors are equal if they
    hold the same tensor.)

    Args:
        gamma: a number, or an array or tensor broadcastable to the batch of theta. Gradients flow into a tensor. To
            learn it, keep it positive: ``knapgrad.Gini(log_gamma.exp())`` in each step.
    """

    name: ClassVar[str]
    is_steep: ClassVar[bool] = True  # whether dprob changes so fast near q = 1 that it shows how q is rounded there
    gamma: Any
    _strength: Any = None  # gamma; a number as an array, see backends.open_number. None until it was checked
    _version: Any = None  # of a tensor, when it was checked

    def __init__(self, gamma: Any = 1.0) -> None:
        gamma = backends.plain("gamma", gamma)
        if isinstance(gamma, (list, tuple)):
            gamma = _listed(gamma)
        check_positive(gamma)
        gamma = read_only(gamma)
        if isinstance(gamma, (int, np.number)) or (isinstance(gamma, np.ndarray) and gamma.ndim == 0):
            gamma = float(gamma)
        if isinstance(gamma, float):
            self._keep(gamma=gamma, _strength=backends.open_number(gamma))
        else:
            self._keep(gamma=gamma, _strength=gamma, _version=backends.version(gamma))

    def check_again(self) -> None:
        """Checks a gamma that was written to since it was checked: a parameter changes in training."""
        version = backends.version(self.gamma)
        if version is not None and version != self._version:
            check_positive(self.gamma)
            self._keep(_version=version)

    @staticmethod
    def value(delta):
        raise NotImplementedError

    @staticmethod
    def prob(delta):
        raise NotImplementedError

    @staticmethod
    def dprob(q):
        raise NotImplementedError


class Shannon(Regularizer):
    """``Omega(q) = gamma sum q log q``: a softmax over all feasible subsets. Dense and smooth; the order of the items
    does not matter.

    Args:
        gamma: the strength, see :class:`Regularizer`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.relax(np.array([2.0, 1.0, 0.0]), kg.TopK(1), kg.Shannon()).round(3)
    array([0.665, 0.245, 0.09 ])
    """

    name = "shannon"
    is_steep = False

    @staticmethod
    def value(delta):
        return xp.log1p(xp.exp(-xp.abs(delta)))

    @staticmethod
    def prob(delta):
        small = xp.exp(-xp.abs(delta))
        large = 1.0 / (1.0 + small)
        return xp.where(delta > 0.0, large, small * large)

    @staticmethod
    def dprob(q):
        return q * (1.0 - q)


class Gini(Regularizer):
    """``Omega(q) = gamma/2 (sum q^2 - 1)``: sparse; a decision is certain once better by gamma.

    Args:
        gamma: the strength, see :class:`Regularizer`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.relax(np.array([2.0, 1.5, 0.0]), kg.TopK(1), kg.Gini())
    array([0.75, 0.25, 0.  ])
    """

    name = "gini"
    is_steep = False

    @staticmethod
    def value(delta):
        smaller = 0.5 * (1.0 - xp.abs(delta))
        smaller = xp.where(smaller < 0.0, 0.0, smaller)
        return smaller * smaller

    @staticmethod
    def prob(delta):
        q = 0.5 * (1.0 + delta)
        return xp.where(q < 0.0, 0.0, xp.where(q > 1.0, 1.0, q))

    @staticmethod
    def dprob(q):
        return xp.where(q * (1.0 - q) > 0.0, 0.5, 0.0 * q)


class Tsallis(Regularizer):
    """``Omega(q) = 4 gamma/3 (sum q^1.5 - 1)``: sparse and smooth; a decision is certain once better by 2 gamma.

    Args:
        gamma: the strength, see :class:`Regularizer`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.relax(np.array([2.0, 1.0, -2.0]), kg.TopK(1), kg.Tsallis()).round(3)
    array([0.831, 0.169, 0.   ])
    """

    name = "tsallis"

    # With s = min(|delta|/2, 1) and r = sqrt(2 - s^2): sqrt(q) - sqrt(1 - q) = +-s and sqrt(q) + sqrt(1 - q) = r.
    @staticmethod
    def value(delta):
        s = 0.5 * xp.abs(delta)
        s = xp.where(s > 1.0, 1.0, s)
        square = 2.0 - s * s
        return xp.where(s < 1.0, 4.0 / 3.0 - s - xp.sqrt(square) * square * (1.0 / 3.0), 0.0 * s)

    @staticmethod
    def prob(delta):
        s = 0.5 * xp.abs(delta)
        s = xp.where(s > 1.0, 1.0, s)
        root = 0.5 * (xp.sqrt(2.0 - s * s) - s)
        smaller = root * root
        return xp.where(delta > 0.0, 1.0 - smaller, smaller)

    @staticmethod
    def dprob(q):
        u = xp.sqrt(q * (1.0 - q))
        return u / xp.sqrt(1.0 + 2.0 * u)


class Hard(Regularizer):
    """``Omega = 0``, the exact maximum: the kernels of :func:`knapgrad.solve` use it. Ties are skipped."""

    name = "hard"

    @staticmethod
    def value(delta):
        return xp.where(delta > 0.0, 0.0, xp.where(delta < 0.0, 0.0, delta))

    @staticmethod
    def prob(delta):
        return xp.where(delta > 0.0, 1.0, xp.where(delta < 0.0, 0.0, delta))

    @staticmethod
    def dprob(q):
        return 0.0 * q


REGULARIZERS: dict[str, type[Regularizer]] = {cls.name: cls for cls in (Shannon, Gini, Tsallis)}


def linear(q, z):
    """A pick adds z."""
    return q * z, z


def entropy(q, z):
    """A decision adds its surprise, ``h(q) = -q log q - (1 - q) log(1 - q)`` on average."""
    spread = q * (1.0 - q)
    inside = xp.where(spread > 0.0, q, 0.5)
    pick, skip = xp.log(inside), xp.log(1.0 - inside)
    return xp.where(spread > 0.0, -q * pick - (1.0 - q) * skip, spread), xp.where(spread > 0.0, skip - pick, spread)


DIRECTIONS: dict[str, Callable[..., Any]] = {"linear": linear, "entropy": entropy}


def is_steep(name: str) -> bool:
    """Of the regularizer of that name."""
    return name != Hard.name and REGULARIZERS[name].is_steep


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """``value``, ``prob`` and ``dprob`` of the regularizer of that name, also of the hard one."""
    cls = Hard if name == Hard.name else REGULARIZERS[name]
    return {"value": cls.value, "prob": cls.prob, "dprob": cls.dprob}


def rebind(function: Callable[..., Any], backend: ModuleType) -> Callable[..., Any]:
    """The same function with another module under the name ``xp``."""
    names = {"xp": backend, "tl": getattr(backend, "tl", None)}  # Triton's interpreter looks for tl among the globals
    rebound = FunctionType(function.__code__, names, function.__name__)
    rebound.__module__, rebound.__qualname__ = function.__module__, function.__qualname__
    return rebound


def check_regularizer(regularizer: Any) -> None:
    if not isinstance(regularizer, Regularizer) or regularizer.name not in REGULARIZERS:
        choices = ", ".join(f"knapgrad.{cls.__name__}(gamma)" for cls in REGULARIZERS.values())
        hint = " (a class: call it)" if isinstance(regularizer, type) else ""
        raise TypeError(f"regularizer must be one of {choices}, got {regularizer!r}{hint}")


def _listed(gamma: Any) -> np.ndarray:
    """One gamma per instance, as a list."""
    try:
        found = np.asarray(gamma)
    except (TypeError, ValueError) as error:
        raise TypeError(f"gamma must be a number, an array or a tensor, got a list: {error}") from None
    return found.astype(float) if found.dtype.kind in "iuf" else found


def _kind(gamma: Any, values: np.ndarray) -> str:
    return f"{type(gamma).__name__} of {values.dtype}" if values.ndim else type(gamma).__name__


def check_positive(gamma: Any) -> None:
    """Raises unless gamma is positive and finite; does nothing if its values cannot be read without waiting."""
    if isinstance(gamma, (int, float)) and not isinstance(gamma, bool):
        good = 0 < gamma <= sys.float_info.max
    else:
        values = backends.known(gamma)
        if values is None:
            return
        if values.dtype.kind not in "iuf":
            raise TypeError(
                f"gamma must be a number, an array or a tensor, got {_kind(gamma, values)}; "
                "for example knapgrad.Gini(0.5)"
            )
        good = bool(((values > 0) & (values < np.inf)).all())
    if not good:
        raise ValueError(f"gamma must be positive and finite, got {gamma}; to select without smoothing: knapgrad.solve")
