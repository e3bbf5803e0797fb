"""The sweeps as JAX functions of a batch, with their derivatives.

Every function takes the name of a regularizer, theta (*batch, n), a lattice of int32 arrays that broadcast to it, and
gamma that broadcasts to the batch, and computes a function of theta / gamma. Only theta is kept for a backward pass:
derivatives are linear functions that compute again what they need, forwards and transposed.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from knapgrad.kernels import jax_calls, jax_scan
from knapgrad.kernels.numba import from_jax as on_cpu
from knapgrad.kernels.operations import OPERATIONS
from knapgrad.kernels.triton import from_jax as on_cuda
from knapgrad.lattice import LARGEST, Lattice


def _run(name: str, regularizer: str, theta: Array, lattice: Lattice, gamma: Array, *extra: Array) -> Any:
    """An operation of that name: fused on CPUs and CUDA devices where it can be, elsewhere a scan."""
    operation = OPERATIONS[name]
    scan = partial(_batched, getattr(jax_scan, name), regularizer, operation.axis)
    found = {place.PLATFORM: place.find(name, regularizer, theta, lattice) for place in (on_cpu, on_cuda)}
    fused = {platform: function for platform, function in found.items() if function is not None}
    if not fused:
        return scan(theta, lattice, gamma, extra)
    elsewhere = jax_calls.traced_late(scan, operation)

    def call(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, default=elsewhere, **fused)

    return jax_calls.foldable(_guarded(call), operation.axis)(theta, lattice, gamma, extra)


def _guarded(function: Any) -> Any:
    """The same function, which says that it has no derivative: in loops, JAX looks behind that of the operator."""
    call = jax.custom_jvp(lambda *arguments: function(*arguments))
    call.defjvp(lambda primals, tangents: _no_derivative())
    return call


def _batched(
    function: Any, regularizer: str, axis: int, theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]
) -> Any:
    """``function`` of every instance. In extras and results the batch is that axis. Shared arguments are not copied."""
    *batch, n = theta.shape
    size = prod(batch)
    constants = {"weights": (lattice.weights, (n,)), "capacity": (lattice.capacity, ()), "gamma": (gamma, ())}
    if lattice.slack is not None:
        constants["slack"] = lattice.slack, ()
    flat: dict[str, Array] = {"theta": theta.reshape(size, n)}
    axes: dict[str, int | None] = {"theta": 0}
    for name, (x, shape) in constants.items():
        shared = x.size == prod(shape)
        axes[name] = None if shared else 0
        if not shared:
            x = placed(jnp.broadcast_to(x, (*batch, *shape)), theta)
        flat[name] = x.reshape(shape if shared else (size, *shape))

    def one(own: dict[str, Array], *extra: Array) -> Any:
        own_lattice = lattice.replace(weights=own["weights"], capacity=own["capacity"], slack=own.get("slack"))
        return function(own["theta"], own_lattice, own["gamma"], regularizer, *extra)

    out = axis if extra else 0
    flat_extra = [placed(x, theta, axis).reshape(*x.shape[:axis], size, *x.shape[axis + len(batch) :]) for x in extra]
    results = jax.vmap(one, (axes, *[axis] * len(extra)), out)(flat, *flat_extra)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:out], *batch, *x.shape[out + 1 :]), results)


def placed(x: Array, theta: Array, axis: int = 0) -> Array:
    """x, whose batch starts at that axis, on the devices where the batch of theta is; for meshes with explicit axes."""
    sharding = jax.typeof(theta).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    batch = sharding.spec[: theta.ndim - 1]
    spec = PartitionSpec(*[None] * axis, *batch, *[None] * (x.ndim - axis - len(batch)))
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _direction(theta: Array, gamma: Array, theta_tangent: Array, gamma_tangent: Array) -> Array:
    """The tangent of theta / gamma. An item that is out contributes nothing to the derivative by gamma."""
    finite = jnp.where(theta == -jnp.inf, 0.0, theta)
    gamma = gamma[..., None]
    return (theta_tangent - finite / gamma * gamma_tangent[..., None]) / gamma


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def value(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> Array:
    """The smoothed optimum (*batch,), twice differentiable in every mode. It is apart from :func:`operator`, whose
    forward-mode derivative includes that of the selection, which cannot be differentiated again."""
    return _run("value", regularizer, theta, lattice, gamma)


@value.defjvp
def _value_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma = primals
    optimum, y = operator(regularizer, theta, lattice, gamma)
    return optimum, (y * _direction(theta, gamma, tangents[0], tangents[2])).sum(-1)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def operator(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> tuple[Array, Array]:
    """The smoothed optimum (*batch,) and its gradient, the relaxed selection (*batch, n)."""
    return _run("operator", regularizer, theta, lattice, gamma)


@operator.defjvp
def _operator_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma = primals
    direction = _direction(theta, gamma, tangents[0], tangents[2])
    value, y = operator(regularizer, theta, lattice, gamma)
    return (value, y), ((y * direction).sum(-1), _product(regularizer, theta, lattice, gamma, direction))


def _product(regularizer: str, theta: Array, lattice: Lattice, gamma: Array, z: Array) -> Array:
    """The Jacobian of relax times z. It is symmetric, so the product is its own transpose. A linear solve is the one
    primitive of JAX that accepts a linear function together with its transpose, so it tells JAX that."""
    theta, lattice, gamma, z = jax_scan.varying((theta, lattice, gamma, z))  # the solve cannot do that

    def inverse(x: Array) -> Array:  # never computed: JAX only differentiates it, and that raises
        return _constant(x, theta, gamma)

    def product(_: Any, z: Array) -> Array:
        return _run("vjp", regularizer, theta, lattice, gamma, z)

    return lax.custom_linear_solve(inverse, z, product, symmetric=True)


@jax.custom_jvp
def _constant(x: Array, *_: Array) -> Array:
    return x


@_constant.defjvp
def _constant_jvp(primals: Any, tangents: Any) -> Any:
    _no_derivative()


def _no_derivative() -> NoReturn:
    raise NotImplementedError(
        "knapgrad has two derivatives of value, and one of relax, entropy, log_prob and frontier, of value too inside "
        "lax.scan, lax.map and lax.fori_loop, where vmap has two; differentiate once less, or use "
        "jax.lax.stop_gradient on theta where this derivative is not wanted"
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def entropy(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> Array:
    return _run("entropy", regularizer, theta, lattice, gamma)


@entropy.defjvp
def _entropy_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma = primals
    result, gradient = _run("entropy_grad", regularizer, _constant(theta), lattice, _constant(gamma))
    return result, (gradient * _direction(theta, gamma, tangents[0], tangents[2])).sum(-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def frontier(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> Array:
    """The smoothed optimum at every capacity (*batch, reach + 1), -inf where nothing is feasible."""
    return _run("frontier", regularizer, theta, lattice, gamma)


def _frontier_forward(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> tuple[Array, Any]:
    return frontier(regularizer, theta, lattice, gamma), (theta, lattice, gamma)


def _frontier_backward(regularizer: str, kept: Any, cotangent: Array) -> tuple[Array, None, Array]:
    theta, lattice, gamma = kept
    gradient = _run("frontier_vjp", regularizer, _constant(theta), lattice, _constant(gamma), cotangent)
    pull = jax.linear_transpose(partial(_direction, theta, gamma), theta, gamma)
    by_theta, by_gamma = pull(gradient)
    return by_theta, None, by_gamma


frontier.defvjp(_frontier_forward, _frontier_backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_prob(regularizer: str, theta: Array, lattice: Lattice, gamma: Array, y: Array) -> Array:
    """(samples, *batch) for selections (samples, *batch, n)."""
    return _run("log_prob", regularizer, theta, lattice, gamma, y)


@log_prob.defjvp
def _log_prob_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma, y = primals
    direction = _direction(theta, gamma, tangents[0], tangents[2])

    @jax.checkpoint  # to compute the tables again when it is transposed, rather than keep them
    def derivative(theta: Array, lattice: Lattice, gamma: Array, y: Array, z: Array) -> Array:
        return _run("log_prob_jvp", regularizer, theta, lattice, gamma, y, z[None])

    result = log_prob(regularizer, theta, lattice, gamma, y)
    return result, derivative(_constant(theta), lattice, _constant(gamma), y, direction)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def recall(
    regularizer: str, theta: Array, lattice: Lattice, gamma: Array, value: Array, mean: Array
) -> tuple[Array, Array]:
    """:func:`operator`, where its results are known."""
    return value, mean


@recall.defjvp
def _recall_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma, value, mean = primals
    direction = _direction(theta, gamma, tangents[0], tangents[2])
    return (value, mean), ((mean * direction).sum(-1), _product(regularizer, theta, lattice, gamma, direction))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def surrogate(regularizer: str, theta: Array, lattice: Lattice, gamma: Array, y: Array) -> Array:
    """Selections y (samples, *batch, n), with the derivative of relax."""
    return y


@surrogate.defjvp
def _surrogate_jvp(regularizer: str, primals: Any, tangents: Any) -> Any:
    theta, lattice, gamma, y = primals
    direction = _direction(theta, gamma, tangents[0], tangents[2])
    return y, jnp.broadcast_to(_product(regularizer, theta, lattice, gamma, direction), y.shape)


def tabulate(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> tuple[Array, Array, Array]:
    """The smoothed optimum (*batch,), the relaxed selection (*batch, n) and the tables (*batch, ...); detached."""
    theta, gamma = lax.stop_gradient((theta, gamma))
    return _batched(jax_scan.tabulate, regularizer, 0, theta, lattice, gamma, ())


def walk(theta: Array, lattice: Lattice, value: Array, tables: Array, uniforms: Array) -> Array:
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape, and tables."""

    def one(theta: Array, lattice: Lattice, gamma: Array, _: str, uniforms: Array, value: Array, Q: Array) -> Array:
        return jax_scan.walk(lattice, value[0], Q[0], uniforms)

    return _batched(one, "", 1, theta, lattice, jnp.ones((), theta.dtype), (uniforms, value[None], tables[None]))


def mode(regularizer: str, theta: Array, lattice: Lattice, gamma: Array) -> Array:
    """The most probable selection (*batch, n)."""
    theta, gamma = lax.stop_gradient((theta, gamma))
    return _run("mode", regularizer, theta, lattice, gamma)


def sample(regularizer: str, theta: Array, lattice: Lattice, gamma: Array, uniforms: Array) -> Array:
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    theta, gamma = lax.stop_gradient((theta, gamma))
    return _run("sample", regularizer, theta, lattice, gamma, uniforms)


def solve(theta: Array, lattice: Lattice) -> Array:
    """The best selection (*batch, n)."""
    theta, gamma = lax.stop_gradient(theta), jnp.ones((), theta.dtype)
    if theta.dtype == jnp.float64:  # divided by a power of two, large scores are in range
        largest = jnp.where(jnp.isfinite(theta), abs(theta), 0.0).max(-1, initial=0.0)
        gamma = jnp.where(largest > LARGEST, 2.0**64, 1.0)
    return _run("solve", "hard", theta, lattice, gamma)
