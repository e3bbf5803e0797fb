"""How a batch and its scratch get into compiled code: as two arrays of integers, sizes and addresses.

Numba looks at every array that it is given, for as long as a small kernel runs. What stays the same from call to call
is therefore written down once, and a kernel begins by :func:`opened`. Whoever calls it keeps the arrays alive.
"""

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from knapgrad.kernels.numba.bands import COLUMNS, Batch, Scratch
from knapgrad.kernels.numba.variants import inline

# A frame of a layout: address and length of arrays, then numbers.
WEIGHTS, CAPACITY, SLACK = 0, 2, 4
STRIDE, OPTIONS, ENTRIES, MARGIN, KEEPS, COMPLETE, REACH, STEPS, CELLS = range(6, 15)
# A frame of scratch: address and length of buffers, of the table the number of rows; then bands.BEYOND, and the address
# of the frame: an array that is made from an address is not counted by Numba whenever it is passed on.
INTEGERS, WIDE, NARROW, TABLE, ITSELF = 0, 2, 4, 6, 9


def frame_of_layout(batch: Batch, steps: int, cells: int) -> np.ndarray:
    arrays = [number for x in (batch.weights, batch.capacity, batch.slack) for number in (address(x), len(x))]
    numbers = (batch.stride, batch.options, batch.entries, batch.margin, batch.keeps, batch.complete, batch.reach)
    return np.array([*arrays, *numbers, steps, cells], np.int64)


def frame_of_scratch(integers: np.ndarray, wide: np.ndarray, narrow: np.ndarray, table: np.ndarray) -> np.ndarray:
    arrays = [number for x in (integers, wide, narrow, table) for number in (address(x), len(x))]
    frame = np.array([*arrays, 0, 0], np.int64)
    frame[ITSELF] = address(frame)
    return frame


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as a pointer."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), cast


@inline
def opened(theta, gamma, tree, layout, memory):
    """The batch and its scratch."""
    n, rows = theta.shape[1], (layout[STEPS] + 1) * COLUMNS
    weights = carray(pointer(layout[WEIGHTS]), (layout[WEIGHTS + 1], n), np.int64)
    capacity = carray(pointer(layout[CAPACITY]), (layout[CAPACITY + 1],), np.int64)
    slack = carray(pointer(layout[SLACK]), (layout[SLACK + 1],), np.int64)
    batch = Batch(
        theta, weights, capacity, slack, gamma, layout[STRIDE], tree, layout[OPTIONS], layout[ENTRIES], layout[MARGIN],
        layout[KEEPS] != 0, layout[COMPLETE] != 0, layout[REACH],
    )  # fmt: skip
    integers = carray(pointer(memory[INTEGERS]), (memory[INTEGERS + 1],), np.int64)
    scratch = Scratch(
        integers[:rows].reshape((layout[STEPS] + 1, COLUMNS)),
        integers[rows:],
        carray(pointer(memory[WIDE]), (memory[WIDE + 1],), np.float64),
        carray(pointer(memory[NARROW]), (memory[NARROW + 1],), theta.dtype),
        carray(pointer(memory[TABLE]), (memory[TABLE + 1], layout[CELLS]), theta.dtype),
        carray(pointer(memory[ITSELF]), (ITSELF,), np.int64),
    )
    return batch, scratch
