"""The operations, as a thread of XLA runs them: a task takes slices of a batch, and calls a kernel for each.

A task is compiled for the operations that share a kernel, a type of scores, and items, choices or boxes. The kernel is
the one that calls from Python use, of any regularizer. An instance without a feasible selection, or whose capacity is
below 0, is NaN.
"""

import hashlib
from functools import cache
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import overload

from knapgrad.kernels.compile_log import mention
from knapgrad.kernels.numba import frames, handlers, xla
from knapgrad.kernels.numba.entries import address_of
from knapgrad.kernels.numba.frames import pointer
from knapgrad.kernels.numba.handlers import ARRAYS, EXTRA, LAYOUT
from knapgrad.kernels.numba.kernels import KERNELS
from knapgrad.kernels.numba.layout import TABLE, arrange, bytes_of_scratch, whole_lines
from knapgrad.kernels.numba.private import c_function
from knapgrad.kernels.numba.variants import KINDS, SOURCES, direction_of, function, inline, regularizer_of
from knapgrad.kernels.numba.xla import words
from knapgrad.kernels.operations import OPERATIONS

# Arrays of arguments and results, as kernels take them.


@inline
def items(array, theta):
    """(batch, n), or (batch, capacities)"""
    n = xla.last_dimension(array)
    return carray(xla.data(array), (xla.length(array) // n, n), theta.dtype)


@inline
def samples(array, theta):
    """(samples, batch, n)"""
    return carray(xla.data(array), (xla.length(array) // theta.size, *theta.shape), theta.dtype)


@inline
def sums(array, theta):
    """(samples, batch), or (1, batch)"""
    return carray(xla.data(array), (xla.length(array) // theta.shape[0], theta.shape[0]), theta.dtype)


@inline
def gradient(call, theta, backwards):
    """What a sweep back writes: the last result. Theta stands for it where there is none."""
    return items(xla.result(call, xla.results(call) - 1), theta) if backwards else theta


# What each kernel takes after the batch and the groups. Numbers per instance go to ``value`` and ``tangent``.


def _operator(call, theta, value, tangent, backwards):
    return backwards, value, gradient(call, theta, backwards)


def _tangent(call, theta, value, tangent, backwards):
    return items(xla.argument(call, EXTRA), theta), backwards, value, tangent, gradient(call, theta, backwards)


def _sample(call, theta, value, tangent, backwards):
    return False, samples(xla.argument(call, EXTRA), theta), value, samples(xla.result(call, 0), theta)


def _solve(call, theta, value, tangent, backwards):
    return value, items(xla.result(call, 0), theta), np.empty((0, 0))


def _mode(call, theta, value, tangent, backwards):
    return value, items(xla.result(call, 0), theta)


def _log_prob(call, theta, value, tangent, backwards):
    result = sums(xla.result(call, 0), theta)
    return False, samples(xla.argument(call, EXTRA), theta), result, backwards, value, result, theta


def _frontier(call, theta, value, tangent, backwards):
    rows = items(xla.argument(call, EXTRA) if backwards else xla.result(call, 0), theta)
    return rows, backwards, rows, gradient(call, theta, backwards)


_EXTRAS = {
    "operator": _operator, "tangent": _tangent, "sample": _sample, "solve": _solve, "mode": _mode,
    "log_prob": _log_prob, "frontier": _frontier,
}  # fmt: skip


@function
def scratch_of(sizes, item_size):
    """A piece of memory for a thread, and the address of its frame; 0 if memory ran out."""
    address = xla.malloc(bytes_of_scratch(sizes, item_size))
    start = whole_lines(address)
    if address != 0:
        arrange(words(start, frames.SCRATCH), start, sizes, item_size)
    return address, start


@function
def start(theta, call, samples, begin, end, value, first):
    """Sets what kernels add to, or leave alone."""
    for b in range(begin, end):
        value[b] = 0.0
        if first == frames.SUM:
            for s in range(samples):
                sums(xla.result(call, 0), theta)[s, b] = 0.0


@function
def finish(theta, call, samples, begin, end, value, tangent, first):
    """Numbers per instance as the first result, and NaN in all results of instances that are broken."""
    capacity, outer, size = xla.argument(call, handlers.CAPACITY), max(samples, 1), theta.shape[0]
    goals = carray(xla.data(capacity), (xla.length(capacity),), np.int32)
    for b in range(begin, end):
        if first in (frames.VALUE, frames.TANGENT):
            sums(xla.result(call, 0), theta)[0, b] = tangent[b] if first == frames.TANGENT else value[b]
        if value[b] == -np.inf or goals[b if goals.shape[0] > 1 else 0] < 0:
            for position in range(xla.results(call)):
                array = xla.result(call, position)
                inner = xla.length(array) // (outer * size)
                cells = carray(xla.data(array), (outer, size, inner), theta.dtype)
                cells[:, b] = np.nan


def take_slices(key, like, address):
    """Of the batch of a block, until none is left. Never called by Python."""


@overload(take_slices, prefer_literal=True, jit_options={"error_model": "numpy"})
def _choose(key, like, address):
    name, kind, _ = key.literal_value.split("/")
    structure_of, extras_of = handlers.STRUCTURES[KINDS.index(kind)], inline(_EXTRAS[name])
    variants = (None, None) if name == "tangent" else (None,)  # what has no size when it is passed

    def take(key, like, address):
        block, frame = words(address, ARRAYS), words(address + 8 * LAYOUT, frames.LAYOUT)
        scratch = memory_at = 0
        while True:
            taken = xla.add(address + 8 * handlers.NEXT, 1)
            if taken >= block[handlers.SLICES]:
                break
            if scratch == 0:
                scratch, memory_at = scratch_of(frame[frames.SIZES :], like.itemsize)
            if scratch == 0:
                block[handlers.FAILED] = 1
            else:
                call, given = block[handlers.CALL], xla.argument(block[handlers.CALL], handlers.THETA)
                n, samples = xla.last_dimension(given), frame[frames.SAMPLES]
                backwards, first = frame[frames.BACKWARDS] != 0, frame[frames.FIRST]
                theta = carray(xla.data(given), (xla.length(given) // n, n), like.dtype)
                gamma = carray(pointer(block[handlers.GAMMA_AT]), (block[handlers.GAMMAS],), np.float64)
                value = carray(pointer(block[handlers.VALUE_AT]), (theta.shape[0],), np.float64)
                tangent = carray(pointer(block[handlers.TANGENT_AT]), (theta.shape[0],), np.float64)
                begin = taken * block[handlers.SLICE]
                end = min(begin + block[handlers.SLICE], frame[frames.GROUPS])
                low, high = begin * frame[frames.STRIDE], min(end * frame[frames.STRIDE], theta.shape[0])
                start(theta, call, samples, low, high, value, first)
                run = theta, gamma, structure_of(call), frame, words(memory_at, frames.SCRATCH), begin, end
                extras = extras_of(call, theta, value, tangent, backwards)
                if not xla.call_kernel(block[handlers.KERNEL], variants + run + extras):
                    block[handlers.FAILED] = 1
                finish(theta, call, samples, low, high, value, tangent, first)
            xla.add(address + 8 * handlers.DONE, 1)
        if scratch:
            xla.free(scratch)
        handlers.leave(address)

    return take


@cache
def _compiled(kernel: str, dtype: str, kind: int) -> Any:
    """A task, compiled or found on disk."""
    key, number = f"{kernel}/{KINDS[kind]}/{SOURCES}", np.dtype(dtype).type

    def run(address):
        take_slices(key, np.empty((0, 0), number), address)

    return c_function(run, types.void(types.int64), f"{kernel}_of_{KINDS[kind]}_{dtype}")


def _signature(name: str, regularizer: str, dtype: str, kind: int) -> tuple[Any, ...]:
    """The types of the arguments of a kernel."""

    def array(element: Any, dimensions: int) -> types.Array:
        return types.Array(element, dimensions, "C")

    number, direction, kernel = getattr(types, dtype), OPERATIONS[name].direction, str(OPERATIONS[name].kernel)
    per_instance, integers = array(types.float64, 1), array(types.int64, 1)
    found = {
        "filled": types.boolean, "backwards": types.boolean, "value": per_instance, "tangent": per_instance,
        "items": array(number, 2), "samples": array(number, 3), "sums": array(number, 2),
        "rows": array(types.float64, 2),
    }  # fmt: skip
    variants = [regularizer_of(regularizer), *([direction_of(direction)] if direction else [])]
    structure = (types.none, integers, array(types.int64, 2))[kind]
    run = found["items"], per_instance, structure, integers, integers, types.int64, types.int64
    return *(x.numba_type for x in variants), *run, *(found[word] for word in KERNELS[TABLE][kernel].takes)


@cache
def task(name: str, regularizer: str, dtype: str, kind: int, way: int) -> int:
    """The number under which a task and its kernel are in the table."""
    begin, kernel_name = perf_counter(), str(OPERATIONS[name].kernel)
    kernel = address_of(KERNELS[way][kernel_name].run, _signature(name, regularizer, dtype, kind))
    run = _compiled(kernel_name, dtype, kind)
    mention(f"{name} for JAX", dtype, perf_counter() - begin)
    key = f"{name} {regularizer_of(regularizer).numba_type.name} {dtype} {KINDS[kind]} {way}"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    with _lock:
        handlers.TASKS[len(_numbers)] = number, run.address, kernel
        _numbers.append(number)
    return number


_numbers: list[int] = []  # in the table
_lock = Lock()
