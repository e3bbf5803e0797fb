"""The shapes that are measured, and the speedups that are aimed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import knapgrad as kg


class Target(NamedTuple):
    """How many times faster than the paper's layout: value and relax alone, and with the VJP."""

    forward: float
    both: float | None = None


@dataclass(frozen=True)
class Case:
    """``batch`` instances that share their weights: a knapsack, or a top-k when ``k`` is given."""

    batch: int
    items: int
    k: int | None = None
    target: tuple[Target, ...] | None = None  # for Shannon, Gini and Tsallis
    lightest: int = 3
    heaviest: int = 8
    capacity: int | None = None  # half of the total weight
    bound: tuple[float, float] | None = None  # milliseconds on an H200: value and relax, and with the VJP

    @property
    def name(self) -> str:
        return f"knapsack n={self.items}" if self.k is None else f"top-{self.k} of n={self.items}"

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.items}" + ("" if self.k is None else f" k={self.k}")


SPEED = (
    Case(32, 10, target=(Target(4, 2), Target(1.2, 1), Target(7, 3.5))),
    Case(32, 25, target=(Target(8, 4), Target(2, 1.5), Target(15, 7))),
    Case(32, 50, target=(Target(12, 6), Target(4, 2.5), Target(25, 12))),
    Case(32, 100, target=(Target(20, 10), Target(6, 4), Target(40, 18))),
    Case(128, 1000, k=50, target=(Target(12), Target(3), Target(16))),
)
SAMPLING = (Case(32, 10), Case(32, 100), Case(128, 1000, k=50))
# From microseconds of work to some tens of milliseconds: where does a second thread begin to pay?
THREADS = (
    *(Case(batch, items) for items in (10, 50, 100) for batch in (32, 128, 512, 2048)),
    Case(128, 1000, k=50),
)
OVERHEAD = Case(32, 10)
JAX = (Case(32, 25), Case(32, 100))
MEMORY = (Case(512, 100), Case(512, 200))

GPU = (
    Case(32, 100, bound=(0.065, 0.15)),
    Case(1024, 100, bound=(0.22, 0.50)),
    Case(8192, 100, bound=(1.3, 3.0)),
    Case(4096, 20, lightest=1, heaviest=5, capacity=40, bound=(0.030, 0.065)),
    Case(128, 1000, k=50, bound=(0.40, 0.95)),
    Case(1024, 1000, k=100, bound=(0.90, 2.0)),
    Case(16, 500, lightest=1, heaviest=39, capacity=5000, bound=(2.0, 4.5)),
)
GPU_OVERHEAD = Case(4, 10)
GPU_MEMORY = Case(8192, 100)
GPU_SAMPLING = Case(1024, 100)


@dataclass(frozen=True)
class Instances:
    """The arrays of a case: theta and the cotangent z ``(batch, n)``, weights ``(1, n)``, capacity ``(1,)``."""

    theta: np.ndarray
    z: np.ndarray
    weights: np.ndarray
    capacity: np.ndarray
    exactly: bool

    @property
    def total(self) -> int:
        return int(self.capacity[0])

    @property
    def constraint(self) -> kg.TopK | kg.Knapsack:
        return kg.TopK(self.total) if self.exactly else kg.Knapsack(self.weights[0], self.total)


def make(case: Case, seed: int = 0) -> Instances:
    """Scores are standard normal in units of gamma; weights are uniform in lightest..heaviest."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((case.batch, case.items)).astype(np.float32)
    z = rng.standard_normal((case.batch, case.items)).astype(np.float32)
    if case.k is None:
        weights = rng.integers(case.lightest, case.heaviest + 1, case.items)
        capacity = int(weights.sum()) // 2 if case.capacity is None else case.capacity
    else:
        weights = np.ones(case.items, dtype=np.int64)
        capacity = case.k
    return Instances(theta, z, weights.astype(np.int64)[None], np.array([capacity]), exactly=case.k is not None)
