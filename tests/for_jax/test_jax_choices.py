"""JAX: choices among options, and frontiers of items and of choices, against the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import knapgrad as kg  # noqa: E402
from backends import TOLERANCES  # noqa: E402
from knapgrad import reference  # noqa: E402
from knapgrad.jax import backend, operators  # noqa: E402
from knapgrad.kernels import jax_scan  # noqa: E402
from knapgrad.kernels.triton import from_jax  # noqa: E402
from knapgrad.lattice import FEASIBLE, Lattice, tournament  # noqa: E402
from knapgrad.numpy import backend as numpy_backend  # noqa: E402
from knapgrad.regularizers import REGULARIZERS, Hard  # noqa: E402

BATCH, CHOICES, SAMPLES = 3, 3, 10
GAMMA = np.array([0.5, 1.0, 2.0])
CLASSES = {**REGULARIZERS, Hard.name: Hard}


@pytest.fixture(autouse=True)
def compiled_in_a_hurry() -> Iterator[None]:
    """Most of a test is compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax_scan.float64(False):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64(compiled_in_a_hurry: None) -> Iterator[None]:
    with jax_scan.float64(True):
        yield


def close(actual: Any, expected: Any, tolerance: float, what: str = "it") -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), what)
    actual, expected = actual[np.isfinite(expected)], expected[np.isfinite(expected)]
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)), f"{what} is off by {error}"


def rounded(x: Any) -> np.ndarray:
    """Numbers that float32 has."""
    return np.asarray(x, np.float32).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """Scores and a lattice, some instances of which have to use most of their capacity."""

    theta: np.ndarray
    lattice: Lattice

    def rows(self) -> Iterator[tuple[np.ndarray, Lattice, float]]:
        """theta / gamma, the lattice for the reference, and gamma, of each instance."""
        lattice = self.lattice
        for b, theta in enumerate(self.theta):
            weights = np.broadcast_to(lattice.weights, self.theta.shape)[b].astype(int)
            slack = None if lattice.slack is None else int(lattice.slack[b])
            own = lattice.replace(weights=weights, capacity=int(lattice.capacity[b]), slack=slack)
            yield theta / GAMMA[b], own, GAMMA[b]


def case(options: int, own: bool, least: bool, seed: int = 0) -> Case:
    """Weights shared, or each instance its own; all may stay unused, or not. An option of the last choice is not there,
    if it has three or more. The first and the last option of each choice make every instance feasible."""
    rng = np.random.default_rng(seed + options)
    n = CHOICES * options if options else 2 * CHOICES
    theta = rounded(rng.standard_normal((BATCH, n)))
    if options > 2:
        theta[:, -2] = -np.inf
    weights = rng.integers(0, 5, (BATCH, n) if own else n, np.int32)
    if options > 1:
        weights[..., ::options], weights[..., options - 1 :: options] = 1, 3
    elif options:
        weights[...] = [2, 0, 3]
    slack = np.array([2, 3, 4], np.int32) if least else None
    return Case(theta, Lattice(weights, np.array([7, 5, 9], np.int32), slack, 9, 5, options))


def derivative(function: Callable[[np.ndarray], Any], x: np.ndarray, z: np.ndarray, step: float = 1e-6) -> Any:
    return (function(x + step * z) - function(x - step * z)) / (2 * step)


# Against the specification

#: options, regularizer, dtype, weights of each instance its own, a least weight
TABLE = [
    (options, name, ("float32", "float64")[(i + j) % 2], bool((i + j // 2) % 2), bool((i // 2 + j) % 2))
    for i, options in enumerate((1, 2, 3, 5, 8))
    for j, name in enumerate(REGULARIZERS)
]


def test_the_table_has_every_pair():
    columns = [*zip(*TABLE)]
    for kinds in columns[2:]:
        assert {*zip(columns[0], kinds)} == {(m, kind) for m in columns[0] for kind in kinds}
        assert {*zip(columns[1], kinds)} == {(name, kind) for name in columns[1] for kind in kinds}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("options, regularizer, dtype, own, least", TABLE)
def test_every_function_is_the_specification(options, regularizer, dtype, own, least):
    """All in one compiled function, which is given everything but the regularizer; with float32, x64 is off."""
    given = case(options, own, least)
    rng, n = np.random.default_rng(1), given.theta.shape[1]
    z = rounded(rng.standard_normal((BATCH, n)))
    uniforms = rounded(rng.random((SAMPLES, BATCH, n)))
    uniforms[0], uniforms[1] = 0.0, 1.0 - 2.0**-24
    cotangent = rounded(rng.standard_normal((BATCH, given.lattice.reach + 1)))
    drawn = np.stack([
        [reference.sample(theta, uniforms[s, b], lattice, CLASSES[regularizer]) for s in range(SAMPLES)]
        for b, (theta, lattice, _) in enumerate(given.rows())
    ], 1)  # fmt: skip
    drawn[-1, :, :options], drawn[-2, :, :options] = 1, 0

    with jax_scan.float64(dtype == "float64"):

        def everything(theta: Any, lattice: Lattice, gamma: Any, z: Any, uniforms: Any, y: Any, cotangent: Any) -> Any:
            def run(name: str, *extra: Any, axis: int = 0) -> Any:
                return operators._run(name, regularizer, theta, lattice, gamma, *extra, axis=axis)

            value, relaxed = run("operator")
            entropy, entropy_gradient = run("entropy_grad")
            return {
                "value": value,
                "relax": relaxed,
                "vjp": run("vjp", z),
                "entropy": run("entropy"),
                "entropy, with its gradient": entropy,
                "gradient of the entropy": entropy_gradient,
                "sample": run("sample", uniforms, axis=1),
                **({"solve": operators.solve(theta, lattice)} if regularizer == "gini" else {}),
                "log_prob": run("log_prob", y, axis=1),
                "derivative of log_prob": run("log_prob_jvp", y, z[None], axis=1),
                "frontier": run("frontier"),
                "gradient of the frontier": run("frontier_vjp", cotangent),
            }

        floats = [jnp.asarray(x, dtype) for x in (z, uniforms, drawn, cotangent)]
        found = jax.jit(everything)(jnp.asarray(given.theta, dtype), given.lattice, jnp.asarray(GAMMA, dtype), *floats)
        found = jax.tree.map(np.asarray, found)

    tolerance = TOLERANCES[dtype]
    assert all(x.dtype == dtype for x in found.values())
    for b, (theta, lattice, _) in enumerate(given.rows()):
        problem = lattice, CLASSES[regularizer]
        value, relaxed = reference.operator(theta, *problem)
        entropy, entropy_gradient = reference.entropy(theta, *problem)
        wide = lattice.replace(capacity=lattice.reach)
        frontier = reference.frontier(theta, wide, CLASSES[regularizer])
        counted = np.where(frontier < FEASIBLE, 0.0, cotangent[b])
        assert value > FEASIBLE and np.abs(relaxed).max() > 0
        expected = {
            "value": (value, tolerance.value),
            "relax": (relaxed, tolerance.relax),
            "vjp": (reference.vjp(theta, z[b], *problem), tolerance.vjp),
            "entropy": (entropy, tolerance.log_prob),
            "entropy, with its gradient": (entropy, tolerance.log_prob),
            "gradient of the entropy": (entropy_gradient, tolerance.vjp),
            **({"solve": (reference.solve(theta, lattice), 0.0)} if regularizer == "gini" else {}),
            "frontier": (np.where(frontier < FEASIBLE, -np.inf, frontier), tolerance.value),
            "gradient of the frontier": (
                reference.frontier_vjp(theta, counted, wide, CLASSES[regularizer]),
                tolerance.relax,
            ),
        }
        for name, (truth, limit) in expected.items():
            close(found[name][b], truth, limit, name)
        for s in range(SAMPLES):
            y = drawn[s, b]
            truth = reference.log_prob(theta, y, *problem)
            close(found["log_prob"][s, b], truth, tolerance.log_prob, "log_prob")
            assert np.isfinite(truth) == (s < SAMPLES - 2 or (s == SAMPLES - 1 and options == 1))
            if s < SAMPLES - 2:
                np.testing.assert_array_equal(found["sample"][s, b], y)
            if np.isfinite(truth):
                slope = derivative(lambda x: reference.log_prob(x, y, *problem), theta, z[b])
                close(found["derivative of log_prob"][s, b], slope, max(tolerance.vjp, 1e-6), "derivative of log_prob")
            else:
                assert found["derivative of log_prob"][s, b] == 0


def test_every_level_of_the_tournament_is_two_slices():
    for options in range(1, 40):
        nodes = [(o, o + 1) for o in jax_scan._order(options)]
        joined = []
        while len(nodes) > 1:
            alone, skip, pick = jax_scan._level(nodes)
            joined += [(low, middle, high) for (low, middle), (_, high) in zip(skip, pick, strict=True)]
            assert all(low[1] == high[0] for low, high in zip(skip, pick))
            nodes = alone + [(low, high) for (low, _), (_, high) in zip(skip, pick)]
        assert sorted(joined) == sorted(map(tuple, tournament(options).tolist()))


def test_float32_scores_with_near_ties():
    """Scores of 1e4 gamma; every exchange of options of equal weight is worth about one gamma."""
    rng, gamma, shape = np.random.default_rng(3), 1e-4, (40, 4)
    weights = rng.integers(3, 9, shape)
    theta = (weights + gamma * rng.standard_normal(shape)).astype(np.float32)
    limit = kg.MultipleChoice(weights, 200)
    lattice = limit.lattice(theta.size)
    value, y = reference.operator(theta.astype(np.float64).reshape(-1) / np.float32(gamma), lattice, kg.Gini)
    close(kg.relax(jnp.asarray(theta), limit, kg.Gini(gamma)), y.reshape(shape), 1e-5)
    close(kg.value(jnp.asarray(theta), limit, kg.Gini(gamma)), value * gamma, 1e-5)
    assert ((y > 0.01) & (y < 0.99)).any()


# Frontiers


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "options, exactly, regularizer",
    [
        (0, False, "shannon"),
        (0, True, "gini"),
        (0, True, "tsallis"),
        (0, False, "hard"),
        (3, False, "gini"),
        (3, True, "hard"),
    ],
)
def test_the_frontier_and_its_gradients(options, exactly, regularizer):
    """Under jit and vmap, by theta and gamma, of weights per instance."""
    given = case(options, own=True, least=False)
    given = Case(given.theta, given.lattice.replace(slack=np.zeros(BATCH, np.int32) if exactly else None))
    cotangent = rounded(np.random.default_rng(2).standard_normal((BATCH, given.lattice.reach + 1)))

    def gradients(theta: Any, gamma: Any, lattice: Lattice, cotangent: Any) -> Any:
        def frontier(theta: Any, gamma: Any) -> Any:
            return backend.frontier(theta, lattice, gamma, regularizer)

        row, pull = jax.vjp(frontier, theta, gamma)
        return row, pull(cotangent)

    theta, gamma, cotangent32 = (jnp.asarray(x, jnp.float32) for x in (given.theta, GAMMA, cotangent))
    arguments = theta, gamma, given.lattice, cotangent32
    rows, found = jax.jit(gradients)(*arguments)
    mapped_rows, mapped = jax.jit(jax.vmap(gradients))(*arguments)
    close(mapped_rows, rows, 1e-6)
    assert np.isinf(rows).any() == (exactly or options > 0)
    tolerance = TOLERANCES["float32"]
    for b, (theta, lattice, gamma) in enumerate(given.rows()):
        problem = lattice.replace(capacity=lattice.reach), CLASSES[regularizer]
        row = reference.frontier(theta, *problem)
        feasible = row > FEASIBLE
        close(rows[b], np.where(feasible, row, -np.inf), tolerance.value, "the frontier")
        by_scores = reference.frontier_vjp(theta, np.where(feasible, cotangent[b], 0.0), *problem)
        by_gamma = -(by_scores * np.where(theta == -np.inf, 0.0, theta)).sum() / gamma
        for by in (found, mapped):
            close(by[0][b], by_scores / gamma, tolerance.vjp, "its gradient")
            close(by[1][b], by_gamma, tolerance.vjp, "its gradient by gamma")


def test_the_gradient_of_the_frontier_by_finite_differences(x64):
    for options in (0, 3):
        given = case(options, own=False, least=False)
        theta = np.where(given.theta == -np.inf, 0.3, given.theta)

        def of(theta: Any, log_gamma: Any, lattice: Lattice = given.lattice) -> Any:
            return backend.frontier(theta, lattice, jnp.exp(log_gamma), "tsallis")

        check_grads(jax.jit(of), (jnp.asarray(theta), jnp.asarray(0.3)), 1, ("rev",), atol=1e-5, rtol=1e-5)


def test_the_frontier_of_scores_that_are_not_numbers():
    """Even of a single option, which has nothing to decide."""
    given = case(1, own=False, least=False)
    theta = given.theta.copy()
    theta[1, 2] = np.nan

    @jax.jit
    def both(theta: Any) -> Any:
        row, pull = jax.vjp(lambda theta: backend.frontier(theta, given.lattice, 1.0, "gini"), theta)
        return row, pull(jnp.ones_like(row))[0]

    row, gradient = both(jnp.asarray(theta, jnp.float32))
    assert np.isnan(row[1]).any() and not np.isfinite(row[1]).any() and np.isnan(gradient[1]).all()
    assert not np.isnan(row[::2]).any() and np.isfinite(gradient[::2]).all()


def test_the_frontier_has_one_derivative():
    given = case(0, own=False, least=False)

    def total(theta: Any) -> Any:
        return backend.frontier(theta, given.lattice, 1.0, "gini").sum()

    with pytest.raises(NotImplementedError, match="differentiate once less"):
        jax.grad(lambda theta: jax.grad(total)(theta).sum())(jnp.asarray(given.theta, jnp.float32))


def test_kernels_of_a_gpu_leave_choices_and_frontiers_to_the_scan(monkeypatch):
    monkeypatch.setattr(from_jax, "multiprocessors", lambda: 100)
    items, choices = case(0, own=False, least=False), case(3, own=False, least=False)
    for given, name, fused in ((items, "value", True), (items, "frontier", False), (choices, "value", False)):
        found = from_jax.find(name, "gini", jnp.asarray(given.theta, jnp.float32), given.lattice)
        assert (found is not None) == fused


# The public functions

GROUPS, WIDTH = 3, 9
RNG = np.random.default_rng(5)
CAPACITY = np.array([6, 8, 7])


def scores(options: int) -> np.ndarray:
    return rounded(RNG.standard_normal((BATCH, GROUPS, options)))


def weights_of(options: int) -> np.ndarray:
    """The last option of each group weighs 3, so that 5 can be reached, the first at most 1."""
    weights = RNG.integers(0, 5, (BATCH, GROUPS, options))
    weights[..., -1] = 3
    weights[..., 0] = 3 if options == 1 else 1
    return weights


def references(
    function: Callable[..., Any], theta: np.ndarray, limit: Any, regularizer: str, gamma: Any, *more: Any
) -> np.ndarray:
    """A function of the reference, of every instance; results per item in theta's shape."""
    flat = limit.flat(numpy_backend, theta)
    whole = limit.lattice(flat.shape[-1])
    results = []
    for b, scores in enumerate(flat):
        slack = None if whole.slack is None else int(np.broadcast_to(whole.slack, (BATCH,))[b])
        weights, capacity = np.broadcast_to(whole.weights, flat.shape)[b], np.broadcast_to(whole.capacity, (BATCH,))[b]
        lattice = whole.replace(weights=weights, capacity=int(capacity), slack=slack)
        results.append(function(scores / gamma[b], *(x[b] for x in more), lattice, CLASSES[regularizer]))
    stacked = np.stack(results)
    return limit.whole(stacked, theta.shape[1:]) if stacked.ndim == 2 else stacked


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "options, optional, least, regularizer, traced",
    [
        (3, False, 0, "gini", True),
        (3, True, 5, "tsallis", True),
        (2, False, 5, "shannon", False),
        (1, True, 0, "tsallis", True),
        (1, False, 5, "gini", False),
    ],
)
def test_operations_of_multiple_choice(options, optional, least, regularizer, traced):
    """Weights and capacity known, and weights shared, or traced and mapped; masked options."""
    theta, z, weights = scores(options), scores(options), weights_of(options)
    weights = weights if traced else weights[0, 0]
    capacity = np.full(BATCH, 9) if options == 1 else CAPACITY
    if options == 3:
        theta[0, 1, 1] = theta[2, 2, 1] = -np.inf

    def limited(weights: Any, capacity: Any, width: int | None = None) -> Any:
        return kg.MultipleChoice(weights, capacity, at_least=least, optional=optional, max_capacity=width)

    limit = limited(weights, capacity)
    best = references(lambda theta, lattice, _: reference.solve(theta, lattice), theta, limit, regularizer, GAMMA)

    def everything(theta: Any, y: Any, z: Any, gamma: Any, key: Any, weights: Any, capacity: Any) -> Any:
        own = limited(weights, capacity, WIDTH) if traced else limit
        smoothing = getattr(kg, regularizer.capitalize())(gamma)
        relaxed, pull = jax.vjp(lambda theta: kg.relax(theta, own, smoothing), theta)
        return {
            "value": kg.value(theta, own, smoothing),
            "relax": relaxed,
            "vjp": pull(z)[0],
            "entropy": kg.entropy(theta, own, smoothing),
            "solve": kg.solve(theta, own),
            "log_prob": kg.log_prob(theta, y, own, smoothing),
            "loss": kg.fenchel_young_loss(theta, y, own, smoothing),
            "samples": kg.sample(theta, own, smoothing, num_samples=SAMPLES, rng=key),
        }

    floats = [jnp.asarray(x, jnp.float32) for x in (theta, best, z, GAMMA)]
    keys = jax.random.split(jax.random.key(0), BATCH) if traced else jax.random.key(0)
    found = jax.jit(jax.vmap(everything) if traced else everything)(*floats, keys, weights, capacity)
    found = jax.tree.map(np.asarray, found)

    tolerance = TOLERANCES["float32"]
    of = {
        name: references(function, theta, limit, regularizer, GAMMA)
        for name, function in {
            "value": lambda *a: reference.operator(*a)[0],
            "relax": lambda *a: reference.operator(*a)[1],
            "entropy": lambda *a: reference.entropy(*a)[0],
        }.items()
    }
    close(found["value"], of["value"] * GAMMA, tolerance.value, "value")
    close(found["relax"], of["relax"], tolerance.relax, "relax")
    close(found["entropy"], of["entropy"], tolerance.log_prob, "entropy")
    score = np.where(best > 0, theta, 0.0).sum((1, 2))
    close(found["loss"], of["value"] * GAMMA - score, tolerance.value, "loss")
    flat_z = limit.flat(numpy_backend, z)
    product = references(reference.vjp, theta, limit, regularizer, GAMMA, flat_z)
    close(found["vjp"], product / GAMMA[:, None, None], tolerance.vjp, "vjp")
    flat_y = limit.flat(numpy_backend, best, is_selection=True)
    log_prob = references(reference.log_prob, theta, limit, regularizer, GAMMA, flat_y)
    close(found["log_prob"], log_prob, tolerance.log_prob, "log_prob")
    np.testing.assert_array_equal(found["solve"], best)
    samples = np.moveaxis(found["samples"], 0, 1) if traced else found["samples"]
    assert limit.contains(samples).all() and limit.contains(jnp.asarray(samples)).all()
    assert not samples[:, theta == -np.inf].any()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("operation", ["value", "relax", "entropy", "log_prob"])
def test_derivatives_by_finite_differences(operation, x64):
    """By theta and gamma."""
    theta, limit = scores(3)[0], kg.MultipleChoice(weights_of(3)[0], 6, at_least=4)
    y = (kg.solve(jnp.asarray(theta), limit),) if operation == "log_prob" else ()

    def of(theta: Any, log_gamma: Any) -> Any:
        return getattr(kg, operation)(theta, *y, limit, kg.Tsallis(jnp.exp(log_gamma)))

    arguments = jnp.asarray(theta), jnp.asarray(0.3)
    check_grads(jax.jit(of), arguments, 1, ("fwd", "rev"), atol=1e-5, rtol=1e-5)


def test_a_masked_option_has_no_gradient_and_gives_gamma_no_nan():
    theta, limit = scores(3), kg.MultipleChoice(weights_of(3), CAPACITY)
    theta[0, 1, 1] = theta[1, 0, 2] = -np.inf

    @jax.jit
    def gradients(theta: Any, gamma: Any) -> Any:
        def total(theta: Any, gamma: Any, f: Any) -> Any:
            return (f(theta, limit, kg.Gini(gamma)) ** 2).sum()

        return [jax.grad(total, (0, 1))(theta, gamma, f) for f in (kg.value, kg.relax, kg.entropy)]

    for by_theta, by_gamma in gradients(jnp.asarray(theta, jnp.float32), jnp.asarray(GAMMA, jnp.float32)):
        assert np.isfinite(by_theta).all() and np.isfinite(by_gamma).all()
        assert by_theta[0, 1, 1] == by_theta[1, 0, 2] == 0
        assert (by_gamma != 0).any()


@pytest.mark.parametrize("traced", [True, False])
def test_an_infeasible_instance_is_nan(traced):
    """Below its lightest options; a least weight that no options reach; a group without options; a score that is no
    number; and traced numbers that are not valid. The first instance is feasible."""
    names = ["feasible", "capacity", "at least", "masked", "nan", "above the bound", "negative"]
    size = len(names) if traced else names.index("nan") + 1
    theta, weights = np.zeros((size, GROUPS, 3)), np.full((size, GROUPS, 3), [1, 2, 1])
    capacity, at_least = np.full(size, 6), np.full(size, 4)
    capacity[1], at_least[1] = 2, 1
    capacity[2], at_least[2] = 8, 8
    theta[3, 1], theta[4, 1, 1] = -np.inf, np.nan
    if traced:
        capacity[5], weights[6, 0, 0] = WIDTH + 1, -1

    def everything(theta: Any, key: Any, *numbers: Any) -> Any:
        limited, least = numbers[1:] or (capacity, at_least)
        limit = kg.MultipleChoice((numbers or (weights,))[0], limited, at_least=least, max_capacity=WIDTH)
        y, smoothing = jnp.zeros_like(theta).at[..., 0].set(1).at[:, 1:].set(jnp.array([0, 1.0, 0])), kg.Gini()
        relaxed, pull = jax.vjp(lambda theta: kg.relax(theta, limit, smoothing), theta)
        return {
            "value": kg.value(theta, limit, smoothing),
            "relax": relaxed,
            "vjp": pull(jnp.ones_like(theta))[0],
            "entropy": kg.entropy(theta, limit, smoothing),
            "log_prob": kg.log_prob(theta, y, limit, smoothing),
            "solve": kg.solve(theta, limit),
            "sample": kg.sample(theta, limit, smoothing, rng=key),
        }

    numbers = (weights, capacity, at_least) if traced else ()
    found = jax.jit(everything)(jnp.asarray(theta, jnp.float32), jax.random.key(0), *numbers)
    for operation, result in found.items():
        assert np.isfinite(result[0]).all(), operation
        for name, row in zip(names[1:], result[1:]):
            assert np.isnan(row).all(), f"{operation}: {name}"


def test_a_negative_weight_that_is_traced_is_nan():
    relax = jax.jit(lambda theta, weights: kg.relax(theta, kg.MultipleChoice(weights, 5, max_capacity=9), kg.Gini()))
    assert np.isnan(relax(jnp.ones((2, 2)), jnp.array([[-5, 0], [0, 0]]))).all()
    assert np.isfinite(relax(jnp.ones((2, 2)), jnp.array([[5, 0], [0, 0]]))).all()
