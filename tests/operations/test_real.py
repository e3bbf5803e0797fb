"""Real costs: what fits in units fits in truth, and what fits in truth fits in optimistic units."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import knapgrad as kg
from knapgrad.real import Scale

Constraint = kg.Knapsack | kg.MultipleChoice


class Drawn(NamedTuple):
    weights: np.ndarray  # (groups, options), or (n, 1) for items
    capacity: Any
    at_least: Any
    resolution: int | None
    optional: bool
    per_item: bool

    def constraint(self) -> Constraint:
        limits = {"at_least": self.at_least, "resolution": self.resolution}
        if self.per_item:
            return kg.Knapsack.from_real(self.weights[:, 0], self.capacity, **limits)
        return kg.MultipleChoice.from_real(self.weights, self.capacity, optional=self.optional, **limits)

    def selections(self) -> list[tuple[np.ndarray, list[Any]]]:
        """Every 0/1 selection of theta's shape, with the weights it takes."""
        groups, options = self.weights.shape
        found = []
        for picks in itertools.product(range(-1 if self.optional else 0, options), repeat=groups):
            taken = [(group, option) for group, option in enumerate(picks) if option >= 0]
            y = np.zeros(self.weights.shape)
            y[tuple(zip(*taken)) if taken else ([], [])] = 1
            found.append((y[:, 0] if self.per_item else y, [self.weights[at] for at in taken]))
        return found


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    per_item = draw(st.booleans())
    groups, options = (draw(st.integers(1, 7)), 1) if per_item else (draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    optional = per_item or draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights: np.ndarray = rng.uniform(0, 1, (groups, options))
    kind = draw(st.sampled_from(["any", "float32", "decimals", "integers", "some equal", "large", "odd unit"]))
    if kind == "float32":
        weights = weights.astype(np.float32)
    elif kind == "decimals":
        weights = np.round(10 * weights, 1)
    elif kind == "integers":
        weights = rng.integers(0, 20, weights.shape)
    elif kind == "some equal":
        weights = np.where(rng.random(weights.shape) < 0.5, 0.25, weights)
    elif kind == "large":
        weights = weights * 10.0 ** draw(st.integers(-12, 12))
    elif kind == "odd unit":
        weights = np.where(rng.random(weights.shape) < 0.7, 0.1 + 0.2, 0.0)
    least, most = float(weights.min(-1).astype(float).sum()), float(weights.max(-1).astype(float).sum())
    least = 0.0 if optional else least
    between = least + rng.uniform() * (most - least)
    sums = [between, between, between, most, 1.2 * most, np.nextafter(most, 2 * most), float(weights.ravel()[:2].sum())]
    capacity = draw(st.sampled_from([*sums, round(most / 2, 1), 0.0]))
    at_least = draw(st.sampled_from([0, 0, rng.uniform() * capacity, 0.9 * capacity, capacity, least]))
    resolution = draw(st.sampled_from([None, 1, 2, 5, 10, 30, 100, 1000]))
    if kind == "float32" and draw(st.booleans()):
        capacity, at_least = np.float32(capacity), np.float32(at_least)
    return Drawn(weights, capacity, at_least, resolution, optional, per_item)


def float_sums(taken: list[Any]) -> list[float]:
    """In different orders, and in the type of the weights."""
    if not taken:
        return [0.0]
    orders = [np.array(taken), np.array(taken)[::-1], np.sort(taken), np.sort(taken)[::-1]]
    return [math.fsum(taken), *(float(np.sum(x)) for x in orders), *(float(np.cumsum(x)[-1]) for x in orders)]


@settings(max_examples=300)
@given(case=drawn())
def test_every_selection(case):
    try:
        constraint = case.constraint()
    except ValueError as error:
        assert "at_least" in str(error) or "lightest" in str(error) or "multiples" in str(error)
        return
    for y, taken in case.selections():
        accepted, hoped = bool(constraint.contains(y)), bool(constraint.optimistic.contains(y))
        if constraint.exact:
            weight = sum((Fraction(str(w)) for w in taken), Fraction(0))
            assert accepted == hoped == (Fraction(str(case.at_least)) <= weight <= Fraction(str(case.capacity)))
        else:
            weight = sum((Fraction(float(w)) for w in taken), Fraction(0))
            if Fraction(float(case.at_least)) <= weight <= Fraction(float(case.capacity)):
                assert hoped
            for total in float_sums(taken) if accepted else []:
                assert case.at_least <= total <= case.capacity
                assert total <= constraint.budgets[int((constraint.weights * y).sum())] * (1 + 1e-6)
    assert constraint.budgets.shape == (int(constraint.capacity) + 1,)
    if not constraint.exact and case.capacity < case.weights.max(-1).astype(float).sum():
        assert constraint.budgets[-1] <= case.capacity


# Batches


def fill(constraint: Constraint, rng: np.random.Generator, batch: int) -> np.ndarray:
    """A random feasible selection per instance, with no room left for what was not picked."""
    per_item = isinstance(constraint, kg.Knapsack)
    weights = constraint.weights[..., None] if per_item else constraint.weights
    weights = np.broadcast_to(weights, (batch, *weights.shape[-2:]))
    left, y, rows = np.broadcast_to(constraint.capacity, batch).copy(), np.zeros(weights.shape), np.arange(batch)
    lightest = np.zeros(weights.shape[:2], int) if per_item or constraint.optional else weights.argmin(-1)
    for group in rng.permuted(np.tile(np.arange(weights.shape[1]), (batch, 1)), axis=1).T:
        option = rng.integers(0, weights.shape[2], batch)
        fits = weights[rows, group, option] <= left
        picked = np.where(fits, option, lightest[rows, group])
        y[rows, group, picked] = fits if per_item or constraint.optional else 1
        left -= (weights[rows, group, picked] * y[rows, group, picked]).astype(int)
    return y[..., 0] if per_item else y


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("resolution", [None, 300])
@pytest.mark.parametrize("event", [(30,), (12, 5)])
@pytest.mark.parametrize("optional", [False, True])
def test_a_batch_with_a_unit_per_instance(event, resolution, dtype, optional):
    rng = np.random.default_rng(0)
    weights = rng.lognormal(size=(200, *event)).astype(dtype)
    if len(event) == 1:
        capacity = rng.uniform(0.3, 0.7, 200) * weights.sum(-1)
        make: Any = kg.Knapsack.from_real
    else:
        capacity = weights.min(-1).sum(-1) + rng.uniform(0.3, 0.7, 200) * (weights.max(-1) - weights.min(-1)).sum(-1)
        make = lambda *a, **k: kg.MultipleChoice.from_real(*a, **k, optional=optional)  # noqa: E731
    constraint = make(weights, capacity, at_least=0.7 * capacity, resolution=resolution)
    assert not constraint.exact and constraint.unit.shape == (200,) and constraint.capacity.shape == (200,)
    assert constraint.budgets.shape == (200, constraint.capacity.max() + 1)
    assert (constraint.budgets[np.arange(200), constraint.capacity] <= capacity).all()
    count = 0
    for _ in range(10):
        y = fill(constraint, rng, 200)
        taken = (y * weights).reshape(200, -1).astype(dtype)
        for total in (taken.sum(-1), taken.cumsum(-1)[:, -1], taken[:, ::-1].cumsum(-1)[:, -1]):
            assert (total <= capacity).all()
            accepted = constraint.contains(y)
            assert (total[accepted] >= 0.7 * capacity[accepted]).all()
            assert constraint.optimistic.contains(y)[total >= 0.7 * capacity].all()
        count += accepted.sum()
    assert count > 500


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_safe_to_the_last_float(dtype):
    """Ten items of a tenth of the capacity, and one that leaves no common unit: floats add up to more or less."""
    over = under = 0
    for capacity in np.random.default_rng(0).uniform(1, 2, 300).astype(dtype):
        weights = np.append(np.full(10, capacity / 10, dtype), np.sqrt(dtype(0.5)))
        y = np.append(np.ones(10), 0.0)
        total = np.cumsum(weights[:10])[-1]
        over, under = over + (total > capacity), under + (total < capacity)
        assert not kg.Knapsack.from_real(weights, capacity).contains(y)
        constraint = kg.Knapsack.from_real(weights, 1.2 * capacity, at_least=capacity)
        assert not constraint.exact and not constraint.contains(y)
        assert kg.Knapsack.from_real(weights, capacity).optimistic.contains(y)
        assert constraint.optimistic.contains(y)
    assert over > 30 and under > 30


@pytest.mark.parametrize("make", [kg.Knapsack.from_real, kg.MultipleChoice.from_real])
def test_instances_of_a_batch_are_as_alone(make):
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.5, 1, (5, 6) if make == kg.Knapsack.from_real else (5, 6, 3))
    capacity, at_least = np.full(5, 4.9), np.linspace(0, 4.5, 5)
    batch = make(weights, capacity, at_least=at_least)
    for i in range(5):
        alone = make(weights[i], capacity[i], at_least=at_least[i])
        assert alone.unit == batch.unit[i]
        for one, all_of_them in ((alone, batch), (alone.optimistic, batch.optimistic)):
            np.testing.assert_array_equal(one.weights, all_of_them.weights[i])
            assert (one.capacity, one.at_least) == (all_of_them.capacity[i], all_of_them.at_least[i])
    shared = make(weights[0], [4.9, 4.95])
    assert shared.weights.shape == (2, *weights.shape[1:]) and shared.unit.shape == (2,)


def test_prices_with_a_capacity_per_instance_keep_one_unit():
    constraint = kg.Knapsack.from_real([0.25, 0.5, 0.1], [0.6, 0.05, 9.0], at_least=[0.35, 0, 0])
    assert constraint.unit == 0.05 and constraint.weights.tolist() == [5, 10, 2]
    assert constraint.capacity.tolist() == [12, 1, 17] and constraint.at_least.tolist() == [7, 0, 0]
    assert constraint.budgets.shape == (18,)


# Exact units


@pytest.mark.parametrize(
    "weights, capacity, expected, units, unit",
    [
        ([3.57, 2.1], 5.0, [17, 10], 23, 0.21),
        ([3, 5], 7, [3, 5], 7, 1.0),
        ([30, 50], 79, [3, 5], 7, 10.0),
        (np.array([3.57, 2.1], np.float32), np.float32(5.67), [17, 10], 27, 0.21),
        ([0.1] * 3, 0.3, [1, 1, 1], 3, 0.1),
        ([0.1 + 0.2] * 3, 0.7, [1, 1, 1], 2, 0.1 + 0.2),
        ([math.pi, math.pi], 2 * math.pi, [1, 1], 2, math.pi),
        ([1e-3, 2e-3], 1e9, [1, 2], 3, 1e-3),  # no more than all weights together
        ([0.0, 0.0], 1.0, [0, 0], 0, 1.0),
        ([0.3, 0.0], 0.0, [1, 0], 0, 0.3),
        ([1e-25, 3e-25], 3e-25, [1, 3], 3, 1e-25),
        ([2.0**70, 2.0**71], 2.0**71, [1, 2], 2, 2.0**70),
        ([], 1.0, [], 0, 1.0),
        ([Decimal("0.25"), Fraction(1, 2)], Decimal("0.8"), [1, 2], 3, 0.25),
    ],
)
def test_a_common_unit(weights, capacity, expected, units, unit):
    constraint = kg.Knapsack.from_real(weights, capacity)
    assert constraint.exact and constraint.optimistic is constraint
    assert constraint.weights.tolist() == expected and int(constraint.capacity) == units
    assert constraint.unit == unit and constraint.offset == 0
    np.testing.assert_allclose(constraint.budgets, unit * np.arange(units + 1), rtol=1e-15)


def test_the_lightest_options_are_taken_off_first():
    weights = [[0.3, 0.5, 1.1], [0.25, 0.45, 0.25]]
    constraint = kg.MultipleChoice.from_real(weights, 1.5, at_least=0.95)
    assert constraint.exact and constraint.unit == 0.2 and constraint.offset == 0.55
    assert constraint.weights.tolist() == [[0, 1, 4], [0, 1, 0]]
    assert int(constraint.capacity) == 4 and int(constraint.at_least) == 2
    assert constraint.budgets.tolist() == [0.55, 0.75, 0.95, 1.15, 1.35]
    assert kg.MultipleChoice.from_real(weights, 1.5, optional=True).unit == 0.05


def test_budgets_are_the_decimals_themselves():
    constraint = kg.Knapsack.from_real(np.full(100, 0.01), 0.99)
    assert constraint.budgets.tolist() == [float(f"{c / 100:.2f}") for c in range(100)]


def test_many_prices_are_found_fast_and_exactly():
    rng = np.random.default_rng(0)
    cents = rng.integers(1, 10_000, (300, 400))
    constraint = kg.Knapsack.from_real(cents / 100, cents.sum(-1) // 200 / 1.0, resolution=10**7)
    assert constraint.exact and constraint.unit == 0.01
    np.testing.assert_array_equal(constraint.weights, cents)
    np.testing.assert_array_equal(constraint.capacity, cents.sum(-1) // 200 * 100)
    cents[-1, -1] = 10**7
    odd = cents / 100
    odd[-1, -1] += 1e-7
    assert not kg.Knapsack.from_real(odd, 1000.0, resolution=10**6).exact


def test_a_capacity_above_all_weights_is_no_limit():
    weights = np.random.default_rng(0).random((2, 50))
    for capacity in (1.000001 * weights.sum(-1), 1e6, [1e6, 10.0]):
        constraint = kg.Knapsack.from_real(weights, capacity, at_least=5.0)
        y = kg.solve(np.ones((2, 50)), constraint)
        assert y[0].all() and y[1].all() == (not isinstance(capacity, list))
        np.testing.assert_array_equal(constraint.capacity[0], constraint.weights[0].sum())


def test_the_default_resolution():
    rng = np.random.default_rng(0)
    assert kg.Knapsack.from_real(rng.random(20), 3.0).capacity == 10_000
    assert kg.Knapsack.from_real(rng.random(200), 30.0).capacity == 20_000
    groups = rng.random((150, 3))
    assert kg.MultipleChoice.from_real(groups, 100.0).capacity == 15_000
    assert kg.MultipleChoice.from_real(groups, 100.0).weights.min(-1).max() == 0


# Bits of a network


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
def test_a_capacity_of_billions_of_bits(dtype):
    rng, bits = np.random.default_rng(0), np.array([2, 3, 4, 6, 8, 16])
    weights = (rng.integers(10**8, 10**9, (40, 1)) * bits).astype(dtype)
    constraint = kg.MultipleChoice.from_real(weights, 7.6e10)
    assert not constraint.exact and constraint.capacity == 10_000
    assert constraint.offset == pytest.approx(2 / 16 * weights[:, -1].astype(float).sum(), rel=1e-6)
    assert constraint.unit == pytest.approx((7.6e10 - constraint.offset) / 10_000, rel=1e-4)
    for y in fill(constraint, rng, 500):
        assert (y * weights).sum(dtype=dtype) <= 7.6e10
    y = kg.solve(np.log(bits) * np.ones((40, 1)), constraint)
    assert 7.5e10 < float((y * weights.astype(float)).sum()) <= 7.6e10
    equal = kg.MultipleChoice.from_real(10**9 * np.ones((40, 1), dtype) * bits, 7.6e10 * 4)
    assert equal.exact and equal.unit == 1e9


# The optimum


@settings(max_examples=60)
@given(case=drawn(), seed=st.integers(0, 2**32))
def test_the_optimum_is_between_the_two(case, seed):
    try:
        constraint = case.constraint()
    except ValueError:
        return
    theta = np.random.default_rng(seed).standard_normal(case.weights.shape)
    theta = theta[:, 0] if case.per_item else theta
    values: dict[str, list[float]] = {"safe": [], "true": [], "hoped": []}
    for y, taken in case.selections():
        value = float((theta * y).sum())
        if constraint.contains(y):
            values["safe"].append(value)
        if constraint.optimistic.contains(y):
            values["hoped"].append(value)
        if case.at_least <= math.fsum(taken) <= case.capacity:
            values["true"].append(value)
    if values["safe"]:
        assert (theta * kg.solve(theta, constraint)).sum() == pytest.approx(max(values["safe"]))
    if not constraint.exact and values["true"]:
        assert max(values["safe"], default=-math.inf) <= max(values["true"]) <= max(values["hoped"])
        bound = (theta * kg.solve(theta, constraint.optimistic)).sum()
        assert bound == pytest.approx(max(values["hoped"]))


@pytest.mark.parametrize("event", [(100,), (100, 8)])
def test_the_price_of_rounding_is_small(event):
    rng = np.random.default_rng(0)
    theta, weights = rng.random((2, 9, *event))
    if len(event) == 1:
        constraint = kg.Knapsack.from_real(weights, weights.sum(-1) / 4)
    else:
        constraint = kg.MultipleChoice.from_real(weights, 0.3 * weights.max(-1).sum(-1))
    axes = tuple(range(1, theta.ndim))
    safe, bound = ((theta * kg.solve(theta, c)).sum(axes) for c in (constraint, constraint.optimistic))
    assert (bound >= safe).all() and 0 < np.median((bound - safe) / safe) < 0.01


@pytest.mark.parametrize("digits", [1, 17])
@pytest.mark.parametrize("event", [(9,), (5, 3)])
def test_budgets_are_those_of_the_frontier(event, digits):
    rng = np.random.default_rng(0)
    theta, weights = rng.random((2, 2, *event))
    weights = np.round(weights, digits)
    make = kg.Knapsack.from_real if len(event) == 1 else kg.MultipleChoice.from_real
    constraint = make(weights, [3.0, 100.0], resolution=200)
    values, budgets = kg.frontier(theta, constraint), constraint.budgets
    assert constraint.exact == (digits == 1)
    for i, c in itertools.product(range(2), range(0, values.shape[-1], 7)):
        found = np.broadcast_to(budgets, values.shape)[i, c]
        best = kg.solve(theta[i], make(weights[i], found, resolution=10**6))  # much finer, or exact too
        assert (theta[i] * best).sum() >= values[i, c] - 1e-9
        if constraint.exact:
            assert (theta[i] * best).sum() == pytest.approx(values[i, c])


# Frameworks, values, errors


def test_numbers_of_every_framework():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    weights, capacity = [1.25, 0.5, 2.75], [3.0, 1.5]
    expected = kg.Knapsack.from_real(weights, capacity)
    for asarray in (np.array, tuple, torch.tensor, jnp.asarray, lambda x: torch.tensor(x).bfloat16()):
        assert kg.Knapsack.from_real(asarray(weights), asarray(capacity)) == expected
    assert kg.Knapsack.from_real(jnp.asarray(weights, jnp.bfloat16), capacity) == expected
    y = kg.solve(torch.ones(2, 3), expected)
    assert (y @ torch.tensor(weights) <= torch.tensor(capacity)).all()


def test_traced_numbers_are_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"weights must be numbers.*traced by JAX.*outside"):
        jax.jit(lambda w: kg.Knapsack.from_real(w, 3.0).capacity)(np.ones(3))
    with pytest.raises(TypeError, match=r"capacity must be numbers.*traced by JAX"):
        jax.jit(lambda c: kg.MultipleChoice.from_real(np.ones((2, 3)), c).capacity)(2.5)


def test_tensors_without_values_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"weights requires a gradient.*weights\.detach\(\)"):
        kg.Knapsack.from_real(torch.ones(3, requires_grad=True), 2.0)
    with pytest.raises(TypeError, match=r"weights must be numbers with values.*vmap"):
        torch.func.vmap(lambda w: torch.tensor(kg.Knapsack.from_real(w, 3.0).weights))(torch.ones(2, 3))


def rounded_items() -> kg.Knapsack:
    return kg.Knapsack.from_real([math.pi, math.e, math.sqrt(2)], 4.5, at_least=1.0)


def rounded_groups() -> kg.MultipleChoice:
    return kg.MultipleChoice.from_real(np.sqrt([[[2.0, 3.0], [5.0, 7.0]]] * 2), [4.5, 4.0])


MADE = [rounded_items, rounded_groups, lambda: kg.Knapsack.from_real([0.1, 0.3], 0.3)]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize(
    "how",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: type(x)(**x.arguments)],
)
def test_copies_keep_the_scale(make, how):
    constraint, other = make(), how(make())
    assert constraint == other and hash(constraint) == hash(other) and repr(constraint) == repr(other)
    assert constraint.optimistic == other.optimistic and constraint.exact == other.exact
    np.testing.assert_array_equal(constraint.budgets, other.budgets)


@pytest.mark.parametrize("make", MADE)
def test_a_repr_makes_it_again(make):
    array = {"Knapsack": kg.Knapsack, "MultipleChoice": kg.MultipleChoice, "Scale": Scale}
    assert eval(repr(make()), array) == make()


def test_the_scale_belongs_to_the_value():
    plain, scaled = kg.Knapsack([1, 3], 3), kg.Knapsack.from_real([0.1, 0.3], 0.3)
    assert plain != scaled != kg.Knapsack.from_real([0.2, 0.6], 0.6) and len({plain, scaled}) == 2
    assert rounded_items() != rounded_items().optimistic


def test_nothing_can_be_written_to():
    constraint = rounded_groups()
    for name in ("unit", "offset", "exact", "budgets", "optimistic", "scale"):
        with pytest.raises(AttributeError, match=r"cannot be set"):
            setattr(constraint, name, 1)
    for array in (constraint.unit, constraint.offset, constraint.optimistic.weights):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_integers_stand_for_themselves():
    for constraint in (kg.Knapsack([3, 2, 2], 4), kg.MultipleChoice([[1, 4], [1, 2]], [4, 3])):
        assert (constraint.unit, constraint.offset, constraint.exact) == (1, 0, True)
        assert constraint.optimistic is constraint and constraint.budgets.tolist() == [0, 1, 2, 3, 4]


def test_a_module_keeps_the_scale():
    pytest.importorskip("torch")
    layer, other = (kg.torch.Relax(rounded_items(), kg.Gini()) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    assert other.constraint == rounded_items()
    assert set(layer.state_dict()) == {"weights", "capacity", "at_least", "units"}


def several_budgets(factor):
    return kg.MultiKnapsack.from_real([[1, 1, 1], [0.5 * factor, 0.25 * factor, 0.75 * factor]], [2, 1.0 * factor])


@pytest.mark.parametrize("make", [
    lambda x: kg.Knapsack.from_real([0.1 * x, 0.25 * x, 0.3 * x], 0.5 * x),
    lambda x: kg.Knapsack.from_real([[0.5, 1.0], [0.5 * x, 1.0 * x]], [1.5, 1.5 * x]),
    lambda x: kg.MultipleChoice.from_real([[0.1 * x, 0.25 * x], [0.2 * x, 0.3 * x]], 0.5 * x),
    several_budgets,
])  # fmt: skip
def test_the_state_of_a_module_has_the_units(make):
    torch = pytest.importorskip("torch")
    saved, other, plain = make(4), kg.torch.Relax(make(1), kg.Gini()), kg.torch.Relax(make(1), kg.Gini())
    state = kg.torch.Relax(saved, kg.Gini()).half().state_dict()  # units are not rounded with the parameters
    other.load_state_dict(state)
    assert other.constraint == saved and other.constraint.exact
    plain.load_state_dict({name: x for name, x in state.items() if name != "units"})  # of integers
    assert (plain.constraint.units == (1, 1)) if make is several_budgets else (plain.constraint.unit == 1)
    assert isinstance(state["units"], torch.Tensor)


def test_a_part_of_a_state_counts_in_the_units_of_the_module():
    torch = pytest.importorskip("torch")
    layer = kg.torch.Relax(kg.Knapsack.from_real([0.5, 1.0], 1.5), kg.Gini())
    layer.load_state_dict({"capacity": torch.tensor(2)}, strict=False)
    assert layer.constraint.capacity == 2 and layer.constraint.unit == 0.5


def test_a_state_does_not_have_what_would_be_optimistic():
    pytest.importorskip("torch")
    layer, other = (kg.torch.Relax(kg.Knapsack.from_real([x, 0.2, 0.3], 0.5), kg.Gini()) for x in (0.123456789, 0.1))
    other.load_state_dict(layer.state_dict())
    assert not other.constraint.exact and other.constraint.unit == layer.constraint.unit
    with pytest.raises(ValueError, match="optimistic is not saved"):
        _ = other.constraint.optimistic


@pytest.mark.parametrize("make", [kg.Knapsack.from_real, kg.MultipleChoice.from_real])
@pytest.mark.parametrize(
    "change, kind, message",
    [
        ({"weights": np.nan}, ValueError, r"weights must be finite, got nan at index.*score of -inf"),
        ({"weights": np.inf}, ValueError, r"weights must be finite, got inf at index"),
        ({"weights": -0.5}, ValueError, r"weights must not be negative, got -0.5 at index"),
        ({"weights": 1j}, TypeError, r"weights must be real numbers, got complex128"),
        ({"capacity": np.nan}, ValueError, r"capacity must be finite, got nan; .*sum of the weights"),
        ({"capacity": np.inf}, ValueError, r"capacity must be finite, got inf; .*sum of the weights"),
        ({"capacity": [3.0, -1.0]}, ValueError, r"capacity must not be negative, got -1.0 at index 1"),
        ({"capacity": "many"}, TypeError, r"capacity must be real numbers"),
        ({"capacity": True}, TypeError, r"capacity must be real numbers, got bool"),
        ({"capacity": None}, TypeError, r"capacity must be real numbers, got object"),
        ({"at_least": np.nan}, ValueError, r"at_least must be finite, got nan; .*give 0"),
        ({"at_least": -1.0}, ValueError, r"at_least must not be negative"),
        ({"at_least": 3.5}, ValueError, r"at_least must not be above the capacity, 3, .*got 3.5"),
        (
            {"capacity": [3.0, 9.0], "at_least": [1.0, 8.0]},
            ValueError,
            r"nor above the heaviest selection.*got 8 at index 1",
        ),
        (
            {"capacity": np.ones(2), "at_least": np.ones(3)},
            ValueError,
            r"capacity of shape \(2,\), at_least of .*\(3,\)",
        ),
        ({"at_least": 3.0}, ValueError, r"no selection surely weighs from 3 to 3.*larger resolution"),
        ({"resolution": 0}, ValueError, r"resolution must be at least 1.*got 0"),
        ({"resolution": 10.5}, TypeError, r"resolution must be an integer.*got 10.5"),
        ({"resolution": True}, TypeError, r"resolution must be an integer.*got True"),
    ],
)
def test_bad_arguments(make, change, kind, message):
    weights: Any = np.sqrt([4.4, 1.5, 3.2, 0.3])
    if "weights" in change:
        weights = weights.astype(type(change["weights"]))
        weights[2] = change["weights"]
    weights = weights if make == kg.Knapsack.from_real else weights.reshape(2, 2)
    with pytest.raises(kind, match=message):
        make(**{"weights": weights, "capacity": 3.0, **change, **({"weights": weights} if "weights" in change else {})})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kg.Knapsack.from_real(2.5, 3.0), r"weights must have one entry per item.*got shape \(\)"),
        (lambda: kg.MultipleChoice.from_real([1.0, 2.5], 3.0), r"weights must have the shape \(groups, options\)"),
        (
            lambda: kg.MultipleChoice.from_real([[1.5, 2.0], [2.5, 3.0]], 3.9),
            r"capacity .*lightest options, 4; got 3.9",
        ),
        (
            lambda: kg.MultipleChoice.from_real(np.sqrt([[2.0, 3], [5, 7]]), [4.0, 3.0]),
            r"lightest.*3.65.*3.0 at index 1",
        ),
        (lambda: kg.MultipleChoice.from_real([[1e308, 1.1e308]] * 3, 1e308), r"capacity .*options, inf; got 1e\+308"),
        (lambda: kg.Knapsack.from_real([4.0, 8.0], 7, at_least=5), r"no selection weighs from 5 to 7.*multiples of 4"),
        (
            lambda: kg.Knapsack.from_real([0.5], 1.0, at_least=0.6),
            r"at_least must not be above .*heaviest selection, 0.5",
        ),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_bad_arguments():
    with pytest.raises(TypeError, match=r"optional must be True or False"):
        kg.MultipleChoice.from_real(np.ones((2, 2)), 3.0, optional=1)
    with pytest.raises(TypeError, match=r"scale must be a Scale or None, got 2.0; .*from_real"):
        kg.Knapsack([1, 2], 3, scale=2.0)
    with pytest.raises(ValueError, match=r"weights must be whole numbers.*2\.5.*from_real"):
        kg.Knapsack([1, 2.5], 3)
    with pytest.raises(ValueError, match=r"one row per group: got 1 .*3 groups"):
        kg.solve(np.zeros((3, 2)), kg.MultipleChoice.from_real([[0.1, 0.2]], 3.0))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_a_capacity_of_the_lightest_options_alone(groups, dtype):
    """It is refused below what floats may add up to, in another order of addition too; the error says what is enough.
    Nothing else fits into that."""
    refused = 0
    for weights in np.random.default_rng(0).random((100, groups, 3)).astype(dtype):
        lowest = weights.min(-1)
        orders = [lowest[list(order)] for order in itertools.permutations(range(groups))]
        sums = [float(np.cumsum(x.astype(kind))[-1]) for x in orders for kind in (dtype, np.float64)]
        enough = min(sums)
        try:
            constraint = kg.MultipleChoice.from_real(weights, enough)
        except ValueError as error:
            refused, enough = refused + 1, float(re.findall(r"options, (\S+) in some order of addition", str(error))[0])
            constraint = kg.MultipleChoice.from_real(weights, enough)
        assert enough <= max(sums) * (1 + groups * np.finfo(dtype).eps)
        if constraint.exact:  # as they are printed
            assert sum(Fraction(str(x)) for x in lowest) <= Fraction(str(enough))
        else:
            assert max(sums) <= enough and constraint.capacity == 0
        assert constraint.contains((weights == lowest[:, None]).astype(float))
    assert (refused > 5) == (groups > 2 or (groups == 2 and dtype == np.float32))


def test_a_sum_that_no_order_rounds_is_enough_of_a_capacity():
    """Of multiples of 2**-30, which are no decimals of a few digits."""
    weights = np.random.default_rng(0).integers(1, 2**30, (40, 3)) / 2**30
    constraint = kg.MultipleChoice.from_real(weights, weights.min(-1).sum())
    assert constraint.contains((weights == weights.min(-1, keepdims=True)).astype(float))


def test_decimals_whose_floats_add_up_to_more_than_the_capacity():
    """1.72 + 1.72 + 1.71 is 5.15 or 5.1499999999999995, by the order."""
    weights = np.array([[1.72, 2.0], [1.72, 2.5], [1.71, 3.0]])
    with pytest.raises(
        ValueError, match=r"lightest options, 5\.15\d* in some order of addition; got 5\.1499999999999995"
    ):
        kg.MultipleChoice.from_real(weights, 1.71 + 1.72 + 1.72)
    assert 1.71 + 1.72 + 1.72 < 1.72 + 1.72 + 1.71 == 5.15
    assert kg.MultipleChoice.from_real(weights, 5.15).contains(np.array([[1, 0], [1, 0], [1, 0]]))
