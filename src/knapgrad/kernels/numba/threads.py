"""Slices of a batch on threads, each with scratch memory of its own.

Plain Python threads around kernels that release the lock: unlike Numba's and OpenMP's own pools they may be entered
from several threads at once, and a forked child just makes new ones. How work is split never changes a result.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numba
import numpy as np

from knapgrad.kernels.numba.frames import ITSELF, SCRATCH, TABLE, address
from knapgrad.kernels.numba.layout import LINE, arrange, bytes_of_scratch, slice_of

WORTH_WAKING = 0.6e6  # nanoseconds of work below which a call stays on its own thread
_SLICE = 20e6  # nanoseconds of work, as expected, after which Python looks for interrupts; it may take twice as long
_KEPT_BYTES = 64 << 20  # a larger scratch is given back after the call

_local = threading.local()
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def num_threads() -> int:
    """torch's thread count if torch is in use (so DataLoader workers stay on one), else Numba's setting."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def run(work: Callable[[int, int], None], groups: int, nanoseconds: float) -> None:
    """Calls ``work(begin, end)`` until all groups are done, on several threads.

    Python sees an interrupt only between two calls, so they are short. An instance is never split: one with a huge
    table is finished first.
    """
    if nanoseconds <= WORTH_WAKING:
        if groups:
            work(0, groups)
        return
    threads = min(num_threads(), groups)
    size = max(1, int(groups * _SLICE / nanoseconds))
    if threads > 1:
        size = min(size, slice_of(groups, threads))
    begins = iter(range(0, groups, size))
    turn, is_stopped = threading.Lock(), False

    def worker() -> None:
        nonlocal is_stopped
        try:
            while not is_stopped:
                with turn:
                    begin = next(begins, None)
                if begin is None:
                    return
                work(begin, min(begin + size, groups))
        except BaseException:
            is_stopped = True  # the others need not go on
            raise

    helpers = []
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down: this one does it all
        helpers += [_executor().submit(worker) for _ in range(threads - 1)]
    try:
        worker()
        for helper in helpers:
            if not helper.cancel():  # one that never started has nothing left to do
                helper.result()
    except BaseException:
        is_stopped = True
        wait([helper for helper in helpers if not helper.cancel()])  # they write into arrays of the caller
        raise


class Memory:
    """Scratch of a thread: a frame, and buffers of these lengths behind it."""

    def __init__(self, dtype: np.dtype, sizes: tuple[int, ...]) -> None:
        self.sizes, self.bytes = sizes, bytes_of_scratch(sizes, dtype.itemsize)
        self.enough_for = sizes  # the last that were asked for
        memory = np.empty(self.bytes, np.uint8)
        self.frame = memory[-address(memory) % LINE :][: 8 * SCRATCH].view(np.int64)
        arrange(self.frame, address(self.frame), sizes, dtype.itemsize)
        self.frames = self.frame, self.frame.data  # for kernels, and for Python, where it is read faster

    def frames_with(self, table: np.ndarray) -> tuple[np.ndarray, memoryview]:
        frame = self.frame.copy()
        frame[TABLE], frame[TABLE + 1], frame[ITSELF] = address(table), len(table), address(frame)
        return frame, frame.data


def scratch(dtype: np.dtype, sizes: tuple[int, ...]) -> Memory:
    """This thread's buffers, at least of these lengths."""
    kept = _local.__dict__.get(dtype.char)
    if kept is not None:
        if kept.enough_for is sizes:
            return kept
        (integers, wide, narrow, cells), most = sizes, kept.sizes
        if integers <= most[0] and wide <= most[1] and narrow <= most[2] and cells <= most[3]:
            kept.enough_for = sizes
            return kept
    memory = Memory(dtype, sizes if kept is None else tuple(map(max, kept.sizes, sizes)))
    if memory.bytes <= _KEPT_BYTES:
        _local.__dict__[dtype.char] = memory
    return memory


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(
                os.cpu_count(), thread_name_prefix="knapgrad"
            )  # threads start as they are needed
        return _pool


def _forget() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
