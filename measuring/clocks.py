"""Clocks for a noisy machine: contestants take turns in one process; medians, and ratios within a turn, are kept."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

_TURN = 2e-3  # seconds, of short calls


def set_threads(count: int) -> None:
    """For every contestant; knapgrad follows torch's setting."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(count)


def take_turns(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, np.ndarray]:
    """Seconds per call, one number per turn, in about ``seconds`` altogether. Short calls are repeated within a turn.

    Each turn has another order, since a call finds the caches as the previous one left them.
    """
    repeats = {name: max(1, math.ceil(_TURN / _shortest(call))) for name, call in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    deadline, order = time.perf_counter() + seconds, random.Random(0)
    gc.collect()
    gc.disable()
    try:
        while time.perf_counter() < deadline or min(map(len, times.values())) < 5:
            for name in order.sample(list(contestants), len(contestants)):
                call = contestants[name]
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    call()
                times[name].append((time.perf_counter() - start) / repeats[name])
    finally:
        gc.enable()
    return {name: np.array(measured) for name, measured in times.items()}


def _shortest(call: Callable[[], Any]) -> float:
    """Seconds of a call that is warm. The second call may take six times as long as the tenth; a contestant that was
    judged by it would have few repeats, and be measured cold beside others that are warm."""
    call()
    shortest, begin = math.inf, time.perf_counter()
    while time.perf_counter() - begin < _TURN or shortest == math.inf:
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}


def microseconds(times: np.ndarray) -> dict[str, float]:
    return {key: round(1e6 * value, 2) for key, value in spread(times).items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> dict[str, float]:
    """How many times faster ``fast`` is, turn by turn."""
    return {key: round(value, 3) for key, value in spread(slow / fast).items()}
