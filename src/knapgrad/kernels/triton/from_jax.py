"""JAX arrays on a CUDA device: launches the kernels through jax-triton.

The functions replace those of the same names in :mod:`knapgrad.kernels.jax_scan`, but take a whole batch: theta
(*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch.
"""

from __future__ import annotations

import os
import warnings
from functools import cache, partial
from inspect import signature
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from knapgrad.kernels import jax_calls
from knapgrad.kernels.jax_scan import float64
from knapgrad.kernels.operations import OPERATIONS
from knapgrad.kernels.triton import plan
from knapgrad.kernels.triton.kernels import kernel_of
from knapgrad.lattice import Lattice

PLATFORM = "cuda"
_SCANNED = {"mode", "frontier", "frontier_vjp", "log_prob_jvp"}  # operations that run no kernel here


@cache
def multiprocessors() -> int:
    """The multiprocessors of the smallest CUDA device; 0 if there is none, or if kernels cannot be launched."""
    try:
        devices = jax.local_devices(backend=PLATFORM)
    except RuntimeError:
        return 0
    cache_folder = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"knapgrad runs on this GPU without its fused kernels, 10 to 100 times slower ({error}); they need "
            "`pip install jax-triton`",
            stacklevel=2,
        )
        return 0
    finally:  # it is emptied by jax-triton, and torch needs it
        os.environ.pop("TRITON_CACHE_DIR", None)
        if cache_folder is not None:
            os.environ["TRITON_CACHE_DIR"] = cache_folder
    return min(device.core_count for device in devices)


def find(name: str, regularizer: str, theta: Array, lattice: Lattice) -> jax_calls.Kernel | None:
    """The function ``(theta, lattice, gamma, extra) -> results`` for a batch like theta, if kernels can run it."""
    if name in _SCANNED or lattice.options or theta.size == 0 or multiprocessors() == 0:
        return None
    if plan.is_shared(theta.shape[-1], lattice.reach, OPERATIONS[name].tables * theta.dtype.itemsize):
        return None  # rows so long that a scan keeps the device busy

    return jax_calls.spread(partial(_run, name, regularizer), OPERATIONS[name].axis)


def _run(
    name: str, regularizer: str, theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The results of an operation, on one device."""
    from knapgrad.kernels.triton import instances, paths, variants

    operation, kernel = OPERATIONS[name], kernel_of(name)
    size, n, samples = prod(theta.shape[:-1]), theta.shape[-1], len(extra[0]) if operation.is_sampled else 1
    inputs, outputs = dict(zip(operation.extras, extra)), operation.results
    if kernel.is_sweep:
        inputs, outputs = inputs or {"z": theta}, ("value", "tangent", "y")
    shapes = {array: operation.shape_of(array, theta.shape, lattice.reach, samples) for array in outputs}
    if size == 0:
        return tuple(jnp.zeros(shapes[array], theta.dtype) for array in operation.results)
    layout = plan.plan(size, n, lattice.reach, kernel.tables, theta.dtype.itemsize, multiprocessors())
    given: dict[str, Any] = {"batch": size, "n": n, "width": layout.width, **_constants(theta, lattice, gamma)}
    given |= variants.functions(regularizer) | layout.settings | kernel.constants
    if kernel.is_sweep:
        given |= {"SOURCE": variants.source(given["SOURCE"]), "LATER": layout.later}
    else:
        given |= {"whole": size, "samples": samples, "FILLED": False, "LANES": plan.lanes(samples)}
        inputs = inputs or {"uniforms": theta}
    if name == "log_prob":
        inputs["cotangent"], shapes["gradient"] = inputs["selections"], (1,)
    given |= {array: x.reshape(-1) for array, x in {"theta": theta, **inputs}.items()}
    with float64(True):
        every = {array: jax.ShapeDtypeStruct(shape, theta.dtype) for array, shape in shapes.items()}
        for array, shape in layout.scratch(n).items():
            every[array] = jax.ShapeDtypeStruct(shape, jnp.float64 if array == "V_rows" else theta.dtype)
        function = getattr(instances if kernel.is_sweep else paths, kernel.name)
        arguments = [given.pop(name) for name in function.arg_names if name in given and name.islower()]
        results = dict(zip(every, call(function, arguments, list(every.values()), layout.programs, **given)))
    invalid = lattice.capacity < 0
    invalid = invalid.reshape(()) if invalid.size == 1 else invalid
    return tuple(
        jnp.where(invalid[..., None] if array == "y" else invalid, jnp.nan, results[array])
        for array in operation.results
    )


def _constants(theta: Array, lattice: Lattice, gamma: Array) -> dict[str, Any]:
    """The arguments for the lattice and gamma, by name; flat, with a step of 0 where instances share them."""
    *batch, n = theta.shape
    capacity = jnp.maximum(lattice.capacity, 0)
    slack = capacity if lattice.slack is None else lattice.slack
    found: dict[str, Any] = {
        "reach": lattice.reach,
        "SLACK": lattice.slack is not None,
        "GAMMAS": True,
        "scale": 1.0,
        **plan.box_of(lattice.box),
    }
    for name, x, shape in (
        ("weights", jnp.maximum(lattice.weights, 0), (n,)),  # traced ones have not been looked at
        ("capacity", capacity, ()),
        ("slack", slack, ()),
        ("gamma", gamma, ()),
    ):
        is_shared = x.size == prod(shape)
        found[name] = x.reshape(-1) if is_shared else jnp.broadcast_to(x, (*batch, *shape)).reshape(-1)
        found[f"{name}_step"] = 0 if is_shared else prod(shape)
    return found


def call(kernel: Any, arguments: list[Any], outputs: list[Any], programs: int, **options: Any) -> Any:
    """A launch: arrays and numbers in the kernel's order, which has the outputs after them."""
    import jax_triton

    # jax-triton 0.4 calls the outputs out_type, and warns of the name that 0.3 knows.
    is_new = "out_type" in signature(jax_triton.triton_call).parameters
    options["out_type" if is_new else "out_shape"] = outputs
    return jax_triton.triton_call(*arguments, kernel=kernel, grid=(programs,), **options)
