"""What a small call costs beside its arithmetic: next to an empty autograd.Function, and on a GPU next to one that does
nothing but launch the same compiled kernel.

    python -m benchmarks.small_calls --device cpu --output small-calls-cpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knapgrad as kg
from measuring.clocks import microseconds, ratio, set_threads
from measuring.origin import environment

SIZES = {"cpu": [(8, 10), (32, 10)], "cuda": [(4, 10), (64, 32)]}


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()


def bare_launch(theta: Tensor, lattice: Any, regularizer: str) -> Callable[[Tensor], Tensor]:
    """A Function that allocates results and launches what knapgrad has compiled, in both directions."""
    from knapgrad.kernels.triton import from_torch

    unit = np.ones(())
    from_torch.relax(theta, lattice, unit, regularizer)
    from_torch.vjp(theta, theta, lattice, unit, regularizer)
    forwards, backwards = (from_torch._way_of(name, theta, lattice, unit, regularizer) for name in ("operator", "vjp"))
    stream = torch.cuda.current_stream().cuda_stream

    def launch(prepared: Any, x: Tensor, z: Tensor) -> Tensor:
        y, scratch, arguments = torch.empty_like(x), x.new_empty(prepared.bytes // 4), prepared.template.copy()
        for name, offset in prepared.offsets.items():
            arguments[prepared.places[name]] = scratch.data_ptr() + offset
        arguments[0], arguments[1], arguments[prepared.places["y"]] = x.data_ptr(), z.data_ptr(), y.data_ptr()
        prepared.compiled(*arguments, stream=stream)
        return y

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return launch(forwards, x, x)

        @staticmethod
        def backward(ctx: Any, z: Tensor) -> Tensor:
            return launch(backwards, ctx.saved_tensors[0], z)

    return Bare.apply


IN_A_ROW, WARM = 60, 10


def host_times(calls: dict[str, Callable[[], Any]], seconds: float, device: str) -> dict[str, np.ndarray]:
    """Seconds until a call returns, in a row as in a training loop of its own: the first ones, which find the caches as
    other contestants left them, are not counted. A device finishes its work between calls."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, deadline = random.Random(0), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for name in order.sample(list(calls), len(calls)):
            call, spent = calls[name], 0.0
            for turn in range(IN_A_ROW):
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                spent += time.perf_counter() - start if turn >= WARM else 0.0
            times[name].append(spent / (IN_A_ROW - WARM))
    return {name: np.array(x) for name, x in times.items()}


def measure(device: str, batch: int, n: int, regularizer: kg.Regularizer, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    constraint = kg.Knapsack(rng.integers(1, 5, n), n)
    theta = torch.tensor(rng.normal(size=(batch, n)), dtype=torch.float32, device=device)
    leaf, z = theta.clone().requires_grad_(), torch.ones_like(theta)
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        "relax": lambda x: kg.relax(x, constraint, regularizer),
        "empty Function": Empty.apply,
    }
    calls: dict[str, Callable[[], Any]] = {"add": lambda: theta + z}
    if device == "cuda":
        layers["relax"](leaf).backward(z)
        layers["bare launch"] = bare_launch(theta, constraint.copies[theta.device.index, n], regularizer.name)
        expected = torch.autograd.grad(layers["relax"](leaf), leaf, z)[0]
        assert torch.equal(torch.autograd.grad(layers["bare launch"](leaf), leaf, z)[0], expected)
    else:
        from knapgrad.kernels import numba

        lattice, unit, array = constraint.lattice(n), np.ones(()), theta.numpy()
        calls["kernel, relax"] = lambda: numba.relax(array, lattice, unit, regularizer.name)
        calls["kernel, VJP"] = lambda: numba.vjp(array, array, lattice, unit, regularizer.name)
        calls["NumPy relax"] = lambda: kg.relax(array, constraint, regularizer)
    for name, layer in layers.items():
        calls[f"{name}, forward"] = lambda layer=layer: layer(leaf)
        calls[f"{name}, both"] = lambda layer=layer: torch.autograd.grad(layer(leaf), leaf, z)
    times = host_times(calls, seconds, device)
    against = ["empty Function"] + ["bare launch"] * (device == "cuda")
    ratios = {
        f"relax / {other}, {kind}": ratio(times[f"relax, {kind}"], times[f"{other}, {kind}"])
        for other in against
        for kind in ("forward", "both")
    }
    return {
        "batch": batch, "n": n, "capacity": n, "regularizer": regularizer.name,
        "microseconds": {name: microseconds(x) for name, x in times.items()}, "ratios": ratios,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--seconds", type=float, default=6.0, help="per size, all contestants together (6)")
    parser.add_argument("--output", type=Path, help="a JSON file (default: print only)")
    options = parser.parse_args(arguments)
    set_threads(1)
    rows = []
    for batch, n in SIZES[options.device]:
        rows.append(measure(options.device, batch, n, kg.Gini(), options.seconds))
        print(f"{batch} x {n}")
        for name, x in rows[-1]["microseconds"].items():
            print(f"  {x['median']:8.1f} us ({x['q1']:.1f} to {x['q3']:.1f})  {name}")
        for name, x in rows[-1]["ratios"].items():
            print(f"  {x['median']:8.2f}    ({x['q1']:.2f} to {x['q3']:.2f})  {name}")
    if options.output:
        given = sys.argv[1:] if arguments is None else arguments
        origin = environment(given, "benchmarks.small_calls")
        if options.device == "cuda":
            origin["gpu"] = torch.cuda.get_device_name()
        options.output.write_text(json.dumps({"environment": origin, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
