"""What the rest of the library calls: lays out a batch in groups, and runs a kernel over them, on threads.

Arguments: theta (*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma, which is formed in float64: rounded to float32 it would move
    near-ties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import numba
import numpy as np

from knapgrad.kernels.numba import box_paths, choice_paths, paths, threads, vector
from knapgrad.kernels.numba.bands import BEYOND, COLUMNS, Batch, measure, row_length
from knapgrad.kernels.numba.boxes import sides_of
from knapgrad.kernels.numba.entries import call_first, entry_of
from knapgrad.kernels.numba.frames import frame_of_layout
from knapgrad.kernels.numba.sweeps import frontier_kernel, operator_kernel, tangent_kernel
from knapgrad.kernels.numba.variants import BOXES, CHOICES, ITEMS, direction_of, regularizer_of
from knapgrad.lattice import LARGEST, tournament

# Instances go into the lanes when enough of them share their weights and the table of a group stays near the cache.
LARGEST_SHARED_TABLE = 8 << 20  # bytes
# How long a call takes, to decide whether threads pay off, and where it may be interrupted
NANOSECONDS_PER_VECTOR = 8  # of a value + relax sweep
_NANOSECONDS_PER_SCORE = 5  # in a lane
_NANOSECONDS_PER_SAMPLE = 10  # and item
_LARGEST_MEMO = 64  # plans
_UNIT = np.ones(1)
_FLOAT64 = np.dtype(np.float64)  # of which there is one: `is` is faster than `==`
_ALL = np.array([2**62])  # a slack that no capacity exceeds


@dataclass(slots=True)
class Plan:
    """How a kernel runs over batches of one shape, in groups. It is kept with the lattice."""

    kernel: Any
    variants: tuple[Any, ...]
    types: tuple[Any, ...]  # all that its compiled code depends on
    batch: Batch  # of which theta and gamma change from call to call
    shape: tuple[int, int]  # of theta, as the kernel takes it
    groups: int
    fixed: tuple[Any, np.ndarray]  # the tree of the batch, and all of this, as compiled code takes it
    cells: int  # of a table
    sizes: tuple[int, ...]  # of scratch
    nanoseconds: float
    is_free: bool  # nothing is required, so that every instance has a feasible selection
    call: Callable[..., None] | None  # the compiled kernel
    strength: tuple[Any, Any] = None, None  # the last gamma that was one number, as it was given and as kernels take it


def _plan(
    kernel, regularizer, theta, lattice, *, direction=None, keeps=True, complete=False, entries=None, samples=0,
    weight=1.0, rows=2, tables=0,
):  # fmt: skip
    """Of a kernel that takes ``weight`` times as long as value and relax, and needs so many rows and tables."""
    key = kernel, regularizer, direction, theta.shape, theta.dtype.char, keeps, complete, entries, samples
    found = lattice.memo.get(key)
    if found is not None:
        return found
    if numba.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set, and the kernels of knapgrad run only compiled; unset it")
    batch, cells = _batch(theta, lattice, keeps, complete, entries or lattice.options)
    size, n, lanes = prod(theta.shape[:-1]), theta.shape[-1], vector.BYTES // theta.itemsize
    steps, row, slots = n // (lattice.options or 1), row_length.py_func(batch, lanes), lattice.options * lanes
    groups = -(-size // batch.stride)
    narrow = rows * row + 2 * n * lanes + tables * cells
    sizes = (steps + 1) * COLUMNS + samples * lanes, row + n * lanes + slots, narrow + 4 * slots, cells
    time = groups * (weight * cells / lanes * NANOSECONDS_PER_VECTOR + n * lanes * _NANOSECONDS_PER_SCORE)
    time += size * n * samples * _NANOSECONDS_PER_SAMPLE
    if len(lattice.memo) >= _LARGEST_MEMO:
        lattice.memo.clear()
    is_free = lattice.slack is None and not lattice.options
    variants = (regularizer_of(regularizer),) + (() if direction is None else (direction_of(direction),))
    types = *variants, theta.dtype.char, kind_of(lattice)
    fixed, call = (batch.tree, frame_of_layout(batch, steps, cells)), entry_of(kernel, types)
    found = Plan(kernel, variants, types, batch, (size, n), groups, fixed, cells, sizes, time, is_free, call)
    lattice.memo[key] = found
    return found


def _batch(theta, lattice, keeps, complete, entries):
    """A batch like theta, and the length of a table."""
    shape = theta.shape
    size, n = prod(shape[:-1]), shape[-1]
    weights, options = lattice.weights, lattice.options
    if weights.size != n:
        weights = np.broadcast_to(weights, shape)
    weights = _ready(weights).reshape(-(-weights.size // max(n, 1)), n)
    slack = _ALL if lattice.slack is None else _per_instance(lattice.slack, shape[:-1])
    tree, margin, steps = sides_of(lattice.box) if lattice.box else None, 0, n
    if options:
        tree, margin, steps = tree_of(options), lattice.heaviest, n // options
        if margin > lattice.reach:
            weights = np.minimum(weights, margin)
    limits = weights, _per_instance(lattice.capacity, shape[:-1]), slack
    width, flags = vector.BYTES // theta.itemsize, (tree, options, entries, margin, keeps, complete)
    bands = np.empty((steps + 1, COLUMNS), np.int64)
    shared = weights.shape[0] == 1 and size > width // 4
    like, types = np.empty((size, n), np.float32), ("f", kind_of(lattice))  # of any type: its shape counts
    for stride in (width, 1) if shared else (1,):
        given = Batch(like, *limits, _UNIT, stride, *flags, 0), width, bands
        reach, cells = (entry_of(measure, types) or call_first(measure, types, given))(*given)
        if cells * theta.itemsize <= LARGEST_SHARED_TABLE:
            break
    return Batch(np.empty((0, n), theta.dtype), *limits, _UNIT, stride, *flags, reach), cells


def kind_of(lattice):
    """Items, choices among options, or a box."""
    return CHOICES if lattice.options else BOXES if lattice.box else ITEMS


def _paths_of(lattice):
    """The module with the kernels of paths."""
    return {ITEMS: paths, CHOICES: choice_paths, BOXES: box_paths}[kind_of(lattice)]


tree_of = cache(lambda options: tournament(options).reshape(-1))


def _ready(array, dtype=None):
    """C-contiguous, aligned and writeable: the one memory layout that the kernels are compiled for."""
    if array.flags.carray and (dtype is None or array.dtype == dtype):
        return array
    return np.array(array, dtype, order="C")


def _beside(x, plan, theta, *samples):
    """(*samples, batch, n), of the type of theta."""
    return _ready(x, theta.dtype).reshape(*samples, *plan.shape)


def _per_instance(array, shape, dtype=None):
    """One number for all instances, or one per instance."""
    return _ready(array if array.size == 1 else np.broadcast_to(array, shape), dtype).reshape(-1)


def _strength(plan, gamma, theta):
    if gamma.ndim == 0 and gamma.dtype is _FLOAT64:
        plan.strength = gamma, gamma.reshape(1)  # a regularizer has the same number in every call
        return plan.strength[1]
    return _per_instance(gamma, theta.shape[:-1], np.float64)


def _run(plan, theta, gamma, *arguments, table=None, part=None):
    """Runs a kernel over the groups from part[0] to part[1], in scratch of this thread; without a part over all, on
    several threads if that pays."""
    if part is None:
        given, strength = plan.strength
        gamma = strength if gamma is given else _strength(plan, gamma, theta)
        if theta.ndim != 2 or not theta.flags.carray:
            theta = _ready(theta).reshape(plan.shape)
        if table is not None and table.shape != (plan.groups, plan.cells):
            needed = plan.groups, plan.cells
            raise ValueError(f"a table of shape {table.shape} is not of this theta: {needed} is needed")
        if plan.nanoseconds > threads.WORTH_WAKING:
            work = partial(_run, plan, theta, gamma, *arguments, table=table)
            threads.run(lambda *part: work(part=part), plan.groups, plan.nanoseconds)
            return
        part = 0, plan.groups
    try:
        memory = threads.scratch(theta.dtype, plan.sizes)
    except MemoryError as error:
        raise _too_large(plan.batch, error) from None
    frame = memory.frame if table is None else memory.frame_with(table)
    given = *plan.variants, theta, gamma, *plan.fixed, frame, *part, *arguments
    if plan.call is None:
        plan.call = call_first(plan.kernel, plan.types, given)
    else:
        plan.call(*given)
    if frame[BEYOND]:
        instance, frame[BEYOND] = int(frame[BEYOND]) - 1, 0
        raise OutOfRange(
            f"theta / gamma of instance {instance} (counted over the flattened batch) is beyond {LARGEST:g}, the range "
            "in which floating-point numbers can tell scores from what is not feasible; give a larger gamma, or "
            "smaller scores, or use knapgrad.solve, which has no gamma"
        )


class OutOfRange(ValueError):
    """Scores are too large in units of gamma."""


def _too_large(batch, error: MemoryError) -> MemoryError:
    size = f"a capacity of {batch.reach:,}"
    if np.ndim(batch.tree) == 2:
        size = f"a box of {' x '.join(f'{side:,}' for side in batch.tree[0] if side > 1)} capacities"
    return MemoryError(
        f"the tables for {size} do not fit into memory ({error}); divide weights and capacities by a common factor; if "
        "there is none, from_real(..., resolution=...) of the constraint rounds them safely"
    )


def _check_feasible(value: np.ndarray) -> None:
    if (value == -np.inf).any():
        instance = int(np.argmax(value == -np.inf))
        raise ValueError(
            f"instance {instance} (counted over the flattened batch) has no feasible selection: the items that are not "
            "masked (scores of -inf) cannot reach k or at_least, or one option of each group is required, and the "
            "lightest ones exceed the capacity; mask fewer items, lower k or at_least, or raise the capacity"
        )


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    key = theta.shape, theta.dtype.char, regularizer, relaxed  # shorter than that of _plan
    plan = lattice.memo.get(key)
    if plan is None:
        plan = lattice.memo[key] = _plan(operator_kernel, regularizer, theta, lattice, keeps=relaxed)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, relaxed, value, y)
    if not plan.is_free:
        _check_feasible(value)
    return (value, y) if theta.ndim == 2 else (value.reshape(theta.shape[:-1]), y.reshape(theta.shape))


def relax(theta, lattice, gamma, regularizer):
    """The relaxed selection alone."""
    plan = lattice.memo.get((theta.shape, theta.dtype.char, regularizer, True))
    if plan is None or not plan.is_free or theta.ndim != 2:
        return operator(theta, lattice, gamma, regularizer)[1]
    y = np.empty(plan.shape, theta.dtype)  # what a small call needs, and no more
    _run(plan, theta, gamma, True, np.empty(plan.shape[0]), y)
    return y


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every group, for sample and log_prob with the same arguments."""
    plan = _plan(operator_kernel, regularizer, theta, lattice)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    try:
        table = np.empty((plan.groups, plan.cells), theta.dtype)
    except MemoryError as error:
        if plan.groups == 1:
            raise _too_large(plan.batch, error) from None
        raise MemoryError(
            f"the tables of {plan.shape[0]:,} instances do not fit into memory together ({error}); make one "
            "distribution for each part of the batch, or call knapgrad.sample and knapgrad.log_prob, which keep no "
            "table"
        ) from None
    _run(plan, theta, gamma, True, value, y, table=table)
    if not plan.is_free:
        _check_feasible(value)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), table


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _tangent("linear", theta, z, lattice, gamma, regularizer, True, 2.5)[1]


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    tangent = _tangent("entropy", theta, np.zeros_like(theta), lattice, gamma, regularizer, False, 5.0)[0]
    return tangent.reshape(theta.shape[:-1])


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    return _tangent("entropy", theta, np.zeros_like(theta), lattice, gamma, regularizer, True, 5.0)[1]


def _tangent(direction, theta, z, lattice, gamma, regularizer, backwards, weight):
    key = theta.shape, theta.dtype.char, regularizer, direction
    plan = lattice.memo.get(key)
    if plan is None:
        needs = {"direction": direction, "weight": weight, "rows": 4, "tables": 1}
        plan = lattice.memo[key] = _plan(tangent_kernel, regularizer, theta, lattice, **needs)
    size = plan.shape[0]
    value, tangent, product = np.empty(size), np.empty(size), np.empty(plan.shape, theta.dtype)
    if z.shape != plan.shape or z.dtype is not theta.dtype or not z.flags.carray:
        z = _beside(z, plan, theta)
    _run(plan, theta, gamma, z, backwards, value, tangent, product)
    if not plan.is_free:
        _check_feasible(value)
    return tangent, product if theta.ndim == 2 else product.reshape(theta.shape)


def frontier(theta, lattice, gamma, regularizer):
    """The smoothed optimum at every capacity up to the reach, (*batch, reach + 1) in float64, -inf where infeasible.
    The capacity of the lattice is not used. Everything is in float64."""
    theta, complete = theta.astype(np.float64, copy=False), _complete(lattice)
    size, n = prod(theta.shape[:-1]), theta.shape[-1]
    rows, nothing = np.empty((size, lattice.reach + 1)), np.empty((0, n))
    if regularizer == "hard" and lattice.options:
        plan = _plan(choice_paths.solve_kernel, "hard", theta, complete, keeps=False, complete=True, entries=1)
        _run(plan, theta, gamma, np.empty(size), nothing, rows)
    else:
        plan = _plan(frontier_kernel, regularizer, theta, complete, keeps=False, complete=True)
        _run(plan, theta, gamma, rows, False, rows, nothing)
    return rows.reshape(*theta.shape[:-1], lattice.reach + 1)


def frontier_vjp(theta, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of those optima weighted by a cotangent (*batch, reach + 1)."""
    wide = theta.astype(np.float64, copy=False)
    plan = _plan(frontier_kernel, regularizer, wide, _complete(lattice), complete=True)
    y, cotangent = np.empty(plan.shape), _ready(cotangent, np.float64).reshape(plan.shape[0], lattice.reach + 1)
    _run(plan, wide, gamma, cotangent, True, cotangent, y)
    return y.reshape(theta.shape).astype(theta.dtype, copy=False)


def _complete(lattice):
    """The same up to the reach, in every instance."""
    found = lattice.memo.get("complete")
    if found is None:
        found = lattice.memo["complete"] = lattice.replace(capacity=np.array(lattice.reach))
    return found


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    kernel, samples = _paths_of(lattice).sample_kernel, len(uniforms)
    plan = _plan(kernel, regularizer, theta, lattice, samples=samples)
    uniform = _beside(uniforms, plan, theta, samples)
    value, y = np.zeros(plan.shape[0]), np.empty_like(uniform)
    _run(plan, theta, gamma, table is not None, uniform, value, y, table=table)
    if not plan.is_free:
        _check_feasible(value)
    return y.reshape(uniforms.shape)


def solve(theta, lattice):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item, or takes the earlier
    option."""
    try:
        return _solve(theta, lattice, _UNIT)
    except OutOfRange:  # divided by a power of two, scores are the same but for their size
        largest = np.abs(np.where(np.isfinite(theta), theta, 0.0)).max(-1)
        return _solve(theta, lattice, np.where(largest > LARGEST, 2.0**64, 1.0))


def _solve(theta, lattice, gamma):
    if not lattice.options:
        return sample(theta, np.full((1, *theta.shape), 0.5, theta.dtype), lattice, gamma, "hard")[0]
    plan = _plan(choice_paths.solve_kernel, "hard", theta, lattice, entries=1)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, value, y, np.empty((0, 0)))
    if not plan.is_free:
        _check_feasible(value)
    return y.reshape(theta.shape)


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    kernel = _paths_of(lattice).mode_kernel
    plan = _plan(kernel, regularizer, theta, lattice, weight=2.0)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, value, y)
    if not plan.is_free:
        _check_feasible(value)
    return y.reshape(theta.shape)


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    return _log_prob(theta, y, None, lattice, gamma, regularizer, table)[0]


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    return _log_prob(theta, y, cotangent, lattice, gamma, regularizer, None)[1]


def _log_prob(theta, y, cotangent, lattice, gamma, regularizer, table):
    kernel, samples = _paths_of(lattice).log_prob_kernel, len(y)
    plan = _plan(kernel, regularizer, theta, lattice, samples=samples)
    size, backwards = plan.shape[0], cotangent is not None
    value, gradient, result = np.zeros(size), np.empty(plan.shape, theta.dtype), np.zeros((samples, size), theta.dtype)
    given = table is not None, _beside(y, plan, theta, samples)
    cotangent = _ready(cotangent, theta.dtype).reshape(result.shape) if backwards else result
    _run(plan, theta, gamma, *given, cotangent, backwards, value, result, gradient, table=table)
    if not plan.is_free:
        _check_feasible(value)
    return result.reshape(y.shape[:-1]), gradient.reshape(theta.shape)
