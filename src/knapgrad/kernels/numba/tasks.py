"""The operations, as a thread of XLA runs them: a task takes slices of a batch, and calls a kernel for each.

A task is compiled for an operation, a type of scores, and items, choices or boxes. The kernel is the one that calls
from Python use, of any regularizer. An instance without a feasible selection, or whose capacity is below 0, is NaN.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, models, overload, register_model

from knapgrad.kernels.first_calls import mention
from knapgrad.kernels.numba import box_paths, choice_paths, frames, paths, xla
from knapgrad.kernels.numba.bands import BEYOND
from knapgrad.kernels.numba.entries import address_of
from knapgrad.kernels.numba.frames import pointer
from knapgrad.kernels.numba.handlers import (
    ARRAYS,
    CAPACITY,
    CELLS,
    DONE,
    EXTRA,
    FAILED,
    FRAME,
    GAMMA_AT,
    GAMMAS,
    GROUPS,
    INTEGERS,
    KERNEL,
    LAYOUT,
    NARROW,
    NEXT,
    NUMBERS,
    SAMPLES,
    SIZE,
    SLICE,
    SLICES,
    STRIDE,
    TANGENT_AT,
    TASKS,
    THETA,
    TREE,
    VALUE_AT,
    WIDE,
    N,
    leave,
)  # fmt: skip
from knapgrad.kernels.numba.private import c_function
from knapgrad.kernels.numba.sweeps import frontier_kernel, operator_kernel, tangent_kernel
from knapgrad.kernels.numba.variants import (
    BOXES,
    CHOICES,
    ITEMS,
    KINDS,
    SOURCES,
    direction_of,
    function,
    inline,
    regularizer_of,
)
from knapgrad.kernels.numba.xla import words

# What a kernel takes after the batch and the groups, from arguments and results as XLA has them. What kernels write in
# float64, per instance, goes to ``value`` and ``tangent``.


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
def totals(array, theta):
    """(samples, batch), or (1, batch)"""
    return carray(xla.data(array), (xla.length(array) // theta.shape[0], theta.shape[0]), theta.dtype)


def _value(frame, theta, value, tangent):
    return False, value, theta


def _operator(frame, theta, value, tangent):
    return True, value, items(xla.result(frame, 1), theta)


def _vjp(frame, theta, value, tangent):
    return items(xla.argument(frame, EXTRA), theta), True, value, tangent, items(xla.result(frame, 0), theta)


def _entropy(frame, theta, value, tangent):
    return items(xla.argument(frame, EXTRA), theta), False, value, tangent, theta


def _entropy_grad(frame, theta, value, tangent):
    return items(xla.argument(frame, EXTRA), theta), True, value, tangent, items(xla.result(frame, 1), theta)


def _sample(frame, theta, value, tangent):
    return False, samples(xla.argument(frame, EXTRA), theta), value, samples(xla.result(frame, 0), theta)


def _solve(frame, theta, value, tangent):
    return value, items(xla.result(frame, 0), theta), np.empty((0, 0))


def _mode(frame, theta, value, tangent):
    return value, items(xla.result(frame, 0), theta)


def _log_prob(frame, theta, value, tangent):
    result = totals(xla.result(frame, 0), theta)
    return False, samples(xla.argument(frame, EXTRA), theta), result, False, value, result, theta


def _frontier(frame, theta, value, tangent):
    rows = items(xla.result(frame, 0), theta)
    return rows, False, rows, theta


def _frontier_vjp(frame, theta, value, tangent):
    cotangent = items(xla.argument(frame, EXTRA), theta)
    return cotangent, True, cotangent, items(xla.result(frame, 0), theta)


class Operation(NamedTuple):
    """What runs an operation, and what it needs; ``weight`` is its time, as a multiple of that of value and relax."""

    extras: Callable[..., tuple[Any, ...]]
    kernels: tuple[Any, Any, Any]  # of items, of choices and of boxes
    types: str  # of extras: b(ool), or an array of so many dimensions of theta's type, or w(ide), of float64
    directions: tuple[str, ...] = ()
    rows: int = 2
    tables: int = 0
    weight: float = 1.0
    weight_of_sample: float = 0.0
    keeps: bool = True
    complete: bool = False
    entries: int | None = None  # of the table per state; None for the number of options
    first: str = ""  # which number per instance the first result is; a sum starts at 0


_SWEEPS, _TANGENTS, _FRONTIERS = (operator_kernel,) * 3, (tangent_kernel,) * 3, (frontier_kernel,) * 3


def _paths(name: str) -> tuple[Any, Any, Any]:
    return getattr(paths, name), getattr(choice_paths, name), getattr(box_paths, name)


OPERATIONS = {
    "value": Operation(_value, _SWEEPS, "bw2", keeps=False, first="value"),
    "operator": Operation(_operator, _SWEEPS, "bw2", first="value"),
    "vjp": Operation(_vjp, _TANGENTS, "2bww2", ("linear",), rows=4, tables=1, weight=2.5),
    "entropy": Operation(_entropy, _TANGENTS, "2bww2", ("entropy",), rows=4, tables=1, weight=5.0, first="tangent"),
    "entropy_grad": Operation(
        _entropy_grad, _TANGENTS, "2bww2", ("entropy",), rows=4, tables=1, weight=5.0, first="tangent"
    ),
    "sample": Operation(_sample, _paths("sample_kernel"), "b3w3", weight_of_sample=0.05),
    "solve": Operation(_solve, (None, choice_paths.solve_kernel, None), "w2W", entries=1),  # items: a sample
    "mode": Operation(_mode, _paths("mode_kernel"), "w2", weight=2.0),
    "log_prob": Operation(_log_prob, _paths("log_prob_kernel"), "b32bw22", weight_of_sample=0.1, first="sum"),
    "frontier": Operation(_frontier, _FRONTIERS, "2b22", keeps=False, complete=True),
    "frontier_vjp": Operation(_frontier_vjp, _FRONTIERS, "2b22", complete=True),
}  # fmt: skip


class OperationType(types.Type):
    """An operation on items, choices or boxes as a Numba type, so that a task is compiled for it."""

    def __init__(self, key: str) -> None:
        name, kind, _ = key.split("/")
        self.kind, self.operation = KINDS.index(kind), OPERATIONS[name]
        self.extras = inline(self.operation.extras)
        super().__init__(name=f"Operation({key})")


@register_model(OperationType)
class _OperationModel(models.OpaqueModel):
    pass


@intrinsic(prefer_literal=True)
def operation_of(_: Any, key: Any) -> Any:
    """From a key to a value of its type."""
    kind = OperationType(key.literal_value)
    return kind(key), lambda context, builder, signature, arguments: context.get_dummy_value()


def extras_of(operation, *arguments):
    """Never called by Python, nor are the next two."""


def tree_of(operation, frame):
    pass


def variants_of(operation):
    pass


@overload(extras_of)
def _choose_extras(operation, *arguments):
    chosen = operation.extras
    return lambda operation, *arguments: chosen(*arguments)


@overload(tree_of)
def _choose_tree(operation, frame):
    if operation.kind == ITEMS:
        return lambda operation, frame: None
    if operation.kind == CHOICES:
        return lambda operation, frame: xla.attribute(frame, TREE)
    return lambda operation, frame: xla.attribute(frame, TREE).reshape((2, 3))


@overload(variants_of)
def _choose_variants(operation):
    """The regularizer, and a direction: what has no size when it is passed."""
    count = 1 + len(operation.operation.directions)
    return (lambda operation: (None,)) if count == 1 else (lambda operation: (None, None))


@function
def scratch_of(block, item_size):
    """One piece of memory for a thread, and the address of its frame; 0 if memory ran out."""
    sizes = 8 * block[INTEGERS], 8 * block[WIDE], item_size * block[NARROW], item_size * block[CELLS]
    total = 192
    for size in sizes:
        total += (size + 63) // 64 * 64
    address = xla.malloc(total)
    if address == 0:
        return address, address
    start = (address + 63) // 64 * 64  # a vector across two cache lines costs twice
    memory, at = words(start, frames.ITSELF + 1), start + 128
    for position in range(4):
        memory[2 * position], memory[2 * position + 1] = at, block[INTEGERS + position]
        at += (sizes[position] + 63) // 64 * 64
    memory[frames.TABLE + 1], memory[BEYOND], memory[frames.ITSELF] = 1, 0, start
    return address, start


@function
def start(theta, block, begin, end, value, first):
    """Sets what kernels add to, or leave alone."""
    numbers, frame = xla.attribute(block[FRAME], NUMBERS), block[FRAME]
    for b in range(begin * block[STRIDE], min(end * block[STRIDE], block[SIZE])):
        value[b] = 0.0
        if first == 3:
            for s in range(numbers[SAMPLES]):
                totals(xla.result(frame, 0), theta)[s, b] = 0.0


@function
def finish(theta, block, begin, end, value, tangent, first):
    """Numbers per instance as the first result, and NaN in all results of instances that are broken."""
    frame, capacity = block[FRAME], xla.argument(block[FRAME], CAPACITY)
    goals = carray(xla.data(capacity), (xla.length(capacity),), np.int32)
    for b in range(begin * block[STRIDE], min(end * block[STRIDE], block[SIZE])):
        if first == 1 or first == 2:
            totals(xla.result(frame, 0), theta)[0, b] = tangent[b] if first == 2 else value[b]
        if value[b] == -np.inf or goals[b if goals.shape[0] > 1 else 0] < 0:
            for position in range(xla.results(frame)):
                array = xla.result(frame, position)
                outer = max(xla.attribute(frame, NUMBERS)[SAMPLES], 1)
                inner = xla.length(array) // (outer * block[SIZE])
                cells = carray(xla.data(array), (outer, block[SIZE], inner), theta.dtype)
                cells[:, b] = np.nan


@function
def take_slices(operation, like, address, first):
    """Of the batch of a block, until none is left."""
    block = words(address, ARRAYS)
    scratch = memory_at = 0
    while True:
        taken = xla.add(address + 8 * NEXT, 1)
        if taken >= block[SLICES]:
            break
        if scratch == 0:
            scratch, memory_at = scratch_of(block, like.itemsize)
        if scratch == 0:
            block[FAILED] = 1
        else:
            frame, begin, end = block[FRAME], taken * block[SLICE], min((taken + 1) * block[SLICE], block[GROUPS])
            theta = carray(xla.data(xla.argument(frame, THETA)), (block[SIZE], block[N]), like.dtype)
            gamma = carray(pointer(block[GAMMA_AT]), (block[GAMMAS],), np.float64)
            value = carray(pointer(block[VALUE_AT]), (block[SIZE],), np.float64)
            tangent = carray(pointer(block[TANGENT_AT]), (block[SIZE],), np.float64)
            layout, tree = words(address + 8 * LAYOUT, ARRAYS - LAYOUT), tree_of(operation, frame)
            start(theta, block, begin, end, value, first)
            memory = words(memory_at, frames.ITSELF + 1)
            run = theta, gamma, tree, layout, memory, begin, end
            extras = extras_of(operation, frame, theta, value, tangent)
            if not xla.call_kernel(block[KERNEL], variants_of(operation) + run + extras):
                block[FAILED] = 1
            finish(theta, block, begin, end, value, tangent, first)
        xla.add(address + 8 * DONE, 1)
    if scratch:
        xla.free(scratch)
    leave(address)


@cache
def _compiled(operation: str, dtype: str, kind: int) -> Any:
    """A task, compiled or found on disk."""
    key = f"{operation}/{KINDS[kind]}/{SOURCES}"
    first, number = ("", "value", "tangent", "sum").index(OPERATIONS[operation].first), np.dtype(dtype).type

    def run(address):
        take_slices(operation_of(key), np.empty((0, 0), number), address, first)

    name = f"{operation}_of_{KINDS[kind]}_{dtype}"
    return c_function(run, types.void(types.int64), name)


def _signature(operation: Operation, regularizer: str, dtype: str, kind: int) -> tuple[Any, ...]:
    """The types of the arguments of a kernel."""
    numbers = types.Array(types.int64, 1, "C")
    kinds: dict[str, Any] = {digit: types.Array(getattr(types, dtype), int(digit), "C") for digit in "23"}
    kinds |= {"b": types.boolean, "w": types.Array(types.float64, 1, "C"), "W": types.Array(types.float64, 2, "C")}
    variants = [regularizer_of(regularizer).numba_type, *(direction_of(x).numba_type for x in operation.directions)]
    tree = {ITEMS: types.none, CHOICES: numbers, BOXES: types.Array(types.int64, 2, "C")}[kind]
    run = kinds["2"], kinds["w"], tree, numbers, numbers, types.int64, types.int64
    return *variants, *run, *(kinds[letter] for letter in operation.types)


@cache
def task(operation: str, regularizer: str, dtype: str, kind: int) -> int:
    """The number under which a task and its kernel are in the table."""
    begin, found = perf_counter(), OPERATIONS[operation]
    kernel = address_of(found.kernels[kind], _signature(found, regularizer, dtype, kind))
    run = _compiled(operation, dtype, kind)
    mention(f"{operation} for JAX", dtype, perf_counter() - begin)
    key = f"{operation} {regularizer_of(regularizer).numba_type.name} {dtype} {KINDS[kind]}"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    with _lock:
        TASKS[len(_numbers)] = number, run.address, kernel
        _numbers.append(number)
    return number


_numbers: list[int] = []  # in the table
_lock = Lock()
