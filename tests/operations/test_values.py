"""Constraints and regularizers as values, what they contain, and limits from below."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import Backend
from kinds import EDGES
from knapgrad.constraints import base

# name -> what makes the value; each twice, from other containers
VALUES: dict[str, tuple[Any, Any]] = {
    "TopK": (lambda: kg.TopK(2), lambda: kg.TopK(np.int32(2))),
    "TopK, k per instance": (lambda: kg.TopK([1, 2]), lambda: kg.TopK(np.array([1, 2], np.int16))),
    "TopK, at_least": (lambda: kg.TopK(3, at_least=1), lambda: kg.TopK(3.0, at_least=np.array(1))),
    "TopK, max_capacity": (lambda: kg.TopK(3, max_capacity=5), lambda: kg.TopK(3, max_capacity=5)),
    "Knapsack": (lambda: kg.Knapsack([3, 2, 2], 4), lambda: kg.Knapsack(np.array([3.0, 2.0, 2.0]), np.uint8(4))),
    "Knapsack, at_least": (
        lambda: kg.Knapsack([3, 2, 2], 4, at_least=3),
        lambda: kg.Knapsack((3, 2, 2), 4, at_least=np.int64(3)),
    ),
    "Knapsack, everything per instance": (
        lambda: kg.Knapsack([[1, 2], [3, 4]], [2, 3], at_least=[0, 1], max_capacity=9),
        lambda: kg.Knapsack(np.array([[1, 2], [3, 4]]), [2, 3], at_least=[0, 1], max_capacity=9),
    ),
    "MultipleChoice": (
        lambda: kg.MultipleChoice([[3, 2], [2, 0]], 4),
        lambda: kg.MultipleChoice(np.array([[3.0, 2.0], [2.0, 0.0]]), np.uint8(4), optional=np.False_),
    ),
    "MultipleChoice, weights of all groups": (
        lambda: kg.MultipleChoice([3, 2], 8, optional=True),
        lambda: kg.MultipleChoice((3, 2), 8, optional=np.True_),
    ),
    "MultipleChoice, everything per instance": (
        lambda: kg.MultipleChoice([[[1, 2]], [[3, 4]]], [2, 3], at_least=[0, 1], optional=True, max_capacity=9),
        lambda: kg.MultipleChoice(
            np.array([[[1, 2]], [[3, 4]]]), [2, 3], at_least=(0, 1), optional=True, max_capacity=9
        ),
    ),
    "Shannon": (lambda: kg.Shannon(), lambda: kg.Shannon(1)),
    "Gini": (lambda: kg.Gini(0.5), lambda: kg.Gini(np.float32(0.5))),
    "Tsallis, gamma per instance": (lambda: kg.Tsallis([0.5, 2.0]), lambda: kg.Tsallis(np.array([0.5, 2.0]))),
}


@pytest.fixture(params=VALUES.values(), ids=VALUES.keys())
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    make, make_again = request.param
    return make(), make_again()


def test_equal_arguments_make_equal_values(pair):
    value, again = pair
    assert value is not again and value == again and hash(value) == hash(again)
    assert len({value, again}) == 1
    assert value != "a string" and (value != 3)


def test_values_differ_in_every_argument():
    made = [make() for make, _ in VALUES.values()]
    made += [kg.TopK(2, at_least=0), kg.TopK(2, at_least=2), kg.Knapsack([3, 2, 2], 4, max_capacity=4), kg.Gini(1.0)]
    made += [kg.Knapsack([[3, 2, 2]], 4), kg.Knapsack([3, 2, 2], [4]), kg.Tsallis([[0.5, 2.0]])]
    made += [kg.MultipleChoice([[3, 2], [2, 0]], 4, optional=True), kg.MultipleChoice([[3, 2], [2, 0]], 4, at_least=1)]
    made += [kg.MultipleChoice([[3, 2], [2, 1]], 4), kg.MultipleChoice([[3, 2], [2, 0]], 5), kg.Knapsack([3, 2], 8)]
    for i, a in enumerate(made):
        for j, b in enumerate(made):
            assert (a == b) == (i == j)


def test_the_first_of_equal_constraints_is_found(pair, monkeypatch):
    if not isinstance(pair[0], base.Constraint):
        return
    base._first_equal.cache_clear()
    n = 4 if isinstance(pair[0], kg.MultipleChoice) else 3
    assert base.first_equal(pair[0], n, 0) is pair[0]
    grows = pair[0].lattice(n).weights.ndim > 1  # with a batch
    assert base.first_equal(pair[1], n, 0) is pair[grows] and base.first_equal(pair[0], n, 0) is pair[0]
    assert base.first_equal(pair[1], n, 1) is pair[1]  # the first one there
    other = kg.Knapsack([7, 7, 7], 8)
    assert base.first_equal(other, 3, 0) is other
    monkeypatch.setattr(base, "_REMEMBERED", (64, 2))
    assert base.first_equal(pair[1], n, 0) is pair[1]  # too many numbers


def test_a_constraint_of_traced_numbers_is_its_own_first():
    jax = pytest.importorskip("jax")

    @jax.jit
    def traced(weights: Any) -> Any:
        limits = [kg.Knapsack(weights, 2, max_capacity=2) for _ in range(2)]
        assert limits[0] == limits[1] and all(base.first_equal(limit, 3, 0) is limit for limit in limits)
        return weights

    traced(np.ones(3, np.int32))


def test_a_repr_makes_the_value_again(pair):
    names = {name: getattr(kg, name) for name in kg.__all__}
    assert eval(repr(pair[0]), names) == pair[0]


def test_a_repr_stays_short():
    assert repr(kg.Knapsack(np.ones(1000, int), 4)) == "Knapsack(weights=<int64 of shape (1000,)>, capacity=4)"
    assert repr(kg.TopK(3, at_least=1)) == "TopK(k=3, at_least=1)"
    choice = "MultipleChoice(weights=[2, 1], capacity=4"
    assert repr(kg.MultipleChoice([2, 1], 4)) == f"{choice})"
    assert repr(kg.MultipleChoice([2, 1], 4, optional=True)) == f"{choice}, optional=True)"
    assert repr(kg.Gini(0.5)) == "Gini(gamma=0.5)"


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal(how, pair):
    theta = np.zeros((2, 2))
    value = how(pair[0])
    assert value == pair[0] and repr(value) == repr(pair[0])
    if isinstance(value, kg.TopK) and (np.max(value.k) > 2):
        theta = np.zeros((2, 3))
    if isinstance(value, kg.Knapsack):
        theta = np.zeros((2, value.weights.shape[-1]))
    if isinstance(value, kg.MultipleChoice):
        theta = np.zeros((2, 1, 2) if value.weights.ndim == 3 else (2, 2, 2))
    arguments = (value, kg.Gini()) if hasattr(value, "lattice") else (kg.TopK(1), value)
    assert np.isfinite(kg.relax(theta, *arguments)).all()


def test_nothing_can_be_written_to(pair):
    """A kernel that was promised smaller numbers would read beyond its tables."""
    value, again = pair
    for name, x in value.arguments.items():
        with pytest.raises(AttributeError, match=f"{name} cannot be set"):
            setattr(value, name, x)
        with pytest.raises(AttributeError, match="cannot be set"):
            delattr(value, name)
        if isinstance(x, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                x[...] = 99
            with pytest.raises(ValueError, match=r"read-only|cannot"):
                x -= 10**6
    assert value == again


REALS: dict[str, Any] = {
    "Knapsack of real numbers": lambda: kg.Knapsack.from_real(np.sqrt([[2.0, 3.0], [5.0, 6.0]]), [2.0, 3.0]),
    "MultipleChoice of real numbers": lambda: kg.MultipleChoice.from_real(np.sqrt([[[2.0, 3.0]], [[5.0, 6.0]]]), 3.0),
}


@pytest.mark.parametrize("make", [make for make, _ in VALUES.values()] + list(REALS.values()), ids=[*VALUES, *REALS])
def test_whoever_forces_an_array_open_does_not_reach_what_kernels_read(make):
    value = make()
    names = [*value.arguments, "unit", "offset"] if hasattr(value, "unit") else [*value.arguments]
    lattice = value.lattice(4 if value.event_dims == 2 else 3) if isinstance(value, base.Constraint) else None
    read = [] if lattice is None else [x for x in (lattice.weights, lattice.capacity, lattice.slack) if x is not None]
    before = [np.array(y) for y in read]
    for x in (getattr(value, name, None) for name in names):
        while isinstance(x, np.ndarray):
            assert not x.flags.writeable
            x.setflags(write=True)
            x[...] = 10**6
            x = x.base
    if hasattr(value, "budgets"):
        assert value.budgets.flags.writeable  # a copy
    for y, expected in zip(read, before):
        np.testing.assert_array_equal(y, expected)


def test_a_tensor_of_the_user_is_copied():
    torch = pytest.importorskip("torch")
    weights, capacity = torch.tensor([3, 2, 2]), torch.tensor([4])
    budget, choice = kg.Knapsack(weights, capacity), kg.MultipleChoice(weights, capacity)
    weights[:], capacity[:] = -(10**6), 10**6
    assert budget == kg.Knapsack([3, 2, 2], [4]) and choice == kg.MultipleChoice([3, 2, 2], [4])


def test_what_torch_makes_of_an_array_is_not_what_kernels_read():
    """torch writes into read-only memory, after a warning."""
    torch = pytest.importorskip("torch")
    budget = kg.Knapsack([1, 2, 3], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(budget.weights)[:] = 10**9
    np.testing.assert_array_equal(budget.lattice(3).weights, [1, 2, 3])


def test_arrays_of_the_user_are_copied():
    weights, capacity, gamma = np.array([3, 2, 2]), np.array([4]), np.array([0.5])
    constraint, smoothing = kg.Knapsack(weights, capacity), kg.Gini(gamma)
    weights[:], capacity[:], gamma[:] = 0, 10**6, -1.0
    assert constraint == kg.Knapsack([3, 2, 2], [4]) and smoothing == kg.Gini([0.5])
    kg.relax(np.zeros((1, 3)), constraint, smoothing)


def test_arrays_of_choices_are_copied():
    weights, capacity = np.array([[3, 2], [2, 0]]), np.array([4])
    constraint = kg.MultipleChoice(weights, capacity)
    weights[:], capacity[:] = 0, 10**6
    assert constraint == kg.MultipleChoice([[3, 2], [2, 0]], [4])
    plain = kg.relax(np.ones((1, 2, 2)), kg.MultipleChoice([[3, 2], [2, 0]], [4]), kg.Gini())
    np.testing.assert_array_equal(kg.relax(np.ones((1, 2, 2)), constraint, kg.Gini()), plain)


def test_a_tensor_equals_itself_alone():
    torch = pytest.importorskip("torch")
    gamma = torch.nn.Parameter(torch.tensor(0.5))
    assert kg.Gini(gamma) == kg.Gini(gamma) and hash(kg.Gini(gamma)) == hash(kg.Gini(gamma))
    assert kg.Gini(gamma) != kg.Gini(torch.tensor(0.5)) and kg.Gini(gamma) != kg.Gini(0.5)


def test_a_jax_array_never_changes_and_equals_its_like():
    jnp = pytest.importorskip("jax.numpy")
    assert kg.Gini(jnp.array(0.5)) == kg.Gini(jnp.array(0.5)) != kg.Gini(jnp.array(0.25))


# contains


def asarray(backend: Backend, y: np.ndarray) -> Any:
    return backend.asarray(y, backend.widest)


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize(
    "edge", ["no batch", "batch of rank 2", "empty batch", "from 1 to 3", "no items", "choices, batch of rank 2"]
)
def test_contains_takes_soft_selections_and_samples_in_front(edge, backend):
    problem = EDGES[edge]
    soft = np.full(problem.theta.shape, 0.5)
    if problem.n:
        assert not backend.to_numpy(problem.constraint.contains(asarray(backend, soft))).any()
    for front in ((), (3,), (2, 0)):
        y = np.zeros((*front, *problem.theta.shape))
        assert problem.constraint.contains(asarray(backend, y)).shape == (*front, *problem.batch)


def test_contains_counts_large_weights_exactly(backend):
    """In float32, 2**24 + 1 is 2**24."""
    heavy = 2**24
    constraint = kg.Knapsack([heavy, 1], heavy)
    y = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_array_equal(backend.to_numpy(constraint.contains(asarray(backend, y))), [True, False, True])


def test_contains_says_what_is_wrong():
    with pytest.raises(TypeError, match=r"y must be.*list"):
        kg.TopK(1).contains([1, 0])
    with pytest.raises(ValueError, match="one entry per item"):
        kg.Knapsack([1, 2, 3], 3).contains(np.zeros(2))


# at_least


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kg.Knapsack([1, 2], 3, at_least=4), r"at_least must not be above the capacity: it is 4.*is 3"),
        (lambda: kg.Knapsack([1, 2], [3, 2], at_least=[1, 3]), r"at_least.*3 at index 1.*capacity is 2"),
        (lambda: kg.TopK(2, at_least=3), r"at_least must not be above the k"),
        (lambda: kg.Knapsack([1, 2], 3, at_least=-1), "at_least must not be negative"),
        (lambda: kg.Knapsack([1, 2], 3, at_least=0.5), "at_least must be whole numbers"),
        (
            lambda: kg.Knapsack([1, 2], [3, 3], at_least=[1, 1, 1]),
            r"at_least of shape \(3,\).*capacity of shape \(2,\)",
        ),
        (lambda: kg.TopK(2, max_capacity=1), r"max_capacity is 1.*k has 2"),
        (lambda: kg.TopK(2, max_capacity=-1), "max_capacity must not be negative"),
    ],
)
def test_limits_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("max_capacity", [2.5, "3", True])
def test_max_capacity_is_an_integer(max_capacity):
    with pytest.raises(TypeError, match="max_capacity must be an integer"):
        kg.TopK(2, max_capacity=max_capacity)


def test_a_least_weight_must_fit_the_batch():
    with pytest.raises(ValueError, match=r"at_least of shape \(2,\) does not broadcast to the batch"):
        kg.relax(np.zeros((3, 2)), kg.Knapsack([1, 2], 3, at_least=[1, 2]), kg.Gini())


def test_all_of_the_capacity_cannot_be_used_if_the_items_weigh_less():
    """A capacity above the total weight is cut to it, but not what must be used."""
    with pytest.raises(ValueError, match=r"instance 0 .*no feasible selection"):
        kg.solve(np.ones(3), kg.Knapsack([1, 2, 3], 10, at_least=10))
    np.testing.assert_array_equal(kg.solve(-np.ones(3), kg.Knapsack([1, 2, 3], 10, at_least=6)), np.ones(3))


def test_no_items_and_a_least_weight(backend):
    constraint = kg.Knapsack(np.zeros((2, 0), int), 3, at_least=np.array([0, 1]))
    theta = asarray(backend, np.zeros((2, 0)))
    if backend.looks:
        with pytest.raises(ValueError, match="instance 1 "):
            kg.value(theta, constraint, kg.Gini())
    else:
        np.testing.assert_array_equal(np.isnan(backend.to_numpy(kg.value(theta, constraint, kg.Gini()))), [False, True])


#: constraint, and a bound of its capacity
BOUNDED: dict[str, tuple[str, Any]] = {
    "knapsack": ("a least weight of every instance", 6),
    "top-k": ("no batch, top-k", 4),
    "at least k": ("from 1 to 3", 9),
    "choices": ("choices, everything for each instance", 40),
    "optional choices": ("choices, masked, optional", 40),
    "budgets": ("budgets, capacities for each instance", [7, 120]),
}


@pytest.mark.thinned_where_compiled(2)
@pytest.mark.parametrize("name", BOUNDED)
def test_max_capacity_changes_no_result(name, backend, regularizer):
    edge, bound = BOUNDED[name]
    problem = EDGES[edge]
    plain, smoothing, theta = problem.constraint, problem.regularizer(regularizer), asarray(backend, problem.theta)
    option = "max_capacities" if name == "budgets" else "max_capacity"
    wide = type(plain)(**{**plain.arguments, option: bound})
    assert np.array_equal(getattr(wide, option), bound) and getattr(plain, option) is None
    close = {"rtol": 1e-13, "atol": 1e-13} if backend.widest == "float64" else {"rtol": 1e-5, "atol": 1e-6}
    for call in (kg.relax, kg.value, kg.entropy):
        one, other = (backend.to_numpy(call(theta, limit, smoothing)) for limit in (plain, wide))
        np.testing.assert_allclose(one, other, **close)
    one, other = (backend.to_numpy(kg.solve(theta, limit)) for limit in (plain, wide))
    np.testing.assert_array_equal(one, other)


def test_max_capacity_is_cut_to_the_total_weight():
    assert kg.Knapsack([1, 2, 3], 2, max_capacity=5).lattice(3).reach == 5
    assert kg.Knapsack([1, 2, 3], 2, max_capacity=50).lattice(3).reach == 6


def test_a_gamma_of_another_framework():
    torch = pytest.importorskip("torch")
    theta, limit, gamma = np.array([[0.3, -0.2, 0.9]]), kg.Knapsack([1, 2, 1], 2), torch.nn.Parameter(torch.tensor(0.5))
    for operation in (kg.value, kg.relax, kg.divergence, kg.frontier):
        found = operation(theta, limit, kg.Gini(gamma))
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, operation(theta, limit, kg.Gini(0.5)))
