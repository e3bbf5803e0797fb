"""JAX arrays on a CPU: XLA calls the kernels, see :mod:`knapgrad.kernels.numba.handlers`.

The functions replace those of the same names in :mod:`knapgrad.kernels.jax_scan`, but take a whole batch
(:mod:`knapgrad.kernels.jax_calls`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from knapgrad.kernels import jax_calls, jax_scan
from knapgrad.kernels.numba.layout import TABLE, frame_of, kind_of, structure_of, way_of
from knapgrad.kernels.numba.variants import CHOICES, KINDS
from knapgrad.kernels.operations import OPERATIONS
from knapgrad.lattice import Lattice
from knapgrad.regularizers import functions

PLATFORM = "cpu"
_MEMORY = np.frombuffer(
    b"knapgrad: the tables do not fit into memory; divide weights and capacity by a common factor; if there is none, "
    b"from_real(weights, capacity, resolution=...) rounds them safely\0",
    np.uint8,
)
_MISSING = np.frombuffer(
    b"knapgrad: this function was compiled in another process, and its kernels are not loaded: call "
    b"knapgrad.warmup, or trace it again\0",
    np.uint8,
)


_lock = RLock()  # threads may trace at the same time, and XLA takes a name once
_targets: dict[int, str | None] = {}
_tasks: dict[tuple[Any, ...], int | None] = {}


def target(kind: int) -> str | None:
    """The name under which XLA has our handler; None if it does not take it."""

    def make() -> str:
        if sys.platform == "win32":
            raise NotImplementedError("the functions of the C library are not found on Windows")
        from knapgrad.kernels.numba import handlers

        name = f"knapgrad_{KINDS[kind]}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handlers.handler(kind).ctypes), platform=PLATFORM)
        return name

    return _once(_targets, kind, make)


def task(name: str, regularizer: str, dtype: str, kind: int, way: int) -> int | None:
    """The number of what runs an operation, on items, choices or boxes, in one of the ways; None if it cannot be had
    from this version of Numba."""

    def make() -> int:
        from knapgrad.kernels.numba import tasks

        return tasks.task(name, regularizer, dtype, kind, way)

    functions(regularizer)  # an unknown one is an error
    return _once(_tasks, (name, regularizer, dtype, kind, way), make)


def _once(made: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What is made when it is first needed; None, and a warning, where that fails."""
    with _lock:
        if key not in made:
            try:
                made[key] = make()
            except Exception as error:
                made[key] = None
                warnings.warn(
                    f"knapgrad runs JAX on this CPU without its own kernels, about 4 times slower: {error!r}",
                    stacklevel=4,
                )
        return made[key]


def find(name: str, regularizer: str, theta: Array, lattice: Lattice) -> jax_calls.Kernel | None:
    """The function ``(theta, lattice, gamma, extra) -> results`` for a batch like theta, if kernels can run it."""
    if OPERATIONS[name].kernel is None or theta.size == 0 or jax.default_backend() != PLATFORM:
        return None  # on a GPU, kernels of the CPU would rarely be used
    kind = kind_of(lattice)
    solves = name == "solve" and kind != CHOICES  # the best selection of items is drawn with the hard maximum
    name = "sample" if solves else name
    operation = OPERATIONS[name]
    handler, dtype = target(kind), "float64" if operation.is_wide else np.dtype(theta.dtype).name
    way = way_of(operation, lattice, theta.shape, np.dtype(dtype).itemsize, regularizer)
    if handler is None or task(name, regularizer, dtype, kind, way) is None:
        return None
    run = jax_calls.spread(partial(_run, name, handler, regularizer, kind), operation.axis)

    def call(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        if solves:
            return run(theta, lattice, gamma, (jnp.full((1, *theta.shape), 0.5, theta.dtype),))[0]
        if operation.direction == "entropy":
            extra = (jnp.zeros_like(theta),)
        if operation.is_complete:
            lattice = lattice.replace(capacity=np.array(lattice.reach, np.int32))
        if not operation.is_wide:
            return run(theta, lattice, gamma, extra)
        with jax_scan.float64(True):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), (theta, gamma, extra))
            return run(wide[0], lattice, *wide[1:]).astype(theta.dtype)

    return call


def _run(
    name: str, handler: str, regularizer: str, kind: int,
    theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...],
) -> tuple[Array, ...]:  # fmt: skip
    """On one device."""
    operation, structure, dtype = OPERATIONS[name], structure_of(lattice), np.dtype(theta.dtype)
    way = way_of(operation, lattice, theta.shape, dtype.itemsize, regularizer)  # of all that vmap has put together
    number = task(name, regularizer, dtype.name, kind, way)
    if number is None:
        way, number = TABLE, task(name, regularizer, dtype.name, kind, TABLE)
    samples = extra[0].shape[0] if operation.is_sampled else 0
    shapes = (operation.shape_of(array, theta.shape, lattice.reach, samples) for array in operation.results)
    call = jax.ffi.ffi_call(handler, [jax.ShapeDtypeStruct(shape, theta.dtype) for shape in shapes])
    slack = jnp.zeros(1, jnp.int32) if lattice.slack is None else lattice.slack
    arrays = jax_scan.varying((theta, lattice.weights, lattice.capacity, slack, gamma, *extra))
    frame = frame_of(operation, lattice, samples, number, way)
    structure = np.zeros(0, np.int64) if structure is None else structure
    return tuple(call(*arrays, frame=frame, memory=_MEMORY, missing=_MISSING, structure=structure.reshape(-1)))
