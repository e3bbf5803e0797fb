"""Results of every operation on 1,600 fixed problems: saved before a change, compared after it.

    python -m benchmarks.frozen save before.npz --backends numpy torch jax
    python -m benchmarks.frozen compare before.npz after.npz

Only public functions are called, so that the same file runs on both versions (PYTHONPATH chooses one). Half of the
problems come from families that share their shapes and the width of their tables: these are run in JAX, which
compiles for each; the others have shapes of their own. The first 1,000 are knapsacks and top-k; the others have a
least weight, options, or several budgets, and JAX, which compiles for each, runs some of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import knapgrad as kg
from measuring import origin

COUNT, PLAIN, FAMILIES, SAMPLES = 1600, 1000, 16, 3
REGULARIZERS = (kg.Shannon, kg.Gini, kg.Tsallis)


class Frozen(NamedTuple):
    """One problem; the seed is of the random numbers that a framework draws by itself."""

    seed: int
    theta: np.ndarray
    z: np.ndarray
    weights: Any  # None for top-k
    capacity: Any
    regularizer: type[kg.Shannon]
    gamma: Any
    kind: str = "plain"
    least: Any = 0

    def constraint(self) -> Any:
        if self.kind in ("required", "optional"):
            optional = self.kind == "optional"
            return kg.MultipleChoice(self.weights, self.capacity, optional=optional, at_least=self.least)
        if self.kind == "boxes":
            return kg.MultiKnapsack(self.weights, self.capacity)
        if self.weights is None:
            return kg.TopK(self.capacity, at_least=self.least if self.kind == "least" else None)
        return kg.Knapsack(self.weights, self.capacity, at_least=self.least)

    def target(self) -> np.ndarray:
        return kg.solve(self.z.astype(np.float64), self.constraint())


def problems() -> Iterator[Frozen]:
    for index in range(COUNT):
        if index >= PLAIN:
            yield of_another_kind(index)
        else:
            yield of_family(index) if index % 2 else of_its_own(index)


def of_another_kind(index: int) -> Frozen:
    """Odd ones come from families too. Each is feasible: its limits are around what some selection uses."""
    kind = ("least", "required", "optional", "boxes")[index // 2 % 4]
    family = index // 8 % 5 if index % 2 else index
    shape, rng = np.random.default_rng([10, family, index % 2]), np.random.default_rng([11, index])
    batch = int(shape.choice([1, 3, 17]))
    n = int(shape.choice([4, 9, 25]) if index % 2 else shape.integers(1, 40))
    event = (max(n // 4, 1), int(shape.integers(1, 6))) if kind in ("required", "optional") else (n,)
    dtype = np.float32 if shape.random() < 0.7 else np.float64
    theta, z = rng.standard_normal((2, batch, *event)).astype(dtype) * dtype(rng.choice([0.1, 1.0, 30.0]))
    gamma, regularizer = float(rng.choice([0.1, 1.0, 3.0])), REGULARIZERS[int(rng.integers(0, 3))]
    own, is_top_k = bool(shape.random() < 0.4), kind == "least" and shape.random() < 0.3
    if kind == "boxes":
        weights = rng.integers(0, 5, (2 + int(shape.random() < 0.3), *((batch,) if own else ()), n))
        limits = [np.array([12, 9, 3][budget]) for budget in range(len(weights))]
        return Frozen(index, theta, z, list(weights), limits, regularizer, gamma, kind)
    weights = rng.integers(0, 7, (batch, *event) if own else event)
    weights.reshape(-1, n if event == (n,) else event[0] * event[1])[:, 0] = 7
    picked = (
        rng.integers(0, 2, (batch, n))
        if event == (n,)
        else np.eye(event[1], dtype=int)[rng.integers(0, event[1], (batch, event[0]))]
    )
    if kind == "optional":
        picked = picked * rng.integers(0, 2, (batch, event[0], 1))
    used = (picked * (1 if is_top_k else weights)).reshape(batch, -1).sum(-1)
    least = np.maximum(used - rng.integers(0, 3, batch), 0)
    capacity = np.minimum(used + rng.integers(0, 4, batch), n) if is_top_k else used + rng.integers(0, 4, batch)
    if kind != "least" and shape.random() < 0.5:
        least = np.zeros((), int)
    capacity[0] = max(capacity[0], n if is_top_k else 30)
    return Frozen(index, theta, z, None if is_top_k else weights, capacity, regularizer, gamma, kind, least)


def of_family(index: int) -> Frozen:
    family = index // 2 % FAMILIES
    shape, rng = np.random.default_rng([7, family]), np.random.default_rng([8, index])
    batch, n = int(shape.choice([1, 3, 17])), int(shape.choice([4, 9, 25]))
    theta, z = rng.standard_normal((2, batch, n)).astype(np.float64 if family % 4 == 3 else np.float32)
    regularizer = REGULARIZERS[index // 2 // FAMILIES % 3]
    if family % 2:
        capacity = rng.integers(0, n // 2 + 1, batch)
        capacity[0] = n // 2
        return Frozen(index, theta, z, None, capacity, regularizer, float(rng.choice([0.1, 1.0, 3.0])))
    weights = rng.integers(0, 9, (batch, n) if family % 4 == 2 else n)
    weights[..., :3] = 9, 8, 8
    capacity = rng.integers(0, 25, batch)
    capacity[0] = 24
    return Frozen(index, theta, z, weights, capacity, regularizer, float(rng.choice([0.1, 1.0, 3.0])))


def of_its_own(index: int) -> Frozen:
    rng = np.random.default_rng([9, index])
    rank = int(rng.integers(0, 3))
    batch = tuple(int(x) for x in rng.integers(1, (2, 41, 7)[rank], rank))
    n = int(rng.integers(1, 60 if index % 50 else 400))
    dtype = np.float32 if rng.random() < 0.7 else np.float64
    theta, z = rng.standard_normal((2, *batch, n)).astype(dtype) * dtype(rng.choice([0.1, 1.0, 30.0]))
    own = batch if rng.random() < 0.5 else ()
    gamma = rng.uniform(0.2, 3.0, batch) if rng.random() < 0.3 else float(rng.choice([0.01, 0.3, 1.0, 5.0]))
    regularizer = REGULARIZERS[int(rng.integers(0, 3))]
    if rng.random() < 0.4:
        capacity = rng.integers(0, n + 1, own)
        masked = (rng.random(theta.shape) < 0.1) & (np.cumsum(rng.random(theta.shape), -1) < n - capacity.max())
        if (n - masked.sum(-1).max(initial=0)) >= capacity.max(initial=0):
            theta[masked] = -np.inf
        return Frozen(index, theta, z, None, capacity, regularizer, gamma)
    theta[rng.random(theta.shape) < 0.05] = -np.inf
    weights = rng.integers(0, rng.choice([2, 6, 40]), (*batch, n) if rng.random() < 0.4 else n)
    capacity = (weights.sum(-1).max(initial=0) * rng.uniform(0, 1.1, own)).astype(np.int64)
    return Frozen(index, theta, z, weights, capacity, regularizer, gamma)


def in_numpy(problem: Frozen) -> dict[str, Any]:
    theta, constraint, smoothing = problem.theta, problem.constraint(), problem.regularizer(problem.gamma)
    drawn = kg.sample(theta, constraint, smoothing, num_samples=SAMPLES, rng=problem.seed)
    return {
        "solve": kg.solve(theta, constraint),
        "value": kg.value(theta, constraint, smoothing),
        "relax": kg.relax(theta, constraint, smoothing),
        "sample": drawn,
        "log_prob": kg.log_prob(theta, drawn, constraint, smoothing),
        "entropy": kg.entropy(theta, constraint, smoothing),
        "fenchel_young_loss": kg.fenchel_young_loss(theta, problem.target(), constraint, smoothing),
        "divergence": kg.divergence(theta, constraint, smoothing),
    }


def in_torch(problem: Frozen, device: str = "cpu") -> dict[str, Any]:
    import torch

    constraint, smoothing = problem.constraint(), problem.regularizer(problem.gamma)
    theta = torch.from_numpy(problem.theta).to(device).requires_grad_()
    z, target = torch.from_numpy(problem.z).to(theta), torch.from_numpy(problem.target()).to(theta)
    generator = torch.Generator(device).manual_seed(problem.seed)
    drawn = kg.sample(theta, constraint, smoothing, num_samples=SAMPLES, rng=generator)
    distribution = kg.torch.SubsetDistribution(theta.detach(), constraint, smoothing, validate_args=False)
    functions: dict[str, Callable[..., Any]] = {
        "value": lambda theta: kg.value(theta, constraint, smoothing),
        "log_prob": lambda theta: kg.log_prob(theta, drawn, constraint, smoothing),
        "entropy": lambda theta: kg.entropy(theta, constraint, smoothing),
        "fenchel_young_loss": lambda theta: kg.fenchel_young_loss(theta, target, constraint, smoothing),
        "divergence": lambda theta: kg.divergence(theta, constraint, smoothing),
    }
    y = kg.relax(theta, constraint, smoothing)
    found = {"solve": kg.solve(theta, constraint), "sample": drawn, "mode": distribution.mode, "relax": y}
    found |= {"mean": distribution.mean, "distribution sample": distribution.sample((2,), generator=generator)}
    found["vjp"] = torch.autograd.grad(y, theta, z)[0]
    for name, function in functions.items():
        found[name] = function(theta)
        found[f"{name} gradient"] = torch.autograd.grad(found[name].sum(), theta)[0]
    return {name: x.detach().cpu().numpy() for name, x in found.items()}


def in_jax(problem: Frozen) -> dict[str, Any]:
    import jax

    constraint, smoothing = problem.constraint(), problem.regularizer(problem.gamma)
    theta, z = jax.numpy.asarray(problem.theta, "float32"), jax.numpy.asarray(problem.z, "float32")
    drawn = kg.sample(theta, constraint, smoothing, num_samples=SAMPLES, rng=jax.random.key(problem.seed))
    y, pull = jax.vjp(lambda theta: kg.relax(theta, constraint, smoothing), theta)
    found = {"solve": kg.solve(theta, constraint), "sample": drawn, "relax": y, "vjp": pull(z)[0]}
    found["value"] = kg.value(theta, constraint, smoothing)
    for name, function in {
        "log_prob": lambda theta: kg.log_prob(theta, drawn, constraint, smoothing),
        "entropy": lambda theta: kg.entropy(theta, constraint, smoothing),
    }.items():
        found[name], pull = jax.vjp(function, theta)
        found[f"{name} gradient"] = pull(jax.numpy.ones_like(found[name]))[0]
    return {name: np.asarray(x) for name, x in found.items()}


BACKENDS: dict[str, Callable[[Frozen], dict[str, Any]]] = {
    "numpy": in_numpy,
    "torch": in_torch,
    "cuda": lambda problem: in_torch(problem, "cuda"),
    "jax": in_jax,
}


def save(path: Path, backends: list[str], jobs: int) -> None:
    """With several jobs, since a GPU's kernels take longer to compile than to run."""
    found = {}
    if jobs == 1:
        for backend in backends:
            found |= results(backend, 0, 1)
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            tasks = [pool.submit(results, backend, k, jobs) for backend in backends for k in range(jobs)]
            for task in tasks:
                found |= task.result()
    np.savez_compressed(path, **found)
    print(f"Saved {len(found):,} results to {path}, by {kg.__file__}")


def results(backend: str, first: int, step: int) -> dict[str, np.ndarray]:
    """Of every step-th problem."""
    found = {}
    for problem in tqdm(islice(problems(), first, None, step), desc=backend, total=COUNT // step, mininterval=5):
        if backend == "jax" and problem.seed % (2 if problem.kind == "plain" else 18) != 1:
            continue
        for name, x in BACKENDS[backend](problem).items():
            found[f"{backend}/{name}/{problem.seed}"] = x
    return found


def compare(before: Path, after: Path, output: Path | None) -> None:
    """How many results are the same bit for bit, and the largest difference in units of the last place of the largest
    number in the result (at least 1, since sums of scores of order one are rounded)."""
    old, new = np.load(before), np.load(after)
    rows: dict[str, dict[str, Any]] = {}
    for key in tqdm(new.files, mininterval=5):
        backend, name, _ = key.split("/")
        row = rows.setdefault(f"{backend} {name}", {"results": 0, "same_bits": 0, "roundings": 0.0, "missing": 0})
        if key not in old.files:
            row["missing"] += 1
            continue
        a, b = old[key], new[key]
        row["results"] += 1
        row["same_bits"] += bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True))
        finite = np.isfinite(a) & np.isfinite(b)
        if a.shape != b.shape or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            row["roundings"] = float("inf")
        elif finite.any():
            unit = np.spacing(max(np.abs(a[finite]).max(), a.dtype.type(1)))
            row["roundings"] = max(row["roundings"], float(np.abs(a[finite] - b[finite]).max() / unit))
    width = max(map(len, rows))
    for name, row in rows.items():
        same = f"{row['same_bits']:5} of {row['results']:5} same"
        print(f"{name:{width}}  {same}, at most {row['roundings']:.3g} roundings")
    if output:
        environment = origin.environment(["compare", before.name, after.name], "benchmarks.frozen")
        output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frozen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    saving = actions.add_parser("save", help="run all problems and save the results")
    saving.add_argument("path", type=Path, help="an .npz file")
    saving.add_argument("--backends", nargs="+", choices=BACKENDS, default=["numpy", "torch", "jax"], metavar="NAME")
    saving.add_argument("--jobs", type=int, default=1, help="processes that share the problems (1)")
    comparing = actions.add_parser("compare", help="compare two such files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--output", type=Path, help="JSON file for the table")
    options = parser.parse_args()
    if options.action == "save":
        save(options.path, options.backends, options.jobs)
    else:
        compare(options.before, options.after, options.output)


if __name__ == "__main__":
    main()
