"""The CPU kernels as XLA calls them: the same numbers as from Python, however they are batched, split and placed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import knapgrad as kg  # noqa: E402
from knapgrad.jax import backend as jax_backend  # noqa: E402
from knapgrad.kernels import jax_calls, jax_scan, numba  # noqa: E402
from knapgrad.kernels.jax_scan import float64  # noqa: E402
from knapgrad.kernels.numba import from_jax, handlers, layout, tasks, xla  # noqa: E402
from knapgrad.kernels.operations import OPERATIONS  # noqa: E402
from knapgrad.numpy import backend as numpy_backend  # noqa: E402

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of the CPU")

RNG = np.random.default_rng(0)
WEIGHTS = RNG.integers(0, 6, 9)
CONSTRAINTS: dict[str, Any] = {
    "knapsack": kg.Knapsack(WEIGHTS, 12),
    "of each": kg.Knapsack(RNG.integers(0, 6, (2, 5, 9)), RNG.integers(8, 15, (2, 5))),
    "at least": kg.Knapsack(WEIGHTS, RNG.integers(8, 15, (2, 5)), at_least=RNG.integers(0, 5, (2, 1))),
    "top-k": kg.TopK(3),
    "choices": kg.MultipleChoice(RNG.integers(0, 4, (3, 3)), 6),
    "optional": kg.MultipleChoice(RNG.integers(0, 4, (2, 5, 3, 3)), RNG.integers(3, 7, (2, 5)), optional=True),
    "budgets": kg.MultiKnapsack([WEIGHTS, np.ones(9, int)], [12, 4]),
    "budgets of each": kg.MultiKnapsack(RNG.integers(0, 4, (3, 2, 5, 9)), RNG.integers(2, 7, (3, 2, 5))),
}
REGULARIZERS = ("shannon", "gini", "tsallis")
NAMES = sorted({name for name, row in OPERATIONS.items() if row.kernel and hasattr(jax_scan, name)} - {"tabulate"})


@pytest.fixture(params=CONSTRAINTS.values(), ids=CONSTRAINTS)
def constraint(request: pytest.FixtureRequest) -> Any:
    return request.param


def scores(constraint: Any, dtype: Any = np.float32, *batch: int) -> np.ndarray:
    shape = batch or (2, 5)
    theta = np.random.default_rng(1).normal(size=(*shape, 9)).astype(dtype)
    theta[..., 0, 1] = -np.inf
    return theta.reshape(*shape, 3, 3) if isinstance(constraint, kg.MultipleChoice) else theta


def both(name: str, constraint: Any, theta: np.ndarray, regularizer: str, extra: tuple[np.ndarray, ...] = ()) -> Any:
    """Results from XLA and from Python, of a kernel."""
    flat = constraint.flat(numpy_backend, theta)
    lattice, gamma = numpy_backend.lattice(constraint, flat), np.array(0.7, theta.dtype)
    traced = jax_backend.lattice(constraint, jnp.asarray(flat))
    given = tuple(np.random.default_rng(2).random(x).astype(theta.dtype) for x in extra_shapes(name, flat, lattice))
    if name == "log_prob":
        given = (numba.sample(flat, given[0], lattice, gamma, regularizer),)
    if name == "solve":
        regularizer = "hard"
    call = from_jax.find(name, regularizer, jnp.asarray(flat), traced)
    found = jax.jit(call)(jnp.asarray(flat), traced, jnp.asarray(gamma), tuple(map(jnp.asarray, given)))
    if name == "solve":
        return found, numba.solve(flat, lattice)
    function = {"value": numba.operator, "entropy_grad": numba.entropy_grad}.get(name, getattr(numba, name, None))
    expected = function(flat, *given, lattice, gamma, regularizer)
    if name == "value":
        expected = expected[0]
    if name == "entropy_grad":
        expected = numba.entropy(flat, lattice, gamma, regularizer), expected
    return found, expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["operator", "value", "vjp", "entropy", "entropy_grad", "log_prob"])
def test_xla_gets_what_python_gets_without_a_table(name, dtype, monkeypatch):
    monkeypatch.setattr(layout, "LEAST", dict.fromkeys(layout.LEAST, 0))
    of_each = kg.TopK(RNG.integers(2, 6, (2, 5)), at_least=2)
    for constraint in (kg.TopK(3), of_each):
        with float64(dtype == np.float64):
            found, expected = both(name, constraint, scores(constraint, dtype), "shannon")
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x, y.astype(dtype))


def test_a_batch_that_vmap_puts_together_is_without_a_table():
    """It is not one instance that decides."""
    theta = np.random.default_rng(0).normal(size=(40, 600)).astype(np.float32)
    relax = jax.jit(jax.vmap(lambda x, k: kg.relax(x, kg.TopK(k, max_capacity=600), kg.Shannon())))
    found, k = relax(theta, np.arange(40)), np.arange(40)
    np.testing.assert_array_equal(found, kg.relax(theta, kg.TopK(k, max_capacity=600), kg.Shannon()))


def extra_shapes(name: str, flat: Any, lattice: Any) -> list[tuple[int, ...]]:
    return [OPERATIONS[name].shape_of(x, flat.shape, lattice.reach, samples=4) for x in OPERATIONS[name].extras]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_xla_gets_what_python_gets(name, constraint, regularizer, dtype):
    with float64(dtype == np.float64):
        found, expected = both(name, constraint, scores(constraint, dtype), regularizer)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, y.astype(dtype))


@pytest.mark.parametrize("name", [name for name in NAMES if "frontier" not in name])
def test_what_is_infeasible_is_nan_alone(name):
    theta = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    limit = kg.Knapsack([1, 2, 2], [3, 5, 5, 3], at_least=[3, 0, 4, 0])
    lattice = jax_backend.lattice(limit, theta)
    capacity = np.array([3, -1, 5, 3], np.int32)  # what is not valid when it is known only inside jit
    theta = theta.at[2, 1:].set(-jnp.inf)  # nothing left for the least weight
    extra = tuple(jnp.ones(x, jnp.float32) for x in extra_shapes(name, theta, lattice))
    call = from_jax.find(name, "gini", theta, lattice)
    results = jax.jit(call)(theta, lattice.replace(capacity=jnp.asarray(capacity)), jnp.ones(()), extra)
    for x in jax.tree.leaves(results):
        x = np.moveaxis(np.asarray(x), -2 if x.ndim == 3 else -1 if name == "log_prob" else 0, 0)
        assert np.isnan(x[[1, 2]]).all() and not np.isnan(x[[0, 3]]).any()


@pytest.mark.parametrize("kind", ["knapsack", "of each", "choices", "budgets", "budgets of each"])
def test_vmap_is_one_call(kind):
    constraint = CONSTRAINTS[kind]
    theta = jnp.asarray(scores(constraint))
    relax = jax.jit(jax.vmap(lambda theta, gamma: kg.relax(theta, constraint, kg.Gini(gamma)), (None, 0)))
    gammas = jnp.array([0.5, 1.0, 2.0])
    assert relax.lower(theta, gammas).compile().as_text().count("custom-call(") == 1
    found = relax(theta, gammas)
    for row, gamma in zip(found, gammas):
        np.testing.assert_array_equal(row, kg.relax(theta, constraint, kg.Gini(float(gamma))))


def test_many_slices_on_many_threads():
    constraint = CONSTRAINTS["knapsack"]
    theta = scores(constraint, np.float32, 40_000)
    expected = kg.relax(theta, constraint, kg.Shannon(0.5))
    relax = jax.jit(lambda theta: kg.relax(theta, constraint, kg.Shannon(0.5)))
    given = jnp.asarray(theta)
    for _ in range(5):
        np.testing.assert_array_equal(relax(given), expected)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: np.asarray(relax(given)), range(24)):
            np.testing.assert_array_equal(found, expected)


def test_loops_and_branches():
    constraint = CONSTRAINTS["top-k"]
    theta = jnp.asarray(scores(constraint))

    def step(theta: Any, _: Any) -> Any:
        y = kg.relax(theta, constraint, kg.Gini(0.5))
        return jnp.where(jnp.isinf(theta), theta, theta + 0.1 * y), y

    _, rows = jax.jit(lambda theta: jax.lax.scan(step, theta, length=5))(theta)
    expected = theta
    for y in rows:
        np.testing.assert_allclose(y, kg.relax(expected, constraint, kg.Gini(0.5)), atol=1e-6)
        expected, _ = step(expected, None)


def version_after(asked: int) -> int:
    """What a handler says that is asked by an XLA of that version (minor, major, as one word)."""
    metadata = (ctypes.c_int64 * 6)()
    extension = (ctypes.c_int64 * 4)(32, 1, 0, ctypes.addressof(metadata))
    api = (ctypes.c_int64 * 8)(64, 0, 24, 0, asked)
    frame = (ctypes.c_int64 * 22)(176, ctypes.addressof(extension), ctypes.addressof(api))
    assert handlers.handler(0).ctypes(ctypes.addressof(frame)) == 0
    return metadata[3]


def test_only_versions_that_are_known_are_answered():
    assert xla.MAJOR == 0 and version_after(3 << 32) == 3 << 32
    assert version_after(4 << 32) == 3 << 32  # later ones take earlier handlers
    assert version_after(2 << 32) == 0 and version_after(3 << 32 | 1) == 0


def test_without_the_handler_the_scan_is_used(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("API version 1.0")

    constraint = CONSTRAINTS["knapsack"]
    theta = jnp.asarray(scores(constraint, np.float32, 3))
    expected = kg.relax(theta, constraint, kg.Gini())
    jax.clear_caches()
    monkeypatch.setattr(from_jax, "_targets", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    try:
        with pytest.warns(UserWarning, match=r"without its own kernels.*API version 1\.0"):
            found = kg.relax(theta, constraint, kg.Gini())
        assert (
            from_jax.find("operator", "gini", theta, jax_backend.lattice(constraint, theta)) is None
        )  # no new warning
        np.testing.assert_allclose(found, expected, atol=1e-6)
    finally:
        jax.clear_caches()


def everything(theta: Any, constraint: Any) -> Any:
    smoothing = kg.Gini(0.5)
    y = kg.sample(theta, constraint, smoothing, rng=jax.random.key(0))
    results = [
        kg.value(theta, constraint, smoothing),
        kg.relax(theta, constraint, smoothing),
        kg.solve(theta, constraint),
        kg.entropy(theta, constraint, smoothing),
        kg.log_prob(theta, y, constraint, smoothing),
        kg.frontier(theta, constraint, smoothing),
    ]
    for operation in (kg.relax, kg.entropy, kg.frontier):
        results.append(jax.grad(lambda theta, f=operation: f(theta, constraint, smoothing).sum())(theta))
    return [y, *results, jax.vmap(lambda theta: kg.relax(theta, constraint, smoothing))(theta)]


def refuse(*_: Any) -> None:
    raise AssertionError("the scan is traced")


@pytest.mark.parametrize("kind", ["knapsack", "choices", "budgets"])
def test_the_scan_is_traced_for_other_platforms_only(kind, monkeypatch):
    constraint = CONSTRAINTS[kind]
    theta = jnp.asarray(np.where(np.isinf(x := scores(constraint)), -1.0, x))
    traced = jax.jit(lambda theta: everything(theta, constraint)).trace(theta)
    found = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "knapgrad" not in found and found.count("stablehlo.while") >= 20  # one for each sweep of the 11 results
    monkeypatch.setattr(jax_scan, "_fill", refuse)
    found = traced.lower().as_text()
    assert f"knapgrad_{from_jax.KINDS[from_jax.kind_of(constraint.lattice(9))]}" in found
    with pytest.raises(AssertionError, match="the scan is traced"):
        traced.lower(lowering_platforms=("tpu",))


def test_code_for_several_platforms_runs_here():
    constraint = CONSTRAINTS["knapsack"]
    theta = jnp.asarray(scores(constraint))
    relax = jax.jit(lambda theta: kg.relax(theta, constraint, kg.Tsallis(0.5)))
    allowed = [export.DisabledSafetyCheck.custom_call("knapgrad_items")]
    exported = export.export(relax, platforms=["cpu", "cuda"], disabled_checks=allowed)(theta)
    np.testing.assert_array_equal(exported.call(theta), relax(theta))


def test_a_version_of_jax_that_traces_every_scan(monkeypatch):
    constraint = CONSTRAINTS["top-k"]
    theta = jnp.asarray(scores(constraint, np.float32, 3))
    expected = kg.relax(theta, constraint, kg.Gini(0.6))
    monkeypatch.setattr(jax_calls, "_late", None)
    jax.clear_caches()
    np.testing.assert_array_equal(kg.relax(theta, constraint, kg.Gini(0.6)), expected)
    monkeypatch.setattr(jax_scan, "_fill", refuse)
    jax.clear_caches()
    with pytest.raises(AssertionError, match="the scan is traced"):
        kg.relax(theta, constraint, kg.Gini(0.6))
    jax.clear_caches()


def test_a_task_that_is_not_in_the_table_is_an_error():
    constraint = CONSTRAINTS["knapsack"]
    theta = jnp.asarray(scores(constraint, np.float32, 7))
    relax = jax.jit(lambda theta: kg.relax(theta, constraint, kg.Tsallis()))
    before = relax(theta)
    table = handlers.TASKS.copy()
    handlers.TASKS[:] = 0
    try:
        with pytest.raises(Exception, match="kernels are not loaded"):
            jax.block_until_ready(relax(theta))
    finally:
        handlers.TASKS[:] = table
    np.testing.assert_array_equal(relax(theta), before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_tables_that_do_not_fit_are_an_error():
    code = """
        import resource, jax, jax.numpy as jnp, knapgrad as kg
        small = kg.relax(jnp.ones(2), kg.Knapsack([1, 2], 2), kg.Gini())
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
        try:
            jax.block_until_ready(kg.relax(jnp.ones(3), kg.Knapsack([2**28] * 3, 2**29), kg.Gini()))
        except Exception as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert "the tables do not fit into memory" in run.stdout, run.stdout + run.stderr


def test_threads_may_trace_first_calls_at_the_same_time():
    code = """
        import threading, warnings, jax, jax.numpy as jnp, knapgrad as kg
        warnings.simplefilter("error")
        theta, limit, smoothing = jnp.ones((3, 4)), kg.Knapsack([1, 2, 3, 4], 5), kg.Gini(0.5)
        calls = [
            lambda x: kg.relax(x, limit, smoothing), lambda x: kg.value(x, limit, smoothing),
            lambda x: kg.entropy(x, limit, smoothing), lambda x: kg.solve(x, limit),
        ]
        together, done = threading.Barrier(len(calls)), []
        def run(call):
            together.wait()
            done.append(jax.block_until_ready(jax.jit(call)(theta)))
        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        [x.start() for x in threads], [x.join() for x in threads]
        print(len(done))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "4", run.stderr


def test_each_task_has_its_own_file_on_disk():
    """Numba's index has no lock: two processes that save two functions of one name write the same file."""
    one, other = (tasks._compiled(name, "float32", 0) for name in ("operator", "tangent"))
    files = [getattr(x._cache, "_cache_file", None) for x in (one, other)]
    assert None not in files and files[0]._index_path != files[1]._index_path


def test_second_derivatives_in_loops_say_what_to_do():
    limit, theta = CONSTRAINTS["knapsack"], jnp.asarray(RNG.normal(size=(2, 9)), jnp.float32)
    value = lambda row: kg.value(row, limit, kg.Shannon(0.5))  # noqa: E731
    assert jax.hessian(lambda theta: jax.vmap(value)(theta).sum())(theta).shape == (2, 9, 2, 9)
    with pytest.raises(NotImplementedError, match="vmap has two"):
        jax.hessian(lambda theta: jax.lax.map(value, theta).sum())(theta)
