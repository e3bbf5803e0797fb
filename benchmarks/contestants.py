"""One problem, three implementations behind the same three calls; they must agree before they are timed."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from benchmarks import eager_torch
from benchmarks.cases import Instances
from benchmarks.paper_layout import PaperLayout
from knapgrad.kernels import numba


class Contestant(Protocol):
    tolerance: float

    def forward(self) -> tuple[np.ndarray, np.ndarray]: ...  # value (batch,), selection (batch, n)

    def both(self) -> np.ndarray: ...  # forward, then the VJP (batch, n)

    def sample(self) -> np.ndarray: ...  # (samples, batch, n)


class Ours:
    """The kernels on float32, called as the operations call them."""

    tolerance = 2e-5

    def __init__(self, problem: Instances, regularizer: str, uniforms: np.ndarray) -> None:
        self.theta, self.z, self.uniforms = problem.theta, problem.z, uniforms
        self.problem = problem.constraint.lattice(problem.theta.shape[1]), np.ones(1), regularizer

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        return numba.operator(self.theta, *self.problem)

    def both(self) -> np.ndarray:
        numba.operator(self.theta, *self.problem)
        return numba.vjp(self.theta, self.z, *self.problem)

    def sample(self) -> np.ndarray:
        return numba.sample(self.theta, self.uniforms, *self.problem)


class Paper:
    """Baseline (a), on float64 as published."""

    tolerance = 1e-9

    def __init__(self, problem: Instances, regularizer: str, uniforms: np.ndarray) -> None:
        self.theta, self.z = problem.theta.astype(np.float64), problem.z.astype(np.float64)
        self.weights, self.uniforms = problem.weights[0], uniforms.astype(np.float64)
        self.samples = np.empty_like(self.uniforms)
        self.tables = PaperLayout(*self.theta.shape, problem.total, problem.exactly, regularizer)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tables.forward(self.theta, self.weights)

    def both(self) -> np.ndarray:
        self.tables.forward(self.theta, self.weights)
        return self.tables.vjp(self.z, self.weights)

    def sample(self) -> np.ndarray:
        return self.tables.sample(self.theta, self.uniforms, self.weights, self.samples)


class Eager:
    """Baseline (b), on float32; its float32 rows cost it some digits."""

    tolerance = 2e-3

    def __init__(self, problem: Instances, regularizer: str, uniforms: np.ndarray) -> None:
        self.theta, self.z, self.uniforms = (torch.from_numpy(a) for a in (problem.theta, problem.z, uniforms))
        self.theta_grad = self.theta.clone().requires_grad_()
        self.constraint = (problem.weights[0].tolist(), problem.total, problem.exactly, regularizer)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        value, selection = eager_torch.relax(self.theta, *self.constraint)
        return value.detach().numpy(), selection.numpy()

    def both(self) -> np.ndarray:
        _, selection = eager_torch.relax(self.theta_grad, *self.constraint)
        (product,) = torch.autograd.grad(selection, self.theta_grad, self.z)
        return product.numpy()

    def sample(self) -> np.ndarray:
        return eager_torch.sample(self.theta, self.uniforms, *self.constraint).numpy()


def enter(problem: Instances, regularizer: str, samples: int = 1, seed: int = 0) -> dict[str, Contestant]:
    """All contestants on one problem."""
    uniforms = np.random.default_rng(seed).random((samples, *problem.theta.shape), dtype=np.float32)
    return {
        "paper": Paper(problem, regularizer, uniforms),
        "ours": Ours(problem, regularizer, uniforms),
        "eager": Eager(problem, regularizer, uniforms),
    }


def check(contestants: dict[str, Contestant], problem: Instances, sampling: bool = False) -> dict[str, float]:
    """Largest errors against baseline (a), which runs in float64; raises when one is too large to be worth timing."""
    paper = contestants["paper"]
    value, selection = (array.copy() for array in paper.forward())
    product = paper.both().copy()
    errors = {}
    for name, contestant in contestants.items():
        found_value, found_selection = contestant.forward()
        error = np.max(  # unlike max(), it lets a NaN through
            [
                np.max(np.abs(found_value - value) / np.maximum(1.0, np.abs(value))),
                np.max(np.abs(found_selection - selection)),
                np.max(np.abs(contestant.both() - product)) / np.max(np.abs(product)),
            ]
        )
        if not error <= contestant.tolerance:  # a NaN is wrong too
            raise SystemExit(f"{name} is wrong by {error:.1e} (allowed {contestant.tolerance:.0e}): not timed")
        errors[name] = float(error)
        if sampling:
            check_samples(name, contestant.sample(), selection, problem)
    return errors


def check_samples(name: str, samples: np.ndarray, selection: np.ndarray, problem: Instances) -> None:
    used = samples @ problem.weights[0]
    if not (used == problem.total if problem.exactly else used <= problem.total).all():
        raise SystemExit(f"{name} sampled an infeasible subset: not timed")
    # The sum over the batch of (mean - selection) has a variance of at most batch / (4 samples) for each item.
    bias = np.abs((samples.mean(axis=0) - selection).sum(axis=0)).max()
    allowed = 6 * np.sqrt(selection.shape[0] / (4 * len(samples)))
    if not bias <= allowed:
        raise SystemExit(f"{name}'s samples have the wrong mean ({bias:.2f}, allowed {allowed:.2f}): not timed")
