"""The fast kernels against the reference and long-double tables, at odd and large sizes, on poisoned scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import knapgrad as kg
from backends import TOLERANCES
from instances import CONSTRAINTS, problems
from knapgrad import backends, reference
from knapgrad.kernels import numba, operations
from knapgrad.kernels.numba import bands, frames, launch, layout, paths, sweeps, threads
from knapgrad.kernels.numba.groups import Batch as Group
from knapgrad.lattice import INFEASIBLE, Lattice, lattice_of
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import LONG_IS_LONGER, REGULARIZERS, Limits, feasible, long_table, long_vjp, subsets

DTYPES = ("float32", "float64")
LANES = {"float32": 16, "float64": 8}

#: Constraints, and a least weight for which the bands of rows have two parts, with a gap between them.
KINDS = (*CONSTRAINTS, "two parts")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def remembered_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference fills the table of an instance once, not once per operation."""
    plain, known = reference.tables, {}

    def tables(theta: np.ndarray, lattice: Lattice, regularizer: Any) -> Any:
        numbers = lattice.weights.tobytes(), int(lattice.capacity), lattice.slack is None or int(lattice.slack)
        key = theta.tobytes(), *numbers, regularizer
        if key not in known:
            known[key] = plain(theta, lattice, regularizer)
        return known[key]

    monkeypatch.setattr(reference, "tables", tables)


pytestmark = pytest.mark.usefixtures("poisoned_scratch")

UNIT = np.ones(1)


@dataclass(frozen=True)
class Batch:
    """Arguments for a kernel: unit gamma, theta (batch, n)."""

    theta: np.ndarray
    weights: np.ndarray  # (1 or batch, n)
    capacity: np.ndarray  # (1 or batch,)
    at_least: np.ndarray | None = None  # (1 or batch,); None if no instance has a least weight

    @property
    def lattice(self) -> Lattice:
        slack = None if self.at_least is None else self.capacity - self.at_least
        return lattice_of(self.weights, self.capacity, slack, None)

    def constants(self, regularizer: str) -> tuple[Any, ...]:
        return self.lattice, UNIT, regularizer

    def unshared(self) -> Batch:
        """The same instances, each with weights of its own: the kernels then put capacities in the lanes."""
        weights = np.broadcast_to(self.weights, self.theta.shape).copy()
        return replace(self, weights=weights)

    def instances(self) -> Iterator[tuple[np.ndarray, Lattice, Limits]]:
        """theta, the lattice for the reference, just as wide as the capacity says, and the limits."""
        size = len(self.theta)
        weights = np.broadcast_to(self.weights, self.theta.shape)
        least = np.zeros(1, np.int64) if self.at_least is None else self.at_least
        limits = [np.broadcast_to(x, size).tolist() for x in (least, self.capacity)]
        for theta, own, at_least, capacity in zip(self.theta, weights, *limits):
            slack = None if self.at_least is None else capacity - at_least
            yield theta.astype(np.float64), Lattice(own, capacity, slack, capacity, 0), Limits(at_least, capacity)


def batch_of(
    kind: str, size: int, n: int, dtype: str, *, capacity: int | None = None, own: bool = False, scale=1.0
) -> Batch:
    """Weights that all instances share, or that each has for its own; least weights that differ in any case."""
    rng = np.random.default_rng([size, n, len(kind)])
    theta = (scale * rng.standard_normal((size, n))).astype(dtype)
    rows = size if own else 1
    if kind == "top-k":
        k = rng.integers(0, n + 1, rows) if own else np.array([(n + 1) // 2 if capacity is None else min(capacity, n)])
        k = k.astype(np.int64)
        return Batch(theta, np.ones((1, n), np.int64), k, k)
    weights = rng.integers(0, 9, (rows, n))
    if kind == "two parts":  # the light items come first
        weights = np.concatenate([weights[:, : n // 2] // 3, 30 + 7 * weights[:, n // 2 :]], axis=1)
    total = weights.sum(axis=1)
    chosen = (total // 2 if capacity is None else np.full(rows, capacity)).astype(np.int64)
    if kind == "knapsack":
        return Batch(theta, weights, chosen)
    pairs = zip(np.broadcast_to(weights, theta.shape), np.broadcast_to(chosen, size))
    if kind == "two parts":
        least = [light_weight(rng, w[: n // 2], c) for w, c in pairs]
    else:
        least = [some_weight(rng, w, c) for w, c in pairs]
        least[2::5] = [0] * len(least[2::5])  # has none
    return Batch(theta, weights, chosen, np.array(least, np.int64))


def some_weight(rng: np.random.Generator, weights: np.ndarray, capacity: int) -> int:
    """Of a selection that fits."""
    loads = np.cumsum(rng.permutation(weights))
    return int(rng.choice([0, *loads[loads <= capacity]]))


def light_weight(rng: np.random.Generator, weights: np.ndarray, capacity: int) -> int:
    """Of one item, or of none."""
    return int(rng.choice([0, *weights[weights <= capacity]]))


def bands_of(batch: Batch, dtype: str, in_lanes: bool) -> np.ndarray:
    """The plan (n + 1, columns) of the one group of a batch: instances in the lanes, or capacities of a single one."""
    (size, n), width = batch.theta.shape, LANES[dtype]
    assert size <= (width if in_lanes else 1)
    slack = None if batch.at_least is None else batch.capacity - batch.at_least
    whole = Lattice(batch.weights, batch.capacity, slack, 0, 0)  # no capacity is cut to the total weight
    theta = batch.theta.astype(dtype)
    limits = launch._limits(whole, theta.shape, operations.OPERATIONS["operator"])
    group = Group(theta, *limits, np.ones(1), width if in_lanes else 1, None, None, 0, 0, 0, True, False, 0)
    found = np.full((n + 1, bands.COLUMNS), -(10**6))
    reach, cells = bands.measure(group, width, found)
    assert reach == batch.capacity.max() and cells == (found[:n, bands.END] * width).sum()
    return found


def assert_relative(actual: np.ndarray, expected: np.ndarray, tolerance: float, scale: Any = 0.0) -> None:
    assert np.abs(actual - expected).max(initial=0.0) <= tolerance * max(
        np.abs(expected).max(initial=0.0), np.max(scale)
    )


def check_against_reference(batch: Batch, regularizer: str, dtype: str) -> None:
    tolerance, smoothing = TOLERANCES[dtype], CLASSES[regularizer]
    rng = np.random.default_rng(0)
    z = rng.standard_normal(batch.theta.shape).astype(dtype)
    uniforms = rng.random((2, *batch.theta.shape)).astype(dtype) * 0.999
    value, y = numba.operator(batch.theta, *batch.constants(regularizer))
    product = numba.vjp(batch.theta, z, *batch.constants(regularizer))
    entropy = numba.entropy(batch.theta, *batch.constants(regularizer))
    entropy_slope = numba.entropy_grad(batch.theta, *batch.constants(regularizer))
    drawn = numba.sample(batch.theta, uniforms, *batch.constants(regularizer))
    hard = numba.solve(batch.theta, batch.lattice)
    log_prob = numba.log_prob(batch.theta.astype(np.float64), drawn.astype(np.float64), *batch.constants(regularizer))
    assert value.dtype == np.float64 and y.dtype == product.dtype == drawn.dtype == hard.dtype == batch.theta.dtype
    for b, (theta, lattice, limits) in enumerate(batch.instances()):
        arguments = lattice, smoothing
        expected_value, expected_y = reference.operator(theta, *arguments)
        scale = max(1.0, np.abs(theta).max(initial=0.0))
        assert_relative(value[b], expected_value, tolerance.value, scale)
        assert np.abs(y[b] - expected_y).max(initial=0.0) <= tolerance.relax
        assert_relative(
            product[b],
            reference.vjp(theta, z[b].astype(np.float64), *arguments),
            tolerance.vjp,
            np.abs(z[b]).max() / 10,
        )
        expected_entropy, expected_slope = reference.entropy(theta, *arguments)
        assert_relative(entropy[b], expected_entropy, tolerance.value, 1.0)
        if dtype == "float64":  # elsewhere the derivative of a decision that is nearly certain has no digits left
            assert_relative(entropy_slope[b], expected_slope, tolerance.vjp, 1.0)
        best = reference.solve(theta, lattice)
        assert theta @ hard[b] == pytest.approx(theta @ best, rel=1e-12, abs=1e-12)
        assert feasible(hard[b], lattice.weights, limits)
        for s in range(2):
            assert feasible(drawn[s, b], lattice.weights, limits)
            if dtype == "float64":
                np.testing.assert_array_equal(drawn[s, b], reference.sample(theta, uniforms[s, b], *arguments))
            expected = reference.log_prob(theta, drawn[s, b], *arguments)
            assert log_prob[s, b] == pytest.approx(expected, rel=1e-9, abs=1e-9) or expected < -30


@pytest.mark.parametrize("size", [1, 3])
def test_many_samples_against_the_reference(size, regularizer, kind):
    """Paths that take turns in eights, with a rest."""
    batch = batch_of(kind, size, 17, "float64", own=True)
    uniforms = np.random.default_rng(0).random((11, *batch.theta.shape))
    drawn = numba.sample(batch.theta, uniforms, *batch.constants(regularizer))
    for b, (theta, lattice, _) in enumerate(batch.instances()):
        for s in range(11):
            expected = reference.sample(theta, uniforms[s, b], lattice, CLASSES[regularizer])
            np.testing.assert_array_equal(drawn[s, b], expected)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_small_sizes_against_the_reference(n, size, regularizer, constraint):
    for dtype in DTYPES:
        check_against_reference(batch_of(constraint, size, n, dtype), regularizer, dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_small_sizes_with_weights_of_their_own(n, regularizer, constraint):
    """A group is one instance then, whatever the size of the batch."""
    for dtype in DTYPES:
        check_against_reference(batch_of(constraint, 7, n, dtype, own=True), regularizer, dtype)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("capacity", [0, 1, 7, 8, 14, 15, 16, 17, 31, 32])
def test_capacities_around_the_width_of_a_vector(capacity, regularizer, constraint):
    for dtype in DTYPES:
        for size in (1, 9):
            check_against_reference(batch_of(constraint, size, 20, dtype, capacity=capacity), regularizer, dtype)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [1, 9])
def test_a_hundred_items_against_the_reference(size, regularizer, constraint):
    for dtype in DTYPES:
        for own in (False, True):
            check_against_reference(batch_of(constraint, size, 100, dtype, own=own), regularizer, dtype)


@pytest.mark.parametrize("n", [8, 25])
def test_bands_in_two_parts_against_the_reference(n, regularizer):
    for dtype in DTYPES:
        for size, own in ((1, False), (LANES[dtype], False), (5, True)):
            batch = batch_of("two parts", size, n, dtype, own=own)
            check_against_reference(batch, regularizer, dtype)


def test_capacities_of_all_sizes_in_one_group(regularizer, constraint):
    """Lanes of one group start from states far apart, above the total weight as well."""
    rng = np.random.default_rng(3)
    for dtype in DTYPES:
        weights = np.ones((1, 23), np.int64) if constraint == "top-k" else rng.integers(0, 7, (1, 23))
        capacity = np.array([0, 200, 1, 5, 16, 15, 60, 31, 10**12, 2, 0, 33, 17, 45, 3, 69, 8, 8, 68], dtype=np.int64)
        if constraint == "top-k":
            capacity %= 24
        theta = rng.standard_normal((len(capacity), 23)).astype(dtype)
        least = {
            "knapsack": None,
            "top-k": capacity,
            "at least": np.array([some_weight(rng, weights[0], c) for c in capacity]),
        }
        batch = Batch(theta, weights, capacity, least[constraint])
        value, y = numba.operator(theta, *batch.constants(regularizer))
        small = replace(batch, capacity=np.minimum(capacity, int(weights.sum()) + 3))
        same_value, same_y = numba.operator(small.theta, *small.constants(regularizer))
        np.testing.assert_allclose(value, same_value, rtol=1e-14)
        np.testing.assert_allclose(y, same_y, atol=np.finfo(dtype).eps)
        check_against_reference(small, regularizer, dtype)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size, n", [(3, 17), (16, 17), (33, 40), (130, 25)])
def test_the_two_lane_layouts_agree(size, n, regularizer, kind):
    for dtype in DTYPES:
        batch = batch_of(kind, size, n, dtype)
        z = np.random.default_rng(1).standard_normal((size, n)).astype(dtype)
        uniforms = np.random.default_rng(2).random((3, size, n)).astype(dtype)
        tolerance = TOLERANCES[dtype]
        one, other = batch, batch.unshared()
        values, relaxed = zip(*(numba.operator(b.theta, *b.constants(regularizer)) for b in (one, other)))
        assert_relative(values[0], values[1], tolerance.value)
        assert_relative(relaxed[0], relaxed[1], tolerance.relax, 1.0)
        products = [numba.vjp(b.theta, z, *b.constants(regularizer)) for b in (one, other)]
        assert_relative(products[0], products[1], tolerance.vjp)
        drawn = [numba.sample(b.theta, uniforms, *b.constants(regularizer)) for b in (one, other)]
        np.testing.assert_array_equal(*drawn)
        entropies = [numba.entropy(b.theta, *b.constants(regularizer)) for b in (one, other)]
        assert_relative(entropies[0], entropies[1], tolerance.value)
        hard = [numba.solve(b.theta, b.lattice) for b in (one, other)]
        np.testing.assert_array_equal(*hard)
        log_probs = [numba.log_prob(b.theta, drawn[0], *b.constants(regularizer)) for b in (one, other)]
        assert_relative(log_probs[0], log_probs[1], tolerance.log_prob)


def test_a_table_too_large_for_instances_in_the_lanes(regularizer):
    """Many instances with a wide table: the layout with capacities in the lanes takes over."""
    rng = np.random.default_rng(5)
    n, weights = 12, np.full((1, 12), 5000)
    weights += rng.integers(0, 900, (1, n))
    theta = rng.standard_normal((20, n)).astype(np.float32)
    batch = Batch(theta, weights, np.array([int(weights.sum()) // 2]), np.array([0, 9000] * 10))
    few = numba.operator(theta[:2], *replace(batch, at_least=batch.at_least[:2]).constants(regularizer))
    many = numba.operator(theta, *batch.constants(regularizer))
    assert_relative(many[0][:2], few[0], TOLERANCES["float32"].value)
    assert_relative(many[1][:2], few[1], TOLERANCES["float32"].relax, 1.0)
    for b, (scores, lattice, _) in list(enumerate(batch.instances()))[:2]:
        expected = reference.operator(scores, lattice, CLASSES[regularizer])
        assert np.abs(many[1][b] - expected[1]).max() <= TOLERANCES["float32"].relax


@pytest.mark.thinned(3)
@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
@pytest.mark.parametrize(
    "kind, size, capacity",
    [
        ("knapsack", 1, None),
        ("knapsack", 17, 300),
        ("top-k", 17, 50),
        ("top-k", 1, 500),
        ("at least", 1, 700),
        ("at least", 17, 300),
        ("two parts", 17, 400),
    ],
)
def test_a_thousand_items_against_long_double(kind, size, capacity, regularizer):
    for dtype in DTYPES:
        batch = batch_of(kind, size, 1000, dtype, capacity=capacity)
        value, y = numba.operator(batch.theta, *batch.constants(regularizer))
        for b in {0, size - 1}:
            theta, lattice, limits = list(batch.instances())[b]
            expected_value, expected_y = long_table(theta, lattice.weights, limits, regularizer)
            assert_relative(value[b], float(expected_value), TOLERANCES[dtype].value)
            assert np.abs(y[b] - expected_y.astype(np.float64)).max() <= TOLERANCES[dtype].relax


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_vjp_against_differences_of_the_enumeration(dtype, regularizer, constraint, data):
    """Scores come from a seed, not from hypothesis: on an exact threshold of Gini there is no derivative."""
    problem = data.draw(problems(constraint, max_n=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    theta = rng.uniform(-2, 2, problem.theta.shape).astype(dtype).astype(np.float64)
    theta[np.isneginf(problem.theta)] = -np.inf
    problem = replace(problem, theta=theta, gamma=1.0)
    z = rng.standard_normal(theta.shape).astype(dtype)
    product = numba.vjp(theta.astype(dtype), z, problem.constraint.lattice(problem.n), UNIT, regularizer)
    for one, actual, direction in zip(problem.truths(regularizer), problem.flat(product), problem.flat(z)):
        expected = one.vjp(direction)
        assert_relative(actual, expected, TOLERANCES[dtype].vjp, np.abs(direction).max(initial=0.0) / 10)


@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
def test_vjp_against_differences_in_long_double(regularizer, kind):
    batch = batch_of(kind, 3, 100, "float32")
    z = np.random.default_rng(1).standard_normal(batch.theta.shape).astype(np.float32)
    product = numba.vjp(batch.theta, z, *batch.constants(regularizer))
    for b, (theta, lattice, limits) in enumerate(batch.instances()):
        expected = long_vjp(theta, z[b], lattice.weights, limits, regularizer)
        assert_relative(product[b], expected, TOLERANCES["float32"].vjp)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_vjp_at_near_ties(scale, regularizer, constraint):
    """float32 with accurate rows against the reference in float64; each score is as large as ``scale`` gammas."""
    rng = np.random.default_rng(7)
    n, size = 100, 17
    weights = np.ones((1, n), np.int64) if constraint == "top-k" else rng.integers(3, 9, (1, n))
    capacity = np.array([10 if constraint == "top-k" else int(weights.sum()) // 2])
    theta = (scale * weights / weights.max() + rng.standard_normal((size, n))).astype(np.float32)
    z = rng.standard_normal((size, n)).astype(np.float32)
    # scores are proportional to the weights: with the other sign only a least weight keeps selections from being empty
    theta = -theta if constraint == "at least" else theta
    least = {"knapsack": None, "top-k": capacity, "at least": capacity - rng.integers(0, 40, size)}[constraint]
    batch = Batch(theta, weights, capacity, least)
    for one in (batch, batch.unshared()):
        product = numba.vjp(theta, z, *one.constants(regularizer))
        for b, (scores, lattice, _) in enumerate(one.instances()):
            expected = reference.vjp(scores, z[b].astype(np.float64), lattice, CLASSES[regularizer])
            assert_relative(product[b], expected, TOLERANCES["float32"].vjp)


def test_vjp_with_masks_has_no_nan(regularizer, constraint):
    for dtype in DTYPES:
        batch = batch_of(constraint, 17, 20, dtype, capacity=6)
        if constraint == "at least":
            batch.weights[0, 1:3], batch.at_least[:] = (2, 3), np.arange(17) % 6
            batch.at_least[batch.at_least == 4] = 5
        theta = batch.theta.copy()
        theta[:, ::3] = -np.inf
        z = np.ones_like(theta)
        product = numba.vjp(theta, z, *batch.constants(regularizer))
        assert np.isfinite(product).all()
        assert (product[:, ::3] == 0).all()


def test_log_prob_gradient_against_differences(regularizer, kind):
    batch = batch_of(kind, 17, 9, "float64", scale=0.4)
    rng = np.random.default_rng(8)
    y = numba.sample(batch.theta, rng.random((3, 17, 9)), *batch.constants(regularizer))
    cotangent = rng.standard_normal((3, 17))
    step = 1e-6
    for one in (batch, batch.unshared()):
        gradient = numba.log_prob_vjp(one.theta, y, cotangent, *one.constants(regularizer))
        for i in range(9):
            shift = np.zeros(9)
            shift[i] = step
            up = numba.log_prob(one.theta + shift, y, *one.constants(regularizer))
            down = numba.log_prob(one.theta - shift, y, *one.constants(regularizer))
            slope = (cotangent * (up - down) / (2 * step)).sum(axis=0)
            np.testing.assert_allclose(gradient[:, i], slope, rtol=1e-5, atol=1e-5)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_log_probs_of_all_selections(own, regularizer, kind):
    """-inf for what is infeasible; and the mode is the most probable of them."""
    batch = batch_of(kind, 9, 8, "float64", own=own)
    y = np.repeat(np.array(subsets(8), dtype=np.float64)[:, None], 9, axis=1)
    log_prob = numba.log_prob(batch.theta, y, *batch.constants(regularizer))
    mode = numba.mode(batch.theta, *batch.constants(regularizer))
    for b, (theta, lattice, limits) in enumerate(batch.instances()):
        expected = np.array([reference.log_prob(theta, one, lattice, CLASSES[regularizer]) for one in y[:, b]])
        np.testing.assert_allclose(np.exp(log_prob[:, b]), np.exp(expected), rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(np.exp(log_prob[:, b]).sum(), 1.0, rtol=1e-12)
        allowed = [feasible(one, lattice.weights, limits) for one in y[:, b]]
        assert np.isneginf(log_prob[np.logical_not(allowed), b]).all()
        chosen = reference.log_prob(theta, mode[b], lattice, CLASSES[regularizer])
        assert chosen == pytest.approx(expected.max(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("size", [1, 33])
def test_a_kept_table_gives_the_same_samples_and_log_probs(size, regularizer, kind):
    for dtype in DTYPES:
        batch = batch_of(kind, size, 19, dtype)
        uniforms = np.random.default_rng(9).random((4, size, 19)).astype(dtype)
        value, y, table = numba.tabulate(batch.theta, *batch.constants(regularizer))
        plain_value, plain_y = numba.operator(batch.theta, *batch.constants(regularizer))
        np.testing.assert_array_equal(value, plain_value)
        np.testing.assert_array_equal(y, plain_y)
        drawn = numba.sample(batch.theta, uniforms, *batch.constants(regularizer))
        np.testing.assert_array_equal(
            numba.sample(batch.theta, uniforms, *batch.constants(regularizer), table=table), drawn
        )
        log_prob = numba.log_prob(batch.theta, drawn, *batch.constants(regularizer))
        kept = numba.log_prob(batch.theta, drawn, *batch.constants(regularizer), table=table)
        assert_relative(kept, log_prob, TOLERANCES[dtype].log_prob)


@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_uniform_numbers_give_feasible_selections(u, regularizer, constraint):
    """A pick that is certain is made, one that is impossible is not, whatever number is drawn from [0, 1)."""
    batch = batch_of(constraint, 17, 9, "float64", scale=3.0)
    batch.theta[:, ::3] = -np.inf
    if constraint == "at least":  # what is left can weigh
        batch.at_least[:] = np.minimum(batch.at_least, batch.weights[0, 1])
    drawn = numba.sample(batch.theta, np.full((1, 17, 9), u), *batch.constants(regularizer))
    for y, (_, lattice, limits) in zip(drawn[0], batch.instances(), strict=True):
        assert feasible(y, lattice.weights, limits)
    assert (drawn[..., ::3] == 0).all()
    assert (numba.log_prob(batch.theta, drawn, *batch.constants(regularizer)) > -np.inf).all()


#: operation -> a call of its kernel
OPERATIONS: dict[str, Callable[..., Any]] = {
    "operator": numba.operator,
    "tabulate": numba.tabulate,
    "vjp": lambda theta, *problem: numba.vjp(theta, theta, *problem),
    "entropy": numba.entropy,
    "entropy_grad": numba.entropy_grad,
    "sample": lambda theta, *problem: numba.sample(theta, np.full((2, *theta.shape), 0.5), *problem),
    "mode": numba.mode,
    "log_prob": lambda theta, *problem: numba.log_prob(theta, np.zeros((2, *theta.shape)), *problem),
    "log_prob_vjp": lambda theta, *problem: numba.log_prob_vjp(
        theta, np.zeros((2, *theta.shape)), np.zeros((2, *theta.shape[:-1])), *problem
    ),
    "solve": lambda theta, lattice, gamma, regularizer: numba.solve(theta, lattice),
}

#: why the second of three instances has no feasible selection -> weights, capacity, least weight
UNREACHABLE: dict[str, tuple[list[int], int, int]] = {
    "no items of that weight": ([4, 4, 4, 8], 15, 13),
    "less than that in all": ([4, 4, 4, 8], 30, 21),
    "far less than that in all": ([4, 4, 4, 8], 10**12, 10**11),
    "items that do not fit": ([4, 4, 4, 90], 40, 30),
    "only a masked item weighs enough": ([30, 1, 2, 3], 40, 20),
}


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("reason", UNREACHABLE)
def test_an_instance_without_a_feasible_selection_is_named(reason, own):
    weights, capacity, least = UNREACHABLE[reason]
    theta = np.array([[0.3, 0.1, -0.2, 0.4]] * 3)
    theta[1, 0] = -np.inf
    batch = Batch(theta, np.array([weights] * (3 if own else 1)), np.array([capacity]), np.array([0, least, 4]))
    for name, call in OPERATIONS.items():
        for regularizer in REGULARIZERS if name == "operator" else ("gini",):
            with pytest.raises(ValueError, match="instance 1 "):
                call(batch.theta, *batch.constants(regularizer))
    possible = replace(batch, at_least=np.array([0, 0, 4]))
    assert np.isfinite(numba.operator(theta, *possible.constants("gini"))[0]).all()


def test_no_items_do_not_have_a_least_weight():
    theta, nothing = np.zeros((2, 0)), np.zeros((1, 0), np.int64)
    assert (numba.operator(theta, *Batch(theta, nothing, np.array([3])).constants("gini"))[0] == 0).all()
    with pytest.raises(ValueError, match="instance 1 "):
        numba.operator(theta, *Batch(theta, nothing, np.array([3]), np.array([0, 1])).constants("gini"))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "solve"])
def test_an_unknown_regularizer_is_an_error(name):
    batch = batch_of("knapsack", 2, 4, "float64")
    with pytest.raises(KeyError, match="softmax"):
        OPERATIONS[name](batch.theta, *batch.constants("softmax"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_table_of_operations_says_what_comes_back(name):
    batch = batch_of("knapsack", 3, 4, "float64")
    lattice, *problem = batch.constants("gini")
    found = OPERATIONS[name](batch.theta, lattice, *problem)
    row = operations.OPERATIONS[name]
    found, names = (found if isinstance(found, tuple) else (found,)), row.results
    if name in ("entropy_grad", "log_prob_vjp"):  # the gradient alone
        names, row = ("y",), row._replace(is_sampled=False)
    expected = [
        row.shape_of(array, batch.theta.shape, lattice.reach, samples=2) for array in names if array != "tables"
    ]
    assert [x.shape for x in found[: len(expected)]] == expected


def test_each_operation_has_one_plan():
    """Whatever asks for it: gradients, values and selections share one where they can."""
    batch = batch_of("knapsack", 3, 4, "float64")
    lattice, *problem = batch.constants("gini")
    for _ in range(2):
        numba.operator(batch.theta, lattice, *problem)
        numba.relax(batch.theta, lattice, *problem)
        numba.vjp(batch.theta, batch.theta, lattice, *problem)
    assert [key[0] for key in lattice.memo] == ["operator", "vjp"]


@pytest.mark.parametrize("sizes", [(0, 0, 0, 0), (1, 1, 1, 1), (55, 123, 1000, 77), (8, 16, 64, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_on_cache_lines_of_their_own(sizes, dtype):
    """A vector across two lines takes twice as long."""
    memory = threads.Memory(np.dtype(dtype), sizes)
    frame, bytes_of_items = memory.frame.tolist(), (8, 8, np.dtype(dtype).itemsize, np.dtype(dtype).itemsize)
    begins = [frame[frames.ITSELF], *(frame[at] for at in (frames.INTEGERS, frames.WIDE, frames.NARROW, frames.TABLE))]
    lengths = [8 * frames.SCRATCH, *(size * length for size, length in zip(bytes_of_items, sizes))]
    assert all(begin % layout.LINE == 0 for begin in begins)
    assert all(begin + length <= later for begin, length, later in zip(begins, lengths, begins[1:]))
    block = memory.frame.base
    assert frames.address(block) <= begins[0] and begins[-1] + lengths[-1] <= frames.address(block) + len(block)
    assert frame[1:8:2] == [*sizes[:3], 1]  # rows of the table


def test_an_unknown_direction_is_an_error():
    with pytest.raises(KeyError, match="sideways"):
        launch.direction_of("sideways")


def test_one_kernel_serves_every_constraint():
    """Else Numba compiles one for each, and keeps it on disk."""
    kernels = (
        sweeps.operator_kernel,
        sweeps.tangent_kernel,
        paths.sample_kernel,
        paths.log_prob_kernel,
        paths.mode_kernel,
    )

    def compiled(kind: str, own: bool) -> list[Any]:
        batch = batch_of(kind, 3, 4, "float64", own=own)
        for array in (batch.theta, batch.weights, batch.capacity):
            array.flags.writeable = not own
        for call in OPERATIONS.values():
            call(batch.theta, *batch.constants("gini"))
        return [set(kernel.signatures) for kernel in kernels]

    first = compiled("knapsack", False)
    for kind in CONSTRAINTS:
        for own in (False, True):
            assert compiled(kind, own) == first, (kind, own)


def test_the_reference_knows_every_regularizer():
    assert tuple(CLASSES) == REGULARIZERS


# Which states a group visits.


@st.composite
def groups(draw: st.DrawFn, members: int) -> Batch:
    """A group of instances that share their weights, light and heavy; some least weights cannot be reached, and some
    capacities are above the total weight."""
    weights = draw(st.lists(st.integers(0, 3) | st.integers(0, 40) | st.integers(40, 120), min_size=1, max_size=8))
    total, capacity, least = sum(weights), [], []
    for _ in range(members):
        capacity.append(draw(st.integers(0, total) | st.integers(total, total + 20)))
        small = draw(st.booleans())
        least.append(draw(st.integers(0, min(3, capacity[-1]) if small else capacity[-1])))
    theta = np.random.default_rng(draw(st.integers(0, 99))).standard_normal((members, len(weights)))
    return Batch(theta, np.array([weights]), np.array(capacity), np.array(least))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_lanes", [False, True], ids=["capacities in the lanes", "instances in the lanes"])
@settings(max_examples=60)
@given(data=st.data())
def test_every_state_on_a_way_back_is_inside_a_band(in_lanes, dtype, data):
    """Also where the way is infeasible, since log_prob follows those too. Where another state stands for a feasible
    one, the two are alike."""
    batch = data.draw(groups(data.draw(st.integers(2, 8)) if in_lanes else 1))
    found = bands_of(batch, dtype, in_lanes)
    (weights,), n, unit = batch.weights, batch.theta.shape[1], 1 if in_lanes else LANES[dtype]
    columns = bands.START, bands.KNEE, bands.TOP, bands.COUNT, bands.NEXT, bands.END, bands.OFFSET
    start, knee, top, count, upper, end, offset = found[:n, columns].T
    assert (count >= 0).all() and (count <= upper).all() and (upper <= end).all(), "parts overlap"
    assert (np.diff(knee) >= 0).all() and (np.diff(top) >= 0).all()
    assert (start >= weights).all(), "a pick would read below the row"
    np.testing.assert_array_equal(offset, np.cumsum(end * LANES[dtype]) - end * LANES[dtype])
    for theta, lattice, _ in batch.instances():
        V, _ = reference.tables(theta, lattice, CLASSES["gini"])
        states = {lattice.capacity}
        for i in reversed(range(n)):
            settled = {c: bands.settle.py_func(c, knee[i], top[i], found[n, bands.KNEE]) for c in states}
            for c, same in settled.items():
                assert V[i + 1, c] in (V[i + 1, same], INFEASIBLE), (i, c, same)
            states = set(settled.values())
            fits = {c for c in states if c >= weights[i]}
            for cell in ((c - start[i]) // unit for c in fits):
                assert 0 <= cell < count[i] or upper[i] <= cell < end[i], (i, cell, found[i])
            states |= {c - weights[i] for c in fits}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_lanes", [False, True], ids=["capacities in the lanes", "instances in the lanes"])
@settings(max_examples=40)
@given(data=st.data())
def test_random_groups_against_the_reference(in_lanes, dtype, data):
    """With parts of bands that are far apart, near to each other, and grown together."""
    batch = data.draw(groups(data.draw(st.integers(5, 8)) if in_lanes else 1))
    for b, (theta, lattice, _) in enumerate(batch.instances()):
        if reference.tables(theta, lattice, CLASSES["gini"])[0][-1, lattice.capacity] == INFEASIBLE:
            batch.at_least[b] = 0
    batch = replace(batch, theta=batch.theta.astype(dtype))
    check_against_reference(batch, data.draw(st.sampled_from(REGULARIZERS)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bands_have_two_parts_where_they_should(dtype):
    """Else the tests above would not see a gap. The bands of a knapsack and of top-k have one part, as they always
    had."""
    for in_lanes in (False, True):
        size = LANES[dtype] if in_lanes else 1
        for kind in KINDS:
            batch = batch_of(kind, size, 25, dtype)
            count, upper, end = bands_of(batch, dtype, in_lanes)[:25, (bands.COUNT, bands.NEXT, bands.END)].T
            has_gap = (count > 0) & (count < upper) & (upper < end)
            if kind != "at least":
                assert has_gap.any() == (kind == "two parts"), (kind, in_lanes)


NEIGHBOURS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "knapsack": lambda most, least: kg.Knapsack([3, 6, 3, 9], most, at_least=least),
    "top-k": lambda most, least: kg.TopK(np.minimum(most, 4), at_least=np.minimum(least, np.minimum(most, 4))),
    "options": lambda most, least: kg.MultipleChoice([[0, 3], [6, 9]], most, at_least=least),
    "optional options": lambda most, least: kg.MultipleChoice(
        [[1], [2], [1], [3]], most, optional=True, at_least=least
    ),
}


@pytest.mark.parametrize("regularizer", ["gini", "hard"])
@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_instances_without_a_feasible_selection_leave_their_neighbours_alone(kind, regularizer):
    """Instances share vectors, and the plan of their rows. (With a NaN they are looked at, and no error is raised.)"""
    rng, size = np.random.default_rng(len(kind)), 40
    most = rng.integers(0, 25, size)
    least = np.maximum(most - rng.integers(0, 6, size), 0)
    constraint = NEIGHBOURS[kind](most, least)
    event = (4, 1) if kind == "optional options" else (2, 2) if kind == "options" else (4,)
    theta = rng.normal(size=(size, *event))
    theta = constraint.flat(backends.load("numpy"), theta)
    limits, n = constraint.lattice(theta.shape[1]), theta.shape[1]
    uniforms = rng.random((3, size, n))
    alone = {}
    for b in range(size):
        slack = limits.slack if limits.slack.ndim == 0 else limits.slack[b : b + 1]
        own = limits.replace(capacity=limits.capacity[b : b + 1], slack=slack)
        try:
            arguments = theta[b : b + 1], uniforms[:, b : b + 1], own, np.ones(1), regularizer
            alone[b] = numba.sample(*arguments)[:, 0]
        except ValueError:  # nothing is feasible
            theta[b, 0] = np.nan
    assert len(alone) < size - 3 or kind == "top-k"
    assert len(alone) > 5
    together = numba.sample(theta, uniforms, limits, np.ones(1), regularizer)
    for b, expected in alone.items():
        np.testing.assert_array_equal(together[:, b], expected)
    if kind == "top-k":  # fewer items than the least number
        theta[::7, :] = -np.inf
        theta[::7, 0] = np.nan
        together = numba.sample(theta, uniforms, limits, np.ones(1), regularizer)
        for b in set(alone) - set(range(0, size, 7)):
            np.testing.assert_array_equal(together[:, b], alone[b])
