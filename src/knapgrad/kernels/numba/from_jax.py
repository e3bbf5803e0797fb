"""JAX arrays on a CPU: XLA calls the kernels, see :mod:`knapgrad.kernels.numba.handlers`.

The functions replace those of the same names in :mod:`knapgrad.kernels.jax_scan`, but take a whole batch
(:mod:`knapgrad.kernels.jax_calls`).
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from knapgrad.kernels import jax_calls, jax_scan
from knapgrad.kernels.numba.launch import NANOSECONDS_PER_VECTOR, tree_of
from knapgrad.lattice import Lattice

PLATFORM = "cpu"
_SCANNED = {"log_prob_jvp"}  # operations that have no kernel here
_PATHS = {"sample", "log_prob"}  # operations whose extras and results begin with samples
_MEMORY = np.frombuffer(
    b"knapgrad: the tables do not fit into memory; divide weights and capacity by a common factor; if there is none, "
    b"from_real(weights, capacity, resolution=...) rounds them safely\0",
    np.uint8,
)
_MISSING = np.frombuffer(
    b"knapgrad: call the function that was compiled once more, its kernels are not loaded\0", np.uint8
)


@cache
def target(choices: bool) -> str | None:
    """The name under which XLA has our handler. If it does not take it, that is said once, and the scan is used."""
    name = "knapgrad_choices" if choices else "knapgrad_items"
    try:
        if sys.platform == "win32":
            raise NotImplementedError("the functions of the C library are not found on Windows")
        from knapgrad.kernels.numba import handlers

        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handlers.handler(choices).ctypes), platform=PLATFORM)
    except Exception as error:
        warnings.warn(
            f"knapgrad runs JAX on this CPU without its own kernels, about 4 times slower: {error}", stacklevel=2
        )
        return None
    return name


def find(name: str, regularizer: str, theta: Array, lattice: Lattice) -> jax_calls.Kernel | None:
    """The function ``(theta, lattice, gamma, extra) -> results`` for a batch like theta, if kernels can run it."""
    if name in _SCANNED or theta.size == 0:
        return None
    if jax.default_backend() != PLATFORM or target(lattice.options > 0) is None:  # on a GPU they would rarely be used
        return None

    def call(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        return _call(name, regularizer, theta, lattice, gamma, extra)

    return jax_calls.foldable(call, axis=1 if name in _PATHS else 0)


def _call(name: str, regularizer: str, theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
    from knapgrad.kernels.numba import handlers, tasks

    if name == "solve" and not lattice.options:
        half = jnp.full((1, *theta.shape), 0.5, theta.dtype)
        return _call("sample", regularizer, theta, lattice, gamma, (half,))[0]
    dtype, m, kind = theta.dtype, lattice.options, target(lattice.options > 0)
    operation, first = tasks.OPERATIONS[name], 1 if name in _PATHS else 0
    if operation.complete:
        lattice = lattice.replace(capacity=np.array(lattice.reach, np.int32))
        theta, gamma, extra = (jax.tree.map(_wide, x) for x in (theta, gamma, extra))
    if name.startswith("entropy"):
        extra = (jnp.zeros_like(theta),)
    samples = extra[0].shape[0] if name in _PATHS else 0
    weight = operation.weight + samples * operation.weight_of_sample
    numbers = np.zeros(handlers.PICOSECONDS + 1, np.int64)
    numbers[handlers.TASK] = tasks.task(name, regularizer, np.dtype(theta.dtype).name, m > 0)
    numbers[handlers.OPTIONS], numbers[handlers.ENTRIES] = m, operation.entries or m
    numbers[handlers.MARGIN] = lattice.heaviest if m else 0
    numbers[handlers.KEEPS], numbers[handlers.COMPLETE] = operation.keeps, operation.complete
    numbers[handlers.LIMITED] = lattice.slack is not None
    numbers[handlers.ROWS], numbers[handlers.TABLES] = operation.rows, operation.tables
    numbers[handlers.SAMPLES], numbers[handlers.PICOSECONDS] = samples, weight * 1000 * NANOSECONDS_PER_VECTOR
    attributes = {"memory": _MEMORY, "missing": _MISSING, "numbers": numbers, "tree": tree_of(max(m, 1))}

    def run(theta: Array, *others: Array) -> Any:
        shapes = _results(name, theta.shape, samples, lattice.reach)
        results = tuple(jax.ShapeDtypeStruct(shape, theta.dtype) for shape in shapes)
        return tuple(jax.ffi.ffi_call(str(kind), results)(theta, *others, **attributes))

    given = jax_calls.constants(theta, lattice, gamma)
    arrays = [theta, *(x for x, _ in given.values()), *extra]
    axes = [0, *(None if shared else 0 for _, shared in given.values()), *[first] * len(extra)]
    results = jax_calls.spread(run, arrays, axes, [first] * len(_results(name, theta.shape, samples, lattice.reach)))
    if theta.dtype != dtype:
        with jax_scan.float64(True):
            results = tuple(x.astype(dtype) for x in results)
    return results if len(results) > 1 else results[0]


def _wide(x: Array) -> Array:
    with jax_scan.float64(True):
        return x.astype(jnp.float64)


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
