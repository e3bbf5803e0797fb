"""Every operation at test sizes, on all layouts of rows, for NVIDIA's checker of memory accesses and races:

compute-sanitizer --tool memcheck python -m benchmarks.sanitize     (or --tool racecheck)
compute-sanitizer --tool memcheck python -m benchmarks.sanitize pipelines     (these alone)
"""

from __future__ import annotations

import sys

import torch

import knapgrad as kg
from knapgrad.constraints import Constraint, base
from knapgrad.kernels.triton import plan
from knapgrad.regularizers import Regularizer


def everything(theta: torch.Tensor, constraint: Constraint, regularizer: Regularizer) -> None:
    theta = theta.cuda().requires_grad_()
    kg.relax(theta, constraint, regularizer).sin().sum().backward()
    kg.value(theta, constraint, regularizer)
    kg.solve(theta, constraint)
    kg.entropy(theta, constraint, regularizer).sum().backward()
    y = kg.sample(theta, constraint, regularizer, num_samples=5)
    kg.log_prob(theta, y, constraint, regularizer).sum().backward()
    distribution = kg.torch.SubsetDistribution(theta, constraint, regularizer)
    distribution.sample((3,)), distribution.mean, distribution.mode
    torch.cuda.synchronize()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.manual_seed(0)
    if sys.argv[1:] == ["pipelines"]:
        pipelines()
        print("done")
        return
    light, heavy = torch.randint(0, 9, (7,)), torch.randint(1, 60, (13,))
    for regularizer in (kg.Gini(0.7), kg.Tsallis(), kg.Shannon()):
        everything(torch.randn(3, 7), kg.Knapsack(light, 17), regularizer)
        everything(torch.randn(5, 9), kg.TopK([0, 1, 4, 8, 9]), regularizer)
        everything(torch.randn(300, 13), kg.Knapsack(heavy, 201), regularizer)
        everything(torch.randn(300, 13), kg.Knapsack(heavy, 201, at_least=90), regularizer)
        everything(torch.randn(5, 9), kg.TopK([0, 1, 4, 8, 9], at_least=[0, 0, 2, 5, 9]), regularizer)
        for largest in (1 << 15, 1000):  # and the same rows, shared by many programs
            plan.LARGEST_ROW = largest
            base._first_equal.cache_clear()  # launches are remembered with the constraint, and with equal ones
            everything(torch.randn(2, 13), kg.Knapsack(9 * heavy, 1333), regularizer)
            everything(torch.randn(2, 13), kg.Knapsack(9 * heavy, 1333, at_least=300), regularizer)
        plan.LARGEST_ROW = 1 << 15
        everything(torch.randn(3, 7), kg.MultiKnapsack([light, light + 1], [9, 12]), regularizer)
    pipelines()
    print("done")


def pipelines() -> None:
    """Tiles, and segments of items."""
    plan.PIPELINED, plan.PIPELINED_FAR, plan.SEGMENTED = (1 << 20, 0, 0), (1 << 20, 0, 0, 1 << 30), (1 << 20, 64)
    plan.GROUP = 2  # compiles sooner
    for regularizer in (kg.Gini(0.7), kg.Shannon()):
        everything(torch.randn(2, 200), kg.TopK([70, 100]), regularizer)
        everything(torch.randn(2, 50), kg.Knapsack(torch.randint(1, 90, (50,)), 400), regularizer)


if __name__ == "__main__":
    main()
