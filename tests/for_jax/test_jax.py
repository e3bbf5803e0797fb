"""JAX: traced problems, transformations, derivatives, float32 without x64, keys, sharding and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import knapgrad as kg  # noqa: E402
from backends import TOLERANCES  # noqa: E402
from calls import SMOOTHED  # noqa: E402
from knapgrad.kernels import jax_scan  # noqa: E402
from knapgrad.kernels.numba import from_jax as on_cpu  # noqa: E402
from knapgrad.regularizers import REGULARIZERS as SMOOTHINGS  # noqa: E402
from oracles import LONG_IS_LONGER, Limits, long_table  # noqa: E402

ON_GPU = jax.default_backend() != "cpu"
BATCH, N, WIDTH = 3, 6, 8
_rng = np.random.default_rng(4)
THETA = _rng.standard_normal((BATCH, N)).astype(np.float32).astype(np.float64)
PRIOR = _rng.standard_normal((BATCH, N)).astype(np.float32).astype(np.float64)
Z = _rng.standard_normal((BATCH, N)).astype(np.float32).astype(np.float64)
WEIGHTS = _rng.integers(0, 5, (BATCH, N))
CAPACITY = np.array([3, 5, 4])
GAMMA = np.array([0.5, 1.0, 2.0])

#: what is differentiated
OPERATIONS = [name for name in SMOOTHED if name != "divergence"]
FRONTIERS = ["frontier", "hard frontier"]


def called(name: str, theta: Any, y: Any, prior: Any, limit: Any, smoothing: Any) -> Any:
    if name in FRONTIERS:
        return kg.frontier(theta, limit, smoothing if name == "frontier" else None).clip(-1e3)
    return SMOOTHED[name](theta, prior if "prior" in name else y, limit, smoothing)


GROUPS = _rng.integers(0, 5, (BATCH, 3, 2))
_ARGUMENTS: dict[str, Any] = {
    "choices": (GROUPS, GROUPS.min(-1).sum(-1) + 2),
    "choices, at least": (GROUPS, GROUPS.min(-1).sum(-1) + 2),
    "optional choices": (GROUPS, CAPACITY),
    "budgets": (np.stack([WEIGHTS, np.ones_like(WEIGHTS)]), np.stack([CAPACITY, [2, 3, 2]])),
}
KINDS = ["knapsack", "top-k", "at least", *_ARGUMENTS]


def numbers_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights and capacity of each instance; k is below n = 6."""
    return _ARGUMENTS.get(kind, (WEIGHTS, CAPACITY))


def limited(kind: str, weights: Any = None, capacity: Any = None) -> Any:
    """A constraint whose arguments may be traced."""
    if weights is None:
        weights, capacity = numbers_of(kind)
    if kind == "top-k":
        return kg.TopK(capacity, max_capacity=6)
    if kind == "budgets":
        return kg.MultiKnapsack(weights, capacity, max_capacities=[WIDTH, 4])
    if "choices" in kind:
        least = capacity - 2 if kind.endswith("at least") else 0
        return kg.MultipleChoice(weights, capacity, at_least=least, optional="optional" in kind, max_capacity=12)
    return kg.Knapsack(weights, capacity, at_least=capacity // 2 if kind == "at least" else 0, max_capacity=WIDTH)


def shaped(kind: str, x: np.ndarray) -> np.ndarray:
    """Numbers (..., 6) as such a constraint needs them."""
    return x.reshape(*x.shape[:-1], 3, 2) if "choices" in kind else x


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def without_x64() -> Iterator[None]:
    with jax_scan.float64(False):
        yield


@pytest.fixture
def x64(without_x64: None) -> Iterator[None]:
    with jax_scan.float64(True):
        yield


def close(actual: Any, expected: Any, tolerance: float, what: str = "it") -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)), f"{what} is off by {error}"


# Traced problems


@pytest.mark.thinned(18)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("through", ["kernels", "scan"])
def test_traced_operations_and_their_gradients_are_those_of_torch(through, dtype, regularizer, kind, monkeypatch):
    """Everything is an argument of one compiled function: the scores, the constraint and gamma."""
    torch = pytest.importorskip("torch")
    if through == "scan":
        monkeypatch.setattr(on_cpu, "find", lambda *_: None)
    scores, prior = (shaped(kind, x) for x in (THETA, PRIOR))
    y = kg.solve(scores, limited(kind))

    # the frontier of a traced k has n + 1 entries, that of a known one as many as k asks for
    names = OPERATIONS + (FRONTIERS if "at least" not in kind and kind != "top-k" else [])

    def weights_of(result: Any) -> np.ndarray:
        return np.cos(np.arange(np.prod(result.shape))).reshape(result.shape)

    with jax_scan.float64(dtype == "float64"):

        @jax.jit
        def everything(theta: Any, gamma: Any, y: Any, prior: Any, weights: Any, capacity: Any) -> Any:
            def one(name: str) -> Any:
                def scalar(theta: Any, gamma: Any) -> Any:
                    smoothing = SMOOTHINGS[regularizer](gamma)
                    result = called(name, theta, y, prior, limited(kind, weights, capacity), smoothing)
                    return (result * weights_of(result)).sum(), result

                (_, result), gradients = jax.value_and_grad(scalar, (0, 1), has_aux=True)(theta, gamma)
                return result, gradients

            return {name: one(name) for name in names}

        floats = [jnp.asarray(x, dtype) for x in (scores, GAMMA, y, prior)]
        found = jax.tree.map(np.asarray, everything(*floats, *map(jnp.asarray, numbers_of(kind))))

    tolerance = TOLERANCES[dtype]
    for name in names:
        result, gradients = found[name]
        assert result.dtype == dtype and all(x.dtype == dtype for x in gradients), name
        smoothing = SMOOTHINGS[regularizer](GAMMA)
        close(result, called(name, scores, y, prior, limited(kind), smoothing), tolerance.relax, name)
        theta, gamma = (torch.tensor(x, requires_grad=True) for x in (scores, GAMMA))
        smoothing = SMOOTHINGS[regularizer](gamma)
        expected = called(name, theta, torch.tensor(y), torch.tensor(prior), limited(kind), smoothing)
        ((expected * torch.tensor(weights_of(expected))).sum() + 0.0 * gamma.sum()).backward()
        for which, actual, grad in zip(("theta", "gamma"), gradients, (theta.grad, gamma.grad)):
            close(actual, grad.numpy(), tolerance.vjp, f"the gradient of {name} by {which}")


def test_solve_and_sample_of_a_traced_problem(kind):
    scores = shaped(kind, THETA)

    @jax.jit
    def both(theta: Any, weights: Any, capacity: Any, gamma: Any, key: Any) -> Any:
        limit = limited(kind, weights, capacity)
        return kg.solve(theta, limit), kg.sample(theta, limit, kg.Gini(gamma), num_samples=50, rng=key)

    floats = jnp.asarray(scores, jnp.float32), jnp.asarray(GAMMA, jnp.float32)
    best, y = both(floats[0], *numbers_of(kind), floats[1], jax.random.key(0))
    np.testing.assert_array_equal(best, kg.solve(scores, limited(kind)))
    assert limited(kind).contains(np.asarray(y)).all()


def test_a_traced_capacity_needs_no_bound_if_the_weights_are_known():
    weights = WEIGHTS[0]

    @jax.jit
    def relax(theta: Any, capacity: Any) -> Any:
        return kg.relax(theta, kg.Knapsack(weights, capacity), kg.Gini())

    theta = jnp.asarray(THETA, jnp.float32)
    for capacity in (0, 3, int(weights.sum()), 1000):
        close(relax(theta, capacity), kg.relax(THETA, kg.Knapsack(weights, capacity), kg.Gini()), 1e-5)


def test_traced_weights_take_their_width_from_a_known_capacity():
    @jax.jit
    def relax(theta: Any, weights: Any) -> Any:
        return kg.relax(theta, kg.Knapsack(weights, CAPACITY), kg.Gini())

    heavy = WEIGHTS.copy()
    heavy[1, 2] = 2**31 - 1
    theta = jnp.asarray(THETA, jnp.float32)
    close(relax(theta, heavy), kg.relax(THETA, kg.Knapsack(heavy, CAPACITY), kg.Gini()), 1e-5)


def test_traced_weights_and_capacity_without_a_bound_are_refused():
    relax = jax.jit(lambda theta, w, c: kg.relax(theta, kg.Knapsack(w, c), kg.Gini()))
    with pytest.raises(ValueError, match=r"weights and capacity.*max_capacity"):
        relax(jnp.zeros(3), np.array([1, 2, 3]), 4)
    several = jax.jit(lambda w, c: kg.relax(jnp.zeros(4), kg.MultiKnapsack(w, c), kg.Gini()))
    with pytest.raises(ValueError, match="max_capacities"):
        several(jnp.ones((2, 4), jnp.int32), jnp.array([2, 4]))


def test_a_bound_below_a_known_capacity_is_refused():
    with pytest.raises(ValueError, match=r"max_capacity is 3.*capacity has 4"):
        kg.Knapsack([1, 2, 3], 4, max_capacity=3)
    with pytest.raises(ValueError, match=r"max_capacity is 1.*2"):
        kg.TopK(2, max_capacity=1)


def test_traced_numbers_that_are_not_integers_are_refused():
    with pytest.raises(TypeError, match=r"weights must be integers.*float32"):
        jax.jit(lambda w: kg.relax(jnp.zeros(3), kg.Knapsack(w, 4), kg.Gini()))(jnp.ones(3))
    with pytest.raises(TypeError, match=r"k must be integers.*float32"):
        jax.jit(lambda k: kg.relax(jnp.zeros(3), kg.TopK(k), kg.Gini()))(1.0)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("bad", [WIDTH + 1, -1])
def test_a_traced_capacity_that_is_not_valid_makes_its_instance_nan(bad, constraint):
    bad = N + 1 if constraint == "top-k" and bad == WIDTH + 1 else bad

    @jax.jit
    def everything(theta: Any, weights: Any, capacity: Any) -> Any:
        limit, smoothing = limited(constraint, weights, capacity), kg.Gini()
        nothing = jnp.zeros_like(theta)
        results = [called(name, theta, nothing, nothing, limit, smoothing) for name in OPERATIONS]
        gradient = jax.grad(lambda theta: kg.relax(theta, limit, smoothing)[:, 0].sum())(theta)
        return [*results, gradient, kg.solve(theta, limit)]

    capacity = CAPACITY.copy()
    capacity[1] = bad
    results = everything(jnp.asarray(THETA, jnp.float32), WEIGHTS, capacity)
    for name, result in zip((*OPERATIONS, "gradient", "solve"), results):
        assert np.isnan(result[1]).all(), name
        assert not np.isnan(result[::2]).any(), name


def test_a_traced_capacity_below_its_bound_is_not_clipped():
    """The bound only gives the table its width."""
    relax = jax.jit(lambda theta, c, k: (kg.relax(theta, kg.Knapsack(WEIGHTS[0], c, max_capacity=5), kg.Gini()),
                                         kg.relax(theta, kg.TopK(k, max_capacity=4), kg.Gini())))  # fmt: skip
    theta = jnp.asarray(THETA[0], jnp.float32)
    for number in (0, 1, 4):
        knapsack, top = relax(theta, number, number)
        close(knapsack, kg.relax(THETA[0], kg.Knapsack(WEIGHTS[0], number), kg.Gini()), 1e-5)
        close(top, kg.relax(THETA[0], kg.TopK(number), kg.Gini()), 1e-5)
    assert np.isnan(relax(theta, 6, 5)).all()
    weights, _ = numbers_of("budgets")
    several = jax.jit(lambda theta, c: kg.relax(theta, limited("budgets", weights[:, 0], c), kg.Gini()))
    assert np.isfinite(several(theta, jnp.array([WIDTH, 4]))).all()
    assert np.isnan(several(theta, jnp.array([2, 5]))).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_traced_integers_of_any_width(dtype):
    theta, weights = np.array([1.0, 2.0, 3.0, 0.5], np.float32), np.array([100, 120, 90, 10])
    expected = kg.relax(theta, kg.Knapsack(weights, 200), kg.Gini(0.1))
    relax = jax.jit(lambda t, w: kg.relax(t, kg.Knapsack(w, 200), kg.Gini(0.1)))
    close(relax(jnp.asarray(theta), jnp.asarray(weights, dtype)), expected, 1e-6)
    if dtype == "uint32":  # of which some are beyond the signed ones
        heavy = relax(theta, jnp.asarray([100, 120, 90, 2**32 - 1], dtype))
        close(heavy, relax(theta, np.array([100, 120, 90, 999])), 0)
    some = jax.jit(lambda t, k: kg.relax(t, kg.TopK(k), kg.Gini()).sum())
    assert float(some(jnp.zeros(300), jnp.asarray(100, dtype))) == pytest.approx(100, abs=1e-3)


def test_traced_weights_below_0_give_nan():
    weights = jnp.array([[1, 2, 1], [1, -2, 1], [0, 0, 0]])
    relaxed = jax.jit(lambda w: kg.relax(jnp.ones((3, 3)), kg.Knapsack(w, 2), kg.Gini()))(weights)
    assert np.isnan(relaxed[1]).all() and np.isfinite(relaxed[::2]).all()


@pytest.mark.parametrize("mode", ["hessian", "reverse twice"])
@pytest.mark.parametrize("operation", ["entropy", "log_prob", "frontier"])
def test_operations_without_a_second_derivative_say_so(operation, mode):
    if operation == "frontier" and mode == "hessian":
        pytest.skip("it has no derivative in forward mode")
    limit, y = kg.TopK(2), jnp.array([1.0, 1.0, 0.0])

    def function(theta: Any) -> Any:
        return called(operation, theta, y, None, limit, kg.Tsallis()).sum()

    twice = jax.hessian(function) if mode == "hessian" else jax.jacrev(jax.jacrev(function))
    with pytest.raises(NotImplementedError, match="differentiate once less"):
        twice(jnp.array([0.3, 0.2, 0.1]))


def test_strict_promotion_and_huge_scores():
    with jax.numpy_dtype_promotion("strict"):
        y = kg.relax(jnp.array([1.0, 2.0, 0.5], jnp.float32), kg.TopK(2), kg.Gini(jnp.float32(1.0)))
        assert float(y.sum()) == pytest.approx(2)
    assert float(kg.value(-1e20 * jnp.ones(100), kg.TopK(60), kg.Gini(1e-8))) == pytest.approx(-6e21)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_a_gamma_that_is_not_positive(bad):
    gamma = jnp.asarray([1.0, bad, 1.0])
    if not ON_GPU:
        with pytest.raises(ValueError, match="gamma must be positive"):
            kg.Gini(gamma)
    both = jax.jit(lambda g: (kg.relax(jnp.asarray(THETA), kg.TopK(2), kg.Gini(g)),
                              kg.value(jnp.asarray(THETA), kg.TopK(2), kg.Gini(g))))  # fmt: skip
    for result in both(gamma):
        assert np.isnan(result[1]).all()
        assert np.isfinite(result[::2]).all()


def test_a_constraint_in_the_closure_serves_several_shapes():
    for limit in (kg.TopK(2), kg.Knapsack(WEIGHTS[0], 5)):
        relax = jax.jit(lambda theta, limit=limit: kg.relax(theta, limit, kg.Shannon(0.7)))
        for shape in ((N,), (2, N), (1, 3, N), (0, N)):
            theta = np.sin(1.0 + np.arange(np.prod(shape))).reshape(shape)
            close(relax(jnp.asarray(theta, jnp.float32)), kg.relax(theta, limit, kg.Shannon(0.7)), 1e-5)


def test_jax_arrays_in_the_closure_of_a_compiled_function():
    """They are known, but what is computed from them is traced."""
    theta, gamma = jnp.asarray(THETA[0], jnp.float32), jnp.asarray(0.5)
    y = jnp.asarray(kg.solve(THETA[0], kg.TopK(2)))
    limit = kg.Knapsack(jnp.asarray(WEIGHTS[0]), jnp.asarray(5))
    found = jax.jit(lambda theta: kg.relax(theta, limit, kg.Gini(gamma)))(theta)
    close(found, kg.relax(THETA[0], limit, kg.Gini(0.5)), 1e-5)
    for smoothing in (kg.Gini(), kg.Shannon()):
        found = jax.jit(lambda theta: kg.log_prob(theta, y, kg.TopK(2), smoothing))(theta)
        close(found, kg.log_prob(THETA[0], np.asarray(y), kg.TopK(2), smoothing), 1e-5)


# Transformations


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    "mapped, constraint",
    [*((name, "knapsack") for name in ("theta", "weights", "capacity", "gamma", "all"))]
    + [("all", "top-k"), ("all", "optional choices"), ("capacity", "budgets")],
)
def test_vmap_is_a_loop(mapped, constraint):
    def four(theta: Any, weights: Any, capacity: Any, gamma: Any) -> Any:
        limit, smoothing = limited(constraint, weights, capacity), kg.Tsallis(gamma)
        loss = lambda theta: kg.relax(theta, limit, smoothing).reshape(-1)[0]  # noqa: E731
        rows = called("frontier", theta, None, None, limit, smoothing)
        return kg.value(theta, limit, smoothing), kg.relax(theta, limit, smoothing), jax.grad(loss)(theta), rows

    names, (weights, capacity) = ("theta", "weights", "capacity", "gamma"), numbers_of(constraint)
    if constraint == "budgets":  # whose axis comes first
        weights, capacity = np.moveaxis(weights, 1, 0), capacity.T
    everything = (shaped(constraint, THETA).astype(np.float32), weights, capacity, GAMMA.astype(np.float32))
    axes = [0 if mapped in (name, "all") else None for name in names]
    arguments = [x if axis == 0 else x[1] for x, axis in zip(everything, axes)]
    found = jax.jit(jax.vmap(four, axes))(*arguments)
    one = jax.jit(four)
    for b in range(BATCH):
        row = [x[b] if axis == 0 else x for x, axis in zip(arguments, axes)]
        theta, weights, capacity, gamma = row
        for actual, expected in zip(found, one(*row)):
            close(actual[b], expected, 1e-6)
        theta64, limit = theta.astype(np.float64), limited(constraint, weights, capacity)
        close(found[1][b], kg.relax(theta64, limit, kg.Tsallis(float(gamma))), 1e-5)


def test_nested_vmap(constraint):
    theta = np.stack([THETA, -THETA]).astype(np.float32)  # (2, batch, n)
    gamma = np.array([0.6, 1.7], np.float32)

    def relax(theta: Any, weights: Any, capacity: Any, gamma: Any) -> Any:
        return kg.relax(theta, limited(constraint, weights, capacity), kg.Gini(gamma))

    inner = jax.vmap(relax, (0, 0, 0, None))
    found = jax.jit(jax.vmap(inner, (0, None, None, 0)))(theta, WEIGHTS, CAPACITY, gamma)
    for a in range(2):
        expected = kg.relax(theta[a].astype(np.float64), limited(constraint), kg.Gini(float(gamma[a])))
        close(found[a], expected, 1e-5)


def test_vmap_over_samples_keys_and_selections():
    theta, limit = jnp.asarray(THETA, jnp.float32), kg.TopK(2)
    keys = jax.random.split(jax.random.key(0), BATCH)
    y = jax.vmap(lambda theta, key: kg.sample(theta, limit, kg.Gini(), rng=key))(theta, keys)
    for b in range(BATCH):
        np.testing.assert_array_equal(y[b], kg.sample(theta[b], limit, kg.Gini(), rng=keys[b]))
    mapped = jax.vmap(lambda theta, y: kg.log_prob(theta, y, limit, kg.Gini()))(theta, y)
    close(mapped, kg.log_prob(THETA, np.asarray(y), limit, kg.Gini()), 1e-5)


@pytest.mark.thinned(9)
def test_jacobians(x64, regularizer, kind):
    """Forward and reverse agree, the Jacobian of relax is symmetric, and it is the Hessian of value."""
    weights, capacity = numbers_of(kind)
    own = (weights[:, 1], capacity[:, 1]) if kind == "budgets" else (weights[1], 3 if kind == "top-k" else capacity[1])
    limit, smoothing, event = limited(kind, *own), SMOOTHINGS[regularizer](1.5), shaped(kind, THETA)[1].shape

    @jax.jit
    def four(theta: Any) -> Any:
        def relax(theta: Any) -> Any:
            return kg.relax(theta.reshape(event), limit, smoothing).reshape(N)

        def value(theta: Any) -> Any:
            return kg.value(theta.reshape(event), limit, smoothing)

        return jax.jacfwd(relax)(theta), jax.jacrev(relax)(theta), jax.hessian(value)(theta), jax.grad(value)(theta)

    forward, reverse, hessian, gradient = four(jnp.asarray(THETA[1]))
    close(forward, reverse, 1e-13)
    close(forward, forward.T, 1e-13)
    close(hessian, forward, 1e-13)
    close(gradient, kg.relax(THETA[1].reshape(event), limit, smoothing).reshape(N), 1e-12)
    up, down = ((THETA[1] + sign * 1e-6 * np.eye(N)).reshape(N, *event) for sign in (1, -1))
    around = kg.relax(up, limit, smoothing) - kg.relax(down, limit, smoothing)
    close(forward, around.reshape(N, N) / 2e-6, 1e-7)
    assert np.abs(forward).max() > 1e-2


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_the_second_derivative_of_value_in_every_mode(inner, outer, x64):
    limit = kg.TopK(2)
    hessian = jax.jit(outer(inner(lambda theta: kg.value(theta, limit, kg.Shannon()))))(jnp.asarray(THETA[0]))
    close(
        hessian, jax.jit(jax.jacrev(lambda theta: kg.relax(theta, limit, kg.Shannon())))(jnp.asarray(THETA[0])), 1e-13
    )


@pytest.mark.thinned(9)
def test_jvp_and_vjp_under_jit_and_vmap(x64, regularizer):
    limit, smoothing = kg.Knapsack(WEIGHTS[1], 5), SMOOTHINGS[regularizer](0.8)

    def relax(theta: Any) -> Any:
        return kg.relax(theta, limit, smoothing)

    forward = jax.jit(jax.vmap(lambda theta, z: jax.jvp(relax, (theta,), (z,))[1]))
    reverse = jax.jit(jax.vmap(lambda theta, z: jax.vjp(relax, theta)[1](z)[0]))
    theta, z = jnp.asarray(THETA), jnp.asarray(Z)
    jacobian = jax.jit(jax.vmap(jax.jacfwd(relax)))(theta)
    close(forward(theta, z), jnp.einsum("bij,bj->bi", jacobian, z), 1e-13)
    close(reverse(theta, z), jnp.einsum("bij,bi->bj", jacobian, z), 1e-13)
    pushed, linear = jax.linearize(relax, theta[0])
    close(pushed, relax(theta[0]), 0.0)
    close(linear(z[0]), forward(theta, z)[0], 1e-13)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_derivatives_by_finite_differences(operation, x64, regularizer):
    """By theta and gamma; of value to the second order."""
    y = jnp.asarray(kg.solve(THETA[1], limited("knapsack", WEIGHTS[1], 5)))

    def of(theta: Any, log_gamma: Any) -> Any:
        limit, smoothing = limited("knapsack", WEIGHTS[1], 5), SMOOTHINGS[regularizer](jnp.exp(log_gamma))
        return called(operation, theta, y, jnp.asarray(PRIOR[1]), limit, smoothing)

    order = 2 if operation == "value" else 1
    check_grads(jax.jit(of), (jnp.asarray(THETA[1]), jnp.asarray(0.3)), order, ("fwd", "rev"), atol=1e-5, rtol=1e-5)


@pytest.mark.thinned(2)
def test_what_is_masked_has_no_gradient_and_gives_gamma_no_nan(kind):
    theta = THETA.astype(np.float32)
    heaviest = GROUPS.argmax(-1) + [0, 2, 4]  # the other option of its group is left
    theta[0, 2] = theta[1, heaviest[1, 0]] = -np.inf
    if "choices" in kind:
        theta[0, 2], theta[0, heaviest[0, 1]] = THETA[0, 2], -np.inf
    masked, theta = np.isneginf(theta), shaped(kind, theta)

    @jax.jit
    def gradients(theta: Any, gamma: Any) -> Any:
        def total(theta: Any, gamma: Any, f: Any) -> Any:
            return (f(theta, limited(kind), kg.Gini(gamma)) ** 2).sum()

        return [jax.grad(total, (0, 1))(theta, gamma, f) for f in (kg.value, kg.relax, kg.entropy)]

    for by_theta, by_gamma in gradients(theta, jnp.asarray(4 * GAMMA, jnp.float32)):
        assert np.isfinite(by_theta).all() and np.isfinite(by_gamma).all()
        assert not by_theta.reshape(BATCH, N)[masked].any()
        assert (by_gamma != 0).any()


def test_a_third_derivative_says_that_there_is_none():
    theta, limit = jnp.asarray(THETA[0], jnp.float32), kg.TopK(2)

    def relax(theta: Any, gamma: Any = 1.0) -> Any:
        return kg.relax(theta, limit, kg.Gini(gamma))

    message = "differentiate once less"
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(lambda theta: jax.grad(lambda theta: relax(theta)[0])(theta).sum())(theta)
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(jax.jacfwd(jax.jacfwd(relax)))(theta)
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(jax.jacfwd(jax.jacrev(jax.grad(lambda theta: kg.value(theta, limit, kg.Shannon())))))(theta)
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(jax.jacfwd(lambda gamma: jax.jacrev(relax)(theta, gamma)))(jnp.asarray(1.0))


def test_solve_and_samples_have_no_gradient():
    theta, key = jnp.asarray(THETA[0], jnp.float32), jax.random.key(0)
    for f in (lambda t: kg.solve(t, kg.TopK(2)), lambda t: kg.sample(t, kg.TopK(2), kg.Gini(), rng=key)):
        assert not jax.grad(lambda t: (f(t) * jnp.arange(N)).sum())(theta).any()


# float32 without float64


def near_ties(constraint: str) -> tuple[np.ndarray, np.ndarray, int, float]:
    """float32 scores of 1e4 gamma; every exchange of items of equal weight is worth about one gamma."""
    gamma, rng = 1e-4, np.random.default_rng(3)
    n = 100 if constraint == "knapsack" else 300
    weights = rng.integers(3, 9, n) if constraint == "knapsack" else np.ones(n, int)
    theta = (weights + gamma * rng.standard_normal(n)).astype(np.float32)
    return theta, weights, int(weights.sum()) // 2 if constraint == "knapsack" else n // 10, gamma


@pytest.mark.thinned(9)
@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
def test_near_ties_in_float32_and_that_they_need_float64(regularizer, constraint, monkeypatch):
    theta, weights, capacity, gamma = near_ties(constraint)
    is_top_k = constraint == "top-k"
    value, y = long_table(theta, weights, Limits(capacity if is_top_k else 0, capacity), regularizer, gamma)
    limit = kg.TopK(capacity) if is_top_k else kg.Knapsack(weights, capacity)
    smoothing = SMOOTHINGS[regularizer](gamma)
    assert np.abs(np.asarray(kg.relax(jnp.asarray(theta), limit, smoothing)) - y).max() <= 1e-5
    assert abs(float(kg.value(jnp.asarray(theta), limit, smoothing)) - value) <= 1e-5 * abs(value)

    if ON_GPU:
        return  # the kernels have it whatever is switched on
    monkeypatch.setattr(on_cpu, "find", lambda *_: None)
    monkeypatch.setattr(jax_scan, "float64", lambda on: nullcontext())
    with pytest.warns(UserWarning, match="float64"):
        other_shape = jnp.asarray(theta)[None, None]  # JAX remembers what it has compiled
        worse = np.asarray(kg.relax(other_shape, limit, smoothing))
    assert not np.abs(worse - y).max() <= 1e-4, "it needs no float64"


# Keys


def test_what_is_not_a_key_is_refused():
    theta = jnp.asarray(THETA, jnp.float32)
    with pytest.raises(ValueError, match=r"rng must be a JAX key.*jax\.random\.key\(seed\)"):
        kg.sample(theta, kg.TopK(2), kg.Gini())
    for wrong in (0, np.random.default_rng(0), jnp.zeros(2), "seed", np.zeros(2, np.uint32)):
        with pytest.raises(TypeError, match=rf"rng must be a JAX key.*got {type(wrong).__name__}"):
            kg.sample(theta, kg.TopK(2), kg.Gini(), rng=wrong)


# What is compiled


def test_nothing_is_called_back():
    def loss(theta: Any, gamma: Any) -> Any:
        return (kg.relax(theta, kg.TopK(2), kg.Gini(gamma)) ** 2).sum() + kg.entropy(theta, kg.TopK(2), kg.Gini()).sum()

    arguments = jnp.zeros((2, 4)), jnp.asarray(1.0)
    for function in (loss, jax.grad(loss, (0, 1))):
        assert "callback" not in str(jax.make_jaxpr(function)(*arguments))
        assert "callback" not in jax.jit(function).lower(*arguments).as_text()


@pytest.mark.thinned(9)
def test_no_table_is_kept_between_forward_and_backward(regularizer):
    """theta, its weights and a few numbers an instance; a table would be 166 times as much."""
    rng = np.random.default_rng(0)
    batch, n = 16, 60
    weights = rng.integers(1, 11, n)
    limit, smoothing = kg.Knapsack(weights, int(weights.sum()) // 2), SMOOTHINGS[regularizer](0.5)
    theta = jnp.asarray(rng.standard_normal((batch, n)), jnp.float32)
    y = jnp.asarray(kg.solve(np.asarray(theta), limit))
    for name in OPERATIONS:
        _, pull = jax.vjp(lambda theta: called(name, theta, y, 0.5 * theta, limit, smoothing), theta)
        kept = sum(x.size for x in jax.tree.leaves(pull))
        assert theta.size <= kept <= 20 * theta.size, f"{name} keeps {kept / theta.size} times theta"


def test_scratch_memory_is_less_than_by_a_differentiated_scan():
    rng = np.random.default_rng(0)
    batch, n = 16, 60
    weights = rng.integers(1, 11, n)
    capacity = int(weights.sum()) // 2
    limit = kg.Knapsack(weights, capacity)
    theta = jnp.asarray(rng.standard_normal((batch, n)), jnp.float32)
    c, widest = np.arange(capacity + 1), int(weights.max())

    def plain(theta: Any) -> Any:
        """Shannon's value as one would write it."""

        def step(row: Any, item: Any) -> Any:
            score, w = item
            padded = jnp.pad(row, ((0, 0), (widest, 0)))
            pick = jax.lax.dynamic_slice_in_dim(padded, widest - w, capacity + 1, axis=1) + score[:, None]
            return jnp.where(c >= w, row + jnp.log1p(jnp.exp(jnp.minimum(pick - row, 60.0))), row), None

        first = jnp.zeros((theta.shape[0], capacity + 1))
        return jax.lax.scan(step, first, (theta.T, jnp.asarray(weights, jnp.int32)))[0][:, capacity]

    def gradient(value: Any) -> Any:
        return jax.value_and_grad(lambda theta: value(theta).sum())

    def product(value: Any) -> Any:
        return jax.grad(lambda theta: (gradient(value)(theta)[1] ** 2).sum())

    def ours(theta: Any) -> Any:
        return kg.value(theta, limit, kg.Shannon())

    for derivative in (gradient, product):
        compiled = [jax.jit(derivative(value)).lower(theta).compile() for value in (ours, plain)]
        np.testing.assert_allclose(*(jax.tree.leaves(run(theta))[-1] for run in compiled), atol=1e-3)
        one, other = (run.memory_analysis().temp_size_in_bytes for run in compiled)
        assert one < other


def test_a_batch_over_two_devices_needs_no_communication():
    code = """
        import jax, jax.numpy as jnp, numpy as np, knapgrad as kg
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        assert jax.device_count() == 2
        mesh = Mesh(np.array(jax.devices()), ("data",))
        rows = NamedSharding(mesh, P("data"))
        rng = np.random.default_rng(0)
        theta, z = (jnp.asarray(rng.standard_normal((8, 12)), jnp.float32) for _ in range(2))
        weights = rng.integers(1, 6, 12)
        limits = (
            kg.TopK(4), kg.Knapsack(weights, 15), kg.Knapsack(rng.integers(1, 6, (8, 12)), rng.integers(5, 15, 8))
        )
        for limit in limits:
            def both(theta, z):
                y, pull = jax.vjp(lambda theta: kg.relax(theta, limit, kg.Gini(0.7)), theta)
                return y, pull(z)[0]

            plain = jax.jit(both)(theta, z)
            spread = [jax.device_put(x, rows) for x in (theta, z)]
            compiled = jax.jit(both).lower(*spread).compile()
            text = compiled.as_text()
            for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"):
                assert word not in text, (limit, word)
            for one, other in zip(plain, compiled(*spread)):
                assert other.sharding.is_equivalent_to(rows, 2), (limit, other.sharding)
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-6)
        print("done")
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.stdout.strip() == "done", done.stderr[-3000:]


# Widths and extremes.


@pytest.mark.parametrize(
    "call",
    [
        lambda: kg.solve(jnp.ones(3), kg.Knapsack([2**59, 2**59, 1], 2**59)),
        lambda: jax.jit(lambda c: kg.solve(jnp.ones(3), kg.Knapsack([2**33, 2**33, 1], c)))(5),
        lambda: jax.jit(lambda w: kg.solve(jnp.ones(3), kg.Knapsack(w, 3, max_capacity=2**31)))(jnp.ones(3, jnp.int32)),
    ],
    ids=["known", "traced capacity", "traced weights"],
)
def test_a_table_beyond_32_bit_indices_is_an_error(call):
    with pytest.raises(ValueError, match="32-bit indices of JAX"):
        call()


@pytest.mark.parametrize(
    "limit",
    [
        kg.Knapsack([2**32 + 1, 1, 2], 5),
        kg.Knapsack([2**59, 1, 2], 5, at_least=3),
        kg.Knapsack([3, 1, 2], 2**32 + 1),
        kg.TopK(3, at_least=0, max_capacity=2**32 + 1),
        kg.MultiKnapsack([[2**32 + 1, 1, 2], [1, 1, 1]], [5, 2]),
        kg.MultipleChoice([[2**32 + 1, 1], [2, 2**40]], 5),
    ],
)
def test_integers_beyond_32_bits_are_not_wrapped_in_arguments(limit):
    theta = np.array([[5.0, 1.0], [2.0, 6.0]] if limit.event_dims == 2 else [5.0, 1.0, 2.0], np.float32)
    found = jax.jit(kg.solve)(jnp.asarray(theta), limit)
    np.testing.assert_array_equal(found, kg.solve(theta, limit))
    assert limit.contains(np.asarray(found)).all()


@pytest.mark.parametrize("least", [2, 2**32])
@pytest.mark.parametrize(
    "make",
    [
        lambda c, least: kg.Knapsack([3, 2, 2], c, at_least=least),
        lambda c, least: kg.MultipleChoice([[3, 0], [2, 0], [2, 0]], c, at_least=least),
        lambda c, least: kg.TopK(c, at_least=least),
    ],
    ids=["knapsack", "choices", "top-k"],
)
def test_a_least_weight_beyond_32_bits_is_not_wrapped_beside_a_traced_capacity(make, least):
    """It would be 0."""
    theta = jnp.zeros((3, 2)) if make(2, 0).event_dims == 2 else jnp.zeros(3)
    found = jax.jit(lambda c: kg.relax(theta, make(c, least), kg.Gini()))(3)
    if least > 3:
        assert np.isnan(found).all()
    else:
        close(found, kg.relax(np.asarray(theta), make(3, least), kg.Gini()), 1e-6)


def test_a_capacity_beyond_32_bits_is_not_wrapped_beside_a_traced_least_weight():
    """It would be 0."""
    found = jax.jit(lambda least: kg.relax(jnp.zeros(3), kg.Knapsack([3, 2, 2], 2**40, at_least=least), kg.Gini()))(2)
    close(found, kg.relax(np.zeros(3), kg.Knapsack([3, 2, 2], 2**40, at_least=2), kg.Gini()), 1e-6)


@pytest.mark.parametrize("weights, capacity", [([[2**40, 2**40 + 1]], 2**40), ([[2**30, 2**30 + 1]] * 4, 2**32 + 1)])
def test_options_that_are_all_beyond_32_bits_cannot_be_arguments(weights, capacity):
    """Of which no option is out, so that none may be narrowed."""
    limit, theta = kg.MultipleChoice(weights, capacity), jnp.zeros((len(weights), 2)).at[:, 1].set(1.0)
    assert limit.contains(kg.solve(theta, limit))
    with pytest.raises(ValueError, match=r"weights .*capacity .*32-bit.*take the lightest option of each group off"):
        jax.jit(kg.solve)(theta, limit)
    assert jax.jit(kg.solve)(theta, kg.MultipleChoice([[0, 1]] * len(weights), 2**40)).sum() == len(weights)


def test_a_theta_that_is_not_of_jax_where_something_is_traced():
    theta, torch = np.ones(3), pytest.importorskip("torch")
    for call in (
        lambda c: kg.solve(theta, kg.Knapsack([1, 2, 3], c)),
        lambda c: kg.solve(torch.ones(3), kg.TopK(c)),
        lambda c: kg.relax(theta, kg.TopK(1), kg.Gini(1.0 * c)),
        lambda c: kg.relax(torch.ones(3), kg.TopK(1), kg.Gini(1.0 * c)),
        lambda c: kg.fenchel_young_loss(theta, c * jnp.ones(3), kg.TopK(3), kg.Gini()),
    ):
        with pytest.raises(TypeError, match=r"traced by JAX, and theta is a .*make theta a JAX array"):
            jax.jit(call)(2)


TINY = [1e-30, 2e-38, 1.1e-38, 1e-39, 1e-44, 1e-60]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("gamma", TINY)
def test_a_gamma_near_the_end_of_the_range_of_float32(gamma, traced):
    """And below it, where XLA takes numbers for 0: results are those of NumPy."""
    scores = np.array([[3.0, 1.0, 2.0, -1.0], [2e4, 1e4, -3e4, 9e3], [-np.inf, -np.inf, 1.0, -np.inf]], np.float32)
    limit = kg.Knapsack([2, 1, 2, 1], 3)

    def everything(theta: Any, smoothing: Any, xp: Any) -> dict[str, Any]:
        y, given = xp.asarray(kg.solve(scores, limit)), (limit, smoothing)
        return {
            "relax": kg.relax(theta, *given),
            "value": kg.value(theta, *given),
            "entropy": kg.entropy(theta, *given),
            "log_prob": kg.log_prob(theta, y, *given),
            "loss": kg.fenchel_young_loss(theta, xp.ones_like(theta), *given),
            "divergence": kg.divergence(theta, *given, prior=xp.ones_like(theta)),
            "frontier": kg.frontier(theta, *given),
        }

    for regularizer in SMOOTHINGS.values():
        if traced and np.float32(gamma) > 0:
            run = jax.jit(lambda theta, gamma, r=regularizer: everything(theta, r(gamma), jnp))
            found = run(jnp.asarray(scores), np.full(3, gamma, np.float32))
        else:
            found = everything(jnp.asarray(scores), regularizer(gamma), jnp)
        for name, expected in everything(scores, regularizer(gamma), np).items():
            if name == "log_prob":  # a difference of large terms
                assert (np.abs(np.float64(found[name]) - expected) * gamma <= 1e-2).all()
            else:
                np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    slope = jax.grad(lambda theta: kg.value(theta, limit, kg.Gini(gamma)).sum())(jnp.asarray(scores))
    np.testing.assert_array_equal(slope, kg.solve(scores, limit))


def test_a_tiny_gamma_of_tiny_scores():
    """In units of gamma they are what they were."""
    scores, limit = np.array([3.0, 1.0, 2.0, -1.0], np.float32), kg.TopK(2)
    for smoothing in SMOOTHINGS.values():
        expected = kg.relax(scores, limit, smoothing(1.0))
        for scale in (1e-35, 2.0**-124):
            small = jnp.asarray(scores * np.float32(scale))
            close(kg.relax(small, limit, smoothing(scale)), expected, 1e-5)
            close(jax.jit(kg.relax)(small, limit, smoothing(jnp.float32(scale))), expected, 1e-5)


@pytest.mark.parametrize("regularizer", SMOOTHINGS)
def test_scores_beyond_the_range_of_float32_in_units_of_gamma(regularizer):
    scores, smoothing = np.array([3e30, 1e30, -2e30, 2e30], np.float32), SMOOTHINGS[regularizer](1e-12)
    for limit in (kg.TopK(2), kg.Knapsack([1, 2, 1, 2], 3)):

        @jax.jit
        def everything(theta: Any, key: Any, limit: Any = limit) -> Any:
            slope = jax.grad(lambda theta: (kg.relax(theta, limit, smoothing) * jnp.arange(4.0)).sum())(theta)
            selected = kg.relax(theta, limit, smoothing), kg.sample(theta, limit, smoothing, rng=key)
            return *selected, kg.solve(theta, limit), kg.entropy(theta, limit, smoothing), slope

        y = kg.solve(scores, limit)
        *selected, entropy, slope = everything(jnp.asarray(scores), jax.random.key(0))
        np.testing.assert_array_equal(selected, [y] * 3)
        assert entropy == 0
        np.testing.assert_array_equal(slope, 0 * y)
