"""Compiles the GPU kernels for an H100 or H200, on a machine without a GPU: Triton's interpreter, which runs them in
other tests, accepts more than its compiler. Prints how many were compiled. Run by test_triton_compiles.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import JITFunction

import knapgrad as kg
from knapgrad.kernels.triton import from_torch as kernels
from knapgrad.kernels.triton import plan
from knapgrad.kernels.triton.segments import Segments
from measuring import compiler

CONSTRAINTS = {
    "registers": (kg.Knapsack([1, 2, 3, 4], 6, at_least=2), 4),
    "memory": (kg.Knapsack(np.full(40, 50), 1500), 40),
    "shared rows": (kg.Knapsack(np.full(4, 20_000), 50_000), 4),
    "a pipeline": (kg.TopK(70), 90),
    "a pipeline of picks that move by several states": (kg.Knapsack(np.full(40, 3), 100, at_least=90), 40),
    "a pipeline of picks that move beyond the next tile": (kg.Knapsack(np.arange(5, 105, 5), 500), 20),
    "a pipeline of segments": (kg.TopK(20), 90),
    "options": (kg.MultipleChoice(np.array([[1, 2], [2, 3]]), 4), 4),
    "many options": (kg.MultipleChoice(np.arange(1, 19).reshape(2, 9), 14), 18),
    "two budgets, registers": (kg.MultiKnapsack([[1, 1, 1, 1], [3, 0, 2, 4]], [3, 6]), 4),
    "three budgets, memory": (kg.MultiKnapsack([np.full(40, 20), np.ones(40, int), np.full(40, 2)], [60, 4, 9]), 40),
    "two budgets, a pipeline": (kg.MultiKnapsack([np.full(4, 20), np.full(4, 30)], [30, 40]), 4),
    "two budgets, shared rows": (kg.MultiKnapsack([np.full(4, 200), np.full(4, 300)], [300, 400]), 4),
}
UNIT = np.ones(())


def main() -> None:
    compiler.use()
    compiled, names, run = set(), [], JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = run(self, *arguments, grid=grid, warmup=True, **options)
        assert len(found.asm["cubin"]) > 1000
        compiled.add(found.hash)
        names.append(self.__name__)

    JITFunction.run = compile_only
    plan.GROUP = plan.FAR_GROUP = 2  # loops over them are unrolled: the usual ones take ten times as long
    for turn, (name, (constraint, n)) in enumerate(CONSTRAINTS.items()):
        plan.PIPELINED = (1 << 20, 0, 0) if "pipeline" in name else (0, 0, 0)
        plan.PIPELINED_FAR = *plan.PIPELINED, 1 << 20
        plan.SEGMENTED = (1 << 20, 20) if "segments" in name else (0, 1)
        plan.tiles.cache_clear()
        plan.segments.cache_clear()
        before = len(names)
        lattice = constraint.lattice(n)
        tensors = {
            key: torch.from_numpy(np.array(getattr(lattice, key)))
            for key in ("weights", "capacity", "slack")
            if getattr(lattice, key) is not None
        }
        lattice = lattice.replace(**tensors)
        theta = torch.zeros(3, n, dtype=(torch.float32, torch.float64)[turn % 2])
        regularizer = "shannon" if "segments" in name else ("shannon", "gini", "tsallis")[turn % 3]
        y = theta.new_zeros(2, 3, n)
        problem = lattice, UNIT, regularizer
        kernels.vjp(theta, theta, *problem)
        kernels.frontier(theta, *problem)
        assert ("fill_tiles_kernel" in names[before:]) == ("pipeline" in name), name
        assert ("join_kernel" in names[before:]) == ("segments" in name), name
        if "shared rows" in name:
            continue
        kernels.log_prob_vjp(theta, y, y[..., 0], *problem)
        (kernels.mode if turn % 2 else kernels.sample)(theta, *[y] * (1 - turn % 2), *problem)
    V, goals = torch.zeros(2, 4, 40, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)
    for dtype, T in (torch.float32, V.float()), (torch.float64, None):
        Segments(*V.shape, dtype, has_tangent=T is not None)(V, T, goals)
    print(len(compiled))


if __name__ == "__main__":
    main()
