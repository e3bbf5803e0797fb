"""The methods: what each sees in training, and its loss. All use the same exact solver."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyepo.func as losses
from pyepo.data.dataset import optDataset
from torch import Tensor, nn

from experiments.pyepo.data import BATCH, Benchmark
from knapgrad.pyepo import regularizedKnapsackFenchelYoung

GAMMA = SIGMA = 5.0

#: predicted values, true values, decisions and their values, each (batch, ...) -> the loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Method(NamedTuple):
    sees: str  # "values" or "decisions"
    make: Callable[[Benchmark, int], Loss]  # of a benchmark and a seed


def of_decisions(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of predicted values and decisions."""
    return lambda predicted, values, decisions, best: loss(predicted, decisions)


def of_solutions(solution: Callable[[Tensor], Tensor]) -> Loss:
    """Half the squared error of what is selected."""
    return lambda predicted, values, decisions, best: 0.5 * (solution(predicted) - decisions).square().mean()


def _dp(regularizer: str) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return of_decisions(regularizedKnapsackFenchelYoung(benchmark.model, GAMMA, regularizer))

    return Method("decisions", make)


def _perturbed(samples: int) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return of_decisions(losses.perturbedFenchelYoung(benchmark.model, n_samples=samples, sigma=SIGMA, seed=seed))

    return Method("decisions", make)


def _black_box(strength: Callable[[int], float]) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return of_solutions(losses.blackboxOpt(benchmark.model, lambd=strength(len(benchmark.weights))))

    return Method("decisions", make)


def _identity(benchmark: Benchmark, seed: int) -> Loss:
    return of_solutions(losses.negativeIdentity(benchmark.model))


def _contrastive(benchmark: Benchmark, seed: int) -> Loss:
    data = benchmark.parts["train"]
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        dataset = optDataset(benchmark.model, data.features, data.values)
    loss = losses.noiseContrastiveEstimation(benchmark.model, solve_ratio=0.05, dataset=dataset)
    loss._branch_rng = np.random.RandomState(seed)  # it takes no seed, and would draw one
    return of_decisions(loss)


def _cross_entropy(benchmark: Benchmark, seed: int) -> Loss:
    return of_decisions(nn.functional.binary_cross_entropy_with_logits)


def _spo_plus(benchmark: Benchmark, seed: int) -> Loss:
    return losses.SPOPlus(benchmark.model)


def _squared_error(benchmark: Benchmark, seed: int) -> Loss:
    return lambda predicted, values, decisions, best: nn.functional.mse_loss(predicted, values)


METHODS = {
    "DP Shannon": _dp("shannon"),
    "DP Gini": _dp("gini"),
    "DP Tsallis": _dp("tsallis"),
    "PFY, 10 samples": _perturbed(10),
    "PFY, 1 sample": _perturbed(1),
    "DBB, 0.1": _black_box(lambda n: 0.1),
    "DBB, scaled": _black_box(lambda n: GAMMA * BATCH * n),  # moves the value of an item that is wrong by gamma
    "NCE": Method("decisions", _contrastive),
    "NID": Method("decisions", _identity),
    "cross-entropy": Method("decisions", _cross_entropy),
    "MSE": Method("values", _squared_error),
    "SPO+": Method("values", _spo_plus),
}
