"""Bad input: every error names the argument, and says what came or what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import BACKENDS, Backend
from calls import OPERATIONS
from kinds import EDGES
from knapgrad.regularizers import REGULARIZERS as CLASSES

Call = Callable[[Backend], Any]


def scores(backend: Backend, *shape: int) -> Any:
    return backend.asarray(np.linspace(-1, 1, int(np.prod(shape))).reshape(shape), backend.widest)


def relax(weights: Any, capacity: Any, *shape: int) -> Call:
    return lambda backend: kg.relax(scores(backend, *shape), kg.Knapsack(weights, capacity), kg.Gini())


def top(k: Any, *shape: int) -> Call:
    return lambda backend: kg.relax(scores(backend, *shape), kg.TopK(k), kg.Gini())


def smooth(gamma: Any, *shape: int) -> Call:
    return lambda backend: kg.relax(scores(backend, *shape), kg.TopK(1), kg.Gini(gamma))


def with_selection(y: Any, *shape: int) -> Call:
    return lambda backend: kg.log_prob(
        scores(backend, *shape), backend.asarray(y, backend.widest), kg.TopK(1), kg.Gini()
    )


def with_target(target: Any, *shape: int) -> Call:
    return lambda backend: kg.fenchel_young_loss(
        scores(backend, *shape), backend.asarray(target, backend.widest), kg.TopK(1), kg.Gini()
    )


def sample(**arguments: Any) -> Call:
    return lambda backend: kg.sample(scores(backend, 3), kg.TopK(1), kg.Gini(), **arguments)


MASKED = np.ma.masked_array([1, 1, 1], [False, True, False])

#: what is wrong -> the call, and a pattern of the message: the argument, then the key word
CASES: dict[str, tuple[Call, str]] = {
    "negative weight": (relax([1, -2, 3], 4, 3), r"weights.*negative.*-2"),
    "fractional weight": (relax([1, 2.5, 3], 4, 3), r"weights.*(whole|integer).*2\.5"),
    "weight that is NaN": (relax([1, np.nan, 3], 4, 3), r"weights.*(whole|integer).*nan"),
    "infinite weight": (relax([1, np.inf, 3], 4, 3), r"weights.*inf"),
    "weights of text": (relax(["a", "b", "c"], 4, 3), r"weights.*integer"),
    "no weights at all": (relax(None, 4, 3), r"weights.*integer"),
    "complex weights": (relax([1j, 2, 3], 4, 3), r"weights.*integer"),
    "ragged weights": (relax([[1, 2], [3]], 4, 2), r"weights"),
    "a single weight": (relax(2, 4, 3), r"weights.*(item|single)"),
    "too few weights": (relax([1, 2], 4, 3), r"weights.*2.*3"),
    "one weight to broadcast": (relax([1], 4, 3), r"weights.*1.*3"),
    "too many weights": (relax([1, 2, 3, 4], 4, 3), r"weights.*4.*3"),
    "weights of another batch": (relax(np.ones((2, 3), int), 4, 5, 3), r"weights.*\(2, 3\).*\(5, 3\)"),
    "weights of a batch that theta lacks": (relax(np.ones((2, 3), int), 4, 3), r"weights.*\(2, 3\).*\(3,\)"),
    "negative capacity": (relax([1, 2, 3], -1, 3), r"capacity.*negative.*-1"),
    "fractional capacity": (relax([1, 2, 3], 1.5, 3), r"capacity.*(whole|integer).*1\.5"),
    "capacity that is a truth value": (relax([1, 2, 3], True, 3), r"capacity.*integer.*bool"),
    "k that is a truth value": (top(True, 3), r"k must.*integer.*bool"),
    "weights that are a mask": (relax(np.ones(3, bool), 2, 3), r"weights.*integer.*bool"),
    "a constraint that was not made": (
        lambda backend: kg.relax(scores(backend, 3), kg.TopK, kg.Gini()),
        r"constraint.*TopK \(a class: call it\)",
    ),
    "capacity of text": (relax([1, 2, 3], "four", 3), r"capacity.*integer"),
    "capacity of another batch": (relax([1, 2, 3], [1, 2], 5, 3), r"capacity.*\(2,\).*\(5,\)"),
    "capacity of a batch that theta lacks": (relax([1, 2, 3], [1, 2], 3), r"capacity.*\(2,\).*\(\)"),
    "k below 0": (top(-1, 3), r"k .*negative.*-1"),
    "k above n": (top(4, 3), r"k .*0\.\.n.*4.*3"),
    "one k above n": (top([1, 5, 2], 3, 4), r"k .*0\.\.n.*5.*4"),
    "fractional k": (top(1.5, 3), r"k .*(whole|integer).*1\.5"),
    "k of another batch": (top([1, 2], 5, 3), r"k .*\(2,\).*\(5,\)"),
    "gamma 0": (smooth(0, 3), r"gamma.*positive.*0"),
    "gamma 0.0": (smooth(0.0, 3), r"gamma.*positive.*0"),
    "negative gamma": (smooth(-0.5, 3), r"gamma.*positive.*-0\.5"),
    "gamma that is NaN": (smooth(float("nan"), 3), r"gamma.*positive.*nan"),
    "one gamma that is not positive": (smooth(np.array([1.0, 0.0]), 2, 3), r"gamma.*positive"),
    "one gamma in a list that is not positive": (smooth([1.0, -1.0], 2, 3), r"gamma.*positive"),
    "gamma of text": (smooth("small", 3), r"gamma.*number"),
    "gamma that is a truth value": (smooth(True, 3), r"gamma.*number.*bool"),
    "gammas that are truth values": (smooth([True, True], 2, 3), r"gamma.*number.*bool"),
    "complex gamma": (smooth(1 + 0j, 3), r"gamma.*number.*complex"),
    "complex gammas": (smooth([1 + 0j, 1.0], 2, 3), r"gamma.*number.*complex"),
    "gammas of text": (smooth(["1"], 1, 3), r"gamma.*number"),
    "ragged gamma": (smooth([[1.0], [1.0, 2.0]], 2, 3), r"gamma.*number.*list"),
    "gamma beyond floats": (smooth(10**400, 3), r"gamma.*finite"),
    "masked gamma": (smooth(MASKED, 3, 3), r"gamma.*masked"),
    "masked weights": (relax(MASKED, 4, 3), r"weights.*masked"),
    "masked capacity": (relax([1, 2, 3], MASKED, 3, 3), r"capacity.*masked"),
    "masked k": (top(MASKED, 3, 3), r"k must.*masked"),
    "masked real weights": (lambda backend: kg.Knapsack.from_real(MASKED, 4), r"weights.*masked"),
    "masked selection": (
        lambda backend: kg.log_prob(scores(backend, 3), MASKED, kg.TopK(1), kg.Gini()),
        r"y must.*masked",
    ),
    "masked target": (
        lambda backend: kg.fenchel_young_loss(scores(backend, 3), MASKED, kg.TopK(1), kg.Gini()),
        r"target.*masked",
    ),
    "masked prior": (
        lambda backend: kg.divergence(scores(backend, 3), kg.TopK(1), kg.Gini(), prior=MASKED),
        r"prior.*masked",
    ),
    "masked y to look at": (lambda backend: kg.TopK(1).contains(MASKED), r"y must.*masked"),
    "no gamma": (smooth(None, 3), r"gamma.*number"),
    "gamma of another batch": (smooth(np.ones(2), 5, 3), r"gamma.*\(2,\).*\(5,\)"),
    "gamma for each item": (smooth(np.ones((5, 3)), 5, 3), r"gamma.*\(5, 3\).*\(5,\)"),
    "selection of another shape": (with_selection(np.zeros(4), 3), r"y .*shape.*\(3,\).*\(4,\)"),
    "selection with too few dimensions": (with_selection(np.zeros(3), 2, 3), r"y .*shape.*\(2, 3\).*\(3,\)"),
    "selection of another batch": (with_selection(np.zeros((4, 3)), 2, 3), r"y .*shape.*\(2, 3\).*\(4, 3\)"),
    "soft selection": (with_selection(np.array([0.5, 0.5, 0.0]), 3), r"y .*(zeros and ones|0/1|0 and 1)"),
    "selection of twos": (with_selection(np.array([2.0, 0.0, 0.0]), 3), r"y .*(zeros and ones|0/1|0 and 1)"),
    "selection with NaN": (with_selection(np.array([np.nan, 0.0, 1.0]), 3), r"y .*(zeros and ones|0/1|0 and 1)"),
    "target of another shape": (with_target(np.zeros(4), 3), r"target.*shape.*\(3,\).*\(4,\)"),
    "target of another batch": (with_target(np.zeros(3), 2, 3), r"target.*shape.*\(2, 3\).*\(3,\)"),
    "prior of another shape": (
        lambda backend: kg.divergence(scores(backend, 3), kg.TopK(1), kg.Gini(), prior=scores(backend, 2)),
        r"prior.*\(3,\).*\(2,\)",
    ),
    "negative num_samples": (sample(num_samples=-1), r"num_samples.*-1"),
    "num_samples that is a truth value": (sample(num_samples=True), r"num_samples.*True"),
    "complex num_samples": (sample(num_samples=2 + 0j), r"num_samples.*2\+0j"),
    "fractional num_samples": (sample(num_samples=2.5), r"num_samples.*2\.5"),
    "rng of text": (sample(rng="seed"), r"rng.*str"),
    "unknown constraint": (lambda backend: kg.relax(scores(backend, 3), "top-3", kg.Gini()), r"constraint.*str"),
    "a number as constraint": (lambda backend: kg.solve(scores(backend, 3), 3), r"constraint.*int"),
    "a class as constraint": (lambda backend: kg.solve(scores(backend, 3), kg.TopK), r"constraint"),
    "unknown regularizer": (lambda backend: kg.relax(scores(backend, 3), kg.TopK(1), "gini"), r"regularizer.*'gini'"),
    "a number as regularizer": (lambda backend: kg.value(scores(backend, 3), kg.TopK(1), 0.5), r"regularizer.*0\.5"),
    "a class as regularizer": (lambda backend: kg.value(scores(backend, 3), kg.TopK(1), kg.Gini), r"regularizer"),
    "a single score": (lambda backend: kg.solve(scores(backend), kg.TopK(1)), r"theta.*shape"),
    "integer theta": (
        lambda backend: kg.relax(as_dtype(backend, "int64"), kg.TopK(1), kg.Gini()),
        r"theta.*float.*int",
    ),
    "boolean theta": (lambda backend: kg.solve(as_dtype(backend, "bool"), kg.TopK(1)), r"theta.*float.*bool"),
    "complex theta": (
        lambda backend: kg.solve(as_dtype(backend, "complex128"), kg.TopK(1)),
        r"theta.*float.*complex",
    ),
}


UNSEEN_ON_A_DEVICE = {"soft selection", "selection of twos", "selection with NaN"}


def as_dtype(backend: Backend, dtype: str) -> Any:
    array = np.ones(3).astype(dtype)
    if backend.name == "numpy":
        return array
    if backend.is_jax:
        import jax.numpy as jnp

        return jnp.asarray(array)
    import torch

    return torch.from_numpy(array).to("cpu" if backend.name == "torch" else backend.name)


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case, backend):
    if backend.on_gpu and case in UNSEEN_ON_A_DEVICE:
        pytest.skip("looking at values would make the device wait")
    call, pattern = CASES[case]
    with pytest.raises((TypeError, ValueError), match=pattern):
        call(backend)


@pytest.mark.parametrize(
    "theta", [[0.1, 0.2], (0.1, 0.2), 0.5, None, "scores", memoryview(b"ab")], ids=lambda x: type(x).__name__
)
def test_theta_of_an_unknown_framework(theta):
    with pytest.raises(TypeError, match=rf"theta.*{type(theta).__name__}"):
        kg.relax(theta, kg.TopK(1), kg.Gini())


def test_checks_come_before_the_work(monkeypatch):
    """The eighth operation refuses as the first does: no kernel runs on bad arguments."""
    import knapgrad.kernels.numba.launch as kernels

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(kernels, "_run", refuse)
    theta, y = np.zeros(3), np.zeros(3)
    for constraint, pattern in ((kg.TopK(4), r"k .*0\.\.n"), (kg.Knapsack([1, 2], 3), r"weights"), (3, r"constraint")):
        for call in OPERATIONS.values():
            with pytest.raises((TypeError, ValueError), match=pattern):
                call(theta, y, constraint, kg.Gini())


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "prior" not in name])
def test_masks_that_leave_too_few_items_name_the_instance(operation, dtype, backend, regularizer):
    for batch, instance in ((40, 13), (3, 2), (1, 0)):
        theta = np.random.default_rng(0).standard_normal((batch, 6))
        y = np.zeros((batch, 6))
        y[:, :3] = 1
        theta[:, 4] = -np.inf

        def call() -> Any:
            given, selection = backend.asarray(theta, dtype), backend.asarray(y, dtype)
            return OPERATIONS[operation](given, selection, kg.TopK(3), CLASSES[regularizer](), rng=backend.rng(0))

        call()
        theta[instance, 1:4] = -np.inf
        if not backend.looks:  # a device, or JAX, which nobody waits for: NaN, or -inf for a selection of probability 0
            result = backend.to_numpy(call())
            assert not np.isfinite(result[instance]).any()
            assert np.isfinite(np.delete(result, instance, axis=0)).all() or operation == "log_prob"
            assert not np.isnan(np.delete(result, instance, axis=0)).any()
            continue
        with pytest.raises(ValueError, match=rf"instance {instance} .*no feasible selection.*mask fewer items"):
            call()


_ITEMS = np.random.default_rng(0).standard_normal((3, 3))
_CHOICES, _WEIGHTS = EDGES["choices, batch of rank 2"].theta[0], EDGES["choices, no batch"].weights
_MASKED = np.where((np.arange(3)[:, None, None] == 1) & (np.arange(3)[:, None] == 2), -np.inf, _CHOICES)

#: theta, and a constraint that the second instance cannot keep
INFEASIBLE: dict[str, tuple[np.ndarray, Any]] = {
    "more than all items weigh": (_ITEMS, kg.Knapsack([[3, 3, 3], [1, 1, 1], [3, 3, 3]], 9, at_least=6)),
    "a sum that none has": (_ITEMS, kg.Knapsack([[1, 2, 3], [2, 4, 6], [1, 2, 3]], 5, at_least=5)),
    "less than the lightest options": (_CHOICES, kg.MultipleChoice(_WEIGHTS, [2, 1, 2])),
    "less than lightest options whose sum is beyond 64 bits": (
        np.zeros((3, 32, 2)),
        kg.MultipleChoice(np.array([0, 2**59, 0])[:, None, None] + np.zeros((1, 2), int), 9),
    ),
    "a group without options": (_MASKED, kg.MultipleChoice(_WEIGHTS, 9)),
    "more than the heaviest options": (_CHOICES, kg.MultipleChoice(_WEIGHTS, 20, at_least=[0, 10, 9])),
    "more than one of each": (_CHOICES, kg.MultipleChoice(_WEIGHTS, 20, at_least=[0, 10, 9], optional=True)),
    "a sum that no options have": (
        _CHOICES,
        kg.MultipleChoice(np.stack([_WEIGHTS, 2 * _WEIGHTS, _WEIGHTS]), 5, at_least=5, optional=True),
    ),
}


@pytest.mark.thinned_where_compiled(3)
@pytest.mark.parametrize("what", INFEASIBLE)
def test_an_infeasible_instance_is_named(what, backend, regularizer):
    """Or NaN in that instance alone where nobody looks."""
    given, constraint = INFEASIBLE[what]
    theta, smoothing = backend.asarray(given, backend.widest), CLASSES[regularizer]()
    remedy = "raise the capacity" if constraint.event_dims == 2 else ""
    for name in ("relax", "value", "solve", "entropy", "sample"):

        def call() -> Any:
            return OPERATIONS[name](theta, None, constraint, smoothing, rng=backend.rng(0))

        if backend.looks:
            message = rf"instance 1 .*no feasible selection.*lower k or at_least.*{remedy}"
            with pytest.raises(ValueError, match=message):
                call()
        else:
            result = backend.to_numpy(call())
            assert np.isnan(result[1]).all() and np.isfinite(result[[0, 2]]).all(), name


def run(code: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "weights, capacity, plain",
    [
        ("[2, 1, 3, 0]", "2**63 - 1", "[2, 1, 3, 0], 6"),
        ("[2, 2**63 - 1, 3, 0]", "4", "[2, 5, 3, 0], 4"),
        ("np.array([2, 2**64 - 1, 3, 0], dtype=np.uint64)", "4", "[2, 5, 3, 0], 4"),
        ("[2, 1, 3, 0]", "np.uint64(2**64 - 1)", "[2, 1, 3, 0], 6"),
    ],
)
def test_the_largest_integers_mean_no_limit_or_out(weights, capacity, plain):
    """sys.maxsize is a natural "no limit". In a process of its own: an overflow here can kill the interpreter."""
    code = f"""
        import numpy as np, knapgrad as kg
        theta = np.array([0.75, -0.5, 1.5, 0.25])
        try:
            found = kg.relax(theta, kg.Knapsack({weights}, {capacity}), kg.Gini())
        except ValueError as error:
            print("weights" in str(error) or "capacity" in str(error))
        else:
            print(np.array_equal(found, kg.relax(theta, kg.Knapsack({plain}), kg.Gini())))
    """
    assert run(code) == "True"


@pytest.mark.parametrize(
    "weights, capacity", [("[2**40] * 4", "2**41"), ("[2**61] * 4", "2**62"), ("[2**63 - 1] * 4", "2**63 - 1")]
)
def test_a_table_that_fits_no_memory_raises(weights, capacity):
    code = f"""
        import numpy as np, knapgrad as kg
        try:
            kg.relax(np.zeros(4), kg.Knapsack({weights}, {capacity}), kg.Gini())
        except (MemoryError, ValueError) as error:
            print("capacity" in str(error) and ("common factor" in str(error) or "smaller number" in str(error)))
    """
    assert run(code) == "True"


def test_weights_that_learn_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"weights requires a gradient.*weights\.detach"):
        kg.Knapsack(torch.nn.Parameter(torch.ones(3)), 2)
    assert kg.Knapsack(torch.ones(3), 2).capacity == 2


def test_weights_under_vmap_are_refused():
    torch = pytest.importorskip("torch")

    def relaxed(theta, weights):
        return kg.relax(theta, kg.Knapsack(weights, 3), kg.Gini())

    with pytest.raises(TypeError, match=r"weights.*vmap.*batch dimension"):
        torch.func.vmap(relaxed)(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.int64))


def test_masked_arrays_are_refused():
    with pytest.raises(TypeError, match=r"theta.*masked.*filled\(-np\.inf\)"):
        kg.relax(np.ma.masked_array(np.zeros(3), [False, True, False]), kg.TopK(1), kg.Gini())


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # they are on their way out
def test_matrices_are_refused():
    with pytest.raises(TypeError, match=r"theta.*matrix.*np\.asarray\(theta\)"):
        kg.relax(np.matrix([[0.0, 1.0, 2.0]]), kg.TopK(1), kg.Gini())
    with pytest.raises(TypeError, match=r"y must not be a NumPy matrix"):
        kg.TopK(1).contains(np.matrix([[0.0, 1.0, 0.0]]))
    for make, name in (
        (lambda: kg.Knapsack(np.matrix([1, 2]), 3), "weights"),
        (lambda: kg.TopK(np.matrix([1])), "k"),
        (lambda: kg.Gini(np.matrix([1.0])), "gamma"),
        (lambda: kg.log_prob(np.zeros(3), np.matrix([1.0, 0.0, 0.0]), kg.TopK(1), kg.Gini()), "y"),
        (lambda: kg.Knapsack.from_real(np.matrix([1.5, 2.0]), 3.0), "weights"),
    ):
        with pytest.raises(TypeError, match=f"{name} must not be a NumPy matrix"):
            make()


class Liar(np.ndarray):
    """Whose attributes are not those of its memory."""

    shape = property(lambda self: (4096, 3))  # type: ignore[assignment]
    size = property(lambda self: 3 * 4096)  # type: ignore[assignment]
    ndim = property(lambda self: 2)  # type: ignore[assignment]
    flags = property(lambda self: np.zeros((4096, 3)).flags)  # type: ignore[assignment]
    dtype = property(lambda self: np.dtype(np.float64))  # type: ignore[assignment]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_attributes_of_a_subclass_are_not_trusted(framework):
    """Kernels read the memory that shape and dtype promise."""
    backend = BACKENDS[framework]
    if not backend.available:
        pytest.skip(backend.reason)

    def results(given: Callable[[Any], Any]) -> list[Any]:
        theta = given(np.array([[0.5, 0.75, 0.25]], np.float32))
        theta = theta if framework == "numpy" else scores(backend, 1, 3)
        y, weights = given(np.array([[0, 1, 0]])), given(np.array([3, 2, 1]))
        limit, smoothing = kg.Knapsack(weights, given(np.array([4]))), kg.Gini(given(np.array([0.5])))
        real, choices = kg.Knapsack.from_real(given(np.array([3.1, 2.2, 1.0])), 4.0), kg.MultipleChoice(weights, 4)
        arguments = theta, limit, smoothing
        return [
            *(call(*arguments) for call in (kg.relax, kg.value, kg.entropy, kg.divergence, kg.frontier)),
            kg.solve(theta, limit),
            kg.solve(theta, real),
            kg.relax(theta, choices, kg.Gini()),
            kg.sample(*arguments, rng=backend.rng(0)),
            kg.log_prob(theta, y, limit, smoothing),
            kg.fenchel_young_loss(theta, y, limit, smoothing),
            kg.divergence(*arguments, prior=given(np.array([[0.5, 1.0, 2.0]]))),
            limit.contains(y),
        ]

    for found, expected in zip(results(lambda x: x.view(Liar)), results(lambda x: x)):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_arrays_of_another_byte_order(backend):
    """Converted, except for theta: the result would have to be of its type."""
    with pytest.raises(TypeError, match=r"theta.*byte order.*>f4.*astype\('float32'\)"):
        kg.relax(np.zeros(3, ">f4"), kg.TopK(1), kg.Gini())

    def results(order: str) -> list[Any]:
        gamma, y, weights = np.array([0.5], f"{order}f8"), np.array([[0, 1, 0]], f"{order}i4"), [3, 2, 1]
        theta, budget = scores(backend, 1, 3), kg.Knapsack(np.array(weights, f"{order}i8"), np.array(4, f"{order}i2"))
        smoothing = kg.Gini(gamma)
        assert smoothing == kg.Gini(np.array([0.5])) and budget.contains(y).all()
        return [
            kg.relax(theta, budget, smoothing),
            kg.log_prob(theta, y, budget, smoothing),
            kg.fenchel_young_loss(theta, y.astype(f"{order}f4"), budget, smoothing),
            kg.divergence(theta, budget, smoothing, prior=y),
        ]

    for one, other in zip(results(">"), results("<")):
        np.testing.assert_array_equal(backend.to_numpy(one), backend.to_numpy(other))


def test_without_a_compiler_an_error_says_so():
    code = """
        import os
        os.environ["NUMBA_DISABLE_JIT"] = "1"
        import numpy as np, knapgrad as kg
        try:
            kg.relax(np.zeros(4), kg.TopK(2), kg.Gini())
        except RuntimeError as error:
            print(error)
    """
    assert "NUMBA_DISABLE_JIT is set" in run(code)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_nothing_warns(framework):
    pytest.importorskip(framework)
    code = f"""
        import sys, warnings
        warnings.simplefilter("error")
        import {framework}, numpy as np, knapgrad as kg

        theta = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
        if {framework!r} == "torch":
            import knapgrad.torch
            theta = torch.from_numpy(theta).requires_grad_()
        if {framework!r} == "jax":
            import knapgrad.jax
            theta = jax.numpy.asarray(theta)
        rng, gamma = jax.random.key(0) if "jax" in sys.modules else None, kg.Gini([0.5, 1.0])
        budget, y = kg.Knapsack([1, 2, 3], 4), kg.solve(theta, kg.TopK(1))
        results = [kg.value(theta, budget, gamma), kg.relax(theta, budget, gamma), kg.entropy(theta, budget, gamma)]
        results += [kg.sample(theta, budget, gamma, num_samples=2, rng=rng), kg.log_prob(theta, y, budget, gamma)]
        results += [kg.fenchel_young_loss(theta, y, budget, gamma), kg.divergence(theta, budget, gamma)]
        results += [kg.frontier(theta, budget), budget.contains(y)]
        half = kg.Knapsack(np.array([1, 2, 3], np.float16), np.float16(4))
        assert half == budget and kg.TopK(np.float16(2)) == kg.TopK(2)
        kg.value(np.array([3e4, 6e4], np.float16), kg.Knapsack([1, 1], 2), kg.Gini())  # inf
        results += [kg.divergence(theta, half, gamma, prior=np.array(x)) for x in ([np.inf, -np.inf, 1], [1, 1e300, 1])]
        for result in results:
            if getattr(result, "requires_grad", False):
                result.sum().backward()
        print("done")
    """
    assert run(code) == "done"


def test_a_distribution_of_too_many_instances_blames_the_batch():
    torch = pytest.importorskip("torch")
    theta, budget = torch.zeros(1, 20).expand(10**5, 20), kg.Knapsack([10**4] * 20, 10**5)
    with pytest.raises(MemoryError, match=r"100,000 instances.*part of the batch.*knapgrad\.sample"):
        kg.torch.SubsetDistribution(theta, budget, kg.Gini()).sample()


def test_results_that_do_not_fit_into_memory_say_what_to_do():
    theta = np.zeros((10**5, 3))
    with pytest.raises(MemoryError, match=r"\(30000000, 100000, 3\).*fewer samples"):
        kg.sample(theta, kg.TopK(1), kg.Gini(), num_samples=3 * 10**7, rng=0)
    with pytest.raises(MemoryError, match=r"\(100000, 10000001\).*fewer instances"):
        kg.frontier(theta, kg.Knapsack([10**7] * 3, 10**7), kg.Gini())


def test_what_the_package_shows():
    assert set(kg.__all__) | {"torch", "jax"} == set(dir(kg)) - {"__version__"}


def test_importing_imports_no_framework():
    code = """
        import sys
        import knapgrad as kg
        import numpy as np
        kg.relax(np.zeros(4), kg.TopK(2), kg.Gini())
        print([name for name in ("torch", "jax") if name in sys.modules])
    """
    assert run(code) == "[]"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_missing_framework_comes_with_the_command_to_install_it(framework):
    code = f"""
        import sys
        sys.modules[{framework!r}] = None
        import knapgrad
        try:
            import knapgrad.{framework}
        except ImportError as error:
            print(error)
    """
    assert f"knapgrad[{framework}]" in run(code)


def test_without_triton_the_cpu_works_and_a_device_says_what_to_install():
    pytest.importorskip("torch")
    code = """
        import sys
        sys.modules["triton"] = None
        import torch, knapgrad as kg
        from knapgrad.torch import registration
        y = kg.relax(torch.zeros(4, requires_grad=True), kg.TopK(2), kg.Gini())
        y.square().sum().backward()
        try:
            registration._run_on_cuda("operator", 1, (torch.zeros(4), kg.TopK(2).lattice(4), torch.tensor(1.0), "gini"))
        except ImportError as error:
            print(y.tolist(), error)
    """
    message = run(code)
    assert message.startswith("[0.5, 0.5, 0.5, 0.5] theta is on a CUDA device") and "pip install triton" in message
