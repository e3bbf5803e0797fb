"""What XLA calls on a CPU: a handler, which lays out a call (:mod:`knapgrad.kernels.numba.layout`), and has its work
done by a task (:mod:`knapgrad.kernels.numba.tasks`).

A handler serves all operations. It finds the task by a number in a table of this process, so that no address gets into
what XLA compiles and keeps. Work goes to the threads of XLA: each takes slices of the batch until none is left, and the
handler, which takes part, waits for those that others have taken. What they share is one block of memory, which is
freed by whoever leaves last: a thread may come late, when the handler is gone.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import overload

from knapgrad.kernels.numba import frames, vector, xla
from knapgrad.kernels.numba.frames import pointer
from knapgrad.kernels.numba.layout import lay_out, slice_of
from knapgrad.kernels.numba.private import c_function
from knapgrad.kernels.numba.threads import WORTH_WAKING
from knapgrad.kernels.numba.variants import KINDS, SOURCES, function, inline
from knapgrad.kernels.numba.xla import words

# Attributes, in the order of their names: the frame of a layout, so far as it is known; what to say if memory runs out,
# or if a task is not in the table; the structure (layout.structure_of).
FRAME, MEMORY, MISSING, STRUCTURE = range(4)
# Arguments that every operation has.
THETA, WEIGHTS, CAPACITY, SLACK, GAMMA, EXTRA = range(6)
# A block: who holds it, slices, whether memory ran out, the call, addresses, the frame of the layout; then arrays.
USERS, NEXT, DONE, SLICES, SLICE, FAILED, CALL, KERNEL, GAMMAS, GAMMA_AT, VALUE_AT, TANGENT_AT, LAYOUT = range(13)
ARRAYS = LAYOUT + frames.LAYOUT

_ALL = 2**62  # a slack that no capacity exceeds
_MOST_TASKS = 4096
TASKS = np.zeros((_MOST_TASKS, 3), np.int64)  # (number, address of the task, address of its kernel)
_NAME = f"knapgrad_tasks_{SOURCES}"
binding.add_symbol(_NAME, frames.address(TASKS))


@function
def widen(array, least, target):
    """Numbers of 32 bits in 64, at least ``least``; returns where they end."""
    count = xla.length(array)
    given, wide = carray(xla.data(array), (count,), np.int32), words(target, count)
    for i in range(count):
        wide[i] = max(given[i], least)
    return target + 8 * count


@function
def widen_gamma(array, target):
    count = xla.length(array)
    single, double = carray(xla.data(array), (count,), np.float32), carray(xla.data(array), (count,), np.float64)
    wide, is_double = carray(pointer(target), (count,), np.float64), xla.item_size(array) == 8
    for i in range(count):
        wide[i] = double[i] if is_double else single[i]
    return target + 8 * count


@function
def block_of(call, structure):
    """With everything that tasks need; 0 if memory ran out."""
    theta, given = xla.argument(call, THETA), xla.attribute(call, FRAME)
    n = xla.last_dimension(theta)
    size, length = xla.length(theta) // n, ARRAYS
    for position in range(WEIGHTS, EXTRA):
        length += xla.length(xla.argument(call, position))
    address = xla.malloc(8 * (length + 2 * size))
    if address == 0:
        return address
    block, frame, at = words(address, ARRAYS), words(address + 8 * LAYOUT, frames.LAYOUT), address + 8 * ARRAYS
    frame[:] = given
    frame[frames.WEIGHTS], frame[frames.WEIGHTS + 1] = at, xla.length(xla.argument(call, WEIGHTS)) // n
    at = widen(xla.argument(call, WEIGHTS), 0, at)
    frame[frames.CAPACITY], frame[frames.CAPACITY + 1] = at, xla.length(xla.argument(call, CAPACITY))
    at = widen(xla.argument(call, CAPACITY), 0, at)
    frame[frames.SLACK], frame[frames.SLACK + 1] = at, xla.length(xla.argument(call, SLACK))
    at = widen(xla.argument(call, SLACK), -1 if frame[frames.LIMITED] else _ALL, at)
    block[GAMMAS], block[GAMMA_AT] = xla.length(xla.argument(call, GAMMA)), at
    block[VALUE_AT] = widen_gamma(xla.argument(call, GAMMA), at)
    block[TANGENT_AT] = block[VALUE_AT] + 8 * size
    lay_out(None, structure, size, n, vector.BYTES // xla.item_size(theta), frame)
    block[USERS], block[NEXT], block[DONE], block[SLICES], block[SLICE] = 1, 0, 0, 1, frame[frames.GROUPS]
    block[FAILED], block[CALL] = 0, call
    return address


@inline
def leave(address):
    if xla.add(address + 8 * USERS, -1) == 1:
        xla.free(address)


@function
def handle(call, tasks, structure):
    """Returns 0, or an error of XLA's."""
    number, task, kernel = xla.attribute(call, FRAME)[frames.TASK], 0, 0
    for position in range(_MOST_TASKS):
        entry = words(tasks + 24 * position, 3)
        if entry[0] == number:
            task, kernel = entry[1], entry[2]
            break
    if task == 0:
        return xla.error(call, MISSING, xla.FAILED_PRECONDITION)
    address = block_of(call, structure)
    if address == 0:
        return xla.error(call, MEMORY, xla.RESOURCE_EXHAUSTED)
    block, frame = words(address, ARRAYS), words(address + 8 * LAYOUT, frames.LAYOUT)
    block[KERNEL], groups = kernel, frame[frames.GROUPS]
    if groups > 1 and frame[frames.NANOSECONDS] > WORTH_WAKING:
        threads = min(xla.threads(call), groups)
        block[SLICE] = slice_of(groups, threads)
        block[SLICES] = -(-groups // block[SLICE])
        for _ in range(threads - 1):
            xla.add(address + 8 * USERS, 1)
            if not xla.schedule(call, task, address):
                xla.add(address + 8 * USERS, -1)
                break
    xla.add(address + 8 * USERS, 1)
    xla.call(task, address)
    while xla.add(address + 8 * DONE, 0) < block[SLICES]:
        xla.sched_yield()
    failed = block[FAILED]
    leave(address)
    return xla.error(call, MEMORY, xla.RESOURCE_EXHAUSTED) if failed else 0


# The structure of a batch, for each kind.
STRUCTURES = (
    inline(lambda call: None),
    inline(lambda call: xla.attribute(call, STRUCTURE)),
    inline(lambda call: xla.attribute(call, STRUCTURE).reshape((2, 3))),
)


def answer(kind, call, tasks):
    """Never called by Python."""


@overload(answer, prefer_literal=True)
def _choose(kind, call, tasks):
    structure_of = STRUCTURES[KINDS.index(kind.literal_value)]
    return lambda kind, call, tasks: 0 if xla.answers_version(call) else handle(call, tasks, structure_of(call))


@cache
def handler(kind: int) -> Any:
    """The handler of calls with items, with choices, or with a box, compiled."""
    name, word = _NAME, KINDS[kind]  # in a closure, so that Numba's cache on disk notices when the sources change

    def run(call):
        return answer(word, call, xla.address_of(name))

    return c_function(run, types.int64(types.int64), f"handler_of_{word}")
