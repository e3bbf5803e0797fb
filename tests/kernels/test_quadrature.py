"""Top-k under Shannon without a table (kernels/numba/laws.py, quadrature.py), at all sizes: against enumeration, and
against sums in 50 digits at larger ones."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given

import knapgrad as kg
from instances import Problem, problems
from knapgrad import reference
from knapgrad.kernels.numba import launch, layout
from knapgrad.kernels.numba.layout import QUADRATURE, TABLE
from oracles import subsets

UNIT = np.ones(())
TOLERANCE = {"float64": (1e-13, 1e-12, 1e-11), "float32": (1e-6, 5e-7, 3e-6)}  # value, relax, VJP
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """However small an instance is."""
    monkeypatch.setattr(layout, "LEAST", dict.fromkeys(layout.LEAST, 0))


def lattice(k: Any, n: int, at_least: Any = None) -> Any:
    return kg.TopK(k, at_least=at_least).lattice(n)


def results(theta: np.ndarray, z: np.ndarray, limits: Any, gamma: Any = UNIT) -> dict[str, np.ndarray]:
    arguments = limits, gamma, "shannon"
    value, y = launch.operator(theta, *arguments)
    np.testing.assert_array_equal(launch.relax(theta, *arguments), y)
    return {
        "value": value, "relax": y, "vjp": launch.vjp(theta, z, *arguments),
        "entropy": launch.entropy(theta, *arguments), "entropy_grad": launch.entropy_grad(theta, *arguments),
    }  # fmt: skip


def ways_of(limits: Any) -> set[int]:
    return {plan.way for plan in limits.memo.values()}


def test_it_is_chosen_by_sizes_alone(monkeypatch):
    monkeypatch.undo()
    cases = {(20, 50, 5): TABLE, (20, 1000, 100): QUADRATURE, (20, 1000, 999): TABLE, (20, 1000, 990): QUADRATURE}
    cases |= {(2, 20, 5): TABLE, (2, 50, 5): QUADRATURE, (20, 600, 0): TABLE}
    for (size, n, k), way in cases.items():
        theta, top, ones = np.zeros((size, n)), lattice(k, n), kg.Knapsack(np.ones(n, int), k, at_least=k).lattice(n)
        for limits in (top, ones):
            launch.operator(theta, limits, UNIT, "shannon")
            assert ways_of(limits) == {way}
    theta = np.zeros((2, 1000))
    twos = kg.Knapsack(np.full(1000, 2), 200).lattice(1000)
    for limits, regularizer in ((lattice(100, 1000), "gini"), (twos, "shannon")):
        launch.operator(theta, limits, UNIT, regularizer)
        assert ways_of(limits) == {TABLE}


@DTYPES
@given(problem=problems("top-k"))
def test_it_is_the_enumeration(problem, dtype):
    problem = problem.rounded(dtype)
    theta, z = problem.theta.astype(dtype), np.cos(np.arange(problem.theta.size)).reshape(problem.theta.shape)
    limits, gamma = problem.constraint.lattice(problem.n), np.asarray(problem.gamma, float)
    found = results(theta, z.astype(dtype), limits, gamma)
    assert problem.n == 0 or theta.size == 0 or ways_of(limits) == {QUADRATURE}
    for b, truth in enumerate(problem.truths("shannon")):
        at = np.unravel_index(b, problem.batch)
        scale = np.broadcast_to(problem.gamma, problem.batch)[at]
        tight = 30 if dtype == "float64" else 1  # enumeration rounds as well
        value, relax, _ = (tight * x for x in TOLERANCE[dtype])
        assert abs(found["value"][at] * scale - truth.value) <= value * max(problem.scale()[at], abs(truth.value))
        assert np.abs(found["relax"][at] - truth.relax).max(initial=0) <= relax
        assert abs(found["entropy"][at] - truth.entropy) <= 10 * relax * max(1, truth.entropy)


@DTYPES
@pytest.mark.parametrize("k, at_least", [(3, 3), (4, 1), (6, 0), (7, 2), (1, 1), (6, 5)])
def test_log_prob_of_every_selection(k, at_least, dtype):
    theta = np.random.default_rng(k).normal(scale=2, size=(1, 7)).astype(dtype)
    every = np.array(subsets(7), dtype)[:, None]
    limits = lattice(k, 7, at_least), np.array(0.6), "shannon"
    found = launch.log_prob(theta, every, *limits)[:, 0]
    scores, counts = (every[:, 0].astype(float) @ theta[0].astype(float)) / 0.6, every[:, 0].sum(-1)
    allowed = (counts >= at_least) & (counts <= k)
    exact = np.where(allowed, scores - np.logaddexp.reduce(scores[allowed]), -np.inf)
    assert (np.isneginf(found) == ~allowed).all()
    np.testing.assert_allclose(found[allowed], exact[allowed], rtol=0, atol=TOLERANCE[dtype][2] * 10)
    weights = np.where(allowed, np.cos(np.arange(len(every))), 0)[:, None].astype(dtype)
    gradient = launch.log_prob_vjp(theta, every, weights, *limits)[0]
    marginals = np.exp(exact[allowed]) @ every[allowed, 0]
    expected = (weights[allowed] * (every[allowed, 0] - marginals)).sum(0)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE[dtype][2] * 10)


FAMILIES: dict[str, Any] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "wide": lambda rng, n: 30 * rng.normal(size=n),
    "near-ties": lambda rng, n: 1e4 * rng.integers(0, 5, n) + rng.normal(size=n),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(float),
    "equal": lambda rng, n: np.full(n, 0.7),
    "heavy tails": lambda rng, n: rng.standard_cauchy(n),
    "offset": lambda rng, n: 1e6 + rng.normal(size=n),
    "sorted": lambda rng, n: np.sort(rng.normal(size=n)),
    "two clusters": lambda rng, n: np.where(rng.random(n) < 0.5, 40.0, -40.0) + rng.normal(size=n),
    "one above all": lambda rng, n: np.where(np.arange(n) == 3, 500.0, 0.0) + rng.normal(size=n),
    "masked": lambda rng, n: np.where(rng.random(n) < 0.3, -np.inf, rng.normal(size=n)),
}


def exact(theta: np.ndarray, z: np.ndarray, k: int, at_least: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Value, marginals and H z in 50 digits: elementary symmetric functions from both ends."""
    with mpmath.workdps(50):
        free = [i for i in range(len(theta)) if theta[i] > -np.inf]
        top = max(theta[i] for i in free)
        w = [mpmath.exp(mpmath.mpf(float(theta[i])) - mpmath.mpf(float(top))) for i in free]
        n = len(w)
        low: list[Any] = [[mpmath.mpf(1)] + [mpmath.mpf(0)] * k]
        for x in w:
            row = low[-1]
            low.append([row[0]] + [row[c] + x * row[c - 1] for c in range(1, k + 1)])
        # counts weigh e^{c top}: relative to that of the largest count
        weight = [mpmath.exp((c - k) * mpmath.mpf(float(top))) for c in range(k + 1)]
        total = sum(low[n][c] * weight[c] for c in range(at_least, k + 1))
        # backwards: the derivative of the total in each w, and in pairs by a difference of marginals
        back = [mpmath.mpf(0)] * (k + 1)
        for c in range(at_least, k + 1):
            back[c] = weight[c]
        y = [mpmath.mpf(0)] * n
        tangent, T = [mpmath.mpf(0)] * n, [[mpmath.mpf(0)] * (k + 1)]
        for x, i in zip(w, free):  # derivatives of the rows in direction z
            row, previous = T[-1], low[len(T) - 1]
            T.append([row[0]] + [row[c] + x * (row[c - 1] + float(z[i]) * previous[c - 1]) for c in range(1, k + 1)])
        slope = sum(T[n][c] * weight[c] for c in range(at_least, k + 1)) / total
        backward_tangent = [mpmath.mpf(0)] * (k + 1)
        for j in range(n - 1, -1, -1):
            x, zi = w[j], float(z[free[j]])
            before, before_tangent = low[j], T[j]
            y[j] = sum(back[c] * x * before[c - 1] for c in range(1, k + 1)) / total
            change = sum(
                backward_tangent[c] * x * before[c - 1] + back[c] * x * (before_tangent[c - 1] + zi * before[c - 1])
                for c in range(1, k + 1)
            )
            tangent[j] = change / total - y[j] * slope
            backward_tangent = [
                backward_tangent[c] + (x * (backward_tangent[c + 1] + zi * back[c + 1]) if c < k else 0)
                for c in range(k + 1)
            ]
            back = [back[c] + (x * back[c + 1] if c < k else 0) for c in range(k + 1)]
        value = mpmath.log(total) + k * mpmath.mpf(float(top))
        whole, product = np.zeros(len(theta)), np.zeros(len(theta))
        whole[free], product[free] = [float(a) for a in y], [float(a) for a in tangent]
        return value, whole, product


@DTYPES
@pytest.mark.parametrize("n, k, at_least", [(33, 5, 5), (70, 30, 10), (160, 12, 0), (130, 65, 65)])
@pytest.mark.parametrize("family", FAMILIES)
def test_errors(family, n, k, at_least, dtype):
    rng = np.random.default_rng(n)
    theta, z = FAMILIES[family](rng, n).astype(dtype), rng.normal(size=n).astype(dtype)
    if at_least == k and k == 65 and family == "masked":
        k = at_least = 40
    value, y, product = exact(theta, z, k, at_least)
    found = results(theta[None], z[None], lattice(k, n, at_least))
    errors = TOLERANCE[dtype]
    with mpmath.workdps(30):
        size = max(abs(float(value)), 1.0)
        assert abs(float(mpmath.mpf(float(found["value"][0])) - value)) <= max(errors[0], 4e-16) * size
    assert np.abs(found["relax"][0] - y).max() <= errors[1]
    assert np.abs(found["vjp"][0] - product).max() <= errors[2]


@DTYPES
@pytest.mark.parametrize("k, at_least", [(2, 2), (3, 0), (11, 4), (300, 300), (555, 100)])
def test_large_z_does_not_cancel(k, at_least, dtype):
    """A constant that is added to z changes nothing if all selections have k items."""
    rng, n = np.random.default_rng(k), 600
    theta, z = rng.normal(size=(1, n)).astype(dtype), rng.normal(size=(1, n)).astype(dtype)
    limits = lattice(k, n, at_least), UNIT, "shannon"
    wide = launch.vjp(theta.astype(float), (z + dtype_of(1000.0, dtype)).astype(float), *limits)
    found = launch.vjp(theta, z + dtype_of(1000.0, dtype), *limits)
    allowed = 1e-3 if dtype == "float32" else 1e-10
    assert np.abs(found - wide).max() <= (allowed if at_least < k else allowed / 10)


def dtype_of(x: float, dtype: str) -> Any:
    return np.dtype(dtype).type(x)


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e12, 1e20])
@pytest.mark.parametrize("gamma", [1e-8, 1.0, 1e8])
def test_extremes(size, gamma, dtype):
    rng = np.random.default_rng(3)
    theta, z = (size * rng.normal(size=(4, 50))).astype(dtype), rng.normal(size=(4, 50)).astype(dtype)
    theta[1] = theta[1, 0]
    theta[2, :25] = theta[2, 0]
    for k, at_least in ((7, 7), (20, 5), (49, 49)):
        for x in results(theta, z, lattice(k, 50, at_least), np.array(gamma)).values():
            assert np.isfinite(x).all()
        y = launch.relax(theta, lattice(k, 50, at_least), np.array(gamma), "shannon")
        counts = y.astype(float).sum(-1)
        assert (y >= 0).all() and (y <= 1).all()
        assert (counts >= at_least - 1e-4).all() and (counts <= k + 1e-4).all()
    if size / gamma >= 1e10:
        np.testing.assert_array_equal(
            launch.relax(theta[[0, 3]], lattice(7, 50), np.array(gamma), "shannon"), kg.solve(theta[[0, 3]], kg.TopK(7))
        )


@DTYPES
def test_an_instance_that_is_broken_is_nan_alone(dtype):
    theta = np.random.default_rng(0).normal(size=(6, 40)).astype(dtype)
    z, clean = theta[::-1].copy(), results(theta, theta[::-1].copy(), lattice(5, 40))
    theta[1, 39], theta[2, 0], theta[4, 7] = np.nan, np.inf, np.nan
    for name, x in results(theta, z, lattice(5, 40)).items():
        assert np.isnan(x).reshape(6, -1).all(1).tolist() == [False, True, True, False, True, False]
        np.testing.assert_array_equal(x[[0, 3, 5]], clean[name][[0, 3, 5]])
    for gamma in (0.0, -1.0, np.nan):
        assert np.isnan(launch.relax(theta, lattice(5, 40), np.array(gamma), "shannon")).all()
    theta[:, :37] = -np.inf
    with pytest.raises(ValueError, match=r"instance 0 .* no feasible selection"):
        launch.operator(theta[:1], lattice(5, 40), UNIT, "shannon")
    with pytest.raises(ValueError, match="beyond"):
        launch.operator(np.full((1, 40), 1e30, dtype), lattice(5, 40), np.array(1e-300), "shannon")


@DTYPES
def test_a_single_selection(dtype):
    theta = np.random.default_rng(0).normal(size=(2, 40)).astype(dtype)
    theta[1, 5:] = -np.inf
    for rows, k, expected in (
        (theta, 0, np.zeros_like(theta)),
        (theta[:1], 40, 1 + 0 * theta[:1]),
        (theta[1:], 5, theta[1:] > -9),
    ):
        found = results(rows, np.ones_like(rows), lattice(k, 40))
        np.testing.assert_array_equal(found["relax"], expected)
        kept = np.where(expected != 0, rows, 0).astype(float).sum(-1)
        np.testing.assert_allclose(found["value"], kept, rtol=1e-6)
        assert not (found["vjp"].any() or found["entropy"].any() or found["entropy_grad"].any())


@pytest.mark.parametrize("k, at_least", [(1, 1), (40, 3), (100, 100), (0, 0), (100, 0)])
def test_k_and_gamma_of_each_instance(k, at_least):
    rng = np.random.default_rng(5)
    theta, z, gamma = rng.normal(size=(3, 100)), rng.normal(size=(3, 100)), np.array([0.3, 1.0, 4.0])
    most, least = np.array([k, 7, 50]), np.array([at_least, 7, 20])
    together = results(theta, z, lattice(most, 100, least), gamma)
    for b in range(3):
        alone = results(theta[b : b + 1], z[b : b + 1], lattice(int(most[b]), 100, int(least[b])), gamma[b])
        for name, x in alone.items():
            np.testing.assert_array_equal(together[name][b], x[0])


@pytest.mark.parametrize("k, at_least", [(2, 2), (3, 1), (5, 0), (8, 6)])
def test_the_reference_is_the_reference(k, at_least):
    rng = np.random.default_rng(k)
    theta, z = 2 * rng.normal(size=9), rng.normal(size=9)
    limits = lattice(k, 9, at_least)
    limits = limits.replace(capacity=k, slack=k - at_least)
    found = reference.without_a_table(theta, k, at_least, z)
    value, y = reference.operator(theta, limits, kg.Shannon)
    for x, expected in zip(found, (value, y, reference.vjp(theta, z, limits, kg.Shannon))):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-13)


def test_problems_of_every_count():
    """Every k and at_least of few items: windows at both ends, and wider than what is likely."""
    theta = np.array([[0.3, -2.0, 1.5, 0.9, -0.4, 2.2]])
    for k in range(7):
        for at_least in range(k + 1):
            problem = Problem(theta, None, k, 0.5, at_least)
            y = launch.relax(theta, lattice(k, 6, at_least), np.array(0.5), "shannon")
            np.testing.assert_allclose(y[0], problem.truths("shannon")[0].relax, rtol=0, atol=1e-14)
