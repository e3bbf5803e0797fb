"""How fast it could be: the larger of the bytes over the copy bandwidth and the dependent steps times their latency.

Bytes: the live band of the table Q is written once and read once; the VJP writes and reads Q and R. Add theta, z and
the results. Rows and what the kernels write beside the band are not counted.

Steps: value and relax go through the items twice, once in float64 (V) and once in float32 (E), and the VJP does so
again. The latency of a step is measured with the threads that the kernels use for the shape, alone on the device.
A table that stays in the L2 cache can move faster than a copy: this floor is a yardstick, not a law.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import torch

STEPS = 10_000


def live_cells(weights: np.ndarray, capacity: int) -> int:
    """Cells of Q, over all items, that an instance needs: from max(goal - later weights, 0) to min(prefix, goal)."""
    prefix = np.cumsum(np.minimum(weights, capacity + 1))
    goal = min(capacity, int(prefix[-1]))
    top, low = np.minimum(prefix, goal), np.maximum(goal - (prefix[-1] - prefix), 0)
    return int((top - low + 1).sum())


def bytes_moved(batch: int, weights: np.ndarray, capacity: int, task: str) -> int:
    table = 2 * 4 * live_cells(weights, capacity)
    item_values = 4 * len(weights)
    forward = table + 2 * item_values + 8  # theta, y and the value in float64
    vjp = 2 * table + 3 * item_values  # theta, z, Hz
    return batch * (forward if task == "forward" else forward + vjp)


def floor_ms(moved: int, items: int, task: str, bytes_per_s: float, step_us: dict[str, float]) -> dict[str, Any]:
    """Both terms in milliseconds, and which is the larger."""
    sweeps = 1 if task == "forward" else 2
    terms = {
        "bandwidth": 1e3 * moved / bytes_per_s,
        "latency": 1e-3 * sweeps * items * (step_us["float64"] + step_us["float32"]),
    }
    larger = max(terms, key=terms.__getitem__)
    return {
        "ms": terms[larger],
        "larger": larger,
        "bytes": moved,
        "bandwidth_ms": terms["bandwidth"],
        "steps": 2 * sweeps * items,
        "latency_ms": terms["latency"],
    }


def copy_bandwidth(size: int = 2 << 30) -> float:
    """Bytes per second of a large copy on the device, counting reads and writes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = event_times(lambda: target.copy_(source), 20)
    return 2 * size / (1e-3 * statistics.median(times))


def step_latency(batch: int, items: int, reach: int) -> dict[str, Any]:
    """Microseconds of one dependent step in the layout that the kernels choose for a shape."""
    from benchmarks import chain_kernels
    from knapgrad.kernels.triton import plan
    from knapgrad.kernels.triton.batch import multiprocessors

    device = torch.device("cuda", torch.cuda.current_device())
    layout = plan.plan(batch, items, reach, 1, 4, multiprocessors(device))
    chain = chain_kernels.gather_chain if layout.narrow else chain_kernels.memory_chain
    found: dict[str, Any] = {"layout": "registers" if layout.narrow else "memory", "block": layout.block}
    found["warps"] = layout.warps
    for name in ("float64", "float32"):
        row = torch.zeros(2 * layout.block, dtype=getattr(torch, name), device="cuda")
        times = event_times(lambda row=row: chain[(1,)](row, STEPS, 3, BLOCK=layout.block, num_warps=layout.warps), 7)
        found[name] = 1e3 * statistics.median(times) / STEPS
    return found


def event_times(call: Any, count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls on the device, after one to warm up."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]
