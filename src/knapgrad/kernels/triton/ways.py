"""The ways to work on a batch, which from_torch chooses between. Each is planned once for batches of one shape, is kept
with a lattice, and has two functions:

    results        of a sweep: some of value, tangent, y and tables, in the shape of the batch
    along_paths    writes what a kernel of paths finds to arrays that are given

One launch does whole instances (:class:`Whole`). Where it cannot, or would be slow, other kernels fill tables, which
the kernel of paths is given (:class:`Tabled`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from knapgrad.kernels.triton import paths, plan, variants
from knapgrad.kernels.triton.batch import flat, strength
from knapgrad.kernels.triton.kernels import Kernel
from knapgrad.kernels.triton.launch import Kept, Launch, on
from knapgrad.lattice import Lattice


class Whole(Launch):
    """One launch, of a kernel that does all of each instance."""

    def results(self, kernel: Kernel, theta: Tensor, z: Tensor, gamma: Any, names: tuple[str, ...]) -> list[Tensor]:
        given = {"theta": theta, "z": z, **strength(gamma, theta)}
        for name in names:
            if name == "y":
                given[name] = torch.empty_like(theta)
            elif name == "tables":
                size, n = prod(theta.shape[:-1]), theta.shape[-1]
                given[name] = theta.new_empty(size, n * self.arguments["width"])
            else:
                given[name] = theta.new_empty(theta.shape[:-1], dtype=torch.float64 if name == "value" else theta.dtype)
        self(given)
        return [given[name] for name in names]

    def along_paths(
        self, kernel: Kernel, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, given: dict[str, Tensor]
    ) -> None:
        self({"theta": theta, **strength(gamma, theta), **given})


class Tabled(Kept):
    """Kernels that fill tables of some of the instances at a time."""

    shape: torch.Size  # of a flat batch
    at_once: int  # instances that have tables at a time, where paths are followed

    def sweep(self, theta: Tensor, z: Tensor, strength: dict[str, Any], relaxed: bool, keep: bool) -> dict[str, Tensor]:
        """Value, tangent, y if RELAXED, and the tables if they are kept, for flat theta and z."""
        raise NotImplementedError

    def tables(self, theta: Tensor, strength: dict[str, Any], part: slice) -> Tensor:
        """The tables of some of the instances of flat theta."""
        raise NotImplementedError

    def results(self, kernel: Kernel, theta: Tensor, z: Tensor, gamma: Any, names: tuple[str, ...]) -> list[Tensor]:
        whether = kernel.constants["RELAXED"], kernel.constants["KEEP"]
        found = self.sweep(theta.view(self.shape), z.view(self.shape), strength(gamma, theta), *whether)
        shapes = {"value": theta.shape[:-1], "tangent": theta.shape[:-1], "y": theta.shape}
        return [found[name].view(shapes.get(name, found[name].shape)) for name in names]

    def along_paths(
        self, kernel: Kernel, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, given: dict[str, Tensor]
    ) -> None:
        batch, known = flat(theta, lattice, gamma, regularizer), strength(gamma, theta)
        (size, n), function = batch.theta.shape, getattr(paths, kernel.name)
        shapes = {theta.dim() + 1: (size, n), theta.dim(): (size,)}
        arrays = {name: x.view(len(x), *shapes[x.dim()]) for name, x in given.items()}
        samples = len(next(iter(arrays.values())))
        for k in range(0, size, self.at_once):
            part = slice(k, k + self.at_once)
            some, table = batch.part(part), self.tables(batch.theta, known, part)
            layout = some.plan(1)._replace(width=table.shape[1] // n)
            with on(theta.get_device()):
                function[(layout.programs,)](
                    theta=some.theta, **{name: x[:, part] for name, x in arrays.items()}, **some.constants,
                    batch=len(some.theta), whole=size, samples=samples, n=n, width=layout.width, tables=table,
                    **scratch_of(layout, some.theta), **variants.functions(regularizer), **kernel.constants,
                    FILLED=True, LANES=plan.lanes(samples), **layout.settings,
                )  # fmt: skip


class Given(Tabled):
    """Tables that were kept."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.at_once = table, len(table)

    def tables(self, theta: Tensor, strength: dict[str, Any], part: slice) -> Tensor:
        return self.table


def scratch_of(layout: plan.Plan, theta: Tensor) -> dict[str, Tensor]:
    """The rows of a kernel that is given its tables."""
    shapes = layout.scratch(theta.shape[1])
    return {"V_rows": theta.new_empty(shapes["V_rows"], dtype=torch.float64), "rows": theta.new_empty(shapes["rows"])}
