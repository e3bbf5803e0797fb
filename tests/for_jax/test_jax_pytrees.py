"""Constraints and regularizers as pytrees: arguments of jitted functions, parts of models, things to scan over."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import knapgrad as kg  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiler")

WEIGHTS, GROUPS = [3, 1, 2, 2, 4], [[1, 2], [1, 3], [2, 5]]
CONSTRAINTS: dict[str, Callable[[], kg.Constraint]] = {
    "top-k": lambda: kg.TopK(2),
    "top-k of each": lambda: kg.TopK([1, 2, 3]),
    "top-k, at least": lambda: kg.TopK(3, at_least=1),
    "top-k, bounded": lambda: kg.TopK(2, max_capacity=4),
    "knapsack": lambda: kg.Knapsack(WEIGHTS, 6),
    "knapsack of each": lambda: kg.Knapsack(np.add.outer(np.arange(3), WEIGHTS), [4, 5, 6]),
    "knapsack, at least": lambda: kg.Knapsack(WEIGHTS, 6, at_least=2),
    "knapsack, at least of each": lambda: kg.Knapsack(WEIGHTS, [5, 6, 7], at_least=[0, 2, 5]),
    "knapsack, bounded": lambda: kg.Knapsack(WEIGHTS, 6, max_capacity=9),
    "knapsack without limit": lambda: kg.Knapsack(WEIGHTS, 10**9),
    "real prices": lambda: kg.Knapsack.from_real([1.5, 0.5, 1.0, 1.0, 2.0], 3.0),
    "choices": lambda: kg.MultipleChoice(GROUPS, 8),
    "choices of all groups": lambda: kg.MultipleChoice([1, 3], 7),
    "choices without limit": lambda: kg.MultipleChoice([1, 3], 10**9),
    "choices, at least": lambda: kg.MultipleChoice(GROUPS, 8, at_least=6),
    "optional choices": lambda: kg.MultipleChoice(GROUPS, 4, optional=True),
    "optional items": lambda: kg.MultipleChoice([[1], [2], [2]], 3, optional=True),
    "budgets": lambda: kg.MultiKnapsack([[1] * 5, WEIGHTS], [2, 6]),
}
SMOOTHING = kg.Gini(0.5)


def scores(constraint: Any, *batch: int) -> Any:
    shape = (3, constraint.weights.shape[-1]) if isinstance(constraint, kg.MultipleChoice) else (5,)
    return jnp.asarray(np.random.default_rng(0).normal(size=(*(batch or (3,)), *shape)), jnp.float32)


@pytest.fixture(params=CONSTRAINTS.values(), ids=CONSTRAINTS)
def make(request: pytest.FixtureRequest) -> Callable[[], kg.Constraint]:
    return request.param


def test_a_round_trip_gives_an_equal_one(make):
    constraint = make()
    again = jax.tree.map(lambda x: x, constraint)
    assert again == constraint and hash(again) == hash(constraint) and repr(again) == repr(constraint)
    assert jax.tree.structure(again) == jax.tree.structure(constraint)
    assert pickle.loads(pickle.dumps(again)) == constraint
    assert jax.tree.map(lambda x: jnp.asarray(x) if x.max() < 2**31 else x, constraint) == constraint  # on the device


@pytest.mark.thinned(4)
def test_an_argument_of_a_jitted_function_compiles_once(make):
    traced = []

    @jax.jit
    def layer(theta, constraint, regularizer):
        traced.append(1)
        return kg.relax(theta, constraint, regularizer), kg.solve(theta, constraint)

    theta = scores(make())
    for gamma in (0.5, 0.7):
        found = layer(theta, make(), kg.Gini(gamma))
        plain = np.asarray(theta)
        expected = kg.relax(plain, make(), kg.Gini(gamma)), kg.solve(plain, make())
        for a, b in zip(found, expected):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert len(traced) == 1


@pytest.mark.parametrize("name", ["top-k of each", "knapsack, at least", "choices", "real prices"])
def test_a_static_argument_compiles_once(name):
    make = CONSTRAINTS[name]
    layer = jax.jit(
        lambda theta, constraint, regularizer: kg.relax(theta, constraint, regularizer), static_argnums=(1, 2)
    )
    theta = scores(make())
    for _ in range(3):
        layer(theta, make(), kg.Gini(0.5))
    assert layer._cache_size() == 1


def test_leaves_are_arrays_and_anything_may_take_their_place(make):
    constraint = make()
    leaves, structure = jax.tree.flatten(constraint)
    assert all(isinstance(x, np.ndarray) for x in leaves)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(constraint)]
    assert names[0] in (".weights", ".k")
    for stand_in in (None, object(), -1.5, "x"):
        strange = jax.tree.unflatten(structure, [stand_in] * len(leaves))
        assert type(strange) is type(constraint)
        again = jax.tree.unflatten(structure, jax.tree.leaves(strange, is_leaf=lambda x: x is None))
        assert repr(again) == repr(strange)
    with pytest.raises((TypeError, ValueError), match=r"weights|k "):
        kg.solve(scores(constraint), jax.tree.unflatten(structure, [-1.5] * len(leaves)))


def test_new_numbers_of_the_same_structure_are_used():
    solve = jax.jit(lambda theta, limit: kg.solve(theta, limit))
    theta = jnp.array([3.0, 2.0, 1.0])
    assert solve(theta, kg.Knapsack([2, 2, 2], 4, max_capacity=6)).tolist() == [1, 1, 0]
    assert solve(theta, kg.Knapsack([4, 1, 1], 3, max_capacity=6)).tolist() == [0, 1, 1]
    for capacity in (3, 4, 5):
        limit = kg.MultiKnapsack([[1, 2, 3], [1, 1, 1]], [capacity, 2], max_capacities=[5, 2])
        np.testing.assert_array_equal(solve(theta, limit), kg.solve(np.array([3.0, 2.0, 1.0]), limit))
    assert solve._cache_size() == 2, "one for each structure"
    more = jax.tree.map(lambda x: x + 1, kg.Knapsack([1, 1, 1], 2))  # known numbers: the widths follow them
    assert more == kg.Knapsack([2, 2, 2], 3) and kg.solve(theta, more).tolist() == [1, 0, 0]


@pytest.mark.parametrize("limit", [kg.Knapsack([2, 1, 1], 3), kg.TopK(2), kg.MultipleChoice([[1, 2]], 2)], ids=repr)
def test_a_capacity_that_is_raised_beyond_the_tables_is_nan(limit):
    theta = jnp.ones((1, 2)) if isinstance(limit, kg.MultipleChoice) else jnp.ones(3)

    @jax.jit
    def relax(theta, limit, by):
        *others, capacity = jax.tree.leaves(limit)
        return kg.relax(theta, jax.tree.unflatten(jax.tree.structure(limit), [*others, capacity + by]), SMOOTHING)

    assert jnp.isfinite(relax(theta, limit, 0)).all()
    assert jnp.isnan(relax(theta, limit, 1)).all()


def test_vmap_over_a_constraint():
    theta = scores(kg.TopK(1))
    for limit in (
        kg.TopK([1, 2, 3]),
        kg.Knapsack(np.add.outer(np.arange(3), WEIGHTS), [4, 5, 6]),
        kg.Knapsack(np.add.outer(np.arange(3), WEIGHTS), [4, 5, 6], at_least=[0, 1, 3]),
    ):
        found = jax.vmap(lambda theta, limit: kg.relax(theta, limit, SMOOTHING))(theta, limit)
        np.testing.assert_allclose(found, kg.relax(theta, limit, SMOOTHING), rtol=1e-6, atol=1e-6)
    budgets, shared = np.array([4, 5, 6]), kg.Knapsack(WEIGHTS, [4, 5, 6])
    axes = jax.tree.map(lambda x: 0 if x.shape == budgets.shape else None, shared)
    found = jax.vmap(lambda theta, limit: kg.relax(theta, limit, SMOOTHING), in_axes=(0, axes))(theta, shared)
    np.testing.assert_allclose(found, kg.relax(theta, shared, SMOOTHING), rtol=1e-6, atol=1e-6)


def test_scan_and_cond_over_constraints():
    theta, limits = scores(kg.TopK(1)), kg.Knapsack(np.add.outer(np.arange(3), WEIGHTS), [4, 5, 6])
    expected = kg.solve(theta, limits)
    _, found = lax.scan(lambda _, item: (0, kg.solve(*item)), 0, (theta, limits))
    np.testing.assert_array_equal(found, expected)
    limit = kg.Knapsack(WEIGHTS, 6)
    carried, _ = lax.scan(lambda limit, row: (limit, kg.solve(row, limit)), limit, theta)
    assert jax.tree.structure(carried) == jax.tree.structure(limit)
    for pick in (True, False):
        found = jax.jit(lambda pick, limit: lax.cond(pick, lambda x: kg.solve(theta, x), lambda x: 0 * theta, limit))(
            pick, limit
        )
        np.testing.assert_array_equal(found, kg.solve(theta, limit) if pick else 0 * theta)


@pytest.mark.parametrize("regularizer", [kg.Shannon, kg.Gini, kg.Tsallis])
def test_the_gradient_of_a_regularizer(regularizer):
    theta, limit = scores(kg.TopK(2)), kg.Knapsack(WEIGHTS, 6)

    def loss(smoothing):
        return (kg.relax(theta, limit, smoothing) * theta).sum()

    by_value = jax.grad(loss)(regularizer(0.5))
    by_number = jax.grad(lambda gamma: loss(regularizer(gamma)))(0.5)
    assert type(by_value) is regularizer and by_value.gamma == by_number != 0
    stepped = jax.tree.map(lambda x, slope: x - 0.1 * slope, regularizer(0.5), by_value)
    assert loss(stepped) == loss(regularizer(0.5 - 0.1 * by_number))
    with pytest.raises(ValueError, match="gamma must be positive"):
        loss(jax.tree.map(lambda x: -x, regularizer(0.5)))


def test_an_equinox_model_learns_its_gamma():
    eqx = pytest.importorskip("equinox")

    class Selector(eqx.Module):
        linear: Any
        limit: kg.Constraint
        smoothing: kg.Regularizer

        def __call__(self, x):
            return kg.relax(self.linear(x), self.limit, self.smoothing)

    model = Selector(eqx.nn.Linear(4, 5, key=jax.random.key(0)), kg.Knapsack(WEIGHTS, 6), kg.Shannon(jnp.array(0.5)))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        return (jax.vmap(model)(x) * jnp.arange(5.0)).sum()

    x = jax.random.normal(jax.random.key(1), (3, 4))
    value, gradient = loss(model, x)
    assert gradient.smoothing.gamma != 0 and gradient.limit.weights is None
    stepped = eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient))
    assert stepped.limit == model.limit and stepped.smoothing.gamma != model.smoothing.gamma
    assert loss(stepped, x)[0] < value
    bare = eqx.filter(model, eqx.is_array)
    assert eqx.combine(bare, model).limit == model.limit


def test_models_are_mapped_and_compared():
    model = {"limit": kg.Knapsack(WEIGHTS, 6), "smoothing": kg.Gini(jnp.array(0.5)), "matrix": jnp.ones(2)}
    doubled = jax.tree.map(lambda x: x * 2, model)
    assert doubled["limit"] == kg.Knapsack([6, 2, 4, 4, 8], 12)
    assert doubled["smoothing"].gamma == 1.0
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), model, jax.tree.map(lambda x: x, model)))


@pytest.mark.parametrize("make", [
    lambda costs: kg.Knapsack.from_real(costs, 1.3, resolution=50),
    lambda costs: kg.MultiKnapsack.from_real([np.ones(6), costs], [3, 1.3], resolution=[3, 50]),
], ids=["one budget", "two budgets"])  # fmt: skip
def test_real_costs_compile_once_and_hide_their_units(make):
    """Compiled code runs for constraints with other units, so it must not see those of the first."""
    rng, theta, traces = np.random.default_rng(0), np.linspace(-1, 1, 6, dtype=np.float32), []

    @jax.jit
    def relax(limit: kg.Constraint, theta: jax.Array) -> jax.Array:
        traces.append(limit)
        return kg.relax(theta, limit, kg.Shannon())

    for costs in rng.uniform(0.2, 1, (3, 6)):
        limit = make(costs)
        np.testing.assert_allclose(relax(limit, theta), kg.relax(theta, limit, kg.Shannon()), rtol=1e-5, atol=1e-6)
    assert len(traces) == 1
    assert jax.tree.map(lambda x: x, limit).budgets[0].tolist() == limit.budgets[0].tolist()
    for seen in (lambda: jax.jit(lambda limit: float(limit.exact))(limit), lambda: jax.jit(lambda x: x)(limit).exact):
        with pytest.raises(ValueError, match=r"cannot be read inside of a function that JAX compiles"):
            seen()
    relax(kg.Knapsack([1] * 6, 2), theta)
    assert len(traces) == 2 and traces[-1].unit == 1, "one without units is another"


@pytest.mark.parametrize("stand_in", [None, 0, object(), jax.ShapeDtypeStruct((3,), np.int32)], ids=type)
def test_looking_at_what_holds_anything_checks_nothing(make, stand_in):
    strange = jax.tree.unflatten(jax.tree.structure(make()), [stand_in] * len(jax.tree.leaves(make())))
    assert not hasattr(strange, "foo") and not hasattr(strange, "_foo")
    assert repr(stand_in) in repr(strange) and strange == strange and hash(strange) == hash(strange)
    assert set(strange.arguments) == set(make().arguments)


def test_real_costs_are_printed_inside_of_a_function_that_jax_compiles():
    printed = []
    jax.jit(lambda limit: printed.append(repr(limit)))(kg.Knapsack.from_real([1.5, 0.5], 1.5))
    assert "scale=UnreadableScale()" in printed[0] and "Tracer" in printed[0]
