"""JAX arrays on a CUDA device: launches :mod:`knapgrad.kernels.triton_kernels` through jax-triton.

The functions have the names of those in :mod:`knapgrad.kernels.jax_scan`, which they stand for, but take a whole batch:
theta (*batch, n), weights broadcastable to it, capacity and gamma to the batch; what else there is has the batch at its
axis 0, and for paths at 1, after the samples. ``vmap`` makes the batch larger.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from knapgrad.kernels import triton_plan
from knapgrad.kernels.jax_scan import Choice, Problem, float64

PLATFORM = "cuda"


@cache
def multiprocessors() -> int:
    """Of the smallest CUDA device; 0 if there is none, or no way to launch on it."""
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


def find(name: str, choice: Choice, theta: Array) -> Callable[..., Any] | None:
    """The function ``(problem, extra) -> results`` for a batch like theta, if kernels can run it."""
    function = _FUNCTIONS.get(name)
    if function is None or theta.size == 0 or multiprocessors() == 0:
        return None
    tables = 2 if name in ("vjp", "entropy") else 1
    if triton_plan.is_shared(theta.shape[-1], choice.reach, tables * theta.dtype.itemsize):
        return None  # rows so long that a scan keeps the device busy
    return _foldable(lambda problem, extra: function(problem, choice, *extra), axis=1 if name in _PATHS else 0)


def _foldable(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """``vmap`` puts one more axis in front of the batch, which is at that axis of extras and results."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def fold(size: int, batched: Any, problem: Problem, extra: tuple[Array, ...]) -> Any:
        def whole(x: Array, is_batched: bool, axis: int = 0) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return jnp.moveaxis(x, 0, axis)

        theta = whole(problem.theta, batched[0].theta)
        ranks = theta.ndim, theta.ndim - 1, theta.ndim - 1
        constants = [
            x.reshape(size, *(1,) * (rank - x.ndim), *x.shape[1:]) if is_batched else x
            for x, is_batched, rank in zip(problem[1:], batched[0][1:], ranks)
        ]
        results = call(Problem(theta, *constants), tuple(whole(x, b, axis) for x, b in zip(extra, batched[1])))
        return jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), results), jax.tree.map(lambda x: True, results)

    return call


def _launch(
    kernel: str, problem: Problem, choice: Choice, inputs: Any, outputs: Any, *sizes: int, **options: Any
) -> Any:
    """The outputs, of these shapes and theta's type. A table for a direction is the second one."""
    from knapgrad.kernels import triton_kernels

    theta, weights, capacity, gamma = problem
    *batch, n = theta.shape
    if prod(batch) == 0:
        return [jnp.zeros(shape, theta.dtype) for shape in outputs]
    count, tables = prod(batch), 2 if options.get("DIRECTION", "none") != "none" else 1
    plan = triton_plan.plan(count, n, choice.reach, tables, theta.dtype.itemsize, multiprocessors())
    constants, steps = [], []
    for x, shape in ((weights, (n,)), (jnp.maximum(capacity, 0), ()), (gamma, ())):
        shared = x.size == prod(shape)
        constants.append(x.reshape(-1) if shared else jnp.broadcast_to(x, (*batch, *shape)).reshape(-1))
        steps.append(0 if shared else prod(shape))
    if "LATER" in options:
        options["LATER"] = plan.later
    with float64(True):
        scratch = [
            jax.ShapeDtypeStruct((plan.programs, cells), dtype)
            for cells, dtype in (
                (2 * plan.width, jnp.float64),
                ((2 if tables == 1 else 6) * plan.width, theta.dtype),
                (tables * n * plan.width, theta.dtype),
            )
        ]
        results = call(
            getattr(triton_kernels, kernel),
            [x.reshape(-1) for x in (theta, *inputs)] + constants,
            [1.0, count, *sizes, n, plan.width, choice.reach, *steps],
            [jax.ShapeDtypeStruct(shape, theta.dtype) for shape in outputs] + scratch,
            plan.programs,
            num_warps=plan.warps, REGULARIZER=choice.regularizer, EXACTLY=choice.exactly, GAMMAS=True,
            NARROW=plan.narrow, BLOCK=plan.block, **options,
        )  # fmt: skip
    return results[: len(outputs)]


def call(kernel: Any, arrays: Any, numbers: Any, outputs: Any, programs: int, **options: Any) -> Any:
    import jax_triton

    return jax_triton.triton_call(*arrays, *numbers, kernel=kernel, out_shape=outputs, grid=(programs,), **options)


def _sweep(problem: Problem, choice: Choice, z: Array, direction: str, relaxed: bool = True) -> tuple[Array, ...]:
    """Value, tangent and y. NaN where the capacity is not valid."""
    theta, _, capacity, _ = problem
    options = {"DIRECTION": direction, "RELAXED": relaxed, "KEEP": False, "LATER": True}
    shapes = theta.shape[:-1], theta.shape[:-1], theta.shape
    value, tangent, y = _launch("operator_kernel", problem, choice, [z], shapes, **options)
    invalid = capacity < 0
    return (*(jnp.where(invalid, jnp.nan, x) for x in (value, tangent)), jnp.where(invalid[..., None], jnp.nan, y))


def _value(problem: Problem, choice: Choice) -> Array:
    return _sweep(problem, choice, problem.theta, "none", relaxed=False)[0]


def _operator(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    value, _, y = _sweep(problem, choice, problem.theta, "none")
    return value, y


def _vjp(problem: Problem, choice: Choice, z: Array) -> Array:
    return _sweep(problem, choice, z, "linear")[2]


def _entropy(problem: Problem, choice: Choice) -> tuple[Array, Array]:
    _, entropy, gradient = _sweep(problem, choice, problem.theta, "entropy")
    return entropy, gradient


def _walk(kernel: str, problem: Problem, choice: Choice, inputs: Any, shapes: Any, **options: Any) -> tuple[Array, ...]:
    samples, count = inputs[0].shape[0], prod(problem.theta.shape[:-1])
    options |= {"FILLED": False, "LANES": triton_plan.lanes(samples)}
    return _launch(kernel, problem, choice, inputs, shapes, count, samples, **options)


def _sample(problem: Problem, choice: Choice, uniforms: Array) -> Array:
    (y,) = _walk("sample_kernel", problem, choice, [uniforms], [uniforms.shape], DRAW=True)
    return jnp.where(problem.capacity[..., None] < 0, jnp.nan, y)


def _solve(problem: Problem, choice: Choice) -> Array:
    (y,) = _walk("sample_kernel", problem, choice, [problem.theta[None]], [problem.theta.shape], DRAW=False)
    return jnp.where(problem.capacity[..., None] < 0, jnp.nan, y)


def _log_prob(problem: Problem, choice: Choice, y: Array) -> Array:
    shape = y.shape[:-1]
    result, _ = _walk("log_prob_kernel", problem, choice, [y, y], [shape, (1,)], BACKWARDS=False)
    return jnp.where(problem.capacity < 0, jnp.nan, result)


_PATHS = {"sample": _sample, "log_prob": _log_prob}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "value": _value, "operator": _operator, "vjp": _vjp, "entropy": _entropy, "solve": _solve, **_PATHS
}  # fmt: skip
