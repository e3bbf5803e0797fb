"""The fast kernels for choices against the reference, at odd sizes, on poisoned scratch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from knapgrad import reference
from knapgrad.kernels import numba
from knapgrad.lattice import Lattice
from knapgrad.regularizers import REGULARIZERS as CLASSES

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

UNIT = np.ones(1)
TIGHT = TOLERANCES["float64"]


def lattices(size: int, groups: int, options: int, own: bool, least: bool, optional: bool) -> Lattice:
    """Of weights that all instances share, or that each has for its own, with capacities far apart."""
    rng = np.random.default_rng([size, groups, options, own, least, optional])
    weights = rng.integers(0, 12, (size, groups, options) if own else (groups, options))
    every = np.broadcast_to(weights, (size, groups, options))
    picked = rng.integers(0, options, (size, groups, 1))
    load = np.take_along_axis(every, picked, -1).sum((-2, -1))
    capacity = load + rng.integers(0, 30, size) * rng.integers(0, 2, size)
    at_least = np.maximum(load - rng.integers(0, 5, size), 0) * rng.integers(0, 2, size) if least else 0
    limit = kg.MultipleChoice(weights, capacity, at_least=at_least, optional=optional)
    return limit.lattice(groups * (options + (optional and options > 1)))


def instances(theta: np.ndarray, lattice: Lattice) -> Iterator[tuple[np.ndarray, Lattice]]:
    """theta and the lattice for the reference, just as wide as the capacity says."""
    shape = len(theta)
    weights = np.broadcast_to(lattice.weights, theta.shape)
    capacity = np.broadcast_to(lattice.capacity, shape).tolist()
    slack = [None] * shape if lattice.slack is None else np.broadcast_to(lattice.slack, shape).tolist()
    for row, own, c, s in zip(theta, weights, capacity, slack):
        yield row, Lattice(own, c, s, c, 0, lattice.options)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("size, own", [(1, False), (3, True), (8, False), (11, False)])
@pytest.mark.parametrize("groups, options", [(1, 2), (5, 1), (4, 3), (3, 8), (6, 5)])
@pytest.mark.parametrize("least, optional", [(False, False), (True, False), (True, True)])
def test_every_kernel_is_the_specification(size, own, groups, options, least, optional, regularizer):
    lattice = lattices(size, groups, options, own, least, optional)
    n, rng = lattice.weights.shape[-1], np.random.default_rng(0)
    theta, z = rng.standard_normal((size, n)), rng.standard_normal((size, n))
    theta[rng.random((size, n)) < 0.1] = -50.0  # next to masked, and always feasible
    problem, smoothing = (lattice, UNIT, regularizer), CLASSES[regularizer]
    uniforms = rng.random((3, size, n))
    value, y = numba.operator(theta, *problem)
    product, entropy, slope = (
        numba.vjp(theta, z, *problem),
        numba.entropy(theta, *problem),
        numba.entropy_grad(theta, *problem),
    )
    drawn, best = numba.sample(theta, uniforms, *problem), numba.solve(theta, lattice)
    log_prob = numba.log_prob(theta, drawn, *problem)
    _, _, table = numba.tabulate(theta, *problem)
    np.testing.assert_array_equal(numba.sample(theta, uniforms, *problem, table), drawn)
    for b, (row, one) in enumerate(instances(theta, lattice)):
        given = one, smoothing
        expected_value, expected_y = reference.operator(row, *given)
        np.testing.assert_allclose(value[b], expected_value, rtol=TIGHT.value, atol=TIGHT.value)
        np.testing.assert_allclose(y[b], expected_y, atol=TIGHT.relax)
        np.testing.assert_allclose(product[b], reference.vjp(row, z[b], *given), atol=TIGHT.vjp)
        expected_entropy, expected_slope = reference.entropy(row, *given)
        np.testing.assert_allclose(entropy[b], expected_entropy, atol=TIGHT.value * 10)
        np.testing.assert_allclose(slope[b], expected_slope, atol=TIGHT.vjp * 10)
        assert row @ best[b] == pytest.approx(row @ reference.solve(row, one), rel=1e-12, abs=1e-12)
        for s in range(3):
            np.testing.assert_array_equal(drawn[s, b], reference.sample(row, uniforms[s, b], *given))
            assert log_prob[s, b] == pytest.approx(reference.log_prob(row, drawn[s, b], *given), abs=1e-9)


@pytest.mark.parametrize("size, own", [(1, False), (3, True), (11, False)])
@pytest.mark.parametrize("groups, options", [(7, 0), (4, 3), (6, 5)])
@pytest.mark.parametrize("exactly", [False, True])
def test_frontiers_are_the_specification(size, own, groups, options, exactly, regularizer):
    lattice = lattices(size, groups, max(options, 1), own, False, options == 0)
    lattice = lattice.replace(slack=np.zeros((), np.int64) if exactly else None)
    n, rng = lattice.weights.shape[-1], np.random.default_rng(0)
    theta, cotangent = rng.standard_normal((size, n)), rng.standard_normal((size, lattice.reach + 1))
    for name in (regularizer, "hard"):
        smoothing = CLASSES.get(name, reference.Hard)
        rows = numba.frontier(theta, lattice, UNIT, name)
        gradient = numba.frontier_vjp(theta, cotangent, lattice, UNIT, name)
        for b in range(size):
            weights = np.broadcast_to(lattice.weights, theta.shape)[b]
            one = Lattice(weights, lattice.reach, 0 if exactly else None, lattice.reach, 0, lattice.options)
            row = reference.frontier(theta[b], one, smoothing)
            feasible = row > -1e200
            np.testing.assert_array_equal(np.isneginf(rows[b]), ~feasible)
            np.testing.assert_allclose(rows[b][feasible], row[feasible], rtol=TIGHT.value, atol=TIGHT.value)
            start = np.where(feasible, cotangent[b], 0.0)
            np.testing.assert_allclose(gradient[b], reference.frontier_vjp(theta[b], start, one, smoothing), atol=1e-9)
