"""The fused kernels for JAX arrays. Without a GPU the launch is replaced by Triton's interpreter; the batches, the
folding of vmap and the derivatives around it are as they are. On a GPU, the rows of JAX in all tests run them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("knapgrad.kernels.triton.steps", exc_type=ImportError)
import jax.numpy as jnp  # noqa: E402

import knapgrad as kg  # noqa: E402
from knapgrad.kernels import jax_scan  # noqa: E402
from knapgrad.kernels.numba import from_jax as on_cpu  # noqa: E402
from knapgrad.kernels.triton import from_jax, plan  # noqa: E402
from knapgrad.lattice import Lattice  # noqa: E402
from knapgrad.regularizers import REGULARIZERS as CLASSES  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # of the interpreter's NumPy
]

RNG = np.random.default_rng(0)
THETA = RNG.normal(size=(2, 3, 5)).astype(np.float32)
Z = RNG.normal(size=(2, 3, 5)).astype(np.float32)
WEIGHTS = np.array([2, 1, 3, 2, 4])
KEY = jax.random.key(0)
REGULARIZERS = {name: make(1.1) for name, make in CLASSES.items()}
CONSTRAINTS = {
    "knapsack": kg.Knapsack(WEIGHTS, 6),
    "top-k": kg.TopK(2),
    "at least": kg.Knapsack(WEIGHTS, np.array([[6, 7, 9]]), at_least=np.array([[4], [0]])),
    "several budgets": kg.MultiKnapsack([WEIGHTS, [1, 1, 0, 1, 2], [0, 3, 1, 0, 2]], [6, [[2], [1]], 3]),
}


class Launches(list):
    """The kernels that were launched, with their arguments by name."""

    def call(self, kernel: Any, arguments: list[Any], outputs: list[Any], programs: int, **options: Any) -> Any:
        places = [place for place, x in enumerate(arguments) if isinstance(x, jax.Array)]

        def interpret(*arrays: Any) -> list[np.ndarray]:
            given = list(arguments)
            for place, x in zip(places, arrays):
                given[place] = torch.from_numpy(np.array(x))
            self.append((kernel.fn.__name__, dict(zip(kernel.arg_names, given))))
            results = [torch.full(x.shape, torch.nan, dtype=getattr(torch, x.dtype.name)) for x in outputs]
            kernel[(programs,)](*given, *results, **options)
            return [x.numpy().astype(y.dtype) for x, y in zip(results, narrowed)]

        narrowed = [jax.ShapeDtypeStruct(x.shape, arguments[0].dtype) for x in outputs]
        return jax.pure_callback(interpret, narrowed, *[arguments[place] for place in places])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    seen = Launches()
    monkeypatch.setattr(on_cpu, "find", lambda *_: None)  # the scan is what they are compared with
    monkeypatch.setattr(from_jax, "PLATFORM", "cpu")
    monkeypatch.setattr(from_jax, "multiprocessors", lambda: 2)
    monkeypatch.setattr(from_jax, "call", seen.call)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # each is run once, and compiled for longer than that
    jax.clear_caches()
    plan.plan.cache_clear()
    yield seen
    monkeypatch.undo()
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
    plan.plan.cache_clear()


def both_ways(function: Callable[..., Any], *arguments: Any, launches: Launches) -> None:
    """The kernels and the scan agree, and kernels were launched."""
    fused = function(*arguments)
    assert launches, "no kernel was launched"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_jax, "multiprocessors", lambda: 0)
        jax.clear_caches()
        plain = function(*arguments)
    for x, y in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-6)


def operations(theta: Any, constraint: Any, smoothing: Any) -> Any:
    y, pull = jax.vjp(lambda theta: kg.relax(theta, constraint, smoothing), theta)
    selections = kg.sample(theta, constraint, smoothing, rng=KEY, num_samples=4)
    return {
        "value": kg.value(theta, constraint, smoothing),
        "relax": y,
        "vjp": pull(jnp.asarray(Z))[0],
        "entropy": kg.entropy(theta, constraint, smoothing),
        "entropy gradient": jax.grad(lambda theta: kg.entropy(theta, constraint, smoothing).sum())(theta),
        "sample": selections,
        "log_prob": kg.log_prob(theta, selections, constraint, smoothing),
        "solve": kg.solve(theta, constraint),
    }


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "regularizer, constraint, rows",
    [
        ("shannon", "knapsack", "narrow"),
        ("gini", "knapsack", "wide"),
        ("tsallis", "top-k", "narrow"),
        ("gini", "at least", "wide"),
        ("tsallis", "several budgets", "narrow"),
        ("shannon", "several budgets", "wide"),
    ],
)
def test_every_operation_equals_the_scan(regularizer, constraint, rows, launches, monkeypatch):
    if rows == "wide":
        monkeypatch.setattr(plan, "NARROW", 0)
    function = jax.jit(lambda theta: operations(theta, CONSTRAINTS[constraint], REGULARIZERS[regularizer]))
    both_ways(function, jnp.asarray(THETA), launches=launches)
    assert {name for name, _ in launches} >= {"operator_kernel", "sample_kernel"}


def test_vmap_becomes_one_launch(launches):
    capacity, gamma = jnp.array([3, 6, 0]), jnp.array([0.5, 1.0, 2.0])
    weights = jnp.asarray(RNG.integers(1, 5, (2, 5)))

    def one(theta: Any, weights: Any, capacity: Any, gamma: Any) -> Any:
        limit = kg.Knapsack(weights, capacity, max_capacity=7)
        return kg.relax(theta, limit, kg.Gini(gamma)), kg.value(theta, limit, kg.Gini(gamma))

    inner = jax.vmap(one, (0, None, 0, 0))
    both_ways(jax.jit(jax.vmap(inner, (0, 0, None, None))), THETA, weights, capacity, gamma, launches=launches)
    assert [given["batch"] for _, given in launches] == [6, 6], "instances in a launch"


@pytest.mark.parametrize("outer", [False, True], ids=["inner", "outer"])
def test_vmap_of_least_weights_becomes_one_launch(outer, launches):
    capacity, least = (jnp.array([4, 6]), jnp.array([3, 5])) if outer else (jnp.array([3, 6, 0]), jnp.array([2, 5, 0]))

    def one(theta: Any, capacity: Any, least: Any) -> Any:
        return kg.relax(theta, kg.Knapsack(WEIGHTS, capacity, at_least=least), kg.Gini())

    axes = [(0, None, None), (0, 0, 0)]
    function = jax.jit(jax.vmap(jax.vmap(one, axes[not outer]), axes[outer]))
    both_ways(function, THETA, capacity, least, launches=launches)
    assert [given["batch"] for _, given in launches] == [6], "instances in a launch"
    assert not np.isnan(function(THETA, capacity, least)).any()


def test_vmap_of_samples_keeps_them_in_front(launches):
    smoothing, constraint = kg.Tsallis(), kg.TopK(2)

    def draw(theta: Any, key: Any) -> Any:
        y = kg.sample(theta, constraint, smoothing, rng=key, num_samples=3)
        return y, kg.log_prob(theta, y, constraint, smoothing)

    keys = jax.random.split(KEY, 2)
    both_ways(jax.jit(jax.vmap(draw)), jnp.asarray(THETA), keys, launches=launches)
    both_ways(jax.jit(jax.vmap(draw, (None, 0))), jnp.asarray(THETA[0]), keys, launches=launches)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_jacobians(mode, launches):
    both_ways(
        jax.jit(mode(lambda theta: kg.relax(theta, CONSTRAINTS["knapsack"], kg.Shannon()))), THETA[0], launches=launches
    )


def test_hessian_by_gamma_and_theta(launches):
    def value(theta: Any, gamma: Any) -> Any:
        return kg.value(theta, CONSTRAINTS["knapsack"], kg.Tsallis(gamma)).sum()

    both_ways(jax.jit(jax.hessian(value, (0, 1))), THETA[0, :1], jnp.float32(0.9), launches=launches)


def test_a_capacity_that_is_not_valid_gives_nan(launches):
    @jax.jit
    def run(capacity: Any) -> Any:
        return operations(jnp.asarray(THETA), kg.Knapsack(WEIGHTS, capacity, max_capacity=6), kg.Gini())

    both_ways(run, jnp.array([6, 7, -1]), launches=launches)
    assert np.isnan(run(jnp.array([6, 7, -1]))["relax"][:, 1:]).all()


def test_a_least_weight_that_no_items_have_gives_nan(launches):
    @jax.jit
    def run(at_least: Any) -> Any:
        return operations(jnp.asarray(THETA), kg.Knapsack(2 * WEIGHTS, 7, at_least=at_least), kg.Gini())

    for least in (jnp.array([4, 7, 8]), jnp.array([0, -1, 30])):  # by their sum, above the capacity, not valid
        both_ways(run, least, launches=launches)
        y = run(least)["relax"]
        assert np.isnan(y[:, 1:]).all() and not np.isnan(y[:, 0]).any()


def test_weights_below_0_give_nan_and_write_nothing_elsewhere(launches):
    weights = jnp.array([[2, 1, 3, 2, 4], [-1, 2, -9, 1, 1], [1, 1, 1, 1, 1]])
    run = jax.jit(lambda w: kg.relax(jnp.asarray(THETA), kg.Knapsack(w, 6), kg.Gini()))
    both_ways(run, weights, launches=launches)
    assert np.isnan(run(weights)[:, 1]).all() and not np.isnan(run(weights)[:, ::2]).any()


def test_an_empty_vmap(launches):
    assert jax.vmap(lambda t: kg.relax(t, kg.TopK(2), kg.Gini()))(jnp.zeros((0, 3, 5))).shape == (0, 3, 5)


def test_one_item_and_no_items(launches):
    both_ways(jax.jit(lambda t: kg.relax(t, kg.Knapsack([1], 1), kg.Gini())), THETA[:1, 0, :1], launches=launches)
    assert kg.relax(jnp.zeros((3, 0)), kg.Knapsack(np.zeros(0, int), 1), kg.Gini()).shape == (3, 0)


def test_rows_too_long_for_one_program_are_left_to_the_scan(launches):
    lattice = Lattice(np.ones(3, np.int32), np.int32(2), None, reach=plan.LARGEST_ROW, heaviest=1)
    assert from_jax.find("operator", "gini", jnp.zeros((2, 3)), lattice) is None
    assert from_jax.find("operator", "gini", jnp.zeros((2, 3)), lattice.replace(reach=100)) is not None


def test_outputs_are_named_as_the_installed_version_names_them(monkeypatch):
    """0.3 has only ``out_shape``; 0.4 has ``out_type``, and takes the old name among the options, with a warning."""

    def old(*arguments: Any, kernel: Any, out_shape: Any, grid: Any, **options: Any) -> Any:
        return arguments, kernel, out_shape, grid, options

    def new(*arguments: Any, kernel: Any, out_type: Any = None, grid: Any, **options: Any) -> Any:
        return arguments, kernel, out_type, grid, options

    for triton_call in (old, new):
        monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
        found = from_jax.call("kernel", [1, 2], ["output"], 3, num_warps=4)
        assert found == ((1, 2), "kernel", ["output"], (3,), {"num_warps": 4})


def test_an_unknown_regularizer_is_an_error(launches):
    """In the kernels, and in the scan."""
    theta, gamma = jnp.zeros(3), jnp.ones(())
    lattice = CONSTRAINTS["top-k"].lattice(3)
    with pytest.raises(KeyError, match="softmax"):
        from_jax.find("operator", "softmax", theta, lattice)(theta, lattice, gamma, ())
    for name in ("value", "operator", "entropy", "solve"):
        with pytest.raises(KeyError, match="softmax"):
            getattr(jax_scan, name)(theta, lattice, gamma, "softmax")
    for name in ("vjp", "sample", "log_prob"):
        with pytest.raises(KeyError, match="softmax"):
            getattr(jax_scan, name)(theta, lattice, gamma, "softmax", theta if name == "vjp" else theta[None])
