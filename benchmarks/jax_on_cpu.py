"""JAX on a CPU, jitted: the kernels that XLA calls next to the scan, the NumPy path and the torch path, on one thread.

python -m benchmarks.jax_on_cpu --output jax-on-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ["NPROC"] = "1"  # the threads of XLA, which are read when it is loaded

import jax
import jax.numpy as jnp
import numpy as np
import torch

import knapgrad as kg
from knapgrad.kernels.numba import from_jax
from knapgrad.regularizers import REGULARIZERS
from measuring.clocks import microseconds, ratio, set_threads, take_turns
from measuring.origin import environment

#: batch, items, and capacities if there are several budgets
SIZES: list[tuple[int, int, tuple[int, ...]]] = [(8, 10, ()), (64, 32, ()), (32, 100, ()), (32, 20, (40, 10))]


Calls = dict[str, Callable[[], Any]]


def jitted(constraint: Any, smoothing: Any, theta: Any, z: Any, kept: bool = False) -> tuple[Calls, dict[str, float]]:
    """Relax, and the value and gradient of its product with z; and how many seconds the first calls took. ``kept``:
    outside of JAX's caches."""
    functions = {
        "relax": jax.jit(lambda theta: kg.relax(theta, constraint, smoothing)),
        "with gradient": jax.jit(jax.value_and_grad(lambda theta: (kg.relax(theta, constraint, smoothing) * z).sum())),
    }
    seconds = {}
    for name, function in functions.items():
        start = time.perf_counter()
        if kept:
            functions[name] = function = function.lower(theta).compile()
        jax.block_until_ready(function(theta))
        seconds[name] = round(time.perf_counter() - start, 2)
    calls = {name: lambda f=f: jax.block_until_ready(f(theta)) for name, f in functions.items()}
    return calls, seconds


def measure(batch: int, n: int, capacities: tuple[int, ...], name: str, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights, smoothing = rng.integers(3, 9, n), REGULARIZERS[name](0.5)
    constraint: Any = kg.Knapsack(weights, int(weights.sum()) // 2)
    if capacities:  # the second is a number of items
        constraint = kg.MultiKnapsack([weights, np.ones(n, int)], capacities)
    theta, z = rng.normal(size=(2, batch, n)).astype(np.float32)
    with mock.patch.object(from_jax, "find", lambda *_: None):
        scan, first_of_scan = jitted(constraint, smoothing, jnp.asarray(theta), jnp.asarray(z), kept=True)
    jax.clear_caches()
    ours, first = jitted(constraint, smoothing, jnp.asarray(theta), jnp.asarray(z))
    tensor, direction = torch.tensor(theta, requires_grad=True), torch.from_numpy(z)

    def through_torch() -> Any:
        tensor.grad = None
        (kg.relax(tensor, constraint, smoothing) * direction).sum().backward()
        return tensor.grad

    found = jax.grad(lambda theta: (kg.relax(theta, constraint, smoothing) * z).sum())(jnp.asarray(theta))
    contestants = {
        "JAX, relax": ours["relax"], "JAX, with gradient": ours["with gradient"],
        "scan, relax": scan["relax"], "scan, with gradient": scan["with gradient"],
        "NumPy, relax": lambda: kg.relax(theta, constraint, smoothing), "torch, with gradient": through_torch,
    }  # fmt: skip
    times = take_turns(contestants, seconds)
    return {
        "batch": batch, "n": n, "capacities": capacities, "regularizer": name,
        "first_call_seconds": {"JAX": first, "scan": first_of_scan},
        "largest difference of gradients from torch": float(np.abs(np.asarray(found) - through_torch().numpy()).max()),
        "microseconds": {key: microseconds(x) for key, x in times.items()},
        "ratios": {
            "JAX / NumPy, relax": ratio(times["JAX, relax"], times["NumPy, relax"]),
            "JAX / torch, with gradient": ratio(times["JAX, with gradient"], times["torch, with gradient"]),
            "scan / JAX, relax": ratio(times["scan, relax"], times["JAX, relax"]),
            "scan / JAX, with gradient": ratio(times["scan, with gradient"], times["JAX, with gradient"]),
        },
    }  # fmt: skip


FIRST = """
import time
start = time.perf_counter()
import jax, jax.numpy as jnp, numpy as np, knapgrad as kg
limit, theta = kg.Knapsack(np.arange(1, 101) % 6 + 3, 260), jnp.zeros((32, 100))
imported = time.perf_counter()
jax.jit(lambda theta: kg.relax(theta, limit, kg.Gini())).lower(theta).compile()(theta).block_until_ready()
relaxed = time.perf_counter()
jax.jit(jax.grad(lambda theta: (kg.relax(theta, limit, kg.Gini()) ** 2).sum()))(theta).block_until_ready()
print(imported - start, relaxed - imported, time.perf_counter() - relaxed)
"""


def first_calls() -> dict[str, dict[str, float]]:
    """Seconds of the first calls of a process, without and with kernels that are kept on disk."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("nothing on disk", "kernels on disk"):
            settings = os.environ | {"NUMBA_CACHE_DIR": folder}
            run = subprocess.run(
                [sys.executable, "-c", FIRST], env=settings, capture_output=True, text=True, check=True
            )
            numbers = map(float, run.stdout.split())
            found[state] = {name: round(x, 2) for name, x in zip(("imports", "relax", "its gradient"), numbers)}
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_on_cpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="per cell, all contestants together (4)")
    parser.add_argument("--output", type=Path, help="a JSON file (default: print only)")
    options = parser.parse_args(arguments)
    set_threads(1)
    rows = []
    for batch, n, capacities in SIZES:
        for name in REGULARIZERS:
            rows.append(measure(batch, n, capacities, name, options.seconds))
            print(f"{batch} x {n}, {capacities or 'one budget'}, {name}")
            for key, x in rows[-1]["microseconds"].items():
                print(f"  {x['median']:8.1f} us ({x['q1']:.1f} to {x['q3']:.1f})  {key}")
            for key, x in rows[-1]["ratios"].items():
                print(f"  {x['median']:8.2f}    ({x['q1']:.2f} to {x['q3']:.2f})  {key}", flush=True)
    if options.output:
        given = sys.argv[1:] if arguments is None else arguments
        origin = environment(given, "benchmarks.jax_on_cpu")
        found = {"environment": origin, "first_calls_seconds": first_calls(), "rows": rows}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
