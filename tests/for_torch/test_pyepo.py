"""knapgrad.pyepo: the model under PyEPO's own losses, datasets and metrics; our losses in its conventions."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pyepo")
import pyepo.data  # noqa: E402
import pyepo.func  # noqa: E402
import pyepo.metric  # noqa: E402
from pyepo import EPO  # noqa: E402
from pyepo.data.dataset import optDataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import knapgrad as kg  # noqa: E402
import knapgrad.pyepo as adapter  # noqa: E402
from knapgrad.pyepo import RKFY, RKO, integer_knapsack, knapsackModel  # noqa: E402
from knapgrad.regularizers import REGULARIZERS  # noqa: E402

WEIGHTS, FEATURES, COSTS = pyepo.data.knapsack.genData(120, 4, 7, deg=3, noise_width=0.3, seed=3)
CAPACITY = [round(0.5 * WEIGHTS.sum(), 2)]


class Minimizing(knapsackModel):
    """The same problem with costs instead of values."""

    modelSense = EPO.MINIMIZE


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the solver had."""
    seen: list[int] = []
    solve = kg.solve

    def counted(costs: Any, constraint: Any) -> Any:
        seen.append(len(costs))
        return solve(costs, constraint)

    monkeypatch.setattr(adapter.kg, "solve", counted)
    return seen


@pytest.fixture(scope="module")
def dataset() -> optDataset:
    return optDataset(knapsackModel(WEIGHTS, CAPACITY), FEATURES, COSTS)


def best_by_listing(cost: np.ndarray, weights: np.ndarray, capacity: float) -> float:
    subsets = np.array(list(itertools.product([0, 1], repeat=len(cost))))
    return float((subsets @ cost)[subsets @ weights <= capacity + 1e-9].max())


# The model


def test_decimal_weights_by_listing(dataset):
    for cost, solution, objective in zip(COSTS, dataset.sols.numpy(), dataset.objs.numpy()):
        assert solution @ WEIGHTS[0] <= CAPACITY[0] + 1e-9
        assert objective[0] == pytest.approx(best_by_listing(cost, WEIGHTS[0], CAPACITY[0]))
        assert objective[0] == pytest.approx(cost @ solution)


@pytest.mark.parametrize("seed", range(10))
def test_objectives_equal_those_of_a_solver(seed):
    """30 instances for each of 10 weight vectors; solutions may differ where several are best."""
    ort = pytest.importorskip("pyepo.model.ort")
    pytest.importorskip("ortools")
    weights, _, costs = pyepo.data.knapsack.genData(30, 5, 12, deg=2, noise_width=0.5, seed=seed)
    capacity = [round(0.4 * weights.sum(), 2)]
    solver, model = ort.knapsackModel(weights, capacity), knapsackModel(weights, capacity)
    for cost in costs + np.random.default_rng(seed).normal(size=costs.shape).astype(np.float32):
        solver.setObj(cost)
        model.setObj(cost)
        assert model.solve()[1] == pytest.approx(solver.solve()[1], rel=1e-6)


@pytest.mark.parametrize(
    "weights, capacity, expected, limit",
    [
        ([3.57, 2.1], 5.0, [17, 10], 23),
        ([3, 5], 7, [3, 5], 7),
        ([30, 50], 79, [3, 5], 7),
        ([0.5, 0.25], 0.74, [2, 1], 2),
        (np.array([3.57, 2.1], np.float32), np.float32(5.67), [17, 10], 27),
        ([1e-3, 2e-3], 1e9, [1, 2], 3),  # no more than all weights together
        ([0.0, 0.0], 1.0, [0, 0], 0),
        ([0.1] * 3, 0.3, [1, 1, 1], 3),  # in floats 0.1 + 0.1 + 0.1 is more than 0.3
        ([0.1 + 0.2] * 7, 0.9, [1] * 7, 3),
        ([0.07, 0.05], 55.849999999999994 / 1000, [7, 5], 5),
        ([0.01, 55.85, 20.0], 55.849999999999994, [1, 5585, 2000], 5585),
        ([0.01, 55.85, 20.0], 55.8499, [1, 5585, 2000], 5584),
    ],
)
def test_weights_become_integers_exactly(weights, capacity, expected, limit):
    constraint = integer_knapsack(weights, capacity)
    assert constraint.weights.tolist() == expected and int(constraint.capacity) == limit


@pytest.mark.parametrize(
    "weights, capacity, message",
    [
        ([1 / 3, 1.0], 1.0, r"capacity must be at most 1,000,000 .* round the weights"),
        ([1.0, -1.0], 1.0, "must not be negative"),
        ([1.0, 2.0], -1.0, "must not be negative"),
        ([1.0, np.nan], 1.0, "must be finite"),
        ([1.0, np.inf], 1.0, "must be finite"),
        ([[1.0, 2.0], [2.0, 1.0]], [1.0], "capacity must have an entry per constraint"),
        (
            [[1.0, 2.0]] * 4,
            [1.0] * 4,
            r"at most 3 constraints, got 4.*ort.knapsackModel",
        ),
        (
            np.arange(3.01, 9.0, 0.1).round(2) * [[1.0], [2.0]],
            [99.99, 88.88],
            r"at most 10,000,000 combinations, got 10,000 x 4,445\. Give resolution=.*ort.knapsackModel",
        ),
        ([[1 / 3, 1.0]] * 2, [1.0] * 2, r"combinations, got no common unit\. Give resolution="),
    ],
)
def test_bad_weights(weights, capacity, message):
    with pytest.raises(ValueError, match=message):
        knapsackModel(weights, capacity)


def test_bad_resolutions():
    weights = np.random.default_rng(0).uniform(1, 5, (3, 10))
    with pytest.raises(ValueError, match=r"got 1,001 x 1,001 x 1,001\. Give a smaller resolution than 1000"):
        knapsackModel(weights, [20.0] * 3, resolution=1000)
    with pytest.raises(ValueError, match="one entry per budget each, got 3, 3 and 1"):
        knapsackModel(weights, [20.0] * 3, resolution=[50])


@pytest.mark.parametrize(
    "weights, capacity, at_least, expected",
    [
        ([3.57, 2.1], 5.0, 2.2, (23, 11)),  # in units of 0.21
        ([0.1] * 5, 0.4, 0.1 + 0.2, (4, 3)),  # 0.30000000000000004 is 0.3
        ([1, 2], 3, 0, (3, 0)),
    ],
)
def test_a_least_weight_in_units(weights, capacity, at_least, expected):
    constraint = integer_knapsack(weights, capacity, at_least)
    assert (int(constraint.capacity), int(constraint.at_least)) == expected


@pytest.mark.parametrize(
    "at_least, message",
    [(6.0, "at_least must not be above the capacity"), (-1.0, "must not be negative"), (np.nan, "must be finite")],
)
def test_bad_least_weights(at_least, message):
    with pytest.raises(ValueError, match=message):
        knapsackModel([2.5, 1.5, 4.0], 5.0, at_least=at_least)


def test_no_weight_between_the_limits():
    with pytest.raises(ValueError, match=r"no selection weighs from 5 to 7"):
        knapsackModel([4.0, 8.0], 7, at_least=5)


def test_a_model_with_a_least_weight_is_the_enumeration():
    """With negative costs the least weight is what binds; our loss and PyEPO's run on it too."""
    weights, rng = [2.5, 1.5, 1.0, 2.0], np.random.default_rng(0)
    model = knapsackModel(weights, 5.0, at_least=3.5)
    every = np.array(list(itertools.product((0, 1), repeat=4)))
    possible = every[(every @ weights <= 5.0) & (every @ weights >= 3.5)]
    for cost in rng.standard_normal((20, 4)) - 0.5:
        for made in (model, model.rebuild(), model.copy()):
            made.setObj(cost)
            assert made.solve()[1] == pytest.approx((possible @ cost).max())
    soft = RKO(model, gamma=0.5)(torch.tensor(rng.standard_normal((3, 4)) - 2.0))
    assert (soft @ torch.tensor(weights, dtype=soft.dtype) >= 3.5 - 1e-6).all()


def test_bad_calls():
    model = knapsackModel([1, 2], 2)
    with pytest.raises(RuntimeError, match="setObj"):
        model.solve()
    with pytest.raises(ValueError, match="2 items, got shape"):
        model.setObj([1.0, 2.0, 3.0])
    with pytest.raises(NotImplementedError, match=r"with the model only.*unambRegret"):
        model.addConstr([1.0, 1.0], 1.0)


# Several constraints


def whole_numbers(constraints: int, seed: int, n: int = 10) -> tuple[np.ndarray, list[int], np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 9, (constraints, n))
    return weights, [20] * constraints, (10 * rng.random((30, n))).astype(np.float32)


@pytest.mark.parametrize("constraints", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_several_constraints_by_listing_and_by_a_solver(constraints, seed):
    """30 instances for each of 10 sets of weights."""
    ort = pytest.importorskip("pyepo.model.ort")
    pytest.importorskip("ortools")
    weights, capacity, costs = whole_numbers(constraints, seed)
    subsets = np.array(list(itertools.product([0, 1], repeat=10)))
    subsets = subsets[(subsets @ weights.T <= capacity).all(1)]
    model, solver = knapsackModel(weights, capacity), ort.knapsackModel(weights, capacity)
    for cost in costs:
        model.setObj(cost)
        solver.setObj(cost)
        solution, objective = model.solve()
        assert (weights @ solution <= capacity).all()
        assert objective == pytest.approx((subsets @ cost).max(), rel=1e-6)
        theirs = solver.solve()[1]  # stops at a relative gap of 1e-4
        assert theirs - 1e-5 <= objective <= theirs * (1 + 1e-4)


def test_decimals_of_two_digits_need_a_resolution():
    weights, _, costs = pyepo.data.knapsack.genData(20, 4, 12, dim=2, deg=2, noise_width=0.5, seed=0)
    capacity = [20.0, 20.0]
    assert knapsackModel(weights, capacity).constraint.exact  # 2001 x 2001 states
    model = knapsackModel(weights, capacity, resolution=100)
    assert not model.constraint.exact
    for cost in costs:
        model.setObj(cost)
        solution, objective = model.solve()
        assert (weights @ solution <= capacity).all()
        assert objective <= cost @ kg.solve(cost, model.constraint.optimistic) + 1e-6
    with pytest.raises(ValueError, match="at_least must be 0"):
        knapsackModel(weights, capacity, at_least=3)


def test_nearest_neighbours_on_our_model():
    from pyepo.data.dataset import optDatasetKNN

    weights, capacity, costs = whole_numbers(2, 0)
    features = np.random.default_rng(0).normal(size=(30, 3))
    found = optDatasetKNN(knapsackModel(weights, capacity), features, costs, k=3, weight=0.5)
    assert (found.sols.numpy() @ weights.T <= capacity).all()


def test_our_losses_with_several_constraints():
    weights, capacity, costs = whole_numbers(2, 0)
    model = knapsackModel(weights, capacity)
    theta, limit = torch.as_tensor(costs), kg.MultiKnapsack(weights, capacity)
    torch.testing.assert_close(RKO(model, gamma=2.0)(theta), kg.relax(theta, limit, kg.Shannon(2.0)))
    best = kg.solve(theta, limit)
    expected = kg.fenchel_young_loss(theta, best, limit, kg.Gini(2.0)).mean()
    torch.testing.assert_close(RKFY(model, gamma=2.0, regularizer="gini")(theta, best), expected)
    rebuilt = knapsackModel(weights, capacity, resolution=10).rebuild()
    assert rebuilt.constraint == knapsackModel(weights, capacity, resolution=10).constraint


@pytest.mark.parametrize("shape", ["as PyEPO has them", "plain"])
def test_a_model_can_be_rebuilt(shape):
    model = knapsackModel(WEIGHTS, CAPACITY) if shape != "plain" else knapsackModel(WEIGHTS[0].tolist(), CAPACITY[0])
    for other in (model.rebuild(), model.to_spec().build(), model.copy()):
        model.setObj(COSTS[0])
        other.setObj(COSTS[0])
        assert np.array_equal(model.solve()[0], other.solve()[0])
        assert other.num_cost == 7 and other.modelSense == EPO.MAXIMIZE


def test_a_pool_of_workers():
    loss = pyepo.func.SPOPlus(knapsackModel(WEIGHTS, CAPACITY), processes=2)
    alone = pyepo.func.SPOPlus(knapsackModel(WEIGHTS, CAPACITY))
    data = optDataset(knapsackModel(WEIGHTS, CAPACITY), FEATURES[:5], COSTS[:5])
    predicted = torch.as_tensor(COSTS[:5]) + 1.0
    assert torch.equal(loss(predicted, *data[:5][1:]), alone(predicted, *data[:5][1:]))


def test_minimizing():
    model = Minimizing(WEIGHTS, CAPACITY)
    model.setObj(-COSTS[0])
    solution, objective = model.solve()
    assert objective == pytest.approx(-best_by_listing(COSTS[0], WEIGHTS[0], CAPACITY[0]))
    assert objective == pytest.approx(float(-COSTS[0] @ solution))


# Batches


@pytest.mark.parametrize("kind", ["numpy", "torch", "slice of a larger array"])
def test_a_dataset_is_solved_in_one_call(kind, solved, dataset):
    costs = {
        "numpy": COSTS,
        "torch": torch.as_tensor(COSTS),
        "slice of a larger array": np.concatenate([COSTS[:9], COSTS])[9:],
    }[kind]
    again = optDataset(knapsackModel(WEIGHTS, CAPACITY), FEATURES, costs)
    assert solved == [120]
    assert torch.equal(again.sols, dataset.sols) and torch.equal(again.objs, dataset.objs)


METHODS = {
    "SPO+": (lambda m, d: pyepo.func.SPOPlus(m), lambda f, p, c, w, z: f(p, c, w, z), [32]),
    "PFY": (lambda m, d: pyepo.func.perturbedFenchelYoung(m, n_samples=3), lambda f, p, c, w, z: f(p, w), [96]),
    "DPO": (
        lambda m, d: pyepo.func.perturbedOpt(m, n_samples=3),
        lambda f, p, c, w, z: (f(p) - w).square().sum(),
        [96],
    ),
    "DBB": (lambda m, d: pyepo.func.blackboxOpt(m), lambda f, p, c, w, z: (f(p) - w).square().sum(), [32, 32]),
    "NID": (lambda m, d: pyepo.func.negativeIdentity(m), lambda f, p, c, w, z: (f(p) - w).square().sum(), [32]),
    "NCE": (lambda m, d: pyepo.func.NCE(m, dataset=d), lambda f, p, c, w, z: f(p, w), [32]),
}


@pytest.mark.parametrize("constraints", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_pyepo_runs_unchanged_on_our_model_and_a_batch_is_one_call(method, constraints, dataset, solved):
    """Against the same class on the same model, which is made to answer row by row."""
    make, call, calls = METHODS[method]
    model = partial(knapsackModel, WEIGHTS, CAPACITY)
    if constraints == 2:
        model = partial(knapsackModel, np.vstack([WEIGHTS, np.ones((1, 7))]), [*CAPACITY, 3])
        dataset = optDataset(model(), FEATURES, COSTS)
        solved.clear()
    batch = next(iter(DataLoader(dataset, batch_size=32)))
    results = []
    for ahead in (1024, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "_AHEAD", ahead)
            predicted = (batch[1] + torch.linspace(-2, 2, 7)).requires_grad_()
            loss = call(make(model(), dataset), predicted, *batch[1:])
            loss.backward()
            results.append((loss.detach(), predicted.grad))
        if ahead > 1:
            assert solved == calls
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().sum() > 0


def test_metrics_run_in_batches(dataset, solved):
    network = torch.nn.Linear(4, 7)
    regret = pyepo.metric.regret(network, knapsackModel(WEIGHTS, CAPACITY), DataLoader(dataset, batch_size=60))
    assert solved == [60, 60] and 0 <= regret < 1
    perfect = torch.nn.Identity()
    by_value = [(c, c, w, z) for _, c, w, z in DataLoader(dataset, batch_size=60)]
    assert pyepo.metric.regret(perfect, knapsackModel(WEIGHTS, CAPACITY), by_value) == pytest.approx(0, abs=1e-6)


def test_rows_that_change_are_solved_again(solved):
    model, costs = knapsackModel(WEIGHTS, CAPACITY), COSTS[:6].copy()
    for i in range(6):
        if i == 3:
            costs[3:] = costs[3:][:, ::-1]
        model.setObj(costs[i])
        alone = knapsackModel(WEIGHTS, CAPACITY)
        alone.setObj(costs[i].copy())
        assert np.array_equal(model.solve()[0], alone.solve()[0])


def test_a_solution_is_the_callers_own():
    model = knapsackModel(WEIGHTS, CAPACITY)
    model.setObj(COSTS[0])
    first = model.solve()[0]
    kept = first.copy()
    first[:] = 7
    model.setObj(COSTS[0])
    assert np.array_equal(model.solve()[0], kept)


def test_rows_in_any_order_cost_little(solved):
    model = knapsackModel(WEIGHTS, CAPACITY)
    for i in np.random.default_rng(0).permutation(120):
        model.setObj(COSTS[i])
        model.solve()
    assert sum(solved) < 120 + 2 * 120


def test_rows_that_only_look_like_rows():
    model, table = knapsackModel(WEIGHTS, CAPACITY), np.ascontiguousarray(COSTS[:14].T[:, :7])  # (7, 7)
    tensor = torch.as_tensor(table)
    costs = [table[:, 2], table[2, ::-1], table.reshape(-1)[3:10], COSTS[0].tolist(), COSTS[0].astype(int)]
    costs += [tensor[:, 3], tensor.T[3], tensor.diagonal(), tensor.view(-1)[3:10], tensor[2].long(), tensor[4]]
    for cost in costs:
        model.setObj(cost)
        assert model.solve()[1] == pytest.approx(best_by_listing(np.asarray(cost, float), WEIGHTS[0], CAPACITY[0]))


def test_labels_of_a_transposed_tensor():
    costs = torch.as_tensor(COSTS[:7]).contiguous().T  # (7, 7)
    data = optDataset(knapsackModel(WEIGHTS, CAPACITY), FEATURES[:7], costs)
    for cost, objective in zip(costs.numpy(), data.objs):
        assert float(objective) == pytest.approx(best_by_listing(cost, WEIGHTS[0], CAPACITY[0]))


def test_an_objective_is_what_it_was_when_it_was_set():
    model, cost = knapsackModel(WEIGHTS, CAPACITY), COSTS[0].copy()
    model.setObj(cost)
    cost[:] = 0
    assert model.solve()[1] == pytest.approx(best_by_listing(COSTS[0], WEIGHTS[0], CAPACITY[0]))
    model.setObj(torch.as_tensor(COSTS[0], dtype=torch.float64).requires_grad_() * 1.0)
    assert model.copy().solve()[1] == model.solve()[1]


# Our losses


@pytest.mark.parametrize("model", [knapsackModel, Minimizing])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_losses_and_their_gradients_obey_the_sense(regularizer, model):
    sign = -1.0 if model is Minimizing else 1.0
    optmodel = model(WEIGHTS, CAPACITY)
    predicted = (sign * torch.as_tensor(COSTS[:4])).double().requires_grad_()
    decisions = kg.solve(torch.as_tensor(COSTS[4:8]), optmodel.constraint).double()
    smoothing = REGULARIZERS[regularizer](0.7)
    loss = RKFY(optmodel, 0.7, regularizer, reduction="none")(predicted, decisions)
    expected = kg.fenchel_young_loss(sign * predicted, decisions, optmodel.constraint, smoothing)
    assert torch.equal(loss, expected) and loss.shape == (4,)
    loss.sum().backward()
    relaxed = kg.relax(sign * predicted.detach(), optmodel.constraint, smoothing)
    torch.testing.assert_close(predicted.grad, sign * (relaxed - decisions))
    assert torch.equal(RKO(optmodel, 0.7, regularizer)(predicted.detach()), relaxed)
    step = (predicted - 0.05 * predicted.grad).detach()
    assert RKFY(optmodel, 0.7, regularizer)(step, decisions) < loss.mean()


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradcheck(regularizer):
    optmodel = knapsackModel(WEIGHTS, CAPACITY)
    predicted = torch.as_tensor(COSTS[:2]).double().requires_grad_()
    decisions = torch.zeros(2, 7, dtype=torch.float64)
    gamma = torch.tensor(3.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, g: RKFY(optmodel, g, regularizer)(p, decisions), (predicted, gamma))
    assert torch.autograd.gradcheck(lambda p: RKO(optmodel, 3.1, regularizer)(p), (predicted,))


def test_reductions(dataset):
    _, costs, decisions, _ = dataset[:5]
    each, mean, total = (RKFY(dataset.model, reduction=r)(costs, decisions) for r in ("none", "mean", "sum"))
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())


def test_gamma_to_learn(dataset):
    loss = RKFY(dataset.model, gamma=torch.nn.Parameter(torch.tensor(2.0)))
    assert len(list(loss.parameters())) == 1
    loss(*dataset[:3][1:3]).backward()
    assert loss.gamma.grad.isfinite()


def test_pyepos_own_knapsack_will_do(dataset):
    ort = pytest.importorskip("pyepo.model.ort")
    pytest.importorskip("ortools")
    theirs = ort.knapsackModel(WEIGHTS, CAPACITY)
    _, costs, decisions, _ = dataset[:5]
    assert torch.equal(RKFY(theirs)(costs, decisions), RKFY(dataset.model)(costs, decisions))
    with pytest.raises(TypeError, match="without further constraints"):
        RKFY(theirs.addConstr(np.ones(7), 2))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"regularizer": "softmax"}, ValueError, "regularizer must be one of shannon, gini, tsallis"),
        ({"gamma": 0.0}, ValueError, "gamma must be positive"),
        ({"gamma": "5"}, TypeError, "gamma must be a number"),
        ({"reduction": "median"}, ValueError, "reduction"),
        ({"optmodel": None}, TypeError, "optModel"),
    ],
)
def test_bad_arguments_of_losses(change, error, message):
    with pytest.raises(error, match=message):
        RKFY(**({"optmodel": knapsackModel(WEIGHTS, CAPACITY)} | change))


def test_a_training_step_from_decisions_alone(dataset):
    """The loss falls, and so does the regret."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 7)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_size=120)
    before = pyepo.metric.regret(network, dataset.model, loader)
    loss = RKFY(dataset.model, gamma=1.0, regularizer="tsallis")
    for _ in range(60):
        for features, _, decisions, _ in loader:
            optimizer.zero_grad()
            loss(network(features), decisions).backward()
            optimizer.step()
    assert pyepo.metric.regret(network, dataset.model, loader) < 0.5 * before
