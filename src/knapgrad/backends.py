"""The contract of a backend, and the table of them.

A backend is a module ``knapgrad.<framework>.backend`` with the functions of :class:`Backend`. All that
:mod:`knapgrad.ops`, the constraints and the regularizers know of a framework is what they ask it for.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from knapgrad.lattice import Lattice

if TYPE_CHECKING:
    from knapgrad.constraints import Constraint

#: framework -> the name of its array class. One counts only if the user has imported it, so that none is a dependency.
FRAMEWORKS = {"numpy": "ndarray", "torch": "Tensor", "jax": "Array"}


class Backend(Protocol):
    """What a framework must provide. ``theta``, ``y`` and other arrays are of that framework, in float32 or float64
    where they go into an operation; a regularizer goes by its name."""

    # Operations on theta / gamma, with the derivatives that ops.py promises. Shapes as in ops.py.

    def operator(self, theta: Any, lattice: Lattice, gamma: Any, regularizer: str, relaxed: bool, /) -> tuple[Any, Any]:
        """The smoothed optimum (*batch,), and the relaxed selection (*batch, n), or anything if not ``relaxed``."""
        ...

    def entropy(self, theta: Any, lattice: Lattice, gamma: Any, regularizer: str, /) -> Any:
        """(*batch,)"""
        ...

    def sample(self, theta: Any, uniforms: Any, lattice: Lattice, gamma: Any, regularizer: str, /) -> Any:
        """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape; no gradient."""
        ...

    def log_prob(self, theta: Any, y: Any, lattice: Lattice, gamma: Any, regularizer: str, /) -> Any:
        """(samples, *batch) for selections (samples, *batch, n)."""
        ...

    def solve(self, theta: Any, lattice: Lattice, /) -> Any:
        """The best selection (*batch, n); no gradient."""
        ...

    def lattice(self, constraint: Constraint, theta: Any, /) -> Lattice:
        """The lattice of a constraint for a theta of that shape, as the operations take it."""
        ...

    # Values that a user gave: in a constraint, a gamma, a selection.

    def numbers(self, x: Any, /) -> Any:
        """The values as a NumPy array, copied from a device if need be; x itself if they are traced. Raises TypeError
        where there are none and the framework cannot go on without them."""
        ...

    def known(self, x: Any, /) -> np.ndarray | None:
        """The values as a NumPy array; None if to look at them would stall a device or break a trace."""
        ...

    def unchanging(self, x: Any, /) -> np.ndarray | None:
        """The values as a NumPy array, if they are known and will never change."""
        ...

    def requires_grad(self, x: Any, /) -> bool:
        """Whether x is marked as something to learn."""
        ...

    # Arrays.

    def is_floating(self, x: Any, /) -> bool: ...

    def array(self, x: Any, like: Any, name: str, /) -> Any:
        """Numbers of any origin as an array beside ``like``."""
        ...

    def as_type(self, x: Any, like: Any, /) -> Any: ...

    def computable(self, x: Any, /) -> Any:
        """Half precision is computed in float32."""
        ...

    def double(self, x: Any, /) -> Any:
        """In float64, where the framework has it switched on."""
        ...

    def exact(self) -> AbstractContextManager[Any]:
        """Inside, :meth:`double` is float64 in any case."""
        ...

    def sum_double(self, x: Any, /) -> Any:
        """The sum over items, as :meth:`double`."""
        ...

    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...

    def broadcast_to(self, x: Any, shape: Any, /) -> Any: ...

    def detached(self, x: Any, /) -> Any: ...

    def differentiates(self, *arrays: Any) -> bool:
        """Whether a gradient will be asked for, so that the relaxed selection is worth computing beside a value."""
        ...

    def uniforms(self, rng: Any, shape: tuple[int, ...], like: Any, /) -> Any:
        """Random numbers in [0, 1) of like's type, from what the framework takes as a source."""
        ...


if TYPE_CHECKING:  # mypy holds the modules to the contract
    import knapgrad.jax.backend
    import knapgrad.numpy.backend
    import knapgrad.torch.backend

    _CHECKED: tuple[Backend, ...] = (knapgrad.numpy.backend, knapgrad.torch.backend, knapgrad.jax.backend)


_FOUND: dict[type, Backend] = {}


def backend_of(x: Any) -> Backend | None:
    """That of x's framework; None if x is not an array of one of them."""
    found = _FOUND.get(type(x))
    if found is not None:
        return found
    for framework, array in FRAMEWORKS.items():
        module = sys.modules.get(framework)
        if module is not None and isinstance(x, getattr(module, array)):
            _FOUND[type(x)] = backend = import_module(f"knapgrad.{framework}.backend")
            return backend
    return None


def numbers(x: Any) -> Any:
    """The values of x as a NumPy array, whatever holds them; x itself if they are traced."""
    backend = backend_of(x)
    return np.asarray(x) if backend is None else backend.numbers(x)


def known(x: Any) -> np.ndarray | None:
    """The values of x as a NumPy array, unless to look at them would stall a device or break a trace."""
    backend = backend_of(x)
    return np.asarray(x) if backend is None else backend.known(x)


def unchanging(x: Any) -> np.ndarray | None:
    """The values of an array as a NumPy array, if they are known and will never change."""
    backend = backend_of(x)
    return None if backend is None else backend.unchanging(x)
