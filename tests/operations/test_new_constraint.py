"""A constraint is one class: one that is made by the first step of CONTRIBUTING has every operation, in every framework
that is installed here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import BACKENDS, TOLERANCES
from fuzzing.cases import KINDS, Kind, draw
from fuzzing.checks import failures
from knapgrad.arguments import integers
from knapgrad.constraints.limited import Limited
from knapgrad.values import read_only
from oracles import REGULARIZERS, Limits, Truth, feasible, optimum, subsets


class Packed(Limited):
    """Items that are packed one by one, within a total weight.

    Args:
        weights: non-negative integers, (n,) or broadcastable to theta.
        box: what the box of each item weighs, a non-negative integer.
        capacity: the largest total weight, a non-negative integer, or integers broadcastable to the batch of theta.
        at_least: the least total weight.
        max_capacity: an upper bound of the capacity.

    >>> kg.solve(np.array([3.0, 2.0, 2.0]), Packed([3, 2, 2], 1, capacity=6))
    array([0., 1., 1.])
    """

    def __init__(
        self, weights: Any, box: Any, capacity: Any, *, at_least: Any = 0, max_capacity: int | None = None
    ) -> None:
        weights = integers("weights", weights, "one weight per item")
        box = integers("box", box, "the weight of the box of an item")
        self._keep(weights=read_only(weights), box=read_only(box))
        self._keep_limits(weights + box, capacity, at_least, max_capacity)


THETA = np.array([[0.75, -0.5, 1.5, 0.25], [-1.0, 2.0, 0.5, 1.25]])
WEIGHTS, BOX, HEAVY = [2, 1, 3, 1], 1, [3, 2, 4, 2]
#: the limits of both instances: at least, capacity
CASES: dict[str, tuple[dict[str, Any], list[Limits]]] = {
    "a capacity": ({"capacity": 6}, [Limits(0, 6)] * 2),
    "capacities": ({"capacity": [6, 99]}, [Limits(0, 6), Limits(0, 99)]),
    "a least weight": ({"capacity": [7, 99], "at_least": [3, 5]}, [Limits(3, 7), Limits(5, 99)]),
    "exactly": ({"capacity": [6, 8], "at_least": [6, 8], "max_capacity": 9}, [Limits(6, 6), Limits(8, 8)]),
}
FEW = pytest.mark.parametrize("case", ["capacities", "a least weight"])


def made(case: str) -> Packed:
    return Packed(WEIGHTS, BOX, **CASES[case][0])


@pytest.fixture(params=[name for name in BACKENDS if name != "jax-x64"])
def backend(request: pytest.FixtureRequest) -> Any:
    found = BACKENDS[request.param]
    if not found.available:
        pytest.skip(found.reason)
    with found.active():
        yield found


def truths(case: str, regularizer: str, gamma: float) -> list[Truth]:
    return [Truth(row, HEAVY, limits, regularizer, gamma) for row, limits in zip(THETA, CASES[case][1])]


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("case", CASES)
def test_every_operation_is_the_enumeration(case, regularizer, backend):
    limit, smoothing = made(case), getattr(kg, regularizer.capitalize())(0.8)
    exact, best = truths(case, regularizer, 0.8), [y for _, y in optima(case)]
    theta, y = (backend.asarray(x, backend.widest) for x in (THETA, np.array([each[0] for each in best], float)))
    error = 20 * TOLERANCES[backend.widest].relax

    def close(found: Any, expected: list[Any]) -> None:
        np.testing.assert_allclose(backend.to_numpy(found), expected, rtol=error, atol=error)

    close(kg.value(theta, limit, smoothing), [one.value for one in exact])
    close(kg.relax(theta, limit, smoothing), [one.relax for one in exact])
    close(kg.entropy(theta, limit, smoothing), [one.entropy for one in exact])
    close(kg.log_prob(theta, y, limit, smoothing), [one.log_prob(each[0]) for one, each in zip(exact, best)])
    loss = [one.fenchel_young_loss(each[0]) for one, each in zip(exact, best)]
    close(kg.fenchel_young_loss(theta, y, limit, smoothing), loss)
    close(kg.divergence(theta, limit, smoothing), [one.divergence([0.0] * 4) for one in exact])
    solved = backend.to_numpy(kg.solve(theta, limit)).astype(int)
    assert all(tuple(row) in each for row, each in zip(solved.tolist(), best))
    drawn = kg.sample(theta, limit, smoothing, num_samples=20, rng=backend.rng(0))
    assert backend.to_numpy(limit.contains(drawn)).all()
    every = np.array(subsets(4))[:, None].repeat(2, 1)
    expected = [[feasible(y, HEAVY, limits) for limits in CASES[case][1]] for y in subsets(4)]
    np.testing.assert_array_equal(backend.to_numpy(limit.contains(backend.asarray(every, backend.widest))), expected)


def optima(case: str) -> list[tuple[float, list[Any]]]:
    return [optimum(row, HEAVY, limits) for row, limits in zip(THETA, CASES[case][1])]


@pytest.mark.parametrize("case", CASES)
def test_its_frontier(case, backend):
    limit, theta = made(case), backend.asarray(THETA, backend.widest)
    if case == "a least weight":
        with pytest.raises(ValueError, match=r"at_least = capacity \(exactly c\), got at_least = \[3 5\]"):
            kg.frontier(theta, limit)
        return
    last = 9 if case == "exactly" else np.max(CASES[case][0]["capacity"])
    for regularizer in (None, "gini"):
        rows = backend.to_numpy(kg.frontier(theta, limit, None if regularizer is None else kg.Gini(0.8)))
        assert rows.shape == (2, last + 1)
        for c in range(min(last, 12) + 1):
            limits = Limits(c if case == "exactly" else 0, c)
            one = optimum(THETA[0], HEAVY, limits)[0] if regularizer is None else Truth(
                THETA[0], HEAVY, limits, regularizer, 0.8
            ).value  # fmt: skip
            np.testing.assert_allclose(rows[0, c], one, rtol=1e-5, atol=1e-5)


def test_warmup_takes_it(backend):
    for case in ("a capacity", "a least weight"):
        kg.warmup(backend.asarray(THETA, backend.widest), made(case), kg.Gini())


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_value(case):
    limit = made(case)
    for again in (made(case), copy.deepcopy(limit), pickle.loads(pickle.dumps(limit)), eval(repr(limit))):
        assert again == limit and hash(again) == hash(limit) and repr(again) == repr(limit)
    assert limit != Packed(WEIGHTS, 2, **CASES[case][0]) and limit != Packed([2, 1, 3, 2], BOX, **CASES[case][0])
    assert limit != kg.Knapsack(HEAVY, **CASES[case][0])
    with pytest.raises(AttributeError, match="box cannot be set"):
        limit.box = 3
    for x in (limit.weights, limit.box):
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 9


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Packed([1, -1], 1, 3), "weights must not be negative"),
        (lambda: Packed([1, 2], 0.5, 3), "box must be whole numbers"),
        (lambda: Packed(3, 1, 3), "weights must have one entry per item, got a single number"),
        (lambda: Packed([1, 2], 1, 3, at_least=4), "at_least must not be above the capacity"),
        (lambda: Packed([1, 2], 1, 3, max_capacity=2), "max_capacity is 2, and capacity has 3"),
        (lambda: kg.solve(np.zeros(3), Packed([1, 2], 1, 3)), "one entry per item: got 2 for theta"),
        (lambda: kg.solve(np.zeros((2, 1)), Packed([1], 1, [1, 2, 3])), r"capacity of shape \(3,\)"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_fuzzer_takes_a_row(framework, monkeypatch, torch_threads):
    if not BACKENDS[framework].available:
        pytest.skip(BACKENDS[framework].reason)
    rows = {name: KINDS[name] for name in ("knapsack, own weights", "knapsack, at least", "knapsack, exactly")}
    for name, row in rows.items():
        monkeypatch.delitem(KINDS, name)
        monkeypatch.setitem(KINDS, f"packed {name}", Kind(_packed, row.draw))
    for name in [name for name in KINDS if "packed" not in name]:
        monkeypatch.delitem(KINDS, name)
    checked = 0
    for seed in range(8):
        for operation, failure in failures(draw(np.random.default_rng(seed), framework, largest_batch=20)):
            assert failure is None, (operation, failure)
            checked += 1
    assert checked > 60


def _packed(weights: Any, **limits: Any) -> Packed:
    """Of what items weigh with their boxes."""
    box = int(np.min(weights, initial=1))
    return Packed(weights - box, box, **limits)


# torch


@FEW
def test_torch_derivatives(case):
    torch = pytest.importorskip("torch")
    theta, limit = torch.tensor(THETA, requires_grad=True), made(case)
    y = kg.solve(theta, limit)
    for operation in (kg.value, kg.relax, kg.entropy, kg.divergence, lambda *x: kg.log_prob(x[0], y, *x[1:])):
        assert torch.autograd.gradcheck(lambda x: operation(x, limit, kg.Shannon(0.8)), theta)
    assert torch.autograd.gradgradcheck(lambda x: kg.value(x, limit, kg.Shannon(0.8)), theta)
    batched = torch.func.vmap(torch.func.grad(lambda x: kg.value(x, made("a capacity"), kg.Gini())))(theta)
    torch.testing.assert_close(batched, kg.relax(theta, made("a capacity"), kg.Gini()))


@pytest.mark.parametrize("case", CASES)
def test_torch_compile(case):
    """Made outside, and inside of numbers and of tensors; other numbers are no new graph."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    arguments, theta = CASES[case][0], torch.tensor(THETA)
    tensors = {
        name: torch.tensor(x) for name, x in {"weights": WEIGHTS, "box": BOX, **arguments}.items() if "max" not in name
    }

    def relax(theta: Any, limit: Packed) -> Any:
        return kg.relax(theta, limit, kg.Gini(0.8))

    limit = made(case)
    calls: dict[str, Callable[[Any], Any]] = {
        "outside": lambda theta: relax(theta, limit),
        "numbers": lambda theta: relax(theta, Packed(WEIGHTS, BOX, **arguments)),
        "tensors": lambda theta: relax(theta, Packed(**tensors, max_capacity=100)),
    }
    expected = relax(theta, limit)
    for what, call in calls.items():
        if what == "numbers" and "max_capacity" not in arguments and isinstance(arguments["capacity"], list):
            with pytest.raises(Exception, match="give max_capacity="):
                torch.compile(call, backend="aot_eager", fullgraph=True)(theta)
            continue
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(theta)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=what)
    run = torch.compile(relax, backend="aot_eager", fullgraph=True)
    run(theta, limit)
    with torch.compiler.set_stance("fail_on_recompile"):
        other = Packed([1, 2, 3, 1], 1, **arguments)
        torch.testing.assert_close(run(theta, other), relax(theta, other))


@FEW
def test_torch_modules_and_distribution(case):
    torch = pytest.importorskip("torch")
    theta, limit = torch.tensor(THETA), made(case)
    layer = kg.torch.Relax(limit, kg.Gini(0.8))
    assert set(layer.state_dict()) == {"weights", "box", "capacity", "at_least"}
    other = kg.torch.Relax(Packed(WEIGHTS, 3, **CASES[case][0]), kg.Gini(0.8))
    assert not torch.equal(other(theta), layer(theta))
    other.load_state_dict(layer.state_dict())
    assert other.constraint == limit and torch.equal(other(theta), layer(theta))
    law = kg.torch.SubsetDistribution(theta[0], made("a capacity"), kg.Gini(0.8))
    every = law.enumerate_support()
    chances = law.log_prob(every).exp()
    assert every.shape[0] == sum(feasible(y, HEAVY, Limits(0, 6)) for y in subsets(4))
    torch.testing.assert_close(chances.sum().item(), 1.0)
    torch.testing.assert_close((chances[:, None] * every).sum(0), law.mean)
    assert limit.contains(kg.torch.Sample(limit, kg.Gini(0.8))(theta)).all()


# JAX


@pytest.mark.parametrize("case", CASES)
def test_jax_pytrees(case):
    jax = pytest.importorskip("jax")
    limit = made(case)
    leaves, structure = jax.tree.flatten(limit)
    has_least = "at_least" in CASES[case][0]
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(limit)] == (
        [".weights", ".box", ".capacity"] + [".at_least"] * has_least
    )
    assert jax.tree.map(lambda x: x, limit) == limit == jax.tree.map(jax.numpy.asarray, limit)
    for stand_in in (None, 0, object(), jax.ShapeDtypeStruct((), np.int32)):
        strange = jax.tree.unflatten(structure, [stand_in] * len(leaves))
        assert type(strange) is Packed and not hasattr(strange, "foo") and "Packed(weights=" in repr(strange)
    with pytest.raises((TypeError, ValueError), match="weights"):
        kg.solve(THETA, strange)


@FEW
def test_jax_transformations(case):
    jax = pytest.importorskip("jax")
    theta, limit, traced = jax.numpy.asarray(THETA, "float32"), made(case), []

    @jax.jit
    def relax(theta: Any, limit: Packed) -> Any:
        traced.append(1)
        return kg.relax(theta, limit, kg.Gini(0.8))

    others = [limit, Packed([1, 2, 3, 1], BOX, **CASES[case][0])]
    for each in others:
        np.testing.assert_allclose(relax(theta, each), kg.relax(THETA, each, kg.Gini(0.8)), atol=1e-5)
    assert len(traced) == 1
    inside = jax.jit(lambda theta, w, c: kg.relax(theta, Packed(w, BOX, c, max_capacity=99), kg.Gini(0.8)))
    capacities = np.array([6, 5])
    expected = kg.relax(THETA, Packed(WEIGHTS, BOX, capacities), kg.Gini(0.8))
    np.testing.assert_allclose(inside(theta, np.array(WEIGHTS), capacities), expected, atol=1e-5)
    assert np.isnan(inside(theta, np.array(WEIGHTS), np.array([6, 100]))[1]).all()
    gradient = jax.grad(lambda theta: kg.value(theta, limit, kg.Gini(0.8)).sum())(theta)
    np.testing.assert_allclose(gradient, kg.relax(THETA, limit, kg.Gini(0.8)), atol=1e-5)
    each = Packed(np.array([WEIGHTS, WEIGHTS]), np.array([[1], [0]]), [6, 5])
    mapped = jax.vmap(lambda theta, limit: kg.relax(theta, limit, kg.Gini(0.8)))(theta, each)
    np.testing.assert_allclose(mapped, kg.relax(THETA, each, kg.Gini(0.8)), atol=1e-5)
    np.testing.assert_allclose(jax.jit(kg.frontier)(theta, made("a capacity")), kg.frontier(THETA, made("a capacity")))
    law = kg.jax.SubsetDistribution(theta, limit, kg.Gini(0.8))
    assert limit.contains(law.sample(jax.random.key(0), 9)).all()
