"""What the rest of the library calls: plans an operation, once for batches of a shape, and runs its kernel, on threads.

Arguments: theta (*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma, which is formed in float64: rounded to float32 it would move
    near-ties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numba
import numpy as np

from knapgrad.kernels.numba import frames, threads, vector
from knapgrad.kernels.numba.entries import call_first, entry_of
from knapgrad.kernels.numba.groups import BEYOND
from knapgrad.kernels.numba.kernels import KERNELS
from knapgrad.kernels.numba.layout import TABLE, frame_of, kind_of, lay_out, structure_of, way_of
from knapgrad.kernels.numba.variants import SOURCE_FILES, direction_of, regularizer_of
from knapgrad.kernels.operations import OPERATIONS
from knapgrad.lattice import LARGEST

_LARGEST_MEMO = 64  # plans
_UNIT = np.ones(1)
_FLOAT64 = np.dtype(np.float64)  # of which there is one: `is` is faster than `==`
_ALL = np.array([2**62])  # a slack that no capacity exceeds


@dataclass(slots=True)
class Plan:
    """How an operation runs over batches of one shape, in groups. It is kept with the lattice."""

    way: int  # of computing it (layout.way_of)
    kernel: Any
    variants: tuple[Any, ...]
    types: tuple[Any, ...]  # all that its compiled code depends on
    call: Callable[..., None] | None  # the compiled kernel
    backwards: bool
    checked: int | None  # which argument has the values that show what is infeasible; None if nothing is
    shape: tuple[int, int]  # of theta, as the kernel takes it
    limits: tuple[np.ndarray, ...]  # weights, capacity and slack
    fixed: tuple[Any, np.ndarray]  # structure, and the frame of the layout, which has addresses of the limits
    groups: int
    cells: int  # of a table
    sizes: tuple[int, ...]  # of scratch
    nanoseconds: int
    strength: tuple[Any, Any] = None, None  # the last gamma that was one number, as it was given and as kernels take it


def _plan(name, theta, lattice, regularizer, samples=0, table=None):
    """That of an operation, made when it is first needed."""
    key = name, theta.shape, theta.dtype.char, regularizer, samples, table is not None
    return lattice.memo.get(key) or _made(key, theta, lattice)


def _made(key, theta, lattice):
    if numba.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set, and the kernels of knapgrad run only compiled; unset it")
    name, shape, char, regularizer, samples, has_table = key
    operation, kind = OPERATIONS[name], kind_of(lattice)
    way = TABLE if has_table or name == "tabulate" else way_of(operation, lattice, shape, theta.itemsize, regularizer)
    kernel, takes = KERNELS[way][operation.kernel]
    variants = (regularizer_of(regularizer),)
    if operation.direction:
        variants += (direction_of(operation.direction),)
    types = *variants, char, kind
    size, n = prod(shape[:-1]), shape[-1]
    limits, structure, frame = (
        _limits(lattice, shape, operation),
        structure_of(lattice),
        frame_of(operation, lattice, samples, way=way),
    )
    frame[: 2 * len(limits)] = [number for x in limits for number in (frames.address(x), len(x))]
    _lay_out(kind, SOURCE_FILES, structure, size, n, vector.BYTES // theta.itemsize, frame)
    found = frame.tolist()
    is_free = lattice.slack is None and not lattice.options  # every instance has a feasible selection
    plan = Plan(
        way=way,
        kernel=kernel,
        variants=variants,
        types=types,
        call=entry_of(kernel, types),
        backwards=operation.backwards,
        checked=None if is_free or operation.is_complete else takes.index("value"),
        shape=(size, n),
        limits=limits,
        fixed=(structure, frame),
        groups=found[frames.GROUPS],
        cells=found[frames.CELLS],
        sizes=tuple(found[frames.SIZES :]),
        nanoseconds=found[frames.NANOSECONDS],
    )
    if len(lattice.memo) >= _LARGEST_MEMO:
        lattice.memo.clear()
    lattice.memo[key] = plan
    return plan


def _lay_out(kind, *arguments):
    types = "f", kind  # of any type of scores: lanes are counted
    call = entry_of(lay_out, types)
    if call is None:
        call_first(lay_out, types, arguments)
    else:
        call(*arguments)


def _limits(lattice, shape, operation):
    """Weights (1 or batch, n), capacity and slack (1 or batch,), as kernels take them."""
    weights, n, batch = lattice.weights, shape[-1], shape[:-1]
    if weights.size != n:
        weights = np.broadcast_to(weights, shape)
    weights = _ready(weights).reshape(-(-weights.size // max(n, 1)), n)
    if lattice.options and lattice.heaviest > lattice.reach:
        weights = np.minimum(weights, lattice.heaviest)
    capacity = np.array(lattice.reach) if operation.is_complete else lattice.capacity
    slack = _ALL if lattice.slack is None else lattice.slack
    return weights, _per_instance(capacity, batch), _per_instance(slack, batch)


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


def _run(plan, theta, gamma, *arguments, table=None):
    """Runs a kernel over all groups, on several threads if that pays."""
    given, strength = plan.strength
    gamma = strength if gamma is given else _strength(plan, gamma, theta)
    if theta.ndim != 2 or not theta.flags.carray:
        theta = _ready(theta).reshape(plan.shape)
    if table is not None and table.shape != (plan.groups, plan.cells):
        needed = plan.groups, plan.cells
        raise ValueError(f"a table of shape {table.shape} is not of this theta: {needed} is needed")
    if plan.nanoseconds <= threads.WORTH_WAKING:
        _run_groups(plan, theta, gamma, arguments, table, 0, plan.groups)
    else:
        work = partial(_run_groups, plan, theta, gamma, arguments, table)
        threads.run(work, plan.groups, plan.nanoseconds)
    if plan.checked is not None:
        _check_feasible(arguments[plan.checked])


def _run_groups(plan, theta, gamma, arguments, table, begin, end):
    """Some of the groups, in scratch of this thread."""
    try:
        memory = threads.scratch(theta.dtype, plan.sizes)
    except MemoryError as error:
        raise _too_large(plan, error) from None
    frame, numbers = memory.frames if table is None else memory.frames_with(table)
    given = *plan.variants, theta, gamma, *plan.fixed, frame, begin, end, *arguments
    if plan.call is None:
        plan.call = call_first(plan.kernel, plan.types, given)
    else:
        plan.call(*given)
    if numbers[BEYOND]:
        instance, numbers[BEYOND] = numbers[BEYOND] - 1, 0
        raise OutOfRange(
            f"theta / gamma of instance {instance} (counted over the flattened batch) is beyond {LARGEST:g}, the range "
            "in which floating-point numbers can tell scores from what is not feasible; give a larger gamma, or "
            "smaller scores, or use knapgrad.solve, which has no gamma"
        )


class OutOfRange(ValueError):
    """Scores are too large in units of gamma."""


def _too_large(plan, error: MemoryError) -> MemoryError:
    structure, frame = plan.fixed
    size = f"a capacity of {frame[frames.REACH]:,}"
    if np.ndim(structure) == 2:
        size = f"a box of {' x '.join(f'{side:,}' for side in structure[0] if side > 1)} capacities"
    return MemoryError(
        f"the tables for {size} do not fit into memory ({error}); divide weights and capacities by a common factor; if "
        "there is none, from_real(..., resolution=...) of the constraint rounds them safely"
    )


FEWER_SAMPLES = "draw fewer samples at a time"
_FEWER_CAPACITIES = (
    "it has a number for every capacity of every instance, so take fewer instances at a time, or divide weights and "
    "capacity by a common factor; if there is none, from_real(..., resolution=...) rounds them safely"
)


def room_for(shape: tuple[int, ...], dtype: np.dtype, remedy: str) -> np.ndarray:
    """For the numbers of a result."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise MemoryError(f"the result does not fit into memory ({error}); {remedy}") from None


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
    plan = _plan("operator" if relaxed else "value", theta, lattice, regularizer)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, relaxed, value, y)
    return (value, y) if theta.ndim == 2 else (value.reshape(theta.shape[:-1]), y.reshape(theta.shape))


def relax(theta, lattice, gamma, regularizer):
    """The relaxed selection alone."""
    plan = _plan("operator", theta, lattice, regularizer)
    y = np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, True, np.empty(plan.shape[0]), y)
    return y if theta.ndim == 2 else y.reshape(theta.shape)


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every group, for sample and log_prob with the same arguments."""
    plan = _plan("tabulate", theta, lattice, regularizer)
    value, y = np.empty(plan.shape[0]), np.empty(plan.shape, theta.dtype)
    try:
        table = np.empty((plan.groups, plan.cells), theta.dtype)
    except MemoryError as error:
        if plan.groups == 1:
            raise _too_large(plan, error) from None
        raise MemoryError(
            f"the tables of {plan.shape[0]:,} instances do not fit into memory together ({error}); make one "
            "distribution for each part of the batch, or call knapgrad.sample and knapgrad.log_prob, which keep no "
            "table"
        ) from None
    _run(plan, theta, gamma, True, value, y, table=table)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), table


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _tangent("vjp", theta, z, lattice, gamma, regularizer)[1]


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    tangent = _tangent("entropy", theta, np.zeros_like(theta), lattice, gamma, regularizer)[0]
    return tangent.reshape(theta.shape[:-1])


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    return _tangent("entropy_grad", theta, np.zeros_like(theta), lattice, gamma, regularizer)[1]


def _tangent(name, theta, z, lattice, gamma, regularizer):
    plan = _plan(name, theta, lattice, regularizer)
    size = plan.shape[0]
    value, tangent, product = np.empty(size), np.empty(size), np.empty(plan.shape, theta.dtype)
    if z.shape != plan.shape or z.dtype is not theta.dtype or not z.flags.carray:
        z = _beside(z, plan, theta)
    _run(plan, theta, gamma, z, plan.backwards, value, tangent, product)
    return tangent, product if theta.ndim == 2 else product.reshape(theta.shape)


def frontier(theta, lattice, gamma, regularizer):
    """The smoothed optimum at every capacity up to the reach, (*batch, reach + 1) in float64, -inf where infeasible.
    The capacity of the lattice is not used. Everything is in float64."""
    theta = theta.astype(np.float64, copy=False)
    is_best = regularizer == "hard" and lattice.options
    plan = _plan("best_frontier" if is_best else "frontier", theta, lattice, regularizer)
    size, n = plan.shape
    rows = room_for((size, lattice.reach + 1), _FLOAT64, _FEWER_CAPACITIES)
    nothing = np.empty((0, n))
    _run(plan, theta, gamma, *((np.empty(size), nothing, rows) if is_best else (rows, False, rows, nothing)))
    return rows.reshape(*theta.shape[:-1], lattice.reach + 1)


def frontier_vjp(theta, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of those optima weighted by a cotangent (*batch, reach + 1)."""
    wide = theta.astype(np.float64, copy=False)
    plan = _plan("frontier_vjp", wide, lattice, regularizer)
    y, cotangent = np.empty(plan.shape), _ready(cotangent, np.float64).reshape(plan.shape[0], lattice.reach + 1)
    _run(plan, wide, gamma, cotangent, True, cotangent, y)
    return y.reshape(theta.shape).astype(theta.dtype, copy=False)


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    plan = _plan("sample", theta, lattice, regularizer, len(uniforms), table)
    uniform = _beside(uniforms, plan, theta, len(uniforms))
    value, y = np.zeros(plan.shape[0]), room_for(uniform.shape, theta.dtype, FEWER_SAMPLES)
    _run(plan, theta, gamma, table is not None, uniform, value, y, table=table)
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
    return _likeliest("solve", theta, lattice, gamma, "hard", np.empty((0, 0)))


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    return _likeliest("mode", theta, lattice, gamma, regularizer)


def _likeliest(name, theta, lattice, gamma, regularizer, *more):
    plan = _plan(name, theta, lattice, regularizer)
    y = np.empty(plan.shape, theta.dtype)
    _run(plan, theta, gamma, np.empty(plan.shape[0]), y, *more)
    return y.reshape(theta.shape)


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    return _log_prob("log_prob", theta, y, None, lattice, gamma, regularizer, table)[0]


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    return _log_prob("log_prob_vjp", theta, y, cotangent, lattice, gamma, regularizer, None)[1]


def _log_prob(name, theta, y, cotangent, lattice, gamma, regularizer, table):
    samples = len(y)
    plan = _plan(name, theta, lattice, regularizer, samples, table)
    size, backwards = plan.shape[0], plan.backwards
    value, gradient, result = np.zeros(size), np.empty(plan.shape, theta.dtype), np.zeros((samples, size), theta.dtype)
    cotangent = _ready(cotangent, theta.dtype).reshape(result.shape) if backwards else result
    y_flat = _beside(y, plan, theta, samples)
    _run(plan, theta, gamma, table is not None, y_flat, cotangent, backwards, value, result, gradient, table=table)
    return result.reshape(y.shape[:-1]), gradient.reshape(theta.shape)
