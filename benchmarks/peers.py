"""Soft top-k by several methods on the same scores: time, memory, and what each of them computes.

    pip install softtorch  # needs Python 3.12; without it, its rows are missing
    python -m benchmarks.peers --output benchmarks/results/peers-cpu.json
    python -m benchmarks.peers --device cuda --output benchmarks/results/peers-h200.json

Each method maps scores (batch, n) to a soft selection (batch, n) whose entries sum to k:

- knapgrad: the marginals of the law over k-subsets, p(y) proportional to exp(<theta, y> / gamma).
- table in torch: the same law, by the recursion in the log domain, its derivatives left to autograd.
- SIMPLE (Ahmed et al., 2023): the same marginals, as the gradient of the log-probability that independent coins show
  exactly k heads, by their recursion.
- softtorch, softsort and neuralsort: k softmax rows, one for each rank, added up. Not the marginals of subsets: an
  entry can exceed 1.
- torch.topk: the hard selection, which has no gradient. It is the floor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from tqdm import tqdm

import knapgrad as kg
from benchmarks import eager_torch, processes
from benchmarks.processes import resident
from measuring.clocks import set_threads, spread
from measuring.origin import environment

GAMMA = 0.3
SHAPES = [(128, 1000, 50), (64, 1024, 128), (16, 4096, 512)]
LONG = (8, 8192, 1024)  # ours alone: the others take minutes, or gigabytes
_NEVER = -1e10


limit = cache(kg.TopK)  # made once, as in a model: on a GPU it keeps its arrays there


def knapgrad(theta: Tensor, k: int) -> Tensor:
    return kg.relax(theta, limit(k), kg.Shannon(GAMMA))


def table(theta: Tensor, k: int) -> Tensor:
    return eager_torch.relax(theta / GAMMA, [1] * theta.shape[1], k, True, "shannon")[1]


def simple(theta: Tensor, k: int) -> Tensor:
    """log Pr(exactly j of the first i coins), row by row; its gradient by log p_i is the marginal of item i."""
    again = theta.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        heads, tails = logsigmoid(theta / GAMMA), logsigmoid(-theta / GAMMA)
        heads = heads if again else heads.detach().requires_grad_()
        row = torch.full((len(theta), k + 1), _NEVER, dtype=theta.dtype, device=theta.device)
        row[:, 0] = 0.0
        never = row[:, 1:2]
        for i in range(theta.shape[1]):
            before = torch.cat([never, row[:, :-1]], 1)
            row = torch.logaddexp(row + tails[:, i, None], before + heads[:, i, None])
        return torch.autograd.grad(row[:, k].sum(), heads, create_graph=again)[0]


def of_softtorch(method: str) -> Callable[[Tensor, int], Tensor]:
    import softtorch

    return lambda theta, k: softtorch.topk(theta, k, dim=-1, softness=GAMMA, method=method).indices.sum(-2)


def hard(theta: Tensor, k: int) -> Tensor:
    return torch.zeros_like(theta).scatter_(-1, theta.topk(k, -1).indices, 1.0)


def methods() -> dict[str, Callable[[Tensor, int], Tensor]]:
    found: dict[str, Callable[[Tensor, int], Tensor]] = {"knapgrad": knapgrad, "table in torch": table}
    found["SIMPLE"] = simple
    if importlib.util.find_spec("softtorch"):
        found |= {f"softtorch, {method}": of_softtorch(method) for method in ("softsort", "neuralsort")}
    return found | {"torch.topk": hard}


def inputs(shape: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor, int]:
    batch, n, k = shape
    theta = torch.tensor(np.random.default_rng(0).normal(size=(batch, n)), dtype=torch.float32, device=device)
    return theta, torch.ones_like(theta) / n, k


def calls(name: str, theta: Tensor, z: Tensor, k: int) -> dict[str, Callable[[], Any]]:
    method, leaf = methods()[name], theta.clone().requires_grad_()
    found: dict[str, Callable[[], Any]] = {"forward": lambda: method(theta, k)}
    if name != "torch.topk":
        found["both"] = lambda: torch.autograd.grad(method(leaf, k), leaf, z)
    return found


def peaks(name: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """By how many MB each call on a CPU raises what the process has at most, which should be fresh."""
    theta, z, k = inputs(shape, "cpu")
    for call in calls(name, theta[:1, : 2 * k], z[:1, : 2 * k], k).values():
        call()  # compiles
    found = {}
    for kind, call in calls(name, theta, z, k).items():
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        call()
        found[f"{kind}, peak MB"] = megabytes(resident("VmHWM") - before)
    return found


def megabytes(count: int) -> float:
    return round(max(0, count) / 1e6, 1)


def peaks_alone(name: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """On a CPU: in a process of its own."""
    if not Path("/proc/self/clear_refs").exists():
        return {}  # where the system does not tell
    code = f"import json; from benchmarks.peers import peaks; print(json.dumps(peaks({name!r}, {shape})))"
    return processes.run(code)


def milliseconds(call: Callable[[], Any], device: str, seconds: float) -> dict[str, float]:
    """At least three times, a call that takes longer than all of them should once."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        if times[0] > seconds:
            break
    return {name: round(1e3 * x, 4) for name, x in spread(np.array(times)).items()} | {"calls": len(times)}


def compare(shape: tuple[int, int, int], names: list[str], device: str, seconds: float) -> list[dict[str, Any]]:
    theta, z, k = inputs(shape, device)
    exact, rows = kg.relax(theta.double(), kg.TopK(k), kg.Shannon(GAMMA)), []
    for name in tqdm(names, desc=f"{shape[0]} x {shape[1]}, k = {k}"):
        row: dict[str, Any] = {"batch": shape[0], "n": shape[1], "k": k, "method": name}
        try:
            row |= {} if device == "cuda" else peaks_alone(name, shape)
            for kind, call in calls(name, theta, z, k).items():
                if device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                y = call()
                if device == "cuda":
                    row[f"{kind}, peak MB"] = megabytes(torch.cuda.max_memory_allocated() - before)
                if kind == "forward":
                    row["largest entry"] = round(float(y.max()), 4)
                    row["difference from the marginals"] = float((y - exact).abs().max())
                del y
                row[f"{kind}, ms"] = milliseconds(call, device, seconds)
        except (RuntimeError, SystemExit) as error:  # of memory; the others go on
            row["error"] = str(error)[-200:]
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU (1)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="for each time (3); a call that takes longer is timed once"
    )
    parser.add_argument("--quick", action="store_true", help="a small shape, for a look")
    parser.add_argument("--output", type=Path, help="a JSON file, written after each shape (default: print only)")
    options = parser.parse_args(arguments)
    set_threads(options.threads)
    found: list[dict[str, Any]] = []
    shapes = [((4, 60, 8), list(methods()))] if options.quick else [(shape, list(methods())) for shape in SHAPES]
    if not options.quick:
        shapes.append((LONG, ["knapgrad", "torch.topk"]))
    for shape, names in shapes:
        rows = compare(shape, names, options.device, options.seconds)
        found += rows
        for row in rows:
            print("  ", row)
        if options.output:
            given = sys.argv[1:] if arguments is None else arguments
            origin = environment(given, "benchmarks.peers") | {"threads": options.threads}
            if options.device == "cuda":
                origin["gpu"] = torch.cuda.get_device_name()
            options.output.write_text(
                json.dumps({"environment": origin, "gamma": GAMMA, "rows": found}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
