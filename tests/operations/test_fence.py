"""Kernels between guard pages (fuzzing/fence.py): dirty input, and that an access beyond memory does end a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from fuzzing import fence

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made by Linux's mmap")
BEYOND = """
import ctypes, sys
import numpy as np
from numba import carray, cfunc, types
from fuzzing.fence import Fence

made = Fence(sys.argv[1])
where = 100 if sys.argv[1] == "after" else -1
if sys.argv[2] == "array":
    x = made.aligned(100, "f4")
    x[:] = np.arange(100)
    assert (made.copy(x) == np.arange(100)).all()
    x = made.aligned(112, "f4")  # whole lines of 64 bytes: the page is right behind
    where = 112 if sys.argv[1] == "after" else -1
    print("inside", flush=True)
    ctypes.c_float.from_address(x.ctypes.data + 4 * where).value
else:
    made.install()
    from knapgrad.kernels.numba import xla
    from knapgrad.kernels.numba.frames import pointer

    malloc, free = xla.malloc, xla.free

    @cfunc(types.int64(types.int64))
    def read(cell):
        address = malloc(128)
        found = carray(pointer(address + 8 * cell), (1,), np.int64)[0]
        free(address)
        return found

    read.ctypes(0), read.ctypes(15)
    print("inside", flush=True)
    read.ctypes(16 if sys.argv[1] == "after" else -1)
print("outside", flush=True)
"""


@pytest.mark.parametrize("what", ["array", "malloc"])
@pytest.mark.parametrize("side", fence.SIDES)
def test_an_access_beyond_memory_ends_the_process(side, what):
    done = subprocess.run([sys.executable, "-c", BEYOND, side, what], capture_output=True, text=True)
    assert done.stdout == "inside\n" and done.returncode == -signal.SIGSEGV, done.stderr


@pytest.mark.parametrize("backend", ["numpy", pytest.param("torch", marks=pytest.mark.filterwarnings("ignore"))])
def test_dirty_input_stays_inside(backend):
    pytest.importorskip(backend)
    report = fence.run(3, [backend], 1300, few_kernels=True)
    assert report["found"] == [], report["found"][0]["code"]
    assert report["calls"] > 500 and len(report["operations"]) == len(fence.OPERATIONS[backend]) * len(fence.KINDS)


def test_dirty_input_stays_inside_in_calls_from_xla():
    pytest.importorskip("jax")
    kinds, operations = ["top-k, at least", "options, at least"], ["solve", "sample", "log_prob"]
    report = fence.run(3, ["jax"], 1300, kinds=kinds, operations=operations)
    assert report["found"] == [], report["found"][0]["code"]
    assert report["calls"] > 200
