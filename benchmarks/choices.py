"""One option per group: against HiGHS, against the plain knapsack, and on a GPU.

    python -m benchmarks.choices --output benchmarks/results/choices-cpu.json
    python -m benchmarks.choices --device cuda --output benchmarks/results/choices-h200.json

On a CPU, with one thread, and contestants that take turns: the exact optimum by `kg.solve` and by HiGHS
(`scipy.optimize.milp`, no gap allowed), and the whole frontier. On both: a knapsack written as optional groups of one
option next to `Knapsack`. On a GPU: kernel times from CUDA graphs, and states per second (instances x options or
items x capacities) next to those of items.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

import knapgrad as kg
from benchmarks.gpu import replay_times
from measuring import clocks, origin

REGULARIZERS = {"shannon": kg.Shannon(), "gini": kg.Gini(), "tsallis": kg.Tsallis()}
Row = dict[str, Any]


def highs(theta: np.ndarray, weights: np.ndarray, capacity: int) -> OptimizeResult:
    groups, options = theta.shape
    one_each = LinearConstraint(sparse.kron(sparse.eye(groups), np.ones((1, options)), "csr"), 1, 1)
    budget = LinearConstraint(sparse.csr_array(weights.reshape(1, -1)), -np.inf, capacity)
    return milp(
        -theta.ravel(),
        constraints=[one_each, budget],
        integrality=np.ones(theta.size),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )


def allocation(groups: int, options: int, capacity: int | None, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores that grow with the weights, as for bits per layer. None: 30% of the way to the heaviest options."""
    rng = np.random.default_rng(seed)
    weights = np.sort(rng.integers(1, 1001, (groups, options)))
    lightest, heaviest = weights.min(-1).sum(), weights.max(-1).sum()
    return np.sort(rng.random((groups, options))), weights, capacity or int(lightest + 0.3 * (heaviest - lightest))


def against_highs(seconds: float) -> list[Row]:
    rows = []
    for groups, capacity in ((40, None), (500, 85_040)):
        theta, weights, capacity = allocation(groups, 8, capacity, seed=0)
        limit = kg.MultipleChoice(weights, capacity)
        optimum, found = -highs(theta, weights, capacity).fun, (kg.solve(theta, limit) * theta).sum()
        assert abs(found - optimum) <= 1e-9 * optimum, (found, optimum)
        calls: dict[str, Callable[[], Any]] = {
            "solve": lambda theta=theta, limit=limit: kg.solve(theta, limit),
            "frontier": lambda theta=theta, limit=limit: kg.frontier(theta, limit),
            "HiGHS": lambda theta=theta, weights=weights, c=capacity: highs(theta, weights, c),
        }
        times = clocks.take_turns(calls, seconds)
        rows.append({
            "case": f"{groups} groups x 8 options", "capacity": capacity, "optimum": optimum,
            "microseconds": {name: clocks.microseconds(x) for name, x in times.items()},
            "HiGHS / solve": clocks.ratio(times["HiGHS"], times["solve"]),
            "frontier / solve": clocks.ratio(times["frontier"], times["solve"]),
            "largest resident MB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        })  # fmt: skip
    return rows


def tensors(shape: tuple[int, ...], device: str) -> torch.Tensor:
    rng = np.random.default_rng(1)
    return torch.tensor(rng.normal(size=shape), dtype=torch.float32, device=device, requires_grad=True)


def calls_of(theta: torch.Tensor, limit: Any, regularizer: Any) -> dict[str, Callable[[], Any]]:
    """Value and relax; the same and the VJP."""
    z = torch.ones_like(theta)

    def both() -> Any:
        y = kg.relax(theta, limit, regularizer)
        return torch.autograd.grad(y, theta, z)

    return {"relax": lambda: kg.relax(theta.detach(), limit, regularizer), "with the VJP": both}


def groups_of_one(seconds: float, device: str) -> list[Row]:
    """The same knapsack as items and as optional groups of one option."""
    weights = np.random.default_rng(2).integers(3, 9, 100)
    capacity, batch = int(weights.sum()) // 2, 32 if device == "cpu" else 1024
    items, groups = kg.Knapsack(weights, capacity), kg.MultipleChoice(weights[:, None], capacity, optional=True)
    theta, rows = tensors((batch, 100), device), []
    column = theta.detach()[..., None].requires_grad_()
    for name, regularizer in REGULARIZERS.items():
        for call, plain in calls_of(theta, items, regularizer).items():
            grouped = calls_of(column, groups, regularizer)[call]
            times = measured({"Knapsack": plain, "groups of one": grouped}, seconds, device)
            rows.append({
                "case": f"{batch} x 100", "call": call, "regularizer": name,
                "microseconds": {name: clocks.microseconds(x) for name, x in times.items()},
                "groups of one / Knapsack": clocks.ratio(times["groups of one"], times["Knapsack"]),
            })  # fmt: skip
    return rows


def measured(calls: dict[str, Callable[[], Any]], seconds: float, device: str) -> dict[str, np.ndarray]:
    """On a CPU in turns; on a GPU one after the other, kernels alone."""
    if device == "cpu":
        return clocks.take_turns(calls, seconds)
    times = {name: 1e-3 * replay_times([call], seconds) for name, call in calls.items()}
    turns = min(map(len, times.values()))
    return {name: x[:turns] for name, x in times.items()}


def states_per_second(seconds: float, device: str) -> list[Row]:
    """64 groups of 8 options, and 100 items, at the same capacity."""
    batch, capacity, rng = (
        (1024, 1000, np.random.default_rng(3)) if device == "cuda" else (32, 600, np.random.default_rng(3))
    )
    options = rng.integers(1, 61, (64, 8))
    options -= options.min(-1, keepdims=True)  # so that nothing is taken off the capacity
    contestants: dict[str, tuple[Any, tuple[int, ...]]] = {
        "64 groups x 8 options": (kg.MultipleChoice(options, capacity), (batch, 64, 8)),
        "100 items": (kg.Knapsack(rng.integers(10, 31, 100), capacity), (batch, 100)),
    }
    rows = []
    for name, regularizer in REGULARIZERS.items():
        for call in ("relax", "with the VJP"):
            calls = {
                key: calls_of(tensors(shape, device), limit, regularizer)[call]
                for key, (limit, shape) in contestants.items()
            }
            times = measured(calls, seconds, device)
            states = {key: np.prod(shape) * (capacity + 1.0) for key, (_, shape) in contestants.items()}
            rate = {key: states[key] / np.median(x) / 1e9 for key, x in times.items()}
            rows.append({
                "batch": batch, "capacity": capacity, "call": call, "regularizer": name,
                "microseconds": {key: clocks.microseconds(x) for key, x in times.items()},
                "billion states per second": {key: round(x, 2) for key, x in rate.items()},
                "options / items": round(rate["64 groups x 8 options"] / rate["100 items"], 3),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="per comparison (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    clocks.set_threads(1)
    found: Row = {}
    if options.device == "cpu":
        found["against HiGHS"] = against_highs(options.seconds)
    found["groups of one"] = groups_of_one(options.seconds, options.device)
    found["states"] = states_per_second(options.seconds, options.device)
    for section, rows in found.items():
        print(section)
        for row in rows:
            print("  ", json.dumps(row))
    if options.output:
        result = {"environment": origin.environment(sys.argv[1:], "benchmarks.choices"), **found}
        if options.device == "cuda":
            result["environment"]["gpu"] = torch.cuda.get_device_name()
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
