"""Several budgets: next to a plain loop of eager torch, to one budget of as many states, and to a model with a solver.

python -m benchmarks.several_budgets --output several-budgets.json
python -m benchmarks.several_budgets --device cuda --output several-budgets-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knapgrad as kg
from knapgrad import regularizers
from knapgrad.constraints import Constraint
from measuring.clocks import microseconds, ratio, set_threads, take_turns
from measuring.origin import environment

GPU_SHAPES: list[tuple[int, int, tuple[int, ...]]] = [
    (32, 20, (40, 10)), (1024, 20, (40, 10)), (64, 50, (200, 50)), (64, 20, (20, 20, 20)), (4, 100, (1000, 100)),
]  # fmt: skip
REGULARIZERS = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}


def eager(theta: Tensor, weights: np.ndarray, capacities: list[int], regularizer: str) -> Tensor:
    """The relaxed selection as one would write it: the table in torch, and its derivative by autograd."""
    value = regularizers.rebind(regularizers.functions(regularizer)["value"], torch)
    V = theta.new_zeros(theta.shape[0], capacities[0] + 1, capacities[1] + 1)
    for i in range(theta.shape[1]):
        a, b = (int(w) for w in weights[:, i])
        skip = V[:, a:, b:]
        pick = V[:, : V.shape[1] - a, : V.shape[2] - b] + theta[:, i, None, None]
        delta = pick - skip
        joined = torch.where(delta > 0, pick, skip) + value(delta)
        V = torch.cat([V[:, :a], torch.cat([V[:, a:, :b], joined], 2)], 1)
    return torch.autograd.grad(V[:, -1, -1].sum(), theta, create_graph=True)[0]


def against_eager(seconds: float) -> list[dict[str, Any]]:
    """32 x 20 items, budgets of 40 and 10."""
    rng, found = np.random.default_rng(0), []
    weights, capacities = np.stack([rng.integers(1, 8, 20), np.ones(20, int)]), [40, 10]
    limit = kg.MultiKnapsack(weights, capacities)
    theta = torch.tensor(rng.normal(size=(32, 20)), dtype=torch.float32, requires_grad=True)
    z = torch.ones_like(theta)
    for name, kind in REGULARIZERS.items():
        ours: Callable[[], Tensor] = lambda kind=kind: kg.relax(theta, limit, kind())  # noqa: E731
        theirs: Callable[[], Tensor] = lambda name=name: eager(theta, weights, capacities, name)  # noqa: E731
        torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-4)
        calls = {
            "ours": ours,
            "eager": theirs,
            "ours, with VJP": lambda f=ours: torch.autograd.grad(f(), theta, z),
            "eager, with VJP": lambda f=theirs: torch.autograd.grad(f(), theta, z),
        }
        times = take_turns(calls, seconds)
        found.append({
            "regularizer": name, "microseconds": {key: microseconds(x) for key, x in times.items()},
            "eager / ours": ratio(times["eager"], times["ours"]),
            "eager / ours, with VJP": ratio(times["eager, with VJP"], times["ours, with VJP"]),
        })  # fmt: skip
    return found


def against_one_budget(seconds: float) -> list[dict[str, Any]]:
    """As many items, instances and states: how much longer it takes, and how much longer per cell that is swept (bands
    of a box and of a row differ), one thread, NumPy."""
    rng, found = np.random.default_rng(0), []
    for batch, n, capacities in ((32, 20, (40, 10)), (32, 50, (100, 20)), (2, 50, (200, 50)), (32, 20, (10, 10, 10))):
        box = [c + 1 for c in capacities]
        states = int(np.prod(box))
        weights = np.stack([rng.integers(1, max(4 * c // n, 1) + 1, n) for c in capacities])
        single = np.maximum(rng.integers(1, 4 * states // n + 1, n), 1)
        theta = rng.normal(size=(batch, n)).astype(np.float32)
        limits = {"several": kg.MultiKnapsack(weights, list(capacities)), "one": kg.Knapsack(single, states - 1)}
        for name, kind in REGULARIZERS.items():
            calls = {key: lambda theta=theta, x=x, kind=kind: kg.relax(theta, x, kind()) for key, x in limits.items()}
            times, cells = take_turns(calls, seconds), {key: swept(x, theta, name) for key, x in limits.items()}
            per_cell = {key: times[key] / cells[key] for key in cells}
            found.append({
                "batch": batch, "n": n, "capacities": capacities, "regularizer": name, "cells": cells,
                "microseconds": {key: microseconds(x) for key, x in times.items()},
                "several / one": ratio(times["several"], times["one"]),
                "several / one, per cell": ratio(per_cell["several"], per_cell["one"]),
            })  # fmt: skip
    return found


def swept(constraint: Constraint, theta: np.ndarray, regularizer: str) -> int:
    """The cells of the tables of all groups."""
    plan = constraint.lattice(theta.shape[-1]).memo[theta.shape, theta.dtype.char, regularizer, True]
    return plan.cells * plan.groups


def against_a_solver(epochs: int) -> list[dict[str, Any]]:
    """An epoch of SPO+ on 100 instances of 16 items, budgets of 20, on our model and on PyEPO's with OR-Tools."""
    import pyepo.func
    from pyepo.data.dataset import optDataset
    from pyepo.model import ort
    from torch.utils.data import DataLoader

    from knapgrad.pyepo import knapsackModel

    found = []
    for count in (2, 3):
        rng = np.random.default_rng(count)
        weights, capacity = rng.integers(1, 9, (count, 16)), [20] * count
        features, costs = rng.normal(size=(100, 5)), (5 + 2 * rng.normal(size=(100, 16))).astype(np.float32)
        seconds: dict[str, list[float]] = {}
        for _ in range(epochs):
            for name, model in (
                ("ours", knapsackModel(weights, capacity)),
                ("OR-Tools", ort.knapsackModel(weights, capacity)),
            ):
                data = optDataset(model, features, costs)
                loader, net = DataLoader(data, batch_size=32), torch.nn.Linear(5, 16)
                loss, optimizer = pyepo.func.SPOPlus(model, processes=1), torch.optim.Adam(net.parameters())
                begin = time.perf_counter()
                for x, c, w, z in loader:
                    optimizer.zero_grad()
                    loss(net(x), c, w, z).backward()
                    optimizer.step()
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
        ours, theirs = (np.array(seconds[name]) for name in ("ours", "OR-Tools"))
        found.append({
            "budgets": count, "milliseconds": {name: [1e3 * t for t in x] for name, x in seconds.items()},
            "OR-Tools / ours": ratio(theirs, ours),
        })  # fmt: skip
    return found


def on_a_gpu(seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of the kernels of each operation, in CUDA graphs, next to one budget of as many states."""
    from benchmarks.gpu import milliseconds, replay_times

    found = []
    for batch, n, capacities in GPU_SHAPES:
        rng = np.random.default_rng(0)
        states = int(np.prod([c + 1 for c in capacities]))
        weights = np.stack([rng.integers(1, max(4 * c // n, 1) + 1, n) for c in capacities])
        single = rng.integers(1, 4 * states // n + 1, n)
        theta = torch.tensor(rng.normal(size=(batch, n)), dtype=torch.float32, device="cuda")
        limits = {"several": kg.MultiKnapsack(weights, list(capacities)), "one": kg.Knapsack(single, states - 1)}
        for name, kind in REGULARIZERS.items():
            row: dict[str, Any] = {"batch": batch, "n": n, "capacities": capacities, "regularizer": name}
            for key, limit in limits.items():
                for operation, call in gpu_calls(theta, limit, kind()).items():
                    row[f"{operation}, {key}"] = milliseconds(replay_times([call], seconds))
            found.append(row)
            print(row, flush=True)
    return found


def gpu_calls(theta: Tensor, limit: Constraint, smoothing: Any) -> dict[str, Callable[[], Any]]:
    leaf, z = theta.clone().requires_grad_(), torch.ones_like(theta)
    y = kg.sample(theta, limit, smoothing, num_samples=16)
    return {
        "relax": lambda: kg.relax(theta, limit, smoothing),
        "with VJP": lambda: torch.autograd.grad(kg.relax(leaf, limit, smoothing), leaf, z),
        "sample 16": lambda: kg.sample(theta, limit, smoothing, num_samples=16),
        "log_prob of 16": lambda: kg.log_prob(theta, y, limit, smoothing),
        "solve": lambda: kg.solve(theta, limit),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_budgets", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="per row, all contestants together (4)")
    parser.add_argument("--epochs", type=int, default=5, help="of SPO+ (5)")
    parser.add_argument("--output", type=Path, help="a JSON file (default: print only)")
    options = parser.parse_args(arguments)
    set_threads(1)
    if options.device == "cuda":
        found: dict[str, Any] = {"on a GPU": on_a_gpu(options.seconds)}
    else:
        found = {
            "eager torch": against_eager(options.seconds),
            "one budget": against_one_budget(options.seconds),
            "a solver": against_a_solver(options.epochs),
        }
    for name, rows in found.items():
        print(name)
        for row in rows:
            print("  ", {key: x for key, x in row.items() if key not in ("microseconds", "milliseconds")})
    if options.output:
        given = sys.argv[1:] if arguments is None else arguments
        origin = environment(given, "benchmarks.several_budgets")
        if options.device == "cuda":
            origin["gpu"] = torch.cuda.get_device_name()
        options.output.write_text(json.dumps({"environment": origin, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
