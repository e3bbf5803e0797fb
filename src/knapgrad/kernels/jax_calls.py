"""What a fused kernel needs around it in JAX: a whole batch, however many axes are vmapped, on the devices where it is,
and beside it a scan for other platforms.

The functions here take theta (*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch,
and extras. In extras and results the batch starts at axis 0, or at axis 1, after the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from knapgrad.kernels import jax_scan
from knapgrad.kernels.operations import Operation
from knapgrad.lattice import Lattice

try:
    from jax.core import ShapedArray
    from jax.extend.core import Primitive
    from jax.interpreters.mlir import lower_fun, register_lowering
except ImportError:
    Primitive = None  # type: ignore[assignment, misc]

Kernel = Callable[[Array, Lattice, Array, tuple[Array, ...]], Any]


def foldable(function: Kernel, axis: int) -> Kernel:
    """``vmap`` puts one more axis in front of the batch."""

    def call(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)  # JAX cannot differentiate what has None among its arguments

        @jax.custom_batching.custom_vmap
        def flat(*leaves: Array) -> Any:
            return function(*jax.tree.unflatten(tree, leaves))

        @flat.def_vmap
        def fold(size: int, batched: Any, *leaves: Array) -> Any:
            theta, lattice, gamma, extra = jax.tree.unflatten(tree, leaves)
            theta_is, lattice_is, gamma_is, extra_is = jax.tree.unflatten(tree, batched)

            def whole(x: Array, is_batched: bool, place: int = 0) -> Array:
                x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                return jnp.moveaxis(x, 0, place)

            def constant(x: Array, is_batched: bool, rank: int) -> Array:
                return x.reshape(size, *(1,) * (rank - x.ndim), *x.shape[1:]) if is_batched else x

            theta = whole(theta, theta_is)
            ranks = {"weights": theta.ndim, "capacity": theta.ndim - 1, "slack": theta.ndim - 1}
            lattice = lattice.replace(**{
                name: constant(getattr(lattice, name), getattr(lattice_is, name), rank)
                for name, rank in ranks.items()
                if getattr(lattice, name) is not None
            })  # fmt: skip
            gamma = constant(gamma, gamma_is, theta.ndim - 1)
            results = call(theta, lattice, gamma, tuple(whole(x, b, axis) for x, b in zip(extra, extra_is)))
            return jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), results), jax.tree.map(lambda x: True, results)

        return flat(*leaves)

    return call


def spread(function: Kernel, axis: int) -> Kernel:
    """The same function, computed where the batch of theta is: nothing moves between devices. In the lattice that it
    gets, and in gamma, arrays are of all instances, or one that they share. It returns a tuple; of one result, that is
    taken out."""

    def call(theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        *batch, n = theta.shape
        given = {"weights": (lattice.weights, (n,)), "capacity": (lattice.capacity, (1,)), "gamma": (gamma, (1,))}
        if lattice.slack is not None:
            given["slack"] = lattice.slack, (1,)
        arrays, axes = [theta], [0]  # the axis at which the batch starts; None if instances share an array
        for name, (x, shape) in given.items():
            is_shared = x.size == prod(shape)
            own = theta.shape if name == "weights" else tuple(batch)
            arrays.append(jnp.asarray(x).reshape(shape) if is_shared else jnp.broadcast_to(x, own))
            axes.append(None if is_shared else 0)  # type: ignore[arg-type]

        def run(theta: Array, *others: Array) -> Any:
            own = dict(zip(given, others))
            gamma, extra = own.pop("gamma"), others[len(given) :]
            return function(theta, lattice.replace(**own), gamma, extra)

        return _alone(_where_the_batch_is(run, [*arrays, *extra], [*axes, *[axis] * len(extra)], axis))

    return call


def _alone(results: tuple[Array, ...]) -> Any:
    return results if len(results) > 1 else results[0]


def is_explicit(x: Array) -> bool:
    """Whether its type says how it is sharded."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _where_the_batch_is(
    function: Callable[..., tuple[Array, ...]], arrays: Sequence[Array], axes: Sequence[int | None], out: int
) -> tuple[Array, ...]:
    """``function(*arrays)``: in shard_map, on a mesh of explicit axes, or wherever XLA puts the batch."""
    rank, sharding = arrays[0].ndim - 1, jax.typeof(arrays[0]).sharding

    def specs(batch: Sequence[Any], arrays: Sequence[Any], axes: Iterable[int | None]) -> tuple[PartitionSpec, ...]:
        def spec(x: Any, axis: int | None) -> PartitionSpec:
            alone = [None] * len(x.shape)
            return PartitionSpec(*(alone if axis is None else [*alone[:axis], *batch, *alone[axis + len(batch) :]]))

        return tuple(map(spec, arrays, axes))

    def on_device(*arrays: Array) -> tuple[Array, ...]:
        arrays = jax_scan.varying(arrays)
        return jax_scan.varying((arrays[0], *function(*arrays)))[1:]

    if any(map(jax_scan.varying_axes, arrays)):
        return on_device(*arrays)
    if is_explicit(arrays[0]):
        with jax_scan.float64(True):  # arrays may be float64 without x64, and JAX 0.11 would say that it narrows them
            shapes = jax.eval_shape(function, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        given, found = (specs(sharding.spec[:rank], x, y) for x, y in ((arrays, axes), (shapes, repeat(out))))
        placed = [jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)) for x, spec in zip(arrays, given)]
        return jax.shard_map(on_device, mesh=sharding.mesh, in_specs=given, out_specs=found)(*placed)

    def partition(mesh: Any, given: Any, results: Any) -> Any:
        spec = getattr(given[0].sharding, "spec", ())  # none on a device that the mesh does not name
        batch = [*spec, *[None] * rank][:rank]
        found, taken = (
            tuple(NamedSharding(mesh, spec) for spec in specs(batch, x, y))
            for x, y in ((results, repeat(out)), (given, axes))
        )
        return mesh, function, found, taken

    def rule(mesh: Any, given: Any, results: Any) -> SdyShardingRule:
        fresh, alone = count(), list[str]()

        def factors(x: Any, axis: int | None) -> tuple[str, ...]:
            names = [f"x{next(fresh)}" for _ in x.shape]
            if axis is not None:
                names[axis : axis + rank] = [f"b{i}" for i in range(rank)]
            alone.extend(name for name in names if name[0] == "x")
            return tuple(names)

        operands, found = (tuple(map(factors, *pair)) for pair in ((given, axes), (results, repeat(out))))
        return SdyShardingRule(operands, found, need_replication_factors=tuple(alone))  # type: ignore[arg-type]

    call = custom_partitioning(function)
    call.def_partition(partition=partition, sharding_rule=rule)
    return call(*arrays)


def traced_late(function: Kernel, operation: Operation) -> Kernel:
    """The same function, whose results have the shapes of an operation. It is traced when code is made for a platform
    that needs it: a scan takes 10 to 50 times as long to trace as the call of a kernel."""

    def call(*arguments: Any) -> Any:
        theta, lattice, _, extra = arguments
        leaves, tree = jax.tree.flatten(arguments)
        if _late is None or is_explicit(theta) or any(map(jax_scan.varying_axes, leaves)):
            return function(*arguments)  # types of results would have to say more than their shapes
        samples = len(extra[0]) if operation.is_sampled else 0
        shapes = tuple(operation.shape_of(x, theta.shape, lattice.reach, samples) for x in operation.results)
        is_wide = jax.dtypes.canonicalize_dtype(jnp.float64) == jnp.float64
        results = _late.bind(*leaves, function=function, tree=tree, shapes=shapes, is_wide=is_wide)
        return _alone(tuple(results))

    return call


def _late_primitive() -> Any:
    def run(*leaves: Array, function: Kernel, tree: Any, is_wide: bool, **_: Any) -> list[Array]:
        with jax_scan.float64(is_wide):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    def types(theta: Any, *_: Any, shapes: tuple[tuple[int, ...], ...], **__: Any) -> list[Any]:
        return [ShapedArray(shape, theta.dtype) for shape in shapes]

    found = Primitive("knapgrad_traced_late")
    found.multiple_results = True
    found.def_impl(run)
    found.def_abstract_eval(types)
    register_lowering(found, lower_fun(run, multiple_results=True))
    return found


_late = None if Primitive is None else _late_primitive()  # None: this version of JAX traces at once
