"""The fast kernels against the reference and long-double tables, at odd and large sizes, on poisoned scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import TOLERANCES
from instances import problems
from knapgrad import reference
from knapgrad.kernels import numba_cpu, pool
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import LONG_IS_LONGER, REGULARIZERS, long_table, long_vjp

DTYPES = ("float32", "float64")


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call finds NaN in its scratch: a cell that is read must have been written."""
    plain = pool.scratch

    def poisoned(*arguments: Any) -> Any:
        buffers = plain(*arguments)
        for buffer in buffers:
            buffer.fill(np.nan if buffer.dtype.kind == "f" else 1)
        return buffers

    monkeypatch.setattr(pool, "scratch", poisoned)
    yield


UNIT = np.ones(1)


@dataclass(frozen=True)
class Batch:
    """Arguments for a kernel: unit gamma, theta (batch, n)."""

    theta: np.ndarray
    weights: np.ndarray  # (1 or batch, n)
    capacity: np.ndarray  # (1 or batch,)
    exactly: bool

    def constants(self, regularizer: str) -> tuple[Any, ...]:
        return self.weights, self.capacity, UNIT, regularizer, self.exactly

    def unshared(self) -> Batch:
        """The same instances, each with weights of its own: the kernels then put capacities in the lanes."""
        weights = np.broadcast_to(self.weights, self.theta.shape).copy()
        return Batch(self.theta, weights, np.broadcast_to(self.capacity, len(self.theta)).copy(), self.exactly)

    def instances(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        whole = self.unshared()
        for theta, weights, capacity in zip(whole.theta, whole.weights, whole.capacity):
            yield theta.astype(np.float64), weights, int(capacity)


def batch_of(
    constraint: str, size: int, n: int, dtype: str, *, capacity: int | None = None, own: bool = False, scale=1.0
) -> Batch:
    rng = np.random.default_rng([size, n, len(constraint)])
    theta = (scale * rng.standard_normal((size, n))).astype(dtype)
    rows = size if own else 1
    if constraint == "top-k":
        k = rng.integers(0, n + 1, rows) if own else np.array([(n + 1) // 2 if capacity is None else min(capacity, n)])
        return Batch(theta, np.ones((1, n), np.int64), k.astype(np.int64), True)
    weights = rng.integers(0, 9, (rows, n))
    half = weights.sum(axis=1) // 2
    chosen = half if capacity is None else np.full(rows, capacity)
    return Batch(theta, weights, chosen.astype(np.int64), False)


def assert_relative(actual: np.ndarray, expected: np.ndarray, tolerance: float, scale: Any = 0.0) -> None:
    assert np.abs(actual - expected).max(initial=0.0) <= tolerance * max(
        np.abs(expected).max(initial=0.0), np.max(scale)
    )


def check_against_reference(batch: Batch, regularizer: str, dtype: str) -> None:
    tolerance, smoothing = TOLERANCES[dtype], CLASSES[regularizer]
    rng = np.random.default_rng(0)
    z = rng.standard_normal(batch.theta.shape).astype(dtype)
    uniforms = rng.random((2, *batch.theta.shape)).astype(dtype) * 0.999
    value, y = numba_cpu.operator(batch.theta, *batch.constants(regularizer))
    product = numba_cpu.vjp(batch.theta, z, *batch.constants(regularizer))
    entropy = numba_cpu.entropy(batch.theta, *batch.constants(regularizer))
    entropy_slope = numba_cpu.entropy_grad(batch.theta, *batch.constants(regularizer))
    drawn = numba_cpu.sample(batch.theta, uniforms, *batch.constants(regularizer))
    hard = numba_cpu.solve(batch.theta, batch.weights, batch.capacity, batch.exactly)
    log_prob = numba_cpu.log_prob(
        batch.theta.astype(np.float64), drawn.astype(np.float64), *batch.constants(regularizer)
    )
    assert value.dtype == np.float64 and y.dtype == product.dtype == drawn.dtype == hard.dtype == batch.theta.dtype
    for b, (theta, weights, capacity) in enumerate(batch.instances()):
        arguments = weights, capacity, smoothing, batch.exactly
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
        best = reference.solve(theta, weights, capacity, batch.exactly)
        assert theta @ hard[b] == pytest.approx(theta @ best, rel=1e-12, abs=1e-12)
        weight = weights @ hard[b]
        assert weight == capacity if batch.exactly else weight <= capacity
        if dtype == "float64":
            for s in range(2):
                np.testing.assert_array_equal(drawn[s, b], reference.sample(theta, uniforms[s, b], *arguments))
        for s in range(2):
            expected = reference.log_prob(theta, drawn[s, b], *arguments)
            assert log_prob[s, b] == pytest.approx(expected, rel=1e-9, abs=1e-9) or expected < -30


@pytest.mark.parametrize("size", [1, 3])
def test_many_samples_against_the_reference(size, regularizer, constraint):
    """Paths that take turns in eights, with a rest."""
    batch = batch_of(constraint, size, 17, "float64", own=True)
    uniforms = np.random.default_rng(0).random((11, *batch.theta.shape))
    drawn = numba_cpu.sample(batch.theta, uniforms, *batch.constants(regularizer))
    for b, (theta, weights, capacity) in enumerate(batch.instances()):
        for s in range(11):
            expected = reference.sample(theta, uniforms[s, b], weights, capacity, CLASSES[regularizer], batch.exactly)
            np.testing.assert_array_equal(drawn[s, b], expected)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_small_sizes_against_the_reference(n, size, own, regularizer, constraint):
    for dtype in DTYPES:
        check_against_reference(batch_of(constraint, size, n, dtype, own=own), regularizer, dtype)


@pytest.mark.parametrize("capacity", [0, 1, 7, 8, 14, 15, 16, 17, 31, 32])
def test_capacities_around_the_width_of_a_vector(capacity, regularizer, constraint):
    for dtype in DTYPES:
        for size in (1, 9):
            check_against_reference(batch_of(constraint, size, 20, dtype, capacity=capacity), regularizer, dtype)


@pytest.mark.parametrize("size", [1, 9])
def test_a_hundred_items_against_the_reference(size, regularizer, constraint):
    for dtype in DTYPES:
        for own in (False, True):
            check_against_reference(batch_of(constraint, size, 100, dtype, own=own), regularizer, dtype)


def test_capacities_of_all_sizes_in_one_group(regularizer):
    """Lanes of one group start from states far apart, above the total weight as well."""
    rng = np.random.default_rng(3)
    for dtype in DTYPES:
        weights = rng.integers(0, 7, (1, 23))
        capacity = np.array([0, 200, 1, 5, 16, 15, 60, 31, 10**12, 2, 0, 33, 17, 45, 3, 69, 8, 8, 68], dtype=np.int64)
        theta = rng.standard_normal((len(capacity), 23)).astype(dtype)
        value, y = numba_cpu.operator(theta, weights, capacity, UNIT, regularizer, False)
        total = int(weights.sum())
        small = Batch(theta, weights, np.minimum(capacity, total + 3), False)
        same_value, same_y = numba_cpu.operator(small.theta, *small.constants(regularizer))
        np.testing.assert_allclose(value, same_value, rtol=1e-14)
        np.testing.assert_allclose(y, same_y, atol=np.finfo(dtype).eps)
        check_against_reference(small, regularizer, dtype)


@pytest.mark.parametrize("size, n", [(3, 17), (16, 17), (33, 40), (130, 25)])
def test_the_two_lane_layouts_agree(size, n, regularizer, constraint):
    for dtype in DTYPES:
        batch = batch_of(constraint, size, n, dtype)
        z = np.random.default_rng(1).standard_normal((size, n)).astype(dtype)
        uniforms = np.random.default_rng(2).random((3, size, n)).astype(dtype)
        tolerance = TOLERANCES[dtype]
        one, other = batch, batch.unshared()
        values, relaxed = zip(*(numba_cpu.operator(b.theta, *b.constants(regularizer)) for b in (one, other)))
        assert_relative(values[0], values[1], tolerance.value)
        assert_relative(relaxed[0], relaxed[1], tolerance.relax, 1.0)
        products = [numba_cpu.vjp(b.theta, z, *b.constants(regularizer)) for b in (one, other)]
        assert_relative(products[0], products[1], tolerance.vjp)
        drawn = [numba_cpu.sample(b.theta, uniforms, *b.constants(regularizer)) for b in (one, other)]
        np.testing.assert_array_equal(*drawn)
        entropies = [numba_cpu.entropy(b.theta, *b.constants(regularizer)) for b in (one, other)]
        assert_relative(entropies[0], entropies[1], tolerance.value)
        hard = [numba_cpu.solve(b.theta, b.weights, b.capacity, b.exactly) for b in (one, other)]
        np.testing.assert_array_equal(*hard)
        log_probs = [numba_cpu.log_prob(b.theta, drawn[0], *b.constants(regularizer)) for b in (one, other)]
        assert_relative(log_probs[0], log_probs[1], tolerance.log_prob)


def test_a_table_too_large_for_instances_in_the_lanes(regularizer):
    """Many instances with a wide table: the layout with capacities in the lanes takes over."""
    rng = np.random.default_rng(5)
    n, weights = 12, np.full((1, 12), 5000)
    weights += rng.integers(0, 900, (1, n))
    theta = rng.standard_normal((20, n)).astype(np.float32)
    capacity = np.array([int(weights.sum()) // 2])
    few = numba_cpu.operator(theta[:2], weights, capacity, UNIT, regularizer, False)
    many = numba_cpu.operator(theta, weights, capacity, UNIT, regularizer, False)
    assert_relative(many[0][:2], few[0], TOLERANCES["float32"].value)
    assert_relative(many[1][:2], few[1], TOLERANCES["float32"].relax, 1.0)
    expected = reference.operator(theta[1].astype(float), weights[0], int(capacity[0]), CLASSES[regularizer], False)
    assert np.abs(many[1][1] - expected[1]).max() <= TOLERANCES["float32"].relax


@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
@pytest.mark.parametrize(
    "constraint, size, capacity", [("knapsack", 1, None), ("knapsack", 17, 300), ("top-k", 17, 50), ("top-k", 1, 500)]
)
def test_a_thousand_items_against_long_double(constraint, size, capacity, regularizer):
    for dtype in DTYPES:
        batch = batch_of(constraint, size, 1000, dtype, capacity=capacity)
        value, y = numba_cpu.operator(batch.theta, *batch.constants(regularizer))
        for b in (0, size - 1):
            theta, weights, most = list(batch.instances())[b]
            expected_value, expected_y = long_table(theta, weights, most, regularizer, batch.exactly)
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
    problem = type(problem)(theta, problem.weights, problem.capacity)
    z = rng.standard_normal(theta.shape).astype(dtype)
    weights = np.ones(problem.n, np.int64) if problem.exactly else np.asarray(problem.weights, np.int64)
    capacity = np.asarray(problem.capacity, np.int64)
    product = numba_cpu.vjp(theta.astype(dtype), z, weights, capacity, UNIT, regularizer, problem.exactly)
    for one, actual, direction in zip(problem.truths(regularizer), problem.flat(product), problem.flat(z)):
        expected = one.vjp(direction)
        assert_relative(actual, expected, TOLERANCES[dtype].vjp, np.abs(direction).max(initial=0.0) / 10)


@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
def test_vjp_against_differences_in_long_double(regularizer, constraint):
    batch = batch_of(constraint, 3, 100, "float32")
    z = np.random.default_rng(1).standard_normal(batch.theta.shape).astype(np.float32)
    product = numba_cpu.vjp(batch.theta, z, *batch.constants(regularizer))
    for b, (theta, weights, capacity) in enumerate(batch.instances()):
        expected = long_vjp(theta, z[b], weights, capacity, regularizer, batch.exactly)
        assert_relative(product[b], expected, TOLERANCES["float32"].vjp)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_vjp_at_near_ties(scale, regularizer, constraint):
    """float32 with accurate rows against the reference in float64; each score is as large as ``scale`` gammas."""
    rng = np.random.default_rng(7)
    n, size = 100, 17
    weights = np.ones((1, n), np.int64) if constraint == "top-k" else rng.integers(3, 9, (1, n))
    capacity = np.array([10 if constraint == "top-k" else int(weights.sum()) // 2])
    theta = (scale * weights / weights.max() + rng.standard_normal((size, n))).astype(np.float32)
    z = rng.standard_normal((size, n)).astype(np.float32)
    for batch in (
        Batch(theta, weights, capacity, constraint == "top-k"),
        Batch(theta, weights, capacity, constraint == "top-k").unshared(),
    ):
        product = numba_cpu.vjp(theta, z, *batch.constants(regularizer))
        for b, (scores, own, most) in enumerate(batch.instances()):
            expected = reference.vjp(scores, z[b].astype(np.float64), own, most, CLASSES[regularizer], batch.exactly)
            assert_relative(product[b], expected, TOLERANCES["float32"].vjp)


def test_vjp_with_masks_has_no_nan(regularizer, constraint):
    for dtype in DTYPES:
        batch = batch_of(constraint, 17, 20, dtype, capacity=6)
        theta = batch.theta.copy()
        theta[:, ::3] = -np.inf
        z = np.ones_like(theta)
        product = numba_cpu.vjp(theta, z, *batch.constants(regularizer))
        assert np.isfinite(product).all()
        assert (product[:, ::3] == 0).all()


def test_log_prob_gradient_against_differences(regularizer, constraint):
    batch = batch_of(constraint, 17, 9, "float64", scale=0.4)
    rng = np.random.default_rng(8)
    y = numba_cpu.sample(batch.theta, rng.random((3, 17, 9)), *batch.constants(regularizer))
    cotangent = rng.standard_normal((3, 17))
    step = 1e-6
    for one in (batch, batch.unshared()):
        gradient = numba_cpu.log_prob_vjp(one.theta, y, cotangent, *one.constants(regularizer))
        for i in range(9):
            shift = np.zeros(9)
            shift[i] = step
            up = numba_cpu.log_prob(one.theta + shift, y, *one.constants(regularizer))
            down = numba_cpu.log_prob(one.theta - shift, y, *one.constants(regularizer))
            slope = (cotangent * (up - down) / (2 * step)).sum(axis=0)
            np.testing.assert_allclose(gradient[:, i], slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 33])
def test_a_kept_table_gives_the_same_samples_and_log_probs(size, regularizer, constraint):
    for dtype in DTYPES:
        batch = batch_of(constraint, size, 19, dtype)
        uniforms = np.random.default_rng(9).random((4, size, 19)).astype(dtype)
        value, y, table = numba_cpu.tabulate(batch.theta, *batch.constants(regularizer))
        plain_value, plain_y = numba_cpu.operator(batch.theta, *batch.constants(regularizer))
        np.testing.assert_array_equal(value, plain_value)
        np.testing.assert_array_equal(y, plain_y)
        drawn = numba_cpu.sample(batch.theta, uniforms, *batch.constants(regularizer))
        np.testing.assert_array_equal(
            numba_cpu.sample(batch.theta, uniforms, *batch.constants(regularizer), table=table), drawn
        )
        log_prob = numba_cpu.log_prob(batch.theta, drawn, *batch.constants(regularizer))
        kept = numba_cpu.log_prob(batch.theta, drawn, *batch.constants(regularizer), table=table)
        assert_relative(kept, log_prob, TOLERANCES[dtype].log_prob)


@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_uniform_numbers_give_feasible_selections(u, regularizer, constraint):
    """A pick that is certain is made, one that is impossible is not, whatever number is drawn from [0, 1)."""
    batch = batch_of(constraint, 17, 9, "float64", scale=3.0)
    batch.theta[:, ::3] = -np.inf
    drawn = numba_cpu.sample(batch.theta, np.full((1, 17, 9), u), *batch.constants(regularizer))
    for y, (_, weights, capacity) in zip(drawn[0], batch.instances(), strict=True):
        assert weights @ y == capacity if batch.exactly else weights @ y <= capacity
    assert (drawn[..., ::3] == 0).all()
    assert (numba_cpu.log_prob(batch.theta, drawn, *batch.constants(regularizer)) > -np.inf).all()


def test_the_reference_knows_every_regularizer():
    assert tuple(CLASSES) == REGULARIZERS
