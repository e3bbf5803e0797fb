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

from knapgrad.kernels.numba.frames import frame_of_scratch

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
        size = min(size, max(1, groups // (4 * threads)))  # a few slices per thread: a slow core takes fewer
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
    """Buffers of a thread: integers, float64, a dtype, and a table of that dtype; and their frame."""

    def __init__(self, dtype: np.dtype, sizes: tuple[int, ...]) -> None:
        integers, wide, narrow, cells = sizes
        buffers = _aligned(integers, np.int64), _aligned(wide, np.float64), _aligned(narrow, dtype)
        self.buffers = *buffers, _aligned(cells, dtype)[None]
        self.sizes, self.frame = sizes, frame_of_scratch(*self.buffers)

    def frame_with(self, table: np.ndarray) -> np.ndarray:
        return frame_of_scratch(*self.buffers[:3], table)


def scratch(dtype: np.dtype, sizes: tuple[int, ...]) -> Memory:
    """This thread's buffers, at least of these lengths."""
    kept = _local.__dict__.get(dtype.char)
    if kept is not None:
        (integers, wide, narrow, cells), most = sizes, kept.sizes
        if integers <= most[0] and wide <= most[1] and narrow <= most[2] and cells <= most[3]:
            return kept
    memory = Memory(dtype, sizes if kept is None else tuple(map(max, kept.sizes, sizes)))
    if sum(buffer.nbytes for buffer in memory.buffers) <= _KEPT_BYTES:
        _local.__dict__[dtype.char] = memory
    return memory


def _aligned(size: int, dtype: np.dtype | type, boundary: int = 64) -> np.ndarray:
    """Uninitialised memory that starts on a cache line: a vector across two lines costs twice."""
    dtype = np.dtype(dtype)
    raw = np.empty(size * dtype.itemsize + boundary, np.uint8)
    offset = -raw.ctypes.data % boundary
    return raw[offset : offset + size * dtype.itemsize].view(dtype)


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
