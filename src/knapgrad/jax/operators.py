"""The sweeps as JAX functions of a batch, with their derivatives.

Every function takes theta (*batch, n), int32 weights broadcastable to it, capacity and gamma broadcastable to the
batch, and computes a function of theta / gamma. Only theta is kept for a backward pass: derivatives are linear
functions that compute again what they need, forwards and transposed.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from knapgrad.kernels import jax_scan, triton_jax
from knapgrad.kernels.jax_scan import Choice, Problem


def _run(name: str, choice: Choice, problem: Problem, *extra: Array, axis: int = 0) -> Any:
    """The kernel of that name: fused on a GPU where it can be, elsewhere a scan. Extras have the batch at that axis."""
    scan = partial(_batched, getattr(jax_scan, name), choice, axis=axis)
    fused = triton_jax.find(name, choice, problem.theta)
    if fused is None:
        return scan(problem, extra)
    return lax.platform_dependent(problem, extra, default=scan, **{triton_jax.PLATFORM: fused})


def _batched(function: Any, choice: Choice, problem: Problem, extra: tuple[Array, ...], axis: int) -> Any:
    """``function(problem, choice, *extra)`` of every instance; extra has the batch at that axis, as have results."""
    theta, *constants = problem
    *batch, n = theta.shape
    size = prod(batch)
    axes: list[Any] = [0]
    flat: list[Array] = []
    for x, shape in zip(constants, ((n,), (), ())):
        shared = x.size == prod(shape)
        axes.append(None if shared else 0)
        flat.append(x.reshape(shape) if shared else jnp.broadcast_to(x, (*batch, *shape)).reshape(size, *shape))
    one = jax.vmap(lambda p, *e: function(p, choice, *e), (Problem(*axes), *[axis] * len(extra)), axis if extra else 0)
    flat_extra = [x.reshape(*x.shape[:axis], size, *x.shape[axis + len(batch) :]) for x in extra]
    results = one(Problem(theta.reshape(size, n), *flat), *flat_extra)
    out = axis if extra else 0
    return jax.tree.map(lambda x: x.reshape(*x.shape[:out], *batch, *x.shape[out + 1 :]), results)


def _direction(problem: Problem, tangents: Problem) -> Array:
    """The tangent of theta / gamma. An item that is out contributes nothing to the derivative by gamma."""
    finite = jnp.where(problem.theta == -jnp.inf, 0.0, problem.theta)
    gamma = problem.gamma[..., None]
    return (tangents.theta - finite / gamma * tangents.gamma[..., None]) / gamma


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def value(choice: Choice, problem: Problem) -> Array:
    """The smoothed optimum (*batch,). By itself it is twice differentiable in every mode: the derivative of
    :func:`operator` in forward mode always has that of the selection with it, which has no further one."""
    return _run("value", choice, problem)


@value.defjvp
def _value_jvp(choice: Choice, primals: tuple[Problem], tangents: tuple[Problem]) -> Any:
    optimum, y = operator(choice, primals[0])
    return optimum, (y * _direction(primals[0], tangents[0])).sum(-1)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def operator(choice: Choice, problem: Problem) -> tuple[Array, Array]:
    """The smoothed optimum (*batch,) and its gradient, the relaxed selection (*batch, n)."""
    return _run("operator", choice, problem)


@operator.defjvp
def _operator_jvp(choice: Choice, primals: tuple[Problem], tangents: tuple[Problem]) -> Any:
    (problem,), direction = primals, _direction(primals[0], tangents[0])
    value, y = operator(choice, problem)
    return (value, y), ((y * direction).sum(-1), _product(choice, problem, direction))


def _product(choice: Choice, problem: Problem, z: Array) -> Array:
    """The Jacobian of relax times z. It is symmetric, so the product is its own transpose; JAX is told so by the one
    primitive that takes a linear function and its transpose as given, a linear solve."""

    def inverse(x: Array) -> Array:  # never computed: JAX only asks it for derivatives, and there are none
        return _constant(x, problem.theta, problem.gamma)

    def product(_: Any, z: Array) -> Array:
        return _run("vjp", choice, problem, z)

    return lax.custom_linear_solve(inverse, z, product, symmetric=True)


@jax.custom_jvp
def _constant(x: Array, *_: Array) -> Array:
    return x


@_constant.defjvp
def _constant_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "knapgrad has two derivatives of value, and one of relax, entropy and log_prob; differentiate once less, or "
        "use jax.lax.stop_gradient on theta where this derivative is not wanted"
    )


def _frozen(problem: Problem) -> Problem:
    """What is computed from it has no derivative."""
    return problem._replace(theta=_constant(problem.theta), gamma=_constant(problem.gamma))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def entropy(choice: Choice, problem: Problem) -> Array:
    return _run("entropy", choice, problem)[0]


@entropy.defjvp
def _entropy_jvp(choice: Choice, primals: tuple[Problem], tangents: tuple[Problem]) -> Any:
    result, gradient = _run("entropy", choice, _frozen(primals[0]))
    return result, (gradient * _direction(primals[0], tangents[0])).sum(-1)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_prob(choice: Choice, problem: Problem, y: Array) -> Array:
    """(samples, *batch) for selections (samples, *batch, n)."""
    return _run("log_prob", choice, problem, y, axis=1)


@log_prob.defjvp
def _log_prob_jvp(choice: Choice, primals: tuple[Problem, Array], tangents: tuple[Problem, Array]) -> Any:
    problem, y = primals
    direction = _direction(problem, tangents[0])

    @jax.checkpoint  # to compute the tables again when it is transposed, rather than keep them
    def derivative(problem: Problem, y: Array, z: Array) -> Array:
        return _run("log_prob_jvp", choice, problem, y, z[None], axis=1)

    return log_prob(choice, problem, y), derivative(_frozen(problem), y, direction)


def sample(choice: Choice, problem: Problem, uniforms: Array) -> Array:
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    return _run("sample", choice, lax.stop_gradient(problem), uniforms, axis=1)


def solve(choice: Choice, problem: Problem) -> Array:
    """The best selection (*batch, n)."""
    return _run("solve", choice, problem)
