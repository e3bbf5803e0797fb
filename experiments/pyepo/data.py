"""Synthetic knapsacks as in PyEPO's genData, with integer weights."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import knapgrad as kg
from knapgrad.pyepo import knapsackModel

FEATURES = 5  # the paper does not say; PyEPO's examples have 5
BATCH = 32
PARTS = {"train": 10_000, "validation": 4_000, "test": 4_000}


class Part(NamedTuple):
    """Instances: features (size, p), true values and best selections (size, n), and their values (size, 1)."""

    features: Tensor
    values: Tensor
    decisions: Tensor
    best: Tensor


class Benchmark(NamedTuple):
    """One knapsack, and the instances to train, validate and test on."""

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
