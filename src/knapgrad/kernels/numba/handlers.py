"""What XLA calls on a CPU: a handler, which plans a call as :mod:`knapgrad.kernels.numba.launch` does, and has its work
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

from knapgrad.kernels.numba import frames, vector, xla
from knapgrad.kernels.numba.bands import COLUMNS, Batch, measure, row_length
from knapgrad.kernels.numba.frames import pointer
from knapgrad.kernels.numba.launch import LARGEST_SHARED_TABLE
from knapgrad.kernels.numba.private import c_function
from knapgrad.kernels.numba.threads import WORTH_WAKING
from knapgrad.kernels.numba.variants import KINDS, SOURCES, function, inline
from knapgrad.kernels.numba.xla import words

# Attributes, in the order of their names: what to say if memory runs out, or if a task is not in the table; numbers;
# the tree of choices, or the sides of a box.
MEMORY, MISSING, NUMBERS, TREE = range(4)
# Numbers.
TASK, OPTIONS, ENTRIES, MARGIN, KEEPS, COMPLETE, LIMITED, ROWS, TABLES, SAMPLES, PICOSECONDS = range(11)
# Arguments that every operation has.
THETA, WEIGHTS, CAPACITY, SLACK, GAMMA, EXTRA = range(6)
# A block: who holds it, slices, whether memory ran out, the call, sizes, addresses, scratch in the order of its frame;
# then a layout and arrays.
USERS, NEXT, DONE, SLICES, SLICE, GROUPS, FAILED, FRAME, KERNEL, SIZE, N, STRIDE = range(12)
GAMMAS, GAMMA_AT, VALUE_AT, TANGENT_AT, INTEGERS, WIDE, NARROW, CELLS, LAYOUT = range(12, 21)
ARRAYS = LAYOUT + frames.CELLS + 1

_WORTH_WAKING = int(1000 * WORTH_WAKING)  # picoseconds
_ALL = 2**62  # a slack that no capacity exceeds
_MOST_TASKS = 4096
TASKS = np.zeros((_MOST_TASKS, 3), np.int64)  # (number, address of the task, address of its kernel)
_NAME = f"knapgrad_tasks_{SOURCES}"
binding.add_symbol(_NAME, frames.address(TASKS))


@inline
def flag(number):
    return number != 0


@function
def batch_of(frame, tree, weights, capacity, slack, stride, reach):
    numbers, theta = xla.attribute(frame, NUMBERS), xla.argument(frame, THETA)
    n = xla.last_dimension(theta)
    unused = carray(xla.data(theta), (xla.length(theta) // n, n), np.float32)  # its shape counts
    return Batch(
        unused, weights, capacity, slack, np.ones(1), stride, tree, numbers[OPTIONS], numbers[ENTRIES],
        numbers[MARGIN], flag(numbers[KEEPS]), flag(numbers[COMPLETE]), reach,
    )  # fmt: skip


@function
def planned(frame, tree, weights, capacity, slack, bands, width):
    """Stride, reach, cells and the length of a row, as for calls from Python."""
    size = xla.length(xla.argument(frame, THETA)) // weights.shape[1]
    stride = width if weights.shape[0] == 1 and size > width // 4 else 1
    reach, cells = measure(batch_of(frame, tree, weights, capacity, slack, stride, 0), width, bands)
    if stride > 1 and cells * (vector.BYTES // width) > LARGEST_SHARED_TABLE:
        stride = 1
        reach, cells = measure(batch_of(frame, tree, weights, capacity, slack, stride, 0), width, bands)
    batch = batch_of(frame, tree, weights, capacity, slack, stride, reach)
    return stride, reach, cells, row_length(batch, width)


@function
def widen(array, count, least, target):
    """Numbers of 32 bits in 64, at least ``least``."""
    given, wide = carray(xla.data(array), (count,), np.int32), words(target, count)
    for i in range(count):
        wide[i] = max(given[i], least)


@function
def widen_gamma(array, count, target):
    single, double = carray(xla.data(array), (count,), np.float32), carray(xla.data(array), (count,), np.float64)
    wide, is_double = carray(pointer(target), (count,), np.float64), xla.item_size(array) == 8
    for i in range(count):
        wide[i] = double[i] if is_double else single[i]


@function
def block_of(frame, tree):
    """Plans a call; 0 if memory ran out."""
    theta, numbers = xla.argument(frame, THETA), xla.attribute(frame, NUMBERS)
    n, width, options = xla.last_dimension(theta), vector.BYTES // xla.item_size(theta), numbers[OPTIONS]
    size, steps = xla.length(theta) // n, n // max(options, 1)
    given = xla.argument(frame, WEIGHTS), xla.argument(frame, CAPACITY), xla.argument(frame, SLACK)
    rows, goals, slacks = xla.length(given[0]) // n, xla.length(given[1]), xla.length(given[2])
    gammas = xla.length(xla.argument(frame, GAMMA))
    arrays = 8 * (rows * n + goals + slacks + gammas + 2 * size + (steps + 1) * COLUMNS)
    address = xla.malloc(8 * ARRAYS + arrays)
    if address == 0:
        return address
    weights_at = address + 8 * ARRAYS
    capacity_at = weights_at + 8 * rows * n
    slack_at = capacity_at + 8 * goals
    gamma_at = slack_at + 8 * slacks
    value_at = gamma_at + 8 * gammas
    bands_at = value_at + 16 * size
    widen(given[0], rows * n, 0, weights_at)
    widen(given[1], goals, 0, capacity_at)
    widen(given[2], slacks, -1 if numbers[LIMITED] else _ALL, slack_at)
    widen_gamma(xla.argument(frame, GAMMA), gammas, gamma_at)
    weights, bands = (
        carray(pointer(weights_at), (rows, n), np.int64),
        carray(pointer(bands_at), (steps + 1, COLUMNS), np.int64),
    )
    capacity, slack = words(capacity_at, goals), words(slack_at, slacks)
    stride, reach, cells, row = planned(frame, tree, weights, capacity, slack, bands, width)
    groups, block, layout = -(-size // stride), words(address, ARRAYS), words(address + 8 * LAYOUT, ARRAYS - LAYOUT)
    block[USERS], block[NEXT], block[DONE], block[SLICES], block[SLICE], block[GROUPS] = 1, 0, 0, 1, groups, groups
    block[FAILED], block[FRAME], block[SIZE], block[N], block[STRIDE] = 0, frame, size, n, stride
    block[GAMMAS], block[GAMMA_AT], block[VALUE_AT], block[TANGENT_AT] = gammas, gamma_at, value_at, value_at + 8 * size
    block[INTEGERS] = (steps + 1) * COLUMNS + numbers[SAMPLES] * width
    block[WIDE] = row + (n + options) * width
    block[NARROW] = numbers[ROWS] * row + (2 * n + 4 * options) * width + numbers[TABLES] * cells
    block[CELLS] = cells
    layout[frames.WEIGHTS], layout[frames.WEIGHTS + 1] = weights_at, rows
    layout[frames.CAPACITY], layout[frames.CAPACITY + 1] = capacity_at, goals
    layout[frames.SLACK], layout[frames.SLACK + 1] = slack_at, slacks
    layout[frames.STRIDE], layout[frames.OPTIONS], layout[frames.ENTRIES] = stride, options, numbers[ENTRIES]
    layout[frames.MARGIN], layout[frames.KEEPS], layout[frames.COMPLETE] = (
        numbers[MARGIN],
        numbers[KEEPS],
        numbers[COMPLETE],
    )
    layout[frames.REACH], layout[frames.STEPS], layout[frames.CELLS] = reach, steps, cells
    return address


@inline
def leave(address):
    if xla.add(address + 8 * USERS, -1) == 1:
        xla.free(address)


@function
def handle(frame, tasks, tree):
    """Returns 0, or an error of XLA's."""
    numbers, task, kernel = xla.attribute(frame, NUMBERS), 0, 0
    for position in range(_MOST_TASKS):
        entry = words(tasks + 24 * position, 3)
        if entry[0] == numbers[TASK]:
            task, kernel = entry[1], entry[2]
            break
    if task == 0:
        return xla.error(frame, MISSING, xla.FAILED_PRECONDITION)
    address = block_of(frame, tree)
    if address == 0:
        return xla.error(frame, MEMORY, xla.RESOURCE_EXHAUSTED)
    block = words(address, ARRAYS)
    block[KERNEL] = kernel
    if block[GROUPS] > 1:
        width = vector.BYTES // xla.item_size(xla.argument(frame, THETA))
        if block[GROUPS] * block[CELLS] // width * numbers[PICOSECONDS] > _WORTH_WAKING:
            threads = min(xla.threads(frame), block[GROUPS])
            block[SLICE] = max(1, block[GROUPS] // (4 * threads))  # a slow core takes fewer
            block[SLICES] = -(-block[GROUPS] // block[SLICE])
            for _ in range(threads - 1):
                xla.add(address + 8 * USERS, 1)
                if not xla.schedule(frame, task, address):
                    xla.add(address + 8 * USERS, -1)
                    break
    xla.add(address + 8 * USERS, 1)
    xla.call(task, address)
    while xla.add(address + 8 * DONE, 0) < block[SLICES]:
        xla.sched_yield()
    failed = block[FAILED]
    leave(address)
    return xla.error(frame, MEMORY, xla.RESOURCE_EXHAUSTED) if failed else 0


@cache
def handler(kind: int) -> Any:
    """The handler of calls with items, with choices, or with a box, compiled."""
    name = _NAME  # in a closure, so that Numba's cache on disk notices when the sources change

    def of_items(frame):
        return 0 if xla.answers_version(frame) else handle(frame, xla.address_of(name), None)

    def of_choices(frame):
        if xla.answers_version(frame):
            return 0
        return handle(frame, xla.address_of(name), xla.attribute(frame, TREE))

    def of_boxes(frame):
        if xla.answers_version(frame):
            return 0
        return handle(frame, xla.address_of(name), xla.attribute(frame, TREE).reshape((2, 3)))

    python = (of_items, of_choices, of_boxes)[kind]
    return c_function(python, types.int64(types.int64), f"handler_of_{KINDS[kind]}")
