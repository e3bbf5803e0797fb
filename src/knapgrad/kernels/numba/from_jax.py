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
from knapgrad.kernels.numba.boxes import sides_of
from knapgrad.kernels.numba.launch import NANOSECONDS_PER_VECTOR, kind_of, tree_of
from knapgrad.kernels.numba.variants import CHOICES, KINDS
from knapgrad.lattice import Lattice
from knapgrad.regularizers import REGULARIZERS, Hard

PLATFORM = "cpu"
_SCANNED = {"log_prob_jvp"}  # operations that have no kernel here
_PATHS = {"sample", "log_prob"}  # whose extras and results begin with samples
_WIDE = {"frontier", "frontier_vjp"}  # which are computed in float64, up to the reach
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
    with _lock:
        if kind not in _targets:
            name = f"knapgrad_{KINDS[kind]}"
            try:
                if sys.platform == "win32":
                    raise NotImplementedError("the functions of the C library are not found on Windows")
                from knapgrad.kernels.numba import handlers

                capsule = jax.ffi.pycapsule(handlers.handler(kind).ctypes)
                jax.ffi.register_ffi_target(name, capsule, platform=PLATFORM)
                _targets[kind] = name
            except Exception as error:
                _warn(error)
                _targets[kind] = None
        return _targets[kind]


def task(*key: Any) -> int | None:
    """The number of what runs an operation, with a regularizer, on a dtype, on items, choices or boxes; None if it
    cannot be had from this version of Numba."""
    with _lock:
        if key not in _tasks:
            try:
                from knapgrad.kernels.numba import tasks

                _tasks[key] = tasks.task(*key)
            except Exception as error:
                if key[1] not in (*REGULARIZERS, Hard.name):
                    raise
                _warn(error)
                _tasks[key] = None
        return _tasks[key]


def _warn(error: Exception) -> None:
    warnings.warn(
        f"knapgrad runs JAX on this CPU without its own kernels, about 4 times slower: {error!r}", stacklevel=4
    )


def find(
    name: str, regularizer: str, theta: Array, lattice: Lattice, guard: Callable[..., Any] = lambda f: f
) -> jax_calls.Kernel | None:
    """The function ``(theta, lattice, gamma, extra) -> results`` for a batch like theta, if kernels can run it. The
    guard is put around it."""
    kind = kind_of(lattice)
    if name in _SCANNED or theta.size == 0 or jax.default_backend() != PLATFORM:
        return None  # on a GPU, kernels of the CPU would rarely be used
    solves = name == "solve" and kind != CHOICES  # the best selection of items is drawn with the hard maximum
    operation, dtype = "sample" if solves else name, "float64" if name in _WIDE else np.dtype(theta.dtype).name
    handler = target(kind)
    number = None if handler is None else task(operation, regularizer, dtype, kind)
    if handler is None or number is None:
        return None
    run = jax_calls.spread(partial(_run, operation, handler, number), axis=1 if operation in _PATHS else 0)

    def call(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        if solves:
            return run(theta, lattice, gamma, (jnp.full((1, *theta.shape), 0.5, theta.dtype),))[0][0]
        if name.startswith("entropy"):
            extra = (jnp.zeros_like(theta),)
        if name not in _WIDE:
            results = run(theta, lattice, gamma, extra)
        else:
            with jax_scan.float64(True):
                wide = (jax.tree.map(lambda x: x.astype(jnp.float64), x) for x in (gamma, extra))
                complete = lattice.replace(capacity=np.array(lattice.reach, np.int32))
                results = run(theta.astype(jnp.float64), complete, *wide)
                results = tuple(x.astype(theta.dtype) for x in results)
        return results if len(results) > 1 else results[0]

    return jax_calls.foldable(guard(call), axis=1 if name in _PATHS else 0)


def _run(
    name: str, handler: str, number: int, theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]
) -> tuple[Array, ...]:
    """On one device."""
    from knapgrad.kernels.numba import handlers, tasks

    operation, m = tasks.OPERATIONS[name], lattice.options
    samples = extra[0].shape[0] if name in _PATHS else 0
    weight = operation.weight + samples * operation.weight_of_sample
    numbers = np.zeros(handlers.PICOSECONDS + 1, np.int64)
    numbers[handlers.TASK], numbers[handlers.LIMITED] = number, lattice.slack is not None
    numbers[handlers.OPTIONS], numbers[handlers.ENTRIES] = m, operation.entries or m
    numbers[handlers.MARGIN] = lattice.heaviest if m else 0
    numbers[handlers.KEEPS], numbers[handlers.COMPLETE] = operation.keeps, operation.complete
    numbers[handlers.ROWS], numbers[handlers.TABLES] = operation.rows, operation.tables
    numbers[handlers.SAMPLES], numbers[handlers.PICOSECONDS] = samples, weight * 1000 * NANOSECONDS_PER_VECTOR
    shapes = _results(name, theta.shape, samples, lattice.reach)
    call = jax.ffi.ffi_call(handler, tuple(jax.ShapeDtypeStruct(shape, theta.dtype) for shape in shapes))
    slack = jnp.zeros(1, jnp.int32) if lattice.slack is None else lattice.slack
    arrays = jax_scan.varying((theta, lattice.weights, lattice.capacity, slack, gamma, *extra))
    tree = sides_of(lattice.box).reshape(-1) if lattice.box else tree_of(max(m, 1))
    return tuple(call(*arrays, memory=_MEMORY, missing=_MISSING, numbers=numbers, tree=tree))


def _results(name: str, shape: tuple[int, ...], samples: int, reach: int) -> list[tuple[int, ...]]:
    """The shapes of the results for a theta of that shape."""
    batch = shape[:-1]
    return {
        "value": [batch],
        "operator": [batch, shape],
        "entropy": [batch],
        "entropy_grad": [batch, shape],
        "sample": [(samples, *shape)],
        "log_prob": [(samples, *batch)],
        "frontier": [(*batch, reach + 1)],
    }.get(name, [shape])
