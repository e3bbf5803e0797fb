"""How a batch and its scratch get into compiled code: as two arrays of integers, sizes and addresses.

Numba looks at every array that it is given, for as long as a small kernel runs. What stays the same from call to call
is therefore written down once, and a kernel begins by :func:`opened`. Whoever calls it keeps the arrays alive.
"""

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload

from knapgrad.kernels.numba.bands import COLUMNS
from knapgrad.kernels.numba.groups import GOALS, Batch, Scratch
from knapgrad.kernels.numba.variants import inline

NOTHING, VALUE, TANGENT, SUM = range(4)  # FIRST: what the first result is, of what kernels write in float64 or add to
# A frame of a layout: address and length of arrays; what a call says (layout.frame_of); what layout.lay_out works out,
# with the lengths of the buffers of scratch: integers, wide, narrow, and the table.
WEIGHTS, CAPACITY, SLACK = 0, 2, 4
OPTIONS, ENTRIES, MARGIN, KEEPS, COMPLETE, LIMITED, ROWS, TABLES, SAMPLES, TIME, TIME_OF_SAMPLE = range(6, 17)
BACKWARDS, FIRST, TASK = range(17, 20)  # for tasks of XLA
WAY = 20  # of computing: kernels.WAYS
STRIDE, REACH, STEPS, GROUPS, NANOSECONDS, SIZES = range(21, 27)
CELLS, LAYOUT = SIZES + 3, SIZES + 4  # the last of these lengths; of the frame itself
# A frame of scratch: address and length of buffers, of the table the number of rows; then groups.BEYOND, and the
# address of the frame: an array that is made from an address is not counted by Numba whenever it is passed on.
INTEGERS, WIDE, NARROW, TABLE, ITSELF, SCRATCH = 0, 2, 4, 6, 9, 10


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as a pointer."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), cast


def tree_in(structure):
    """What a batch has under this name: the structure, if it is a tournament."""


def sides_in(structure):
    """The structure, if it is a box."""


@overload(tree_in, inline="always")
def _tree_in(structure):
    return (lambda structure: structure) if getattr(structure, "ndim", 0) == 1 else (lambda structure: None)


@overload(sides_in, inline="always")
def _sides_in(structure):
    return (lambda structure: structure) if getattr(structure, "ndim", 0) == 2 else (lambda structure: None)


@inline
def batch_of(theta, gamma, structure, layout):
    weights = carray(pointer(layout[WEIGHTS]), (layout[WEIGHTS + 1], theta.shape[1]), np.int64)
    capacity = carray(pointer(layout[CAPACITY]), (layout[CAPACITY + 1],), np.int64)
    slack = carray(pointer(layout[SLACK]), (layout[SLACK + 1],), np.int64)
    return Batch(
        theta, weights, capacity, slack, gamma, layout[STRIDE], tree_in(structure), sides_in(structure),
        layout[OPTIONS], layout[ENTRIES], layout[MARGIN], layout[KEEPS] != 0, layout[COMPLETE] != 0, layout[REACH],
    )  # fmt: skip


@inline
def opened(theta, gamma, structure, layout, memory):
    """The batch and its scratch."""
    rows = (layout[STEPS] + 1) * COLUMNS
    integers = carray(pointer(memory[INTEGERS]), (memory[INTEGERS + 1],), np.int64)
    scratch = Scratch(
        integers[:rows].reshape((layout[STEPS] + 1, COLUMNS)),
        integers[rows : rows + GOALS],
        integers[rows + GOALS :],
        carray(pointer(memory[WIDE]), (memory[WIDE + 1],), np.float64),
        carray(pointer(memory[NARROW]), (memory[NARROW + 1],), theta.dtype),
        carray(pointer(memory[TABLE]), (memory[TABLE + 1], layout[CELLS]), theta.dtype),
        carray(pointer(memory[ITSELF]), (ITSELF,), np.int64),
    )
    return batch_of(theta, gamma, structure, layout), scratch
