"""The contract of a backend, and the table of them.

A backend is a module ``knapgrad.<framework>.backend`` with the functions of :class:`Backend`. :mod:`knapgrad.ops`, the
constraints and the regularizers use a framework only through these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from knapgrad.forks import imported

if TYPE_CHECKING:
    from knapgrad.constraints import Constraint
    from knapgrad.lattice import Lattice
    from knapgrad.regularizers import Regularizer

#: framework -> the name of its array class. A framework is looked at only if the user has imported it, so none is a
#: dependency.
FRAMEWORKS = {"numpy": "ndarray", "torch": "Tensor", "jax": "Array"}


class Backend(Protocol):
    """What a framework must provide. ``theta``, ``y`` and other arrays are of that framework, in float32 or float64
    where they go into an operation; a regularizer goes by its name."""

    # Operations on theta / gamma, with the derivatives that ops.py promises. Shapes as in ops.py.

    def operator(self, theta: Any, lattice: Lattice, gamma: Any, regularizer: str, relaxed: bool, /) -> tuple[Any, Any]:
        """The smoothed optimum (*batch,), and the relaxed selection (*batch, n), or anything if not ``relaxed``."""
        ...

    def relax(self, theta: Any, lattice: Lattice, gamma: Any, regularizer: str, /) -> Any:
        """The relaxed selection (*batch, n) alone, of theta's dtype."""
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

    def frontier(self, theta: Any, lattice: Lattice, gamma: Any, regularizer: str, /) -> Any:
        """The smoothed optimum at all capacities, (*batch, reach + 1), -inf where nothing is feasible. The capacity of
        the lattice is not used."""
        ...

    def lattice(self, constraint: Constraint, theta: Any, /) -> Lattice:
        """The lattice of a constraint for a theta of that shape, as the operations take it."""
        ...

    # Values that a user gave: in a constraint, a gamma, a selection.

    def numbers(self, x: Any, /) -> Any:
        """The values as a NumPy array, copied from a device if need be; x itself if they are traced. Raises TypeError
        if there are no values to read, and the framework needs them."""
        ...

    def known(self, x: Any, /) -> np.ndarray | None:
        """The values as a NumPy array; None if reading them would stall a device or break a trace."""
        ...

    def unchanging(self, x: Any, /) -> np.ndarray | None:
        """The values as a NumPy array, if they are known and will never change."""
        ...

    def version(self, x: Any, /) -> Any:
        """Another one whenever x was written to; None if it never is."""
        ...

    def integers(self, x: Any, /) -> Any:
        """Traced values as int32 or int64; None if they are of another kind."""
        ...

    def factor(self, regularizer: Regularizer, /) -> Any:
        """Its gamma, which is one number, to multiply results with."""
        ...

    def strength(self, gamma: Any, theta: Any, /) -> Any:
        """Gamma as operations on these scores take it: larger, if the framework computes in a range that it leaves."""
        ...

    def requires_grad(self, x: Any, /) -> bool:
        """Whether x is marked as something to learn."""
        ...

    # Arrays.

    def is_floating(self, x: Any, /) -> bool: ...

    def array(self, x: Any, like: Any, name: str, /) -> Any:
        """Numbers, or an array of any framework, as an array of this framework on the device of ``like``."""
        ...

    def as_type(self, x: Any, like: Any, /) -> Any: ...

    def as_total(self, x: Any, like: Any, /) -> Any:
        """A result per instance, of like's type, or wider where the framework wants losses to be wider."""
        ...

    def computable(self, x: Any, /) -> Any:
        """Half precision is computed in float32."""
        ...

    def double(self, x: Any, /) -> Any:
        """In float64, unless the framework has float64 switched off."""
        ...

    def exact(self) -> AbstractContextManager[Any]:
        """A context in which :meth:`double` always returns float64."""
        ...

    def sum_double(self, x: Any, /) -> Any:
        """The sum over items, as :meth:`double`."""
        ...

    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...

    def broadcast_to(self, x: Any, shape: Any, /) -> Any: ...

    def concatenate(self, arrays: Any, axis: int, /) -> Any: ...

    def take(self, rows: Any, index: Any, /) -> Any:
        """``rows[..., index]``, where the index (..., m) is an array of NumPy or of the framework, and may have the
        leading dimensions of the rows (*batch, n), or none."""
        ...

    def detached(self, x: Any, /) -> Any: ...

    def differentiates(self, *arrays: Any) -> bool:
        """Whether a gradient may be needed, so that the relaxed selection is worth computing together with a value."""
        ...

    def differentiate(self, function: Callable[[Any], Any], x: Any, /) -> Any:
        """Calls a function, and its derivative if the framework has derivatives."""
        ...

    def uniforms(self, rng: Any, shape: tuple[int, ...], like: Any, /) -> Any:
        """Random numbers in [0, 1) of like's dtype, from a generator, seed or key of the framework."""
        ...


if TYPE_CHECKING:  # mypy holds the modules to the contract
    import knapgrad.jax.backend
    import knapgrad.numpy.backend
    import knapgrad.torch.backend

    _CHECKED: tuple[Backend, ...] = (knapgrad.numpy.backend, knapgrad.torch.backend, knapgrad.jax.backend)


_FOUND: dict[type, Backend] = {}
_LOADED = SimpleNamespace()  # not a dictionary: torch.compile would guard its length


def load(framework: str) -> Backend:
    _import(framework)
    return getattr(_LOADED, framework)


def _import(framework: str) -> None:
    if not hasattr(_LOADED, framework):
        setattr(_LOADED, framework, imported(f"knapgrad.{framework}.backend"))


_import._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it instead of tracing it


def is_compiling() -> bool:
    """Whether torch.compile or torch.export traces this call, so that no value can be looked at."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def backend_of(x: Any) -> Backend | None:
    """The backend of x's framework; None if x is not an array of a known framework."""
    compiling = is_compiling()
    if not compiling and type(x) in _FOUND:
        return _FOUND[type(x)]
    for framework, array in FRAMEWORKS.items():
        module = sys.modules.get(framework)
        if module is not None and isinstance(x, getattr(module, array)):
            backend = load(framework)
            if not compiling:
                _FOUND[type(x)] = backend
            return backend
    return None


def check_array(name: str, x: Any) -> Backend:
    """The backend of an argument that must be an array."""
    backend = backend_of(x)
    if backend is None:
        raise TypeError(
            f"{name} must be a NumPy array, a torch tensor or a JAX array, got {type(x).__name__}; "
            "convert it, for example by np.asarray"
        )
    if _is_masked(x):
        raise TypeError(f"{name} must not be a masked array; items that are out get -inf, by {name}.filled(-np.inf)")
    _refuse_matrix(name, x)
    if isinstance(x, np.ndarray) and not is_compiling() and not x.dtype.isnative:
        raise TypeError(
            f"{name} is in the byte order of another machine, {x.dtype.str}; convert it by "
            f"{name}.astype({x.dtype.newbyteorder('=').name!r})"
        )
    return backend


def scores_of(theta: Any) -> Any:
    """Scores without what a subclass of NumPy's arrays may override: kernels trust shapes, and read memory."""
    if not isinstance(theta, np.ndarray) or type(theta) is np.ndarray:
        return theta
    check_array("theta", theta)
    return np.asarray(theta)


def _is_masked(x: Any) -> bool:
    """By what masked arrays alone have: whether NumPy has imported them changes while torch.compile looks."""
    return isinstance(x, np.ndarray) and hasattr(x, "filled")


def _refuse_matrix(name: str, x: Any) -> None:
    if isinstance(x, np.matrix):  # whose rows and sums have two dimensions
        raise TypeError(f"{name} must not be a NumPy matrix; convert it by np.asarray({name})")


def plain(name: str, x: Any) -> Any:
    """What a user gave, with NumPy arrays in the byte order of this machine, and of no subclass. A mask is refused, not
    dropped."""
    if not isinstance(x, np.ndarray) or is_compiling():
        return x
    if _is_masked(x):
        raise TypeError(f"{name} must not be a masked array; say what counts where it is masked, by {name}.filled(...)")
    _refuse_matrix(name, x)
    x = np.asarray(x)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def has_numbers(x: Any) -> bool:
    """Whether x is numbers, a list or a NumPy array, which are known even where tensors are traced."""
    backend = backend_of(x)
    return backend is None or isinstance(x, np.ndarray)


def numbers(x: Any) -> Any:
    """The values of x as a NumPy array, whatever holds them; x itself if they are traced."""
    backend = backend_of(x)
    return np.asarray(x) if backend is None else backend.numbers(x)


def concrete(x: Any, theta: Any, name: str) -> np.ndarray:
    """The values of x, for a theta that is not traced."""
    found = numbers(x)
    if not isinstance(found, np.ndarray):
        raise TypeError(
            f"{name} is traced by JAX, and theta is a {type(theta).__name__} of {type(theta).__module__}; "
            "make theta a JAX array, by jnp.asarray(theta)"
        )
    return found


def known(x: Any) -> np.ndarray | None:
    """The values of x as a NumPy array, or None if reading them would stall a device or break a trace."""
    backend = backend_of(x)
    return np.asarray(x) if backend is None else backend.known(x)


def unchanging(x: Any) -> np.ndarray | None:
    """The values of an array as a NumPy array, if they are known and will never change."""
    backend = backend_of(x)
    return None if backend is None else backend.unchanging(x)


def version(x: Any) -> Any:
    """Another one whenever an array was written to; None for what never is, and while torch.compile traces."""
    backend = None if is_compiling() else backend_of(x)
    return None if backend is None else backend.version(x)


def open_number(x: float) -> Any:
    """A number as an array: torch.compile makes a new graph for each new number, but takes arrays as they come."""
    torch: Any = load("torch") if is_compiling() else None
    return np.asarray(x) if torch is None else torch.open_number(x)
