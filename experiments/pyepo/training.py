"""One training of a small network, and what its decisions are worth."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

import knapgrad as kg
from experiments.pyepo.data import BATCH, FEATURES, Benchmark, generate
from experiments.pyepo.methods import METHODS
from experiments.sweep import Row

EPOCHS, LEARNING_RATE, HIDDEN = 30, 2e-3, 64


def train(method: str, n: int, seed: int, epochs: int = EPOCHS, scale: float = 1.0) -> Row:
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
