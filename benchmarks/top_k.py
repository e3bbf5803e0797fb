"""Soft top-k under Shannon on one thread of a CPU: without a table, with it, and next to ``torch.topk``.

    python -m benchmarks.top_k --output benchmarks/results/top-k-cpu.json

All take turns in one process. Calls go through torch tensors: ``relax``, and ``relax`` with its gradient. Errors are
differences from the same in float64 (which tests compare with 50 digits).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import knapgrad as kg
from knapgrad.kernels.numba import layout
from measuring.clocks import microseconds, ratio, set_threads, take_turns
from measuring.origin import environment

SHAPES = [
    (32, 30, 10), (32, 100, 10), (32, 100, 50), (32, 300, 20), (32, 1000, 10), (32, 1000, 100), (32, 8192, 1024),
    (1, 100, 10), (1, 1000, 100), (1, 8192, 1024), (1, 131072, 2048), (1, 1_000_000, 100_000),
]  # fmt: skip
LARGEST_TABLE = 2e7  # cells, over all instances: beyond, a call takes seconds
NEVER = 1 << 60


def at_least(least: int | None) -> dict[str, int]:
    """From which sizes on there is no table; None for the rule of the library."""
    return RULE if least is None else dict.fromkeys(RULE, least)


RULE = dict(layout.LEAST)


def calls(theta: Tensor, z: Tensor, k: int, least: int | None) -> dict[str, Callable[[], Any]]:
    """The way is chosen when a constraint is first used."""
    limit, smoothing, leaf = kg.TopK(k), kg.Shannon(), theta.clone().requires_grad_()

    def forward() -> Tensor:
        return kg.relax(theta, limit, smoothing)

    def both() -> Tensor:
        return torch.autograd.grad(kg.relax(leaf, limit, smoothing), leaf, z)[0]

    layout.LEAST.update(at_least(least))
    forward(), both()
    layout.LEAST.update(RULE)
    return {"forward": forward, "both": both}


def row_of(batch: int, n: int, k: int, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    theta, z = (torch.randn(batch, n, generator=generator) for _ in range(2))
    contestants: dict[str, Callable[[], Any]] = {"torch.topk": lambda: torch.topk(theta, k)}
    ways = {"knapgrad": None, "without a table": 0, "with a table": NEVER}
    if batch * k * n > LARGEST_TABLE:
        del ways["with a table"]
    for way, least in ways.items():
        contestants |= {f"{way}, {part}": call for part, call in calls(theta, z, k, least).items()}
    times = take_turns(contestants, seconds)
    exact = calls(theta.double(), z.double(), k, 0)
    off = {
        part: float((contestants[f"without a table, {part}"]().double() - exact[part]()).abs().max())
        for part in ("forward", "both")
    }
    row = {"batch": batch, "n": n, "k": k, "microseconds": {name: microseconds(x) for name, x in times.items()}}
    row["off by"] = off
    row["times torch.topk"] = {
        part: ratio(times[f"knapgrad, {part}"], times["torch.topk"]) for part in ("forward", "both")
    }
    if "with a table" in ways:
        row["the table takes, times knapgrad"] = {
            part: ratio(times[f"with a table, {part}"], times[f"knapgrad, {part}"]) for part in ("forward", "both")
        }
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per shape (2)")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args(arguments)
    set_threads(1)
    rows = []
    for shape in tqdm(SHAPES):
        rows.append(row_of(*shape, given.seconds))
        print(json.dumps(rows[-1]))
    if given.output is not None:
        found = {"environment": environment(sys.argv[1:], "benchmarks.top_k"), "rows": rows}
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
