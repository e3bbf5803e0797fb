"""The time of a gradient step: forward and backward pass up to the predicted values, for a batch of 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyepo.func as losses
import torch
from torch import Tensor

import knapgrad as kg
from experiments.pyepo.data import BATCH, Benchmark, generate
from experiments.pyepo.methods import METHODS, SIGMA, Loss, of_decisions
from experiments.sweep import Row
from measuring import clocks


def measure(n: int, seconds: float, with_solver: bool = True) -> list[Row]:
    """All methods in turn in one process, on one thread."""
    torch.set_num_threads(1)
    benchmark = generate(n, seed=0)
    _, values, decisions, best = (x[:BATCH] for x in benchmark.parts["train"])
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    predicted = (values + noise).requires_grad_()

    def step(loss: Loss) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(predicted, values, decisions, best), predicted)

    contestants = {name: step(method.make(benchmark, 0)) for name, method in METHODS.items()}
    contestants["PFY, 10 samples, without PyEPO"] = step(perturbed_directly(benchmark))
    if with_solver:
        contestants["PFY, 10 samples, OR-Tools"] = step(as_shipped(benchmark))
    times = clocks.take_turns(contestants, seconds)
    ours = [name for name in METHODS if name.startswith("DP")]
    return [
        {
            "method": name,
            "n": n,
            "microseconds": clocks.microseconds(measured),
            "times_slower_than": {one: clocks.ratio(measured, times[one]) for one in ours},
        }
        for name, measured in times.items()
    ]


def perturbed_directly(benchmark: Benchmark) -> Loss:
    """The gradient of the perturbed loss in one call of the solver: as little as it can cost."""

    def loss(predicted: Tensor, values: Tensor, decisions: Tensor, best: Tensor) -> Tensor:
        noise = torch.randn(10, *predicted.shape)
        chosen = kg.solve(predicted.detach() + SIGMA * noise, constraint).mean(0)
        return ((chosen - decisions) * predicted).sum(-1).mean()

    constraint = benchmark.constraint
    return loss


def as_shipped(benchmark: Benchmark) -> Loss:
    """PyEPO's perturbed loss on its OR-Tools model, as it comes."""
    from pyepo.model.ort import knapsackModel as solver_model

    model = solver_model(benchmark.weights[None].astype(float), [float(benchmark.capacity)])
    return of_decisions(losses.perturbedFenchelYoung(model, n_samples=10, sigma=SIGMA))
