"""What the rest of the library calls: lays out a batch in groups, and runs a kernel over them, on threads.

Arguments: theta (*batch, n), a lattice of arrays that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma, which is formed in float64: rounded to float32 it would move
    near-ties.
"""

from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from knapgrad.kernels.numba import choice_paths, paths, threads, vector
from knapgrad.kernels.numba.bands import COLUMNS, Batch, Scratch, measure, row_length
from knapgrad.kernels.numba.entries import entry_of
from knapgrad.kernels.numba.sweeps import frontier_kernel, operator_kernel, tangent_kernel
from knapgrad.kernels.numba.variants import direction_of, regularizer_of
from knapgrad.lattice import tournament

# Instances go into the lanes when enough of them share their weights and the table of a group stays near the cache.
_LARGEST_SHARED_TABLE = 8 << 20  # bytes
_NANOSECONDS_PER_VECTOR = 8  # of a value + relax sweep, to decide whether threads pay off
_LARGEST_MEMO = 32  # shapes of batches
_UNIT = np.ones(1)
_ALL = np.array([2**62])  # a slack that no capacity exceeds


class Layout(NamedTuple):
    """A batch, in groups, with what is allocated for it. All but the arrays of the batch is kept with the lattice."""

    batch: Batch
    groups: int
    cells: int  # of a table
    row: int  # length of a row
    steps: int
    lanes: int


def _layout(theta, lattice, gamma, keeps=True, complete=False, entries=None):
    shape = theta.shape
    theta = _ready(theta)
    if theta.ndim != 2:
        theta = theta.reshape(prod(shape[:-1]), shape[-1])
    gamma = gamma if gamma.dtype == np.float64 else gamma.astype(np.float64)
    gamma = _ready(gamma).reshape(1) if gamma.size == 1 else _per_instance(gamma, shape[:-1])
    key = shape, theta.itemsize, keeps, complete, entries
    memo = lattice.memo
    found = memo.get(key)
    if found is None:
        if len(memo) > _LARGEST_MEMO:
            memo.clear()
        found = memo[key] = _measured(theta, shape, lattice, gamma, keeps, complete, entries or lattice.options)
    weights, capacity, slack, constants, sizes = found
    return Layout(Batch(theta, weights, capacity, slack, gamma, *constants), *sizes)


def _measured(theta, shape, lattice, gamma, keeps, complete, entries):
    """What a layout has of a lattice: weights, capacity and slack; the other numbers of a batch; those of a layout."""
    size, n = theta.shape
    weights, options = lattice.weights, lattice.options
    if weights.size != n:
        weights = np.broadcast_to(weights, shape)
    weights = _ready(weights).reshape(-(-weights.size // max(n, 1)), n)
    slack = _ALL if lattice.slack is None else _per_instance(lattice.slack, shape[:-1])
    tree, margin, steps = None, 0, n
    if options:
        tree, margin, steps = _tree(options), lattice.heaviest, n // options
        if margin > lattice.reach:
            weights = np.minimum(weights, margin)
    limits = weights, _per_instance(lattice.capacity, shape[:-1]), slack
    width, flags = vector.BYTES // theta.itemsize, (tree, options, entries, margin, keeps, complete)
    bands = np.empty((steps + 1, COLUMNS), np.int64)
    shared = weights.shape[0] == 1 and size > width // 4
    for stride in (width, 1) if shared else (1,):
        reach, cells = measure(Batch(theta, *limits, gamma, stride, *flags, 0), width, bands)
        if cells * theta.itemsize <= _LARGEST_SHARED_TABLE:
            break
    constants = stride, *flags, reach
    row = row_length.py_func(Batch(theta, *limits, gamma, *constants), width)
    return *limits, constants, (-(-size // stride), cells, row, steps, width)


_tree = cache(lambda options: tournament(options).reshape(-1))


def _ready(array):
    """C-contiguous, aligned and writeable: the one memory layout that the kernels are compiled for."""
    return array if array.flags.carray else np.array(array, order="C")


def _per_instance(array, shape):
    """One number for all instances, or one per instance."""
    return _ready(array if array.size == 1 else np.broadcast_to(array, shape)).reshape(-1)


def _run(kernel, variants, layout, *arguments, weight=1.0, samples=0, rows=2, tables=0, table=None):
    """Runs a kernel over all groups, in slices, each thread in its own scratch."""
    batch, groups, cells, row, steps, lanes = layout
    theta = batch.theta
    n, slots = theta.shape[1], batch.options * lanes
    narrow = rows * row + 2 * n * lanes + tables * cells
    sizes = (samples * lanes, row + n * lanes + slots, narrow + 4 * slots, cells)
    types = [x.dtype.char for x in arguments if isinstance(x, np.ndarray)]
    call = entry_of(kernel, (*variants, theta.dtype.char, batch.options > 0, *types))

    def work(begin: int, end: int) -> None:
        try:
            states, wide, narrow, own_table = threads.scratch(theta.dtype, sizes)
        except MemoryError as error:
            raise _too_large(batch, error) from None
        bands = np.empty((steps + 1, COLUMNS), np.int64)
        scratch = Scratch(bands, states, wide, narrow, own_table if table is None else table)
        call(*variants, batch, scratch, begin, end, *arguments)

    threads.run(work, groups, weight * groups * cells / lanes * _NANOSECONDS_PER_VECTOR)


def _too_large(batch, error: MemoryError) -> MemoryError:
    return MemoryError(
        f"the tables for a capacity of {batch.reach:,} do not fit into memory ({error}); divide weights and capacity "
        "by a common factor; if there is none, from_real(weights, capacity, resolution=...) rounds them safely"
    )


def _check_feasible(value: np.ndarray, lattice) -> None:
    if (lattice.slack is not None or lattice.options) and (value == -np.inf).any():
        instance = int(np.argmax(value == -np.inf))
        raise ValueError(
            f"instance {instance} (counted over the flattened batch) has no feasible selection: no items that are left "
            "by the mask (scores of -inf) come to the weight, or the number, that is required; mask fewer items, or "
            "lower k or at_least there, or raise the capacity if one option of each group is required"
        )


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    layout = _layout(theta, lattice, gamma, keeps=relaxed)
    value, y = _outputs(layout)
    _run(operator_kernel, [regularizer_of(regularizer)], layout, relaxed, value, y)
    _check_feasible(value, lattice)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape)


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every group, for sample and log_prob with the same arguments."""
    layout = _layout(theta, lattice, gamma)
    value, y = _outputs(layout)
    try:
        table = np.empty((layout.groups, layout.cells), theta.dtype)
    except MemoryError as error:
        raise _too_large(layout.batch, error) from None
    _run(operator_kernel, [regularizer_of(regularizer)], layout, True, value, y, table=table)
    _check_feasible(value, lattice)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), table


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _tangent("linear", theta, z, lattice, gamma, regularizer, True, 2.5)[1]


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    return _tangent("entropy", theta, np.zeros_like(theta), lattice, gamma, regularizer, False, 5.0)[0]


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    return _tangent("entropy", theta, np.zeros_like(theta), lattice, gamma, regularizer, True, 5.0)[1]


def _tangent(direction, theta, z, lattice, gamma, regularizer, backwards, weight):
    layout = _layout(theta, lattice, gamma)
    (value, product), z = _outputs(layout), _ready(z).reshape(layout.batch.theta.shape)
    tangent = np.empty_like(value)
    variants = [regularizer_of(regularizer), direction_of(direction)]
    _run(tangent_kernel, variants, layout, z, backwards, value, tangent, product, weight=weight, rows=4, tables=1)
    _check_feasible(value, lattice)
    return tangent.reshape(theta.shape[:-1]), product.reshape(theta.shape)


def frontier(theta, lattice, gamma, regularizer):
    """The smoothed optimum at every capacity up to the reach, (*batch, reach + 1) in float64, -inf where infeasible.
    The capacity of the lattice is not used. Everything is in float64."""
    is_argmax = regularizer == "hard" and lattice.options
    layout = _complete(theta, lattice, gamma, keeps=False, entries=1 if is_argmax else None)
    flat = layout.batch.theta
    rows, nothing = np.empty((flat.shape[0], lattice.reach + 1)), flat[:0]
    if is_argmax:
        _run(choice_paths.solve_kernel, [regularizer_of("hard")], layout, np.empty(flat.shape[0]), nothing, rows)
    else:
        _run(frontier_kernel, [regularizer_of(regularizer)], layout, rows, False, rows, nothing)
    return rows.reshape(*theta.shape[:-1], lattice.reach + 1)


def frontier_vjp(theta, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of those optima weighted by a cotangent (*batch, reach + 1)."""
    layout = _complete(theta, lattice, gamma)
    y = np.empty_like(layout.batch.theta)
    cotangent = _ready(cotangent.astype(np.float64, copy=False)).reshape(y.shape[0], lattice.reach + 1)
    _run(frontier_kernel, [regularizer_of(regularizer)], layout, cotangent, True, cotangent, y)
    return y.reshape(theta.shape).astype(theta.dtype, copy=False)


def _complete(theta, lattice, gamma, **options):
    """A layout in which the last row is complete."""
    lattice = lattice.replace(capacity=np.array(lattice.reach))
    return _layout(theta.astype(np.float64, copy=False), lattice, gamma, complete=True, **options)


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    layout, samples = _layout(theta, lattice, gamma), uniforms.shape[0]
    flat = _ready(uniforms).reshape(samples, *layout.batch.theta.shape)
    value, y = np.zeros(flat.shape[1]), np.empty_like(flat)
    variants, arguments = [regularizer_of(regularizer)], (table is not None, flat, value, y)
    kernel = (choice_paths if lattice.options else paths).sample_kernel
    _run(kernel, variants, layout, *arguments, weight=1 + 0.05 * samples, samples=samples, table=table)
    _check_feasible(value, lattice)
    return y.reshape(uniforms.shape)


def solve(theta, lattice):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item, or takes the earlier
    option."""
    if lattice.options:
        layout = _layout(theta, lattice, _UNIT, entries=1)
        value, y = _outputs(layout)
        _run(choice_paths.solve_kernel, [regularizer_of("hard")], layout, value, y, np.empty((0, 0)))
        _check_feasible(value, lattice)
        return y.reshape(theta.shape)
    return sample(theta, np.full((1, *theta.shape), 0.5, theta.dtype), lattice, _UNIT, "hard")[0]


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    layout = _layout(theta, lattice, gamma)
    value, y = _outputs(layout)
    kernel = (choice_paths if lattice.options else paths).mode_kernel
    _run(kernel, [regularizer_of(regularizer)], layout, value, y, weight=2.0)
    _check_feasible(value, lattice)
    return y.reshape(theta.shape)


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    return _log_prob(theta, y, None, lattice, gamma, regularizer, table)[0]


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    return _log_prob(theta, y, cotangent, lattice, gamma, regularizer, None)[1]


def _log_prob(theta, y, cotangent, lattice, gamma, regularizer, table):
    layout, samples, backwards = _layout(theta, lattice, gamma), y.shape[0], cotangent is not None
    value, gradient = _outputs(layout)
    value[:] = 0.0
    flat = _ready(y).reshape(samples, *gradient.shape)
    result = np.zeros(flat.shape[:2], theta.dtype)
    cotangent = _ready(cotangent).reshape(result.shape) if backwards else result
    variants, arguments = [regularizer_of(regularizer)], (
        table is not None, flat, cotangent, backwards, value, result, gradient,
    )  # fmt: skip
    kernel = (choice_paths if lattice.options else paths).log_prob_kernel
    _run(kernel, variants, layout, *arguments, weight=1 + 0.1 * samples, samples=samples, table=table)
    _check_feasible(value, lattice)
    return result.reshape(y.shape[:-1]), gradient.reshape(theta.shape)


def _outputs(layout):
    theta = layout.batch.theta
    return np.empty(theta.shape[0]), np.empty_like(theta)
