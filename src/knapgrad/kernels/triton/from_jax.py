"""JAX arrays on a CUDA device: launches the kernels through jax-triton.

The functions replace those of the same names in :mod:`knapgrad.kernels.jax_scan`, but take a whole batch: theta
(*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch. In other arguments the batch
starts at axis 0, or at axis 1, after the samples, for functions of paths. ``vmap`` adds an axis to the batch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from knapgrad.kernels import jax_calls
from knapgrad.kernels.jax_scan import float64
from knapgrad.kernels.triton import plan
from knapgrad.lattice import Lattice

PLATFORM = "cuda"


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


def find(
    name: str, regularizer: str, theta: Array, lattice: Lattice, guard: Callable[..., Any] = lambda f: f
) -> Callable[..., Any] | None:
    """The function ``(theta, lattice, gamma, extra) -> results`` for a batch like theta, if kernels can run it. The
    guard is put around it."""
    function = _FUNCTIONS.get(name)
    if function is None or lattice.options or theta.size == 0 or multiprocessors() == 0:
        return None
    tables = 2 if name in ("vjp", "entropy", "entropy_grad") else 1
    if plan.is_shared(theta.shape[-1], lattice.reach, tables * theta.dtype.itemsize):
        return None  # rows so long that a scan keeps the device busy

    axis = 1 if name in _PATHS else 0

    def run(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> tuple[Array, ...]:
        results = function(Batch(theta, lattice, gamma, regularizer), *extra)
        return results if isinstance(results, tuple) else (results,)

    def call(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        results = jax_calls.spread(run, axis)(theta, lattice, gamma, extra)
        return results if len(results) > 1 else results[0]

    return jax_calls.foldable(guard(call), axis)


class Batch(NamedTuple):
    theta: Array
    lattice: Lattice
    gamma: Array
    regularizer: str

    def constants(self) -> dict[str, Any]:
        """The arguments for the lattice and gamma, by name; flat, with a step of 0 where instances share them."""
        *batch, n = self.theta.shape
        lattice = self.lattice
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
            ("gamma", self.gamma, ()),
        ):
            is_shared = x.size == prod(shape)
            found[name] = x.reshape(-1) if is_shared else jnp.broadcast_to(x, (*batch, *shape)).reshape(-1)
            found[f"{name}_step"] = 0 if is_shared else prod(shape)
        return found

    def valid(self, x: Array, items: bool) -> Array:
        """x, and NaN where the capacity is not valid. ``items``: x has one entry per item, not one per instance."""
        invalid = self.lattice.capacity < 0
        invalid = invalid.reshape(()) if invalid.size == 1 else invalid
        return jnp.where(invalid[..., None] if items else invalid, jnp.nan, x)


def _launch(
    kernel: str,
    batch: Batch,
    inputs: dict[str, Array],
    outputs: dict[str, tuple[int, ...]],
    tables: int,
    **options: Any,
) -> dict[str, Array]:
    """The outputs, of these shapes and theta's type."""
    from knapgrad.kernels.triton import choices, instances, paths

    theta = batch.theta
    size, n = prod(theta.shape[:-1]), theta.shape[-1]
    if size == 0:
        return {name: jnp.zeros(shape, theta.dtype) for name, shape in outputs.items()}
    layout = plan.plan(size, n, batch.lattice.reach, tables, theta.dtype.itemsize, multiprocessors())
    given = {"theta": theta.reshape(-1), "batch": size, "n": n, "width": layout.width, **batch.constants()}
    given |= {name: x.reshape(-1) for name, x in inputs.items()}
    given |= choices.functions(batch.regularizer) | layout.options | options
    if "LATER" in options:
        given["LATER"] = layout.later
    with float64(True):
        shapes = {name: jax.ShapeDtypeStruct(shape, theta.dtype) for name, shape in outputs.items()}
        for name, shape in layout.scratch(n).items():
            shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float64 if name == "V_rows" else theta.dtype)
        function = getattr(instances if kernel == "operator_kernel" else paths, kernel)
        arguments = [given.pop(name) for name in function.arg_names if name in given and name.islower()]
        results = call(function, arguments, list(shapes.values()), layout.programs, **given)
    return dict(zip(outputs, results))


def call(kernel: Any, arguments: list[Any], outputs: list[Any], programs: int, **options: Any) -> Any:
    """A launch: arrays and numbers in the kernel's order, which has the outputs after them."""
    import jax_triton

    # jax-triton 0.4 calls the outputs out_type, and warns of the name that 0.3 knows.
    is_new = "out_type" in signature(jax_triton.triton_call).parameters
    options["out_type" if is_new else "out_shape"] = outputs
    return jax_triton.triton_call(*arguments, kernel=kernel, grid=(programs,), **options)


def _sweep(batch: Batch, z: Array, direction: str | None, relaxed: bool = True) -> tuple[Array, ...]:
    """Value, tangent and y."""
    from knapgrad.kernels.triton import choices

    options = {"SOURCE": choices.source(direction), "RELAXED": relaxed, "KEEP": False, "LATER": True}
    shapes = {"value": batch.theta.shape[:-1], "tangent": batch.theta.shape[:-1], "y": batch.theta.shape}
    results = _launch("operator_kernel", batch, {"z": z}, shapes, 1 if direction is None else 2, **options)
    return tuple(batch.valid(x, name == "y") for name, x in results.items())


def _value(batch: Batch) -> Array:
    return _sweep(batch, batch.theta, None, relaxed=False)[0]


def _operator(batch: Batch) -> tuple[Array, Array]:
    value, _, y = _sweep(batch, batch.theta, None)
    return value, y


def _vjp(batch: Batch, z: Array) -> Array:
    return _sweep(batch, z, "linear")[2]


def _entropy(batch: Batch) -> Array:
    return _entropy_grad(batch)[0]


def _entropy_grad(batch: Batch) -> tuple[Array, Array]:
    _, entropy, gradient = _sweep(batch, batch.theta, "entropy")
    return entropy, gradient


def _walk(kernel: str, batch: Batch, inputs: dict[str, Array], outputs: dict[str, Any], **options: Any) -> Array:
    samples, size = next(iter(inputs.values())).shape[0], prod(batch.theta.shape[:-1])
    numbers = {"whole": size, "samples": samples, "FILLED": False, "LANES": plan.lanes(samples)}
    return next(iter(_launch(kernel, batch, inputs, outputs, 1, **numbers, **options).values()))


def _sample(batch: Batch, uniforms: Array) -> Array:
    options = {"DRAW": True, "HARDEN": False}
    return batch.valid(_walk("sample_kernel", batch, {"uniforms": uniforms}, {"y": uniforms.shape}, **options), True)


def _solve(batch: Batch) -> Array:
    inputs, options = {"uniforms": batch.theta[None]}, {"DRAW": False, "HARDEN": False}
    return batch.valid(_walk("sample_kernel", batch, inputs, {"y": batch.theta.shape}, **options), True)


def _log_prob(batch: Batch, y: Array) -> Array:
    inputs, outputs = {"selections": y, "cotangent": y}, {"log_prob": y.shape[:-1], "gradient": (1,)}
    return batch.valid(_walk("log_prob_kernel", batch, inputs, outputs, BACKWARDS=False), False)


_PATHS = {"sample": _sample, "log_prob": _log_prob}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "value": _value, "operator": _operator, "vjp": _vjp, "entropy": _entropy, "entropy_grad": _entropy_grad,
    "solve": _solve, **_PATHS,
}  # fmt: skip
