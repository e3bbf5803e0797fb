"""How a call is laid out, from Python and from XLA alike: groups and tables, scratch, slices for threads.

What is jitable runs as it stands in Python, and is compiled where compiled code calls it.
"""

from functools import cache
from math import prod

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.extending import register_jitable

from knapgrad.kernels.numba import frames, laws, quadrature, vector
from knapgrad.kernels.numba.bands import COLUMNS, measure, row_length
from knapgrad.kernels.numba.boxes import sides_of
from knapgrad.kernels.numba.frames import batch_of, pointer
from knapgrad.kernels.numba.groups import BEYOND, GOALS
from knapgrad.kernels.numba.variants import BOXES, CHOICES, ITEMS, kernel
from knapgrad.lattice import tournament

# Instances go into the lanes when enough of them share their weights and the table of a group stays near the cache.
_LARGEST_SHARED_TABLE = 8 << 20  # bytes
# How long a call takes, to decide whether threads pay off, and where it may be interrupted
_NANOSECONDS_PER_VECTOR = 8  # of a value + relax sweep
_NANOSECONDS_PER_SCORE = 5  # in a lane
_NANOSECONDS_PER_INSTANCE = 1000  # of quadrature
LINE = 64  # bytes of a cache line: a vector across two of them costs twice


TABLE, QUADRATURE = range(2)  # ways of computing: by every state before every step; by nodes of a circle
# Where quadrature is faster: from so many items on, if a table would have one instance at a time; with instances in
# the lanes, from so many cells of a table on, and in float64 so many picks; so many items, if k is traced.
LEAST = {"items": 30, "cells": 5000, "picks": 10, "unknown": 500}


def way_of(operation, lattice, shape, item_size, regularizer):
    """The way in which an operation on a theta of that shape is computed. It does not depend on scores."""
    if regularizer != "shannon" or operation.kernel not in quadrature.KERNELS or lattice.options or lattice.box:
        return TABLE
    if not counts_items(lattice):
        return TABLE
    size, n, width = prod(shape[:-1]), shape[-1], vector.BYTES // item_size
    if lattice.weights.size != n or size <= width // 4:
        return QUADRATURE if n >= LEAST["items"] else TABLE
    k = lattice.capacity if isinstance(lattice.capacity, np.ndarray) else np.array(lattice.reach)
    if k is not lattice.capacity and lattice.reach >= n:
        return QUADRATURE if n >= LEAST["unknown"] else TABLE
    picks = int(np.minimum(k, n - k).max(initial=0))
    is_large = picks * (n - picks) >= LEAST["cells"] and (item_size == 4 or picks >= LEAST["picks"])
    return QUADRATURE if is_large else TABLE


def counts_items(lattice):
    """Whether all weights are 1."""
    return lattice.counts or (
        lattice.heaviest == 1 and isinstance(lattice.weights, np.ndarray) and lattice.weights.all()
    )


def kind_of(lattice):
    """Items, choices among options, or a box."""
    return CHOICES if lattice.options else BOXES if lattice.box else ITEMS


def structure_of(lattice):
    """What kernels know of the kind of a step: a tournament among options, the sides of a box, or None."""
    return _tournament(lattice.options) if lattice.options else sides_of(lattice.box) if lattice.box else None


_FIRST = {"value": frames.VALUE, "tangent": frames.TANGENT, "log_prob": frames.SUM}
_tournament = cache(lambda options: tournament(options).reshape(-1))


def frame_of(operation, lattice, samples=0, task=0, way=TABLE):
    """A frame of a layout, with what is known before arrays are."""
    frame, m = np.zeros(frames.LAYOUT, np.int64), lattice.options
    frame[frames.WAY] = way
    frame[frames.OPTIONS], frame[frames.ENTRIES] = m, operation.entries or m
    frame[frames.MARGIN], frame[frames.LIMITED] = lattice.heaviest if m else 0, lattice.slack is not None
    frame[frames.KEEPS], frame[frames.COMPLETE] = operation.keeps, operation.is_complete
    frame[frames.ROWS], frame[frames.TABLES] = operation.rows, operation.tables
    frame[frames.SAMPLES], frame[frames.TIME_OF_SAMPLE] = samples, operation.time_of_sample
    frame[frames.TIME], frame[frames.TASK] = operation.time * _NANOSECONDS_PER_VECTOR, task
    frame[frames.BACKWARDS], frame[frames.FIRST] = operation.backwards, _FIRST.get(operation.results[0], frames.NOTHING)
    return frame


@kernel
def lay_out(sources, structure, size, n, width, frame):
    """The rest of a frame that has its arrays, for a theta (size, n) of so many lanes. (``sources``: see variants.)"""
    if frame[frames.WAY] == QUADRATURE:
        frame[frames.STRIDE], frame[frames.STEPS], frame[frames.GROUPS], sizes = 1, 0, size, frames.SIZES
        frame[sizes], frame[sizes + 1], frame[sizes + 2] = laws.sizes(n, width)
        frame[frames.NANOSECONDS] = size * (_NANOSECONDS_PER_INSTANCE + n * frame[frames.TIME] // 2)
        frame[frames.NANOSECONDS] += size * n * frame[frames.SAMPLES]
        return
    steps, samples = n // max(frame[frames.OPTIONS], 1), frame[frames.SAMPLES]
    theta = carray(pointer(frame[frames.WEIGHTS]), (size, n), np.float32)  # its shape counts
    gamma, bands = np.ones(1), np.empty((steps + 1, COLUMNS), np.int64)
    frame[frames.STRIDE] = width if frame[frames.WEIGHTS + 1] == 1 and size > width // 4 else 1
    reach, cells = measure(batch_of(theta, gamma, structure, frame), width, bands)
    if frame[frames.STRIDE] > 1 and cells * (vector.BYTES // width) > _LARGEST_SHARED_TABLE:
        frame[frames.STRIDE] = 1
        reach, cells = measure(batch_of(theta, gamma, structure, frame), width, bands)
    groups = -(-size // frame[frames.STRIDE])
    frame[frames.REACH], frame[frames.STEPS], frame[frames.GROUPS] = reach, steps, groups
    row, options, sizes = (
        row_length(batch_of(theta, gamma, structure, frame), width),
        frame[frames.OPTIONS],
        frames.SIZES,
    )
    frame[sizes] = (steps + 1) * COLUMNS + GOALS + samples * width
    frame[sizes + 1] = row + (n + options) * width
    frame[sizes + 2] = frame[frames.ROWS] * row + (2 * n + 4 * options) * width + (frame[frames.TABLES] - 1) * cells
    frame[sizes + 3] = cells
    time = groups * (cells // width * frame[frames.TIME] + n * width * _NANOSECONDS_PER_SCORE)
    frame[frames.NANOSECONDS] = time + size * n * samples * frame[frames.TIME_OF_SAMPLE]


@register_jitable
def whole_lines(size):
    return -(-size // LINE) * LINE


@register_jitable
def bytes_of_buffer(sizes, position, item_size):
    return whole_lines(sizes[position] * (8 if position < 2 else item_size))


@register_jitable
def bytes_of_scratch(sizes, item_size):
    """Of the buffers with their frame, wherever the memory begins."""
    total = LINE + whole_lines(8 * frames.SCRATCH)
    for position in range(4):
        total += bytes_of_buffer(sizes, position, item_size)
    return total


@register_jitable
def arrange(frame, start, sizes, item_size):
    """Fills a frame of scratch, which is where the memory starts: the buffers follow, on cache lines of their own."""
    at = start + whole_lines(8 * frames.SCRATCH)
    for position in range(4):
        frame[2 * position], frame[2 * position + 1] = at, sizes[position]
        at += bytes_of_buffer(sizes, position, item_size)
    frame[frames.TABLE + 1], frame[BEYOND], frame[frames.ITSELF] = 1, 0, start


@register_jitable
def slice_of(groups, threads):
    """A few slices per thread: a slow core takes fewer."""
    return max(1, groups // (4 * threads))
