"""Clocks for a noisy machine: contestants take turns in one process; medians, and ratios within a turn, are kept."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import platform
import random
import shlex
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import knapgrad

ROOT = Path(__file__).resolve().parent.parent


def set_threads(count: int) -> None:
    """For every contestant; knapgrad follows torch's setting."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(count)


def take_turns(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, np.ndarray]:
    """Seconds a call, one number a turn, in about ``seconds`` altogether. Short calls are repeated within a turn.

    Each turn has another order: a call finds the caches as the one before has left them.
    """
    repeats = {}
    for name, call in contestants.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, math.ceil(2e-3 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    deadline, order = time.perf_counter() + seconds, random.Random(0)
    gc.collect()
    gc.disable()
    try:
        while time.perf_counter() < deadline or len(times[name]) < 5:
            for name in order.sample(list(contestants), len(contestants)):
                call = contestants[name]
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    call()
                times[name].append((time.perf_counter() - start) / repeats[name])
    finally:
        gc.enable()
    return {name: np.array(measured) for name, measured in times.items()}


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}


def microseconds(times: np.ndarray) -> dict[str, float]:
    return {key: round(1e6 * value, 2) for key, value in spread(times).items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> dict[str, float]:
    """How many times faster ``fast`` is, turn by turn."""
    return {key: round(value, 3) for key, value in spread(slow / fast).items()}


def environment(command: list[str], module: str = "benchmarks") -> dict[str, Any]:
    """What a reader needs to know to compare two result files."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *command]),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            "knapgrad": knapgrad.__version__,
            **{name: metadata.version(name) for name in ("numpy", "numba", "llvmlite", "torch")},
            **({"jax": metadata.version("jax")} if importlib.util.find_spec("jax") else {}),
        },
        "vector_instructions": sorted(flag for flag in cpu_flags() if flag in {"avx", "avx2", "avx512f", "neon"}),
    }


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        status = git("status", "--porcelain", "--untracked-files=all").splitlines()
        results = (".json", ".jsonl", ".png", ".npz", " experiments/README.md")  # these may have changed
        changed = any(not line.endswith(results) for line in status)
        return git("rev-parse", "--short=10", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    return set(cpu_info().get("flags", "").split())
