"""The paper's first experiment: predict item values from features, so that the best selection is the right one.

Synthetic knapsacks as in PyEPO's genData, with integer weights; a small network; every loss with the same exact solver.
Three parts: ``train`` makes one row for each method, number of items and seed; ``time`` measures a gradient step;
``report`` draws both and writes the tables. What the paper leaves open and what is ours is in this folder's README.md.

    python -m experiments.pyepo_knapsack --help
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyepo.func as losses
import torch
from pyepo.data.dataset import optDataset
from torch import Tensor, nn

import knapgrad as kg
from benchmarks import timing
from experiments import command_line, sweep
from knapgrad.pyepo import knapsackModel, regularizedKnapsackFenchelYoung

MODULE, PACKAGES = "experiments.pyepo_knapsack", ("numpy", "torch", "pyepo")
FEATURES = 5  # the paper does not say; PyEPO's examples have 5
EPOCHS, BATCH, LEARNING_RATE, HIDDEN = 30, 32, 2e-3, 64
PARTS = {"train": 10_000, "validation": 4_000, "test": 4_000}
GAMMA = SIGMA = 5.0
ITEMS = (10, 25, 50, 100)
SEEDS = {10: 10, 25: 10, 50: 10, 100: 5}

#: predicted values, true values, decisions and their values, each (batch, ...) -> the loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Part(NamedTuple):
    """Instances: features (size, p), true values and best selections (size, n), and their values (size, 1)."""

    features: Tensor
    values: Tensor
    decisions: Tensor
    best: Tensor


class Benchmark(NamedTuple):
    weights: np.ndarray
    capacity: int
    parts: dict[str, Part]

    @property
    def constraint(self) -> kg.Knapsack:
        return kg.Knapsack(self.weights, self.capacity)

    @property
    def model(self) -> knapsackModel:
        return knapsackModel(self.weights, self.capacity)


@lru_cache(maxsize=1)
def generate(n: int, seed: int, scale: float = 1.0) -> Benchmark:
    """The paper's data; ``scale`` makes it smaller."""
    rng = np.random.default_rng([seed, n])
    weights = rng.integers(3, 9, n)
    capacity = int(weights.sum()) // 2
    mixing = rng.integers(0, 2, (n, FEATURES))
    parts = {}
    for name, full in PARTS.items():
        size = max(int(scale * full), BATCH)
        features = rng.standard_normal((size, FEATURES))
        polynomial = (features @ mixing.T / np.sqrt(FEATURES) + 3) ** 3 + 1
        noise = rng.uniform(0.7, 1.3, (size, n))
        values = torch.from_numpy(np.ceil(polynomial * 5 / 3.5**3 * noise).astype(np.float32))
        decisions = kg.solve(values, kg.Knapsack(weights, capacity))
        best = (values * decisions).sum(-1, keepdim=True)
        parts[name] = Part(torch.from_numpy(features.astype(np.float32)), values, decisions, best)
    return Benchmark(weights, capacity, parts)


# The methods: what each sees in training, and its loss.


class Method(NamedTuple):
    sees: str  # "values" or "decisions"
    make: Callable[[Benchmark, int], Loss]  # of a benchmark and a seed


def _of_decisions(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda predicted, values, decisions, best: loss(predicted, decisions)


def _of_solutions(solution: Callable[[Tensor], Tensor]) -> Loss:
    """Half the squared error of what is selected."""
    return lambda predicted, values, decisions, best: 0.5 * (solution(predicted) - decisions).square().mean()


def _dp(regularizer: str) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return _of_decisions(regularizedKnapsackFenchelYoung(benchmark.model, GAMMA, regularizer))

    return Method("decisions", make)


def _perturbed(samples: int) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return _of_decisions(losses.perturbedFenchelYoung(benchmark.model, n_samples=samples, sigma=SIGMA, seed=seed))

    return Method("decisions", make)


def _black_box(strength: Callable[[int], float]) -> Method:
    def make(benchmark: Benchmark, seed: int) -> Loss:
        return _of_solutions(losses.blackboxOpt(benchmark.model, lambd=strength(len(benchmark.weights))))

    return Method("decisions", make)


def _identity(benchmark: Benchmark, seed: int) -> Loss:
    return _of_solutions(losses.negativeIdentity(benchmark.model))


def _contrastive(benchmark: Benchmark, seed: int) -> Loss:
    data = benchmark.parts["train"]
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        dataset = optDataset(benchmark.model, data.features, data.values)
    loss = losses.noiseContrastiveEstimation(benchmark.model, solve_ratio=0.05, dataset=dataset)
    loss._branch_rng = np.random.RandomState(seed)  # it takes no seed, and would draw one
    return _of_decisions(loss)


def _cross_entropy(benchmark: Benchmark, seed: int) -> Loss:
    return _of_decisions(nn.functional.binary_cross_entropy_with_logits)


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


# Training.


def train(method: str, n: int, seed: int, epochs: int = EPOCHS, scale: float = 1.0) -> sweep.Row:
    """One training. After each epoch: relative regret and share of wrong decisions."""
    torch.set_num_threads(1)  # runs share the cores
    start = time.perf_counter()
    benchmark = generate(n, seed, scale)
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, n)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    loss = METHODS[method].make(benchmark, seed)
    data = benchmark.parts["train"]
    shuffling = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(epochs):
        for batch in torch.randperm(len(data.features), generator=shuffling).split(BATCH):
            features, *rest = (x[batch] for x in data)
            optimizer.zero_grad()
            loss(network(features), *rest).backward()
            optimizer.step()
        (regret, wrong), (test, _) = (evaluate(network, benchmark, part) for part in ("validation", "test"))
        curve.append({"validation_regret": regret, "validation_wrong": wrong, "test_regret": test})
    by_regret, by_decisions = (
        min(curve, key=lambda epoch, name=name: np.nan_to_num(epoch[name], nan=np.inf))
        for name in ("validation_regret", "validation_wrong")
    )
    return {
        "sees": METHODS[method].sees,
        "test_regret": by_regret["test_regret"],
        "best_epoch": 1 + curve.index(by_regret),
        "test_regret_without_values": by_decisions["test_regret"],
        "curve": {name: [epoch[name] for epoch in curve] for name in curve[0]},
        "seconds": round(time.perf_counter() - start, 1),
    }


@torch.no_grad()
def evaluate(network: nn.Module, benchmark: Benchmark, part: str) -> tuple[float, float]:
    """Mean relative regret, and the share of items that are decided otherwise than in the best selection."""
    features, values, decisions, best = benchmark.parts[part]
    chosen = kg.solve(network(features), benchmark.constraint)
    regret = (best - (values * chosen).sum(-1, keepdim=True)) / best
    return round(float(regret.mean()), 7), round(float((chosen != decisions).float().mean()), 7)


# Time of a gradient step.


def measure(n: int, seconds: float, with_solver: bool = True) -> list[sweep.Row]:
    """Forward and backward pass up to the predicted values, methods in turn in one process, on one thread."""
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
    times = timing.take_turns(contestants, seconds)
    ours = [name for name in METHODS if name.startswith("DP")]
    return [
        {
            "method": name,
            "n": n,
            "microseconds": timing.microseconds(measured),
            "times_slower_than": {one: timing.ratio(measured, times[one]) for one in ours},
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
    return _of_decisions(losses.perturbedFenchelYoung(model, n_samples=10, sigma=SIGMA))


# The command line.


def main() -> None:
    options = parse()
    rows_file, times_file = options.output / "pyepo_knapsack.jsonl", options.output / "pyepo_knapsack_time.json"
    options.output.mkdir(parents=True, exist_ok=True)
    known = command_line.provenance(MODULE, PACKAGES, options.commit)
    if "train" in options.parts:
        tasks = [
            {"method": method, "n": n, "seed": seed, "epochs": options.epochs, "scale": options.scale}
            for seed in range(options.seeds or max(SEEDS.values()))
            for n in options.items
            for method in options.methods
            if options.seeds or seed < SEEDS.get(n, 5)
        ]
        sweep.run(partial(recorded_train, known=known), tasks, rows_file, options.jobs, options.ray)
    if "time" in options.parts:
        rows = [row for n in options.items for row in measure(n, options.seconds, not options.quick)]
        times_file.write_text(json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")
    if "report" in options.parts:
        from experiments import pyepo_report

        times = json.loads(times_file.read_text()) if times_file.exists() else None
        rows = [
            row for row in sweep.read(rows_file) if row["epochs"] == options.epochs and row["scale"] == options.scale
        ]
        pyepo_report.write(rows, times, METHODS, options.output, command_line.to_page(options))


def recorded_train(known: sweep.Row, **task: Any) -> sweep.Row:
    return train(**task) | known


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs on little data: a look, under a minute")
    parser.add_argument("--items", type=int, nargs="+", metavar="N", help="numbers of items (10 25 50 100; quick: 10)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"of {', '.join(METHODS)} (all)")
    parser.add_argument("--seeds", type=int, help="trainings of each (10, of 100 items 5; quick: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, or a local one (RAY_ADDRESS says which)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/results; quick: quick in it)")
    options = parser.parse_args()
    options.parts = command_line.choose(parser, "part", options.parts, command_line.PARTS)
    options.methods = command_line.choose(parser, "method", options.methods, METHODS)
    options.items = options.items or ([10] if options.quick else list(ITEMS))
    if min(options.items) < 1 or options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        parser.error("--items, --seeds and --jobs must be at least 1")
    options.seeds = options.seeds or (1 if options.quick else None)
    options.epochs, options.scale, options.seconds = (2, 0.05, 0.5) if options.quick else (EPOCHS, 1.0, 20.0)
    options.output = options.output or command_line.usual_output(options)
    return options


if __name__ == "__main__":
    from experiments.pyepo_knapsack import main as imported  # workers find it under this name, not as __main__

    imported()
