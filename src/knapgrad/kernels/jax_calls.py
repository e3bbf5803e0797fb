"""What a fused kernel needs around it in JAX: a whole batch, however many axes are vmapped, on the devices where it is.

The functions here take theta (*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch,
and extras. In extras and results the batch starts at axis 0, or at axis 1, after the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from knapgrad.kernels import jax_scan
from knapgrad.lattice import Lattice

Kernel = Callable[[Array, Lattice, Array, tuple[Array, ...]], Any]


def foldable(function: Kernel, axis: int) -> Kernel:
    """``vmap`` puts one more axis in front of the batch."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def fold(size: int, batched: Any, theta: Array, lattice: Lattice, gamma: Array, extra: tuple[Array, ...]) -> Any:
        def whole(x: Array, is_batched: bool, axis: int = 0) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return jnp.moveaxis(x, 0, axis)

        def constant(x: Array, is_batched: bool, rank: int) -> Array:
            return x.reshape(size, *(1,) * (rank - x.ndim), *x.shape[1:]) if is_batched else x

        theta_is, lattice_is, gamma_is, extra_is = batched
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

    return call


def constants(theta: Array, lattice: Lattice, gamma: Array) -> dict[str, tuple[Array, bool]]:
    """The arrays of a lattice, and gamma, by name: those of all instances, or the one that they share; and whether they
    do."""
    *batch, n = theta.shape
    slack = jnp.zeros((), jnp.int32) if lattice.slack is None else lattice.slack
    given = {"weights": (lattice.weights, (n,)), "capacity": (lattice.capacity, (1,)), "slack": (slack, (1,))}
    found = {}
    for name, (x, shape) in (given | {"gamma": (gamma, (1,))}).items():
        is_shared = x.size == prod(shape)
        own = (*batch, n) if name == "weights" else tuple(batch)
        found[name] = jnp.asarray(x).reshape(shape) if is_shared else jnp.broadcast_to(x, own), is_shared
    return found


def spread(
    function: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], out: Sequence[int]
) -> Any:
    """``function(*arrays)``, a tuple, computed where the batch of the first array is, without moving anything.

    Args:
        function: runs on the part of a device as it does on the whole.
        axes: at which axis of each array the batch starts; None if instances share it.
        out: the same of each result.
    """
    rank, sharding = arrays[0].ndim - 1, jax.typeof(arrays[0]).sharding

    def specs(batch: Sequence[Any], ranks: Sequence[int], axes: Sequence[int | None]) -> tuple[Any, ...]:
        def spec(length: int, axis: int | None) -> PartitionSpec:
            alone = [None] * length
            return PartitionSpec(*(alone if axis is None else [*alone[:axis], *batch, *alone[axis + len(batch) :]]))

        return tuple(spec(length, axis) for length, axis in zip(ranks, axes))

    def on_device(*arrays: Array) -> Any:
        """In shard_map."""
        arrays = jax_scan.varying(arrays)
        return jax_scan.varying((arrays[0], *function(*arrays)))[1:]

    if any(map(jax_scan.varying_axes, arrays)):
        return on_device(*arrays)
    if AxisType.Explicit in sharding.mesh.axis_types:
        shapes = jax.eval_shape(function, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        given = specs(sharding.spec[:rank], [x.ndim for x in arrays], axes)
        results = specs(sharding.spec[:rank], [len(x.shape) for x in shapes], out)
        placed = [jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec)) for x, spec in zip(arrays, given)]
        return jax.shard_map(on_device, mesh=sharding.mesh, in_specs=given, out_specs=results)(*placed)

    def partition(mesh: Any, given: Any, results: Any) -> Any:
        batch = [*given[0].sharding.spec, *[None] * rank][:rank]

        def shardings(shapes: Any, axes: Sequence[int | None]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec) for spec in specs(batch, [len(x.shape) for x in shapes], axes))

        return mesh, function, shardings(results, out), shardings(given, axes)

    def rule(mesh: Any, given: Any, results: Any) -> SdyShardingRule:
        fresh, alone = count(), list[str]()

        def factors(kind: Any, axis: int | None) -> tuple[str, ...]:
            names = [f"x{next(fresh)}" for _ in kind.shape]
            if axis is not None:
                names[axis : axis + rank] = [f"b{i}" for i in range(rank)]
            alone.extend(name for name in names if name[0] == "x")
            return tuple(names)

        operands, found = (tuple(map(factors, *pair)) for pair in ((given, axes), (results, out)))
        return SdyShardingRule(operands, found, need_replication_factors=tuple(alone))  # type: ignore[arg-type]

    call = custom_partitioning(function)
    call.def_partition(partition=partition, sharding_rule=rule)
    return call(*arrays)
