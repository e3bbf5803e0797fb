"""A flat batch, the scratch of a kernel, and how instances get into vectors and out of them.

A *group* is what one set of vectors works on, in one of two layouts that share all of the code:

- 16 instances (8 in float64) with the same weights, one in each lane: cell c of a row is the vector at ``c * stride``;
- one instance, with 16 neighbouring capacities in the lanes: ``stride`` is 1, and theta is the same in every lane.
"""

from typing import Any, NamedTuple

import numpy as np

from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.variants import function, inline
from knapgrad.kernels.numba.vector import load, total, where, zeros
from knapgrad.lattice import INFEASIBLE, LARGEST


class Batch(NamedTuple):
    """A flat batch; what all instances share has one row."""

    theta: Any  # (batch, n)
    weights: Any  # (1 or batch, n), int64
    capacity: Any  # (1 or batch,), int64, at most the total weight
    slack: Any  # (1 or batch,), int64; if it is the capacity or more, all of it may stay unused
    gamma: Any  # (1 or batch,), float64
    stride: int  # lanes (instances in the lanes) or 1 (capacities in the lanes)
    tree: Any  # of the options of a choice (lattice.tournament), flat; else None
    sides: Any  # of a box (boxes.sides_of); else None
    options: int  # of a choice
    entries: int  # of the table per state
    margin: int  # cells before cell 0 of a row
    keeps: bool  # whether the table has all steps, or one at a time
    complete: bool  # whether the last row is needed down to state 0
    reach: int  # the largest capacity in any group


class Scratch(NamedTuple):
    bands: Any  # (steps + 1, COLUMNS), int64: a row per step, an item or a choice, and one for the group
    goals: Any  # (GOALS,), int64: the cell of a row from which each lane starts its way back
    states: Any  # the capacities left along paths, int64
    wide: Any  # float64: a row of V, then theta
    narrow: Any  # theta's type: rows and tables
    table: Any  # (1 or groups, cells), theta's type: Q
    frame: Any  # what all this was made from, int64; a kernel says there which instance is out of range


GOALS = 16  # as many as a vector can have lanes
LAST = 2  # the column of bands that all kinds have: in the row of the group, its largest capacity, or last cell
BEYOND = 8  # where in the frame: the number of the instance, counted from 1


@inline
def members_of(batch, group, width):
    """The first instance of a group and the number of instances in it."""
    if batch.stride == 1:
        return group, 1
    return group * width, min(width, batch.theta.shape[0] - group * width)


@inline
def own(array, instance):
    """The row of an instance in an array that may hold one row for all."""
    return array[instance] if array.shape[0] > 1 else array[0]


@function
def pack(array, gamma, first, members, stride, width, packed):
    """(members, n), divided by gamma, to (n, width): one instance in each lane, or in all."""
    for lane in range(width):
        b = first + (0 if stride == 1 else min(lane, members - 1))
        scale = 1.0 / own(gamma, b) if own(gamma, b) > 0.0 else np.nan
        for i in range(array.shape[1]):
            packed[i * width + lane] = array[b, i] * scale


@inline
def all_in_range(packed, width, zero):
    if packed.shape[0] == 0:
        return True
    outside = load(packed, 0, zero) * 0.0
    for p in range(0, packed.shape[0], width):
        size = vector.abs(load(packed, p, zero))
        outside = where(size < LARGEST, outside, size)
    return total(outside) == 0.0


@function
def pack_scores(batch, first, members, width, packed, frame, zero):
    """Divided by gamma; -inf takes an item out, +inf and what is out of range becomes NaN. Returns whether there is a
    NaN."""
    pack(batch.theta, batch.gamma, first, members, batch.stride, width, packed)
    if all_in_range(packed, width, zero):
        return False
    has_nan = False
    for p in range(packed.shape[0]):
        if not abs(packed[p]) <= LARGEST:
            b = first + (0 if batch.stride == 1 else min(p % width, members - 1))
            score, is_valid = batch.theta[b, p // width], own(batch.gamma, b) > 0.0
            if score == -np.inf and is_valid:
                packed[p] = INFEASIBLE
                continue
            packed[p], has_nan = np.nan, True
            if np.isfinite(score) and is_valid:
                frame[BEYOND] = b + 1
    return has_nan


@function
def is_nan(theta, lane, width):
    """Whether the instance in a lane is NaN: one score is enough, even of an item that is too heavy."""
    for p in range(lane, theta.shape[0], width):  # noqa: SIM110  Numba has no any() of a generator
        if np.isnan(theta[p]):
            return True
    return False


@function
def unpack(packed, first, members, stride, width, array):
    """(n, width) to (members, n): the reverse, where lanes of capacities add up."""
    zero = zeros(packed)
    for i in range(array.shape[1]):
        if stride == 1:
            array[first, i] = total(load(packed, i * width, zero))
        else:
            for lane in range(members):
                array[first + lane, i] = packed[i * width + lane]
