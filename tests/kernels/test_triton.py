"""The GPU kernels against the reference: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from instances import CONSTRAINTS, EDGES, Problem
from knapgrad import reference
from knapgrad.constraints import base
from knapgrad.lattice import FEASIBLE, Lattice, lattice_of
from knapgrad.regularizers import REGULARIZERS as CLASSES
from knapgrad.regularizers import Hard
from oracles import LONG_IS_LONGER, chi_square_p_value, long_table, subsets

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from torch import Tensor  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.func import jacrev, vmap  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402
from knapgrad.kernels.triton import from_torch, plan, variants  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "float64")
SMOOTHINGS = CLASSES

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of the interpreter's NumPy

#: where rows live -> the limits that make them
PATHS: dict[str, dict[str, int]] = {"narrow": {}, "wide": {"NARROW": 0}, "shared": {"NARROW": 0, "LARGEST_ROW": 1}}
#: every instance that can be is a pipeline, of small groups, which compile sooner, and small tiles if interpreted
TILES: dict[str, Any] = {"PIPELINED": (1 << 20, 0, 0), "PIPELINED_FAR": (1 << 20, 0, 0, 1 << 30), "GROUP": 2}
TILES |= {} if DEVICE == "cuda" else {"TILE": 4, "FAR_TILE": 8, "FAR_GROUP": 4}
USUAL_GROUP = plan.GROUP


class Limits:
    """Sets limits of the module for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, **limits: Any) -> None:
        for name, limit in limits.items():
            self.monkeypatch.setattr(plan, name, limit)
        forget_plans()

    def plan(self, **changes: Any) -> None:
        """Every plan from now on is changed so."""
        plain = plan.plan
        self.monkeypatch.setattr(plan, "plan", lambda *key: plain(*key)._replace(**changes))


def forget_plans() -> None:
    """And what was planned for constraints that are equal to new ones."""
    for plans in (plan.plan, plan.tiles, plan.segments, base._first_equal):
        plans.cache_clear()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limits]:
    """Limits to set; and scratch that is all NaN: a cell that is read must have been written."""
    new_empty, empty_like, empty = Tensor.new_empty, torch.empty_like, torch.empty

    def poisoned(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            return tensor.fill_(255)  # such floats are NaN
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    forget_plans()
    yield Limits(monkeypatch)
    monkeypatch.undo()
    forget_plans()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, limits: Limits) -> str:
    limits(**PATHS[request.param])
    return request.param


@pytest.fixture
def dtype(path: str, regularizer: str, constraint: str) -> str:
    """One of the two for all three; any two of the four meet."""
    places = list(PATHS).index(path), list(CLASSES).index(regularizer), CONSTRAINTS.index(constraint)
    return DTYPES[sum(places) % 2]


def any_regularizer(path: str, constraint: str) -> str:
    """One of the three for both; any two of the three meet."""
    return list(CLASSES)[(list(PATHS).index(path) + CONSTRAINTS.index(constraint)) % 3]


def tensor(values: Any, dtype: str = "float64") -> Tensor:
    return torch.tensor(np.asarray(values), dtype=getattr(torch, dtype), device=DEVICE)


def host(result: Tensor) -> np.ndarray:
    return result.double().cpu().numpy()


def on_device(plain: Lattice) -> Lattice:
    slack = None if plain.slack is None else tensor(plain.slack, "int64")
    return plain.replace(weights=tensor(plain.weights, "int64"), capacity=tensor(plain.capacity, "int64"), slack=slack)


def columns_of(problem: Problem) -> np.ndarray:
    """Scores (*batch, columns) as kernels take them."""
    theta = problem.columns(problem.theta)
    return theta.reshape(*problem.batch, theta.shape[-1])


class Call:
    """The kernels on one problem, with further arguments from a seed."""

    def __init__(self, problem: Problem, regularizer: str, dtype: str, samples: int = 3) -> None:
        rng, theta = np.random.default_rng(5), columns_of(problem)
        self.theta = tensor(theta, dtype)
        self.lattice, self.regularizer = on_device(problem.constraint.lattice(theta.shape[-1])), regularizer
        gamma = torch.tensor(problem.gamma, dtype=torch.float64)
        self.gamma = gamma.to(DEVICE) if gamma.dim() else gamma  # a number stays on the host
        self.z = tensor(rng.standard_normal(theta.shape), dtype)
        self.uniforms = tensor(rng.random((samples, *theta.shape)) * 0.999, dtype)
        self.cotangent = tensor(rng.standard_normal((samples, *problem.batch)), dtype)
        self.y = torch.zeros_like(self.uniforms)

    @property
    def constants(self) -> tuple[Any, ...]:
        """What every kernel takes after theta."""
        return self.lattice, self.gamma, self.regularizer

    def operator(self, relaxed: bool = True) -> tuple[Tensor, Tensor]:
        return from_torch.operator(self.theta, *self.constants, relaxed)

    def tabulate(self) -> tuple[Tensor, Tensor, Tensor]:
        return from_torch.tabulate(self.theta, *self.constants)

    def vjp(self) -> Tensor:
        return from_torch.vjp(self.theta, self.z, *self.constants)

    def entropy(self) -> Tensor:
        return from_torch.entropy(self.theta, *self.constants)

    def entropy_grad(self) -> Tensor:
        return from_torch.entropy_grad(self.theta, *self.constants)

    def sample(self, table: Tensor | None = None) -> Tensor:
        return from_torch.sample(self.theta, self.uniforms, *self.constants, table)

    def solve(self) -> Tensor:
        return from_torch.solve(self.theta, self.lattice)

    def mode(self) -> Tensor:
        return from_torch.mode(self.theta, *self.constants)

    def log_prob(self, table: Tensor | None = None) -> Tensor:
        return from_torch.log_prob(self.theta, self.y, *self.constants, table)

    def log_prob_vjp(self) -> Tensor:
        return from_torch.log_prob_vjp(self.theta, self.y, self.cotangent, *self.constants)

    def frontier(self) -> Tensor:
        return from_torch.frontier(self.theta, *self.constants)


#: operation -> its result, with the batch in front
RESULTS: dict[str, Callable[[Call], Tensor]] = {
    "value": lambda call: call.operator(relaxed=False)[0],
    "relax": lambda call: call.operator()[1],
    "vjp": Call.vjp,
    "entropy": Call.entropy,
    "entropy_grad": Call.entropy_grad,
    "sample": lambda call: call.sample().movedim(0, -1),
    "sample from a kept table": lambda call: call.sample(call.tabulate()[2]).movedim(0, -1),
    "solve": Call.solve,
    "mode": Call.mode,
    "log_prob": lambda call: call.log_prob().movedim(0, -1),
    "log_prob_vjp": Call.log_prob_vjp,
}
EVERY = {**RESULTS, "frontier": Call.frontier}


def problem_of(constraint: str, batch: int = 2, n: int = 5, seed: int = 0) -> Problem:
    """Weights, limits or k, and gamma for each instance; weights 0 and above the capacity among them."""
    rng = np.random.default_rng([seed, batch, n, len(constraint)])
    theta = rng.standard_normal((batch, n))
    gamma = rng.uniform(0.8, 2.5, batch)
    if constraint == "top-k":
        return Problem(theta, None, rng.permutation(np.arange(batch) % n + 1), gamma)
    weights = rng.integers(0, 7, (batch, n))
    weights[0, 0], weights[-1, n // 2] = 0, 40
    capacity = (np.minimum(weights, 9).sum(axis=1) * rng.uniform(0.4, 0.8, batch)).astype(int)
    if constraint == "knapsack":
        return Problem(theta, weights, capacity, gamma)
    every = weights @ np.array(subsets(n)).T  # of each instance, the weights that selections have
    least = [rng.choice(np.unique(loads[loads <= c])) for loads, c in zip(every, capacity)]
    return Problem(theta, weights, capacity, gamma, at_least=np.array(least))


def assert_within(actual: Any, expected: Any, tolerance: float, scale: float = 0.0, what: str = "") -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    allowed = tolerance * max(np.abs(expected).max(initial=0.0), scale)
    assert np.abs(actual - expected).max(initial=0.0) <= allowed, (what, actual, expected)


def rows_of(problem: Problem, regularizer: str) -> Iterator[tuple[np.ndarray, tuple[Any, ...]]]:
    """theta / gamma of each instance, and what the reference takes after it."""
    theta, gammas = problem.columns(problem.theta), problem.each(problem.gamma)
    whole = problem.constraint.lattice(theta.shape[-1])
    weights = np.broadcast_to(whole.weights, (*problem.batch, theta.shape[-1])).reshape(theta.shape)
    capacity, slack = problem.each(whole.capacity), None if whole.slack is None else problem.each(whole.slack)
    for b in range(problem.size):
        own = whole.replace(weights=weights[b], capacity=capacity[b], slack=None if slack is None else slack[b])
        yield theta[b] / gammas[b], (own, Hard if regularizer == "hard" else CLASSES[regularizer])


def by_instance(x: Any, *shape: int) -> np.ndarray:
    """With those dimensions and one more, also if there are no instances."""
    numbers = host(x)
    return numbers.reshape(*shape, numbers.size // max(int(np.prod(shape)), 1))


def check_sweeps(problem: Problem, regularizer: str, dtype: str) -> None:
    """Value, relax, vjp and entropy."""
    problem, tolerance = problem.rounded(dtype), TOLERANCES[dtype]
    call = Call(problem, regularizer, dtype)
    value, y = call.operator()
    results = {"y": y, "vjp": call.vjp(), "entropy": call.entropy(), "entropy_grad": call.entropy_grad()}
    assert value.dtype == torch.float64 and value.shape == problem.batch
    assert all(x.dtype == call.theta.dtype for x in results.values())
    assert y.shape == results["vjp"].shape == results["entropy_grad"].shape == call.theta.shape
    found = {name: by_instance(x, problem.size) for name, x in {"value": value, "z": call.z, **results}.items()}
    for b, (theta, arguments) in enumerate(rows_of(problem, regularizer)):
        expected, expected_y = reference.operator(theta, *arguments)
        largest = np.abs(theta[np.isfinite(theta)]).max(initial=1.0)
        assert_within(found["value"][b], expected, tolerance.value, largest, "value")
        assert np.abs(found["y"][b] - expected_y).max(initial=0.0) <= tolerance.relax, (found["y"][b], expected_y)
        z = found["z"][b]
        product = reference.vjp(theta, z, *arguments)
        assert_within(found["vjp"][b], product, tolerance.vjp, np.abs(z).max(initial=0.0) / 10, "vjp")
        expected, slope = reference.entropy(theta, *arguments)
        assert_within(found["entropy"][b], expected, tolerance.value, 1.0, "entropy")
        assert_within(found["entropy_grad"][b], slope, tolerance.vjp, 1.0, "entropy_grad")


def check_paths(problem: Problem, regularizer: str, dtype: str) -> None:
    """Samples, their log-probabilities, the optimum and the mode; also from a table that is kept."""
    problem, tolerance = problem.rounded(dtype), TOLERANCES[dtype]
    call = Call(problem, regularizer, dtype)
    drawn, best, table = call.sample(), call.solve(), call.tabulate()[2]
    assert torch.equal(call.sample(table), drawn)
    call.y = drawn
    log_prob = call.log_prob()
    assert torch.equal(call.log_prob(table), log_prob)
    assert drawn.dtype == best.dtype == log_prob.dtype == call.theta.dtype
    assert drawn.shape == call.uniforms.shape and best.shape == call.theta.shape
    assert log_prob.shape == drawn.shape[:-1]
    whole = [problem.constraint.whole(host(x), problem.event) for x in (drawn, best)]
    assert problem.allows(whole[0]) and problem.allows(whole[1])
    drawn, uniforms, log_prob = (by_instance(x, len(x), problem.size) for x in (drawn, call.uniforms, log_prob))
    best, mode = (by_instance(x, problem.size) for x in (best, call.mode()))
    for b, (theta, arguments) in enumerate(rows_of(problem, regularizer)):
        expected = reference.solve(theta, arguments[0])
        assert theta[best[b] == 1].sum() == pytest.approx(theta[expected == 1].sum(), rel=1e-12, abs=1e-12)
        likely = reference.log_prob(theta, mode[b], *arguments)
        for s in range(len(drawn)):
            np.testing.assert_array_equal(drawn[s, b], reference.sample(theta, uniforms[s, b], *arguments))
            expected = reference.log_prob(theta, drawn[s, b], *arguments)
            rounding = 16 * max(problem.n, 1) * np.finfo(dtype).eps * np.exp(-expected)
            assert abs(log_prob[s, b, 0] - expected) <= tolerance.log_prob * max(1.0, abs(expected)) + rounding
            assert likely >= expected - 1e-4


def check_log_prob_gradient(problem: Problem, regularizer: str, dtype: str) -> None:
    """Against differences of the reference; what is never drawn, of the cotangent 0 that autograd gives it, counts
    nothing."""
    problem = problem.rounded(dtype)
    call = Call(problem, regularizer, dtype)
    y, cotangent = call.sample(), call.cotangent
    call.y, call.cotangent = torch.cat([y, 0 * y[:1]]), torch.cat([cotangent, 0 * cotangent[:1]])
    gradient, y, cotangent = (host(x) for x in (call.log_prob_vjp(), y, cotangent))
    for b, (theta, arguments) in enumerate(rows_of(problem, regularizer)):

        def total(theta: np.ndarray) -> float:
            return sum(cotangent[s, b] * reference.log_prob(theta, y[s, b], *arguments) for s in range(len(y)))

        shifts = 1e-6 * np.eye(len(theta))
        slopes = [(total(theta + shift) - total(theta - shift)) / 2e-6 for shift in shifts]
        assert_within(gradient[b], slopes, 1e-4 if dtype == "float32" else 1e-7, 1.0)


def check_frontier(problem: Problem, regularizer: str, dtype: str = "float64", reach: int | None = None) -> None:
    """And its gradient; in a table that may be wider than it needs to be."""
    problem, tolerance = problem.rounded(dtype), TOLERANCES[dtype]
    call = Call(problem, regularizer, dtype)
    reach = call.lattice.reach if reach is None else reach
    call.lattice = call.lattice.replace(reach=reach)
    rows = call.frontier()
    assert rows.shape == (*problem.batch, reach + 1) and rows.dtype == torch.float64
    cotangent = np.random.default_rng(0).standard_normal(rows.shape)
    gradient = from_torch.frontier_vjp(call.theta, tensor(cotangent, dtype), *call.constants)
    assert gradient.shape == call.theta.shape and gradient.dtype == call.theta.dtype
    for b, (theta, (lattice, smoothing)) in enumerate(rows_of(problem, regularizer)):
        one = lattice.replace(capacity=reach, slack=None if lattice.slack is None else 0, reach=reach)
        expected = reference.frontier(theta, one, smoothing)
        feasible = expected > FEASIBLE
        np.testing.assert_array_equal(np.isneginf(host(rows)[b]), ~feasible)
        assert_within(host(rows)[b][feasible], expected[feasible], tolerance.value, 1.0)
        slopes = reference.frontier_vjp(theta, np.where(feasible, cotangent[b], 0.0), one, smoothing)
        assert_within(host(gradient)[b], slopes, 10 * tolerance.relax, 1.0)


@pytest.mark.thinned(5)
def test_sweeps_against_the_reference(dtype, path, regularizer, constraint):
    check_sweeps(problem_of(constraint), regularizer, dtype)


@pytest.mark.thinned(5)
def test_paths_against_the_reference(dtype, path, regularizer, constraint):
    check_paths(problem_of(constraint, seed=1), regularizer, dtype)


def test_what_comes_with_a_table_is_the_same(path, constraint):
    regularizer = any_regularizer(path, constraint)
    call = Call(problem_of(constraint, n=4), regularizer, "float32" if constraint == "top-k" else "float64")
    (value, y), (again, mean, _) = call.operator(), call.tabulate()
    torch.testing.assert_close(again, value, rtol=0, atol=0)
    torch.testing.assert_close(mean, y, rtol=0, atol=8 * torch.finfo(y.dtype).eps)  # sums in another order


@pytest.mark.thinned(5)
def test_log_prob_gradient_against_differences(dtype, path, regularizer, constraint):
    check_log_prob_gradient(problem_of(constraint, n=4, seed=2), regularizer, dtype)


def check_log_probs_of_all_selections(problem: Problem, regularizer: str) -> None:
    """-inf for what is infeasible; and the mode is the most probable of them."""
    call = Call(problem, regularizer, "float64")
    every = np.array(subsets(call.theta.shape[-1]), dtype=float)
    call.y = tensor(np.repeat(every[:, None], problem.size, 1))
    log_prob, mode = host(call.log_prob()), host(call.mode())
    for b, (theta, arguments) in enumerate(rows_of(problem, regularizer)):
        expected = np.array([reference.log_prob(theta, y, *arguments) for y in every])
        np.testing.assert_allclose(np.exp(log_prob[:, b]), np.exp(expected), rtol=1e-9, atol=1e-13)
        assert np.isneginf(log_prob[np.isneginf(expected), b]).all() or regularizer != "shannon"
        best = reference.log_prob(theta, mode[b], *arguments)
        assert best == pytest.approx(expected.max(), rel=1e-9, abs=1e-12)


@pytest.mark.thinned(5)
def test_log_probs_of_all_selections(path, regularizer, constraint):
    check_log_probs_of_all_selections(problem_of(constraint, n=4, seed=3), regularizer)


@pytest.mark.parametrize("regularizer", [*CLASSES, "hard"])
@pytest.mark.parametrize("exactly", [False, True], ids=["at most", "exactly"])
def test_frontiers(regularizer, exactly, limits):
    theta, least = np.random.default_rng(0).standard_normal((2, 4)), 8 if exactly else 0
    check_frontier(Problem(theta, [2, 4, 3, 40], 8, 0.5, at_least=least), regularizer, "float32")


ODD = (
    "no items",
    "no items, top 0",
    "one item",
    "one item too heavy",
    "top 0",
    "top n",
    "capacity 0, some weigh nothing",
    "weight 0 last",
    "weights far above the capacity",
    "capacity far above the total weight",
    "capacity for each instance",
    "masked",
    "masked to exactly k",
    "all masked",
    "on the thresholds",
    "empty batch",
    "empty batch, per-instance everything",
    "a least weight of every instance",
    "a least weight, capacity above the total",
    "a least weight, some weigh nothing",
    "a least weight, masked",
    "from and to of every instance",
)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("edge", ODD)
def test_the_edges(edge, path):
    regularizer = list(CLASSES)[ODD.index(edge) % 3]
    check_sweeps(EDGES[edge], regularizer, "float32")
    check_paths(EDGES[edge], regularizer, "float32")


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "edge, rows",
    [("everything for each instance", "wide"), ("batch of rank 3", "shared"), ("batch of rank 2", "narrow")],
)
def test_batches_of_more_dimensions(edge, rows, limits):
    """They are flat before it is decided where rows live."""
    limits(**PATHS[rows])
    check_sweeps(EDGES[edge], "gini", "float32")
    check_paths(EDGES[edge], "gini", "float32")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("later", [False, True], ids=["sums at once", "sums at the end"])
@pytest.mark.parametrize("constraint, rows", [("top-k", "narrow"), ("knapsack", "wide"), ("at least", "wide")])
def test_sums_of_marginals_at_once_and_at_the_end(later, constraint, rows, limits):
    """With more items than are added up at a time. Rows in registers are summed whole, whatever the constraint."""
    limits(**PATHS[rows])
    limits.plan(later=later, **({"block": 32, "width": 64} if rows == "wide" else {}))
    for n, regularizer in ((1, "gini"), (3, "shannon"), (18, "tsallis")):
        check_sweeps(problem_of(constraint, batch=1, n=n, seed=4), regularizer, "float64")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("at_least", [None, 3], ids=["knapsack", "at least"])
@pytest.mark.parametrize("rows", ["wide", "shared"])
def test_many_tiles(rows, at_least, limits):
    """Weights 450 times as large decide alike, over rows of thousands of cells. With a least weight, there are tiles
    below the knee and above the slack, and some between that nobody visits."""
    limits(**PATHS[rows])
    scores, capacity = np.array([[0.3, -0.4, 0.9, 0.2], [0.1, 0.7, -0.2, 0.4]]), np.array([8, 7])
    weights, rest = np.array([1, 2, 4, 3]), np.array([0, 449])
    small = Problem(scores, weights, capacity, at_least=at_least)
    large = Problem(scores, 450 * weights, 450 * capacity + rest, at_least=at_least and 450 * at_least - 200)
    assert large.constraint.lattice(4).reach > 2048
    few, many = Call(small, "tsallis", "float64"), Call(large, "tsallis", "float64")
    few.y = many.y = few.sample()
    for name, result in RESULTS.items():
        if name != "mode":  # of ties
            torch.testing.assert_close(result(many), result(few), rtol=1e-12, atol=1e-13)
    few.y = many.y = tensor(small.selections())  # infeasible ones among them
    torch.testing.assert_close(many.log_prob(), few.log_prob(), rtol=1e-12, atol=1e-13)


def test_the_last_cell_of_a_row(path):
    """A capacity for which rows are full to the end."""
    problem = Problem(np.array([[0.3, -0.4, 0.9, 0.2, 0.5]]), [12, 9, 3, 11, 7], 31)
    check_sweeps(problem, "shannon", "float64")
    check_paths(problem, "shannon", "float64")


def test_a_capacity_above_the_total_weight(path):
    """It is cut, and the slack with it, in arrays that are known and in those that are on a device."""
    problem = Problem(EDGES["a least weight"].theta[:2], [2, 1, 3, 1], 20, at_least=np.array([5, 7]))
    call = Call(problem, "tsallis", "float64")
    assert call.lattice.capacity.max() == call.lattice.reach == 7
    call.y = call.sample()
    expected = {name: RESULTS[name](call) for name in ("value", "relax", "entropy_grad", "sample", "log_prob")}
    given = tensor([2, 1, 3, 1], "int64"), tensor([20], "int64"), tensor([15, 13], "int64")
    for bound in (20, 7):
        call.lattice = lattice_of(*given, bound)
        assert host(call.lattice.capacity).tolist() == [7, 7] and host(call.lattice.slack).tolist() == [2, 0]
        for name, result in expected.items():
            torch.testing.assert_close(RESULTS[name](call), result, rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("constraint, rows", [("knapsack", "narrow"), ("knapsack", "wide"), ("at least", "wide")])
@pytest.mark.parametrize("operation", RESULTS)
def test_one_program_for_all_instances(operation, constraint, rows, limits):
    limits(**PATHS[rows])
    call = Call(problem_of(constraint, batch=3, n=3), "tsallis", "float64")
    call.y = call.sample()
    apart = RESULTS[operation](call)
    limits(SCRATCH=(1, 1))
    assert plan.plan(3, 3, 9, 1, 8, 2).programs == 1
    assert torch.equal(RESULTS[operation](call), apart)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("constraint, items", [("at least", 0), ("knapsack", 2)])
@pytest.mark.parametrize("operation", ["relax", "vjp", "entropy_grad", "sample", "log_prob_vjp"])
def test_tables_filled_again_are_tables_kept_whole(operation, constraint, items, limits):
    """Rows set aside after every item, or every second one; and a batch in parts."""
    limits(**PATHS["shared"])
    call = Call(problem_of(constraint, batch=2, n=5), "gini", "float64")
    call.y = call.sample()
    whole = RESULTS[operation](call)
    row = 32 * 8 * (2 if operation in ("vjp", "entropy_grad") else 1)
    limits(ITEM_SCRATCH=max(items * row, 1))
    assert torch.equal(RESULTS[operation](call), whole)


def test_short_rows_of_so_many_items_that_they_are_shared(limits):
    """Rows that would fit into registers, in a table too large for one program."""
    limits(LARGEST_ROW=1)
    check_paths(Problem(np.array([[0.3, 0.5, 0.1, 0.9]]), [20, 30, 25, 40], 70), "gini", "float64")


@pytest.mark.parametrize("at_least", [None, 3, np.array([3, 0])], ids=["no", "one", "two"])
def test_parts_of_a_batch_that_shares_its_constants(at_least, limits):
    """All of them, or all but least weights."""
    limits(**PATHS["shared"], ITEM_SCRATCH=1)
    problem = Problem(EDGES["no batch"].theta + np.array([[0.0], [0.3]]), [2, 1, 3, 1], 4, 0.7, at_least)
    check_sweeps(problem, "tsallis", "float64")
    check_paths(problem, "tsallis", "float64")


@pytest.mark.thinned(5)
def test_a_broken_instance_is_nan_alone(path):
    """NaN, plus infinity, and no feasible selection: a least weight that no items have, one above the total weight, and
    masks on the items that it takes; with clean instances between."""
    scores, weights = np.array([[0.5, -0.2, 0.1], [0.3, 0.4, -0.5], [0.0, 1.0, 0.2]])[[0, 1, 2, 0, 1, 2, 0]], [2, 4, 6]
    capacity, least = np.array([9, 7, 9, 20, 7, 6, 12]), np.array([3, 6, 0, 12, 5, 6, 0])
    call = Call(Problem(scores, weights, capacity, at_least=least), "gini", "float32", samples=2)
    call.y = call.solve().expand(2, 7, 3).contiguous()
    clean = {name: result(call) for name, result in RESULTS.items()}
    assert not any(result.isnan().any() for result in clean.values())
    least[1], least[3] = 7, 13
    call.lattice = on_device(kg.Knapsack(weights, capacity, at_least=least).lattice(3))
    call.theta[4, 1:], call.theta[5, 0], call.theta[6, 2] = -torch.inf, torch.nan, torch.inf
    for name, result in RESULTS.items():
        dirty = result(call)
        assert dirty[[1, 3, 4, 5, 6]].isnan().all(), name
        assert torch.equal(dirty[[0, 2]], clean[name][[0, 2]]), name


@pytest.mark.thinned(5)
@pytest.mark.parametrize("capacity, least", [(5, 0), (0, 0), (5, 5)])
def test_a_nan_that_no_selection_has_is_its_instance(capacity, least, path):
    """Of an item that is too heavy, of which nothing is left in a table."""
    scores = np.array([[0.5, 1.0, -0.2], [0.3, 0.4, -0.5], [0.1, 0.2, 0.3], [0.3, 0.4, -0.5]])
    call = Call(Problem(scores, [2, 9, 3], capacity, at_least=least or None), "tsallis", "float64", samples=2)
    call.y = call.solve().expand(2, 4, 3).contiguous()
    clean = {name: result(call) for name, result in RESULTS.items()}
    frontier = from_torch.frontier(call.theta, *call.constants)
    call.theta[0, 1], call.theta[1, 1], call.theta[2, 1] = torch.nan, torch.inf, 1e300
    for name, result in RESULTS.items():
        dirty = result(call)
        assert dirty[:3].isnan().all() or name == "solve", name
        assert torch.equal(dirty[3], clean[name][3]), name
    assert call.solve()[:2].isnan().all() and torch.equal(call.solve()[2], clean["solve"][2])  # which has no gamma
    dirty = from_torch.frontier(call.theta, *call.constants)
    assert dirty[:3].isnan().all() and torch.equal(dirty[3], frontier[3])
    gradient = from_torch.frontier_vjp(call.theta, torch.ones_like(dirty), *call.constants)
    assert gradient[:3].isnan().all() and gradient[3].isfinite().all()


def test_no_items_do_not_have_a_least_weight(limits):
    call = Call(Problem(np.zeros((2, 0)), [], 3, at_least=np.array([0, 1])), "gini", "float64")
    for result in (call.operator()[0], call.entropy(), call.tabulate()[0]):
        np.testing.assert_array_equal(host(result), [0.0, np.nan])
    assert call.vjp().shape == call.solve().shape == (2, 0)


def test_an_unknown_name_is_an_error(limits):
    call = Call(problem_of("knapsack"), "softmax", "float64")
    for name, result in RESULTS.items():
        if name != "solve":
            with pytest.raises(KeyError, match="softmax"):
                result(call)
    with pytest.raises(KeyError, match="sideways"):
        variants.source("sideways")


def test_memory_layout_does_not_matter(path):
    call = Call(problem_of("at least", batch=2, n=3), "gini", "float64")
    call.y = call.sample()
    plain = [RESULTS[name](call) for name in ("relax", "vjp", "sample", "log_prob_vjp")]

    def apart(x: Tensor) -> Tensor:
        """The same numbers with others between them."""
        return torch.stack([x, torch.full_like(x, torch.nan if x.is_floating_point() else -1)], -1)[..., 0]

    for name in ("theta", "z", "uniforms", "y", "cotangent", "gamma"):
        setattr(call, name, apart(getattr(call, name)))
        assert not getattr(call, name).is_contiguous()
    changes = {name: apart(getattr(call.lattice, name)) for name in ("weights", "capacity", "slack")}
    call.lattice = call.lattice.replace(**changes)
    for name, expected in zip(("relax", "vjp", "sample", "log_prob_vjp"), plain):
        assert torch.equal(RESULTS[name](call), expected)


def test_gamma_of_every_kind(path):
    call = Call(problem_of("top-k", batch=2, n=3), "tsallis", "float64")

    def value(gamma: Any) -> list[float]:
        call.gamma = gamma
        return call.operator(relaxed=False)[0].tolist()

    plain = value(torch.tensor(0.5, dtype=torch.float64))
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        for gamma in (torch.tensor(0.5), torch.tensor(0.5, device=DEVICE), tensor([0.5]), tensor([0.5, 0.5])):
            assert value(gamma.to(kind)) == plain
    assert value(tensor([0.5, 2.0]))[0] == plain[0] != value(tensor([0.25, 0.5]))[0]
    for bad in (0.0, -1.0, float("nan")):
        assert np.isnan(value(torch.tensor(bad))).all()
        first, second = value(tensor([bad, 0.5]))
        assert np.isnan(first) and second == plain[1]


@pytest.mark.parametrize("gamma", [0.7, np.array([0.7, 1.9])], ids=["a number", "of each instance"])
def test_what_is_kept_with_a_lattice_knows_neither_theta_nor_gamma(gamma, path):
    plain = problem_of("knapsack", batch=2, n=3)
    problems = [
        Problem(x, plain.weights, plain.capacity, y) for x, y in ((plain.theta, gamma), (-plain.theta, 2 * gamma))
    ]
    call, other = (Call(problem, "gini", "float64") for problem in problems)
    names = "relax", "vjp", "sample", "log_prob_vjp"
    expected = [RESULTS[name](other) for name in names]
    for name in names:
        RESULTS[name](call)
    other.lattice = call.lattice
    assert call.lattice.memo and all(torch.equal(RESULTS[name](other), x) for name, x in zip(names, expected))


@pytest.mark.skipif(not LONG_IS_LONGER, reason="long double is double here: no truth to compare with")
def test_near_ties(path, constraint):
    """Scores of 1e4 gamma in float32, where every exchange of items is worth about one gamma."""
    regularizer = any_regularizer(path, constraint)
    rng = np.random.default_rng(6)
    n, gamma = 30, 0.3
    weights = np.ones(n, dtype=int) if constraint == "top-k" else rng.integers(1, 5, n)
    capacity = 9 if constraint == "top-k" else 30
    scores = gamma * (1e4 * weights / weights.max() + rng.standard_normal((1, n)))
    least = None
    if constraint == "at least":  # which alone keeps selections of negative scores from being empty
        scores, least = -scores, 22
    problem = Problem(scores, None if constraint == "top-k" else weights, capacity, gamma, least).rounded("float32")
    value, y = Call(problem, regularizer, "float32").operator()
    ((theta, _, limits, _),) = problem.rows()
    best, relaxed = long_table(theta, weights, limits, regularizer, gamma)
    assert np.abs(host(y)[0] - relaxed).max() <= TOLERANCES["float32"].relax
    assert abs(host(value)[0] * gamma - best) <= TOLERANCES["float32"].value * abs(best)


def test_sample_frequencies(limits, regularizer):
    problem = Problem(np.array([[0.5, -0.25, 0.3]]), [2, 1, 2], 3, 1.2)
    call = Call(problem, regularizer, "float32", samples=2500)
    found, counts = np.unique(host(call.sample())[:, 0], axis=0, return_counts=True)
    seen = {tuple(int(x) for x in row): int(count) for row, count in zip(found, counts)}
    assert chi_square_p_value(seen, problem.truths(regularizer)[0].probabilities) > 1e-4


def test_more_samples_than_lanes(path):
    """130 samples are those of two smaller calls, and the gradient is the sum of theirs."""
    problem = problem_of("knapsack", batch=2, n=3)
    call = Call(problem, "gini", "float64", samples=130)
    whole_uniforms, whole_cotangent = call.uniforms, call.cotangent
    call.y = drawn = call.sample()
    log_prob, gradient = call.log_prob(), call.log_prob_vjp()
    total = torch.zeros_like(gradient)
    for part in (slice(0, 60), slice(60, 130)):
        call.uniforms, call.y, call.cotangent = whole_uniforms[part], drawn[part], whole_cotangent[part]
        assert torch.equal(call.sample(), drawn[part])
        assert torch.equal(call.log_prob(), log_prob[part])
        total += call.log_prob_vjp()
    torch.testing.assert_close(gradient, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at_least, never", [(0, [0.0, 1, 1, 1]), (2, [0.0, 0, 0, 1])], ids=["too heavy", "too light"])
def test_a_selection_of_no_weight_in_the_gradient_counts_nothing(at_least, never, path):
    """Of probability 0, with the cotangent 0 that autograd gives it."""
    problem = Problem(np.array([[5.0, -5.0, 0.1, 0.2]]), [1, 1, 2, 1], 3, at_least=at_least)
    call = Call(problem, "gini", "float64", samples=2)
    call.y = tensor([[[1.0, 0, 1, 0]], [never]])
    call.cotangent[1] = 0.0
    both = call.log_prob_vjp()
    call.y, call.cotangent = call.y[:1], call.cotangent[:1]
    assert both.any()
    torch.testing.assert_close(both, call.log_prob_vjp(), rtol=0, atol=0)


# With a real device, by the public functions.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

Layout = tuple[tuple[int, ...], Callable[[], Any]]


def knapsack(n: int, capacity: int, at_least: int = 0) -> Callable[[], Any]:
    """About half of the total weight."""
    weights = np.random.default_rng(n).integers(1, max(4 * capacity // n, 2), n)
    return lambda: kg.Knapsack(weights, capacity, at_least=at_least)


def choices_of(groups: int, options: int, capacity: int, **limit: Any) -> Callable[[], Any]:
    weights = np.random.default_rng(groups).integers(0, 2 * capacity // groups, (groups, options))
    return lambda: kg.MultipleChoice(weights, capacity, **limit)


#: what is special -> the shape of theta, and the constraint
SIZES: dict[str, Layout] = {
    "a hundred items": ((33, 100), knapsack(100, 275)),
    "a third of the items": ((7, 300), lambda: kg.TopK(100)),
    "wide rows": ((5, 60), knapsack(60, 5000)),
    "rows shared by programs": ((2, 20), knapsack(20, 40_000)),
    "top 5 of 20000": ((3, 20_000), lambda: kg.TopK(5)),
    "a hundred items, a least weight": ((33, 100), knapsack(100, 275, at_least=270)),
    "wide rows, a least weight": ((5, 60), knapsack(60, 5000, at_least=4600)),
    "rows shared by programs, a least weight": ((2, 20), knapsack(20, 40_000, at_least=30_000)),
    "a hundred groups": ((33, 100, 4), choices_of(100, 4, 700)),
    "many options": ((5, 20, 40), choices_of(20, 40, 500)),
    "wide rows of options": ((2, 12, 3), choices_of(12, 3, 50_000)),
    "options, a least weight": ((9, 40, 5), choices_of(40, 5, 600, at_least=590)),
    "optional": ((9, 40, 8), choices_of(40, 8, 600, optional=True)),
    "two budgets": ((9, 40), lambda: kg.MultiKnapsack([np.ones(40, int), np.arange(40) % 9], [10, 60])),
}


def scores(shape: tuple[int, ...], dtype: Any = torch.float64, scale: float = 1.0, seed: int = 0) -> Tensor:
    """On the host."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def gradient(call: Callable[[Tensor], Tensor], theta: Tensor, z: Tensor | None = None) -> Tensor:
    leaf = theta.detach().clone().requires_grad_()
    result = call(leaf)
    return torch.autograd.grad(result, leaf, torch.ones_like(result) if z is None else z)[0]


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_what_the_cpu_gives(size, dtype, regularizer):
    shape, limit_of = SIZES[size]
    limit, smoothing, tolerance = limit_of(), SMOOTHINGS[regularizer](0.8), TOLERANCES[dtype]
    theta, z = (scores(shape, getattr(torch, dtype), seed=seed) for seed in (0, 1))
    y = kg.solve(theta, limit)
    torch.testing.assert_close(kg.solve(theta.cuda(), limit).cpu(), y, rtol=0, atol=0)

    def both(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[np.ndarray, np.ndarray]:
        return host(call(theta.cuda(), y.cuda(), z.cuda())), host(call(theta, y, z))

    def relax(theta: Tensor) -> Tensor:
        return kg.relax(theta, limit, smoothing)

    assert_within(*both(lambda theta, y, z: kg.value(theta, limit, smoothing)), 2 * tolerance.value, 1.0, "value")
    actual, expected = both(lambda theta, y, z: relax(theta))
    assert np.abs(actual - expected).max() <= 2 * tolerance.relax
    assert_within(*both(lambda theta, y, z: gradient(relax, theta, z)), 2 * tolerance.vjp, 0.1, "vjp")
    assert_within(*both(lambda theta, y, z: kg.entropy(theta, limit, smoothing)), 2 * tolerance.value, 1.0, "entropy")
    log_prob = both(lambda theta, y, z: kg.log_prob(theta, y, limit, smoothing))
    likely = np.isfinite(log_prob[1]) & (log_prob[1] > -600)
    assert_within(log_prob[0][likely], log_prob[1][likely], 2 * tolerance.log_prob, 1.0, "log_prob")
    if dtype == "float64":
        slopes = both(lambda theta, y, z: gradient(lambda x: kg.entropy(x, limit, smoothing), theta))
        assert_within(*slopes, 2 * tolerance.vjp, 1.0, "gradient of entropy")
        slopes = both(lambda theta, y, z: gradient(lambda x: kg.log_prob(x, y, limit, smoothing), theta))
        assert_within(slopes[0][likely], slopes[1][likely], 2 * tolerance.vjp, 1.0, "gradient of log_prob")
    loss = both(lambda theta, y, z: gradient(lambda x: kg.fenchel_young_loss(x, y, limit, smoothing), theta))
    assert_within(*loss, 2 * tolerance.relax, 1.0, "gradient of fenchel_young_loss")
    if len(shape) == 3 and "least" not in size:
        rows = both(lambda theta, y, z: kg.frontier(theta, limit, smoothing).clamp(min=-1e3))
        assert_within(*rows, 2 * tolerance.value, 1.0, "frontier")


@needs_gpu
@pytest.mark.parametrize("size", [size for size in SIZES if size != "top 5 of 20000"])
def test_the_mean_of_many_samples_is_relax(size, regularizer):
    shape, limit_of = SIZES[size]
    limit, smoothing, draws = limit_of(), SMOOTHINGS[regularizer](0.8), 4000
    theta = scores(shape, torch.float32)
    rng = torch.Generator("cuda").manual_seed(0)
    y = kg.sample(theta.cuda(), limit, smoothing, num_samples=draws, rng=rng)
    assert limit.contains(y).all()
    mean = host(kg.relax(theta, limit, smoothing))
    spread = np.sqrt(mean * (1 - mean) / draws)
    assert (np.abs(host(y).mean(axis=0) - mean) <= 6 * spread + 10 / draws).all()


@needs_gpu
def test_a_capacity_of_a_million(regularizer):
    """2000 times the weights of a small instance."""
    weights, smoothing = np.random.default_rng(0).integers(10, 90, 20), SMOOTHINGS[regularizer]()
    small, large = kg.Knapsack(weights, 500), kg.Knapsack(2000 * weights, 1_000_000)
    for dtype, exact in ((torch.float32, TOLERANCES["float32"]), (torch.float64, TOLERANCES["float64"])):
        theta, z = scores((2, 20), dtype), scores((2, 20), dtype, seed=1)
        expected = kg.relax(theta, small, smoothing)
        assert np.abs(host(kg.relax(theta.cuda(), large, smoothing)) - host(expected)).max() <= 2 * exact.relax
        expected = gradient(lambda x: kg.relax(x, small, smoothing), theta, z)
        actual = gradient(lambda x: kg.relax(x, large, smoothing), theta.cuda(), z.cuda())
        assert_within(host(actual), host(expected), 2 * exact.vjp, 0.1)
        assert torch.equal(kg.solve(theta.cuda(), large).cpu(), kg.solve(theta, small))


SMALL: dict[str, Callable[[], Any]] = {
    "top-k": lambda: kg.TopK(2),
    "knapsack": lambda: kg.Knapsack([2, 1, 0, 2], 4),
    "at least": lambda: kg.Knapsack([2, 1, 0, 2], 4, at_least=2),
    "choices": lambda: kg.MultipleChoice([[2, 1], [0, 2]], 3),
    "budgets": lambda: kg.MultiKnapsack([[1, 1, 1, 1], [2, 1, 0, 2]], [2, 4]),
}
FREE = {"at least": kg.Knapsack([2, 1, 0, 2], 4)}  # a frontier needs no least weight


def close_scores(*shape: int, seed: int = 0) -> Tensor:
    """So close that the sparse regularizers leave no selection out; on the device."""
    return scores(shape, scale=0.1, seed=seed).cuda()


@needs_gpu
def test_gradcheck(regularizer, constraint):
    limit, theta = SMALL[constraint](), close_scores(2, 4).requires_grad_()
    gamma = torch.tensor(0.9, dtype=torch.float64, device="cuda", requires_grad=True)
    y = kg.solve(theta, limit)
    calls: list[Callable[[Any, Any], Tensor]] = [
        lambda theta, smoothing: kg.value(theta, limit, smoothing),
        lambda theta, smoothing: kg.relax(theta, limit, smoothing),
        lambda theta, smoothing: kg.entropy(theta, limit, smoothing),
        lambda theta, smoothing: kg.log_prob(theta, y, limit, smoothing),
        lambda theta, smoothing: kg.fenchel_young_loss(theta, y, limit, smoothing),
    ]
    for call in calls:  # the gradient of log_prob is added up atomically, in any order
        of_gamma = lambda theta, gamma, call=call: call(theta, SMOOTHINGS[regularizer](gamma))  # noqa: E731
        assert gradcheck(of_gamma, (theta, gamma), nondet_tol=1e-10)
    assert gradgradcheck(lambda theta: kg.value(theta, limit, SMOOTHINGS[regularizer]()), (theta,))


@needs_gpu
def test_torch_func(regularizer, constraint):
    limit, smoothing = SMALL[constraint](), SMOOTHINGS[regularizer]()
    theta = close_scores(5, 3, 4)
    mapped = vmap(lambda theta: kg.relax(theta, limit, smoothing))(theta)
    torch.testing.assert_close(mapped, kg.relax(theta, limit, smoothing), rtol=1e-12, atol=1e-13)
    y = kg.solve(theta, limit)
    mapped = vmap(lambda theta, y: kg.log_prob(theta, y, limit, smoothing))(theta, y)
    torch.testing.assert_close(mapped, kg.log_prob(theta, y, limit, smoothing), rtol=1e-12, atol=1e-12)
    gammas = torch.tensor([0.6, 1.0, 3.0], dtype=torch.float64, device="cuda")
    mapped = vmap(lambda gamma: kg.value(theta, limit, SMOOTHINGS[regularizer](gamma)))(gammas)
    looped = torch.stack([kg.value(theta, limit, SMOOTHINGS[regularizer](float(gamma))) for gamma in gammas])
    torch.testing.assert_close(mapped, looped, rtol=1e-12, atol=1e-13)
    jacobian = jacrev(lambda theta: kg.relax(theta, limit, smoothing))(theta[0, 0])
    torch.testing.assert_close(jacobian, jacobian.T, rtol=0, atol=1e-13)
    rows = [gradient(lambda x: kg.relax(x, limit, smoothing), theta[0, 0], z) for z in torch.eye(4).double().cuda()]
    torch.testing.assert_close(jacobian, torch.stack(rows), rtol=1e-12, atol=1e-13)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_gpu
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile(compiler, fresh_compiler, regularizer, constraint):
    smoothing, theta, z = SMOOTHINGS[regularizer](0.7), close_scores(3, 4), close_scores(3, 4, seed=1)
    limit = SMALL[constraint]()
    layer, loss = kgt.Relax(limit, smoothing).to("cuda"), kgt.FenchelYoungLoss(limit, smoothing).to("cuda")
    target = kg.solve(theta, SMALL[constraint]())
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda theta: (kg.relax(theta, limit, smoothing) * z).sum(),
        lambda theta: (layer(theta) * z).sum(),
        lambda theta: loss(theta, target),
    ]
    for call in calls:  # before and after the constants have come to the device
        compiled = torch.compile(call, fullgraph=True, backend=compiler)
        first = gradient(compiled, theta)
        torch.testing.assert_close(first, gradient(call, theta), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient(compiled, theta + 0.1 * z), gradient(call, theta + 0.1 * z))
    sampler = kgt.Sample(limit, smoothing).to("cuda")
    drawn = torch.compile(sampler, fullgraph=True, backend=compiler)(theta)
    assert limit.contains(drawn).all()


@needs_gpu
def test_modules_follow_to(regularizer, constraint):
    limit, theta = SMALL[constraint](), scores((3, 4), torch.float32)
    gamma = torch.nn.Parameter(torch.tensor(0.8))
    layer = kgt.Relax(limit, SMOOTHINGS[regularizer](gamma))
    expected = layer(theta)
    (slope,) = torch.autograd.grad(expected.square().sum(), gamma)
    layer = layer.to("cuda")
    assert all(x.is_cuda for x in [*layer.buffers(), *layer.parameters()])
    actual = layer(theta.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-5)
    (on_device,) = torch.autograd.grad(actual.square().sum(), list(layer.parameters()))
    torch.testing.assert_close(on_device.cpu(), slope, rtol=1e-4, atol=1e-4)
    sampler = kgt.Sample(limit, SMOOTHINGS[regularizer]()).to("cuda")
    z = close_scores(3, 4).float()
    leaf = theta.cuda().requires_grad_()
    (surrogate,) = torch.autograd.grad((sampler(leaf) * z).sum(), leaf)
    exact = gradient(lambda x: kg.relax(x, limit, SMOOTHINGS[regularizer]()), theta.cuda(), z)
    torch.testing.assert_close(surrogate, exact)


@needs_gpu
def test_the_distribution(regularizer, constraint):
    limit = SMALL[constraint]()
    theta, other = close_scores(3, 4), close_scores(3, 4, seed=1)
    on_device = kgt.SubsetDistribution(theta, limit, SMOOTHINGS[regularizer](0.7))
    on_host = kgt.SubsetDistribution(theta.cpu(), limit, SMOOTHINGS[regularizer](0.7))
    y = on_device.sample((50,), generator=torch.Generator("cuda").manual_seed(0))
    assert y.is_cuda and y.shape == (50, 3, 4)
    for device, cpu in (
        (on_device.mean, on_host.mean),
        (on_device.entropy(), on_host.entropy()),
        (on_device.log_prob(y), on_host.log_prob(y.cpu())),
        (on_device.log_prob(on_device.mode), on_host.log_prob(on_host.mode)),
    ):
        torch.testing.assert_close(device.cpu(), cpu, rtol=1e-9, atol=1e-10)
    for prior in SMOOTHINGS.values():
        divergences = [
            torch.distributions.kl_divergence(p, kgt.SubsetDistribution(other.to(p.theta.device), limit, prior(0.9)))
            for p in (on_device, on_host)
        ]
        torch.testing.assert_close(divergences[0].cpu(), divergences[1], rtol=1e-9, atol=1e-10)
    z = close_scores(3, 4, seed=2)

    def drawn(theta: Tensor) -> Tensor:
        return kgt.SubsetDistribution(theta, limit, SMOOTHINGS[regularizer](0.7)).rsample()

    expected = gradient(lambda x: kg.relax(x, limit, SMOOTHINGS[regularizer](0.7)), theta, z)
    torch.testing.assert_close(gradient(drawn, theta, z), expected, rtol=1e-10, atol=1e-12)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype, regularizer):
    limit, smoothing = kg.TopK(2), SMOOTHINGS[regularizer](0.7)
    theta = close_scores(3, 4).to(dtype)
    assert torch.equal(kg.relax(theta, limit, smoothing), kg.relax(theta.float(), limit, smoothing).to(dtype))
    linear, x = torch.nn.Linear(5, 4).cuda(), torch.ones(3, 5, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        given = linear(x)
        y = kg.relax(given, limit, smoothing)
        y.float().square().sum().backward()
    assert given.dtype == y.dtype == dtype
    assert torch.equal(y, kg.relax(given.detach().float(), limit, smoothing).to(dtype))
    assert linear.weight.grad.isfinite().all()


@needs_gpu
def test_generators(regularizer):
    theta, arguments = close_scores(3, 4), (kg.TopK(2), SMOOTHINGS[regularizer]())

    def draw(rng: Any) -> Tensor:
        return kg.sample(theta, *arguments, num_samples=30, rng=rng)

    first = draw(torch.Generator("cuda").manual_seed(1))
    assert torch.equal(draw(torch.Generator("cuda").manual_seed(1)), first)
    assert not torch.equal(draw(torch.Generator("cuda").manual_seed(2)), first)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)generator|device"):
        draw(torch.Generator().manual_seed(1))


def everything(theta: Tensor, z: Tensor, y: Tensor, limit: Any, smoothing: Any) -> list[Tensor]:
    """Every operation, with its gradient where it has one."""
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: kg.value(x, limit, smoothing),
        lambda x: (kg.relax(x, limit, smoothing) * z).sum(-1),
        lambda x: kg.entropy(x, limit, smoothing),
        lambda x: kg.log_prob(x, y, limit, smoothing),
        lambda x: kg.fenchel_young_loss(x, y, limit, smoothing),
        lambda x: kg.divergence(x, limit, smoothing, prior=z),
    ]
    results = [gradient(call, theta) for call in calls]
    return [*results, kg.solve(theta, limit), kg.sample(theta, limit, smoothing, num_samples=3)]


@needs_gpu
@pytest.mark.parametrize(
    "size", ["a hundred items", "rows shared by programs", "rows shared by programs, a least weight", "optional"]
)
def test_nothing_waits_for_the_device(size, regularizer):
    shape, limit_of = SIZES[size]
    limit, theta, z = limit_of(), scores(shape).cuda(), scores(shape, seed=1).cuda()
    gammas = torch.linspace(0.5, 1.5, shape[0], device="cuda", dtype=torch.float64)
    smoothings = SMOOTHINGS[regularizer](0.8), SMOOTHINGS[regularizer](gammas)
    y = kg.solve(theta, limit)
    for smoothing in smoothings:
        everything(theta, z, y, limit, smoothing)  # compiles, and brings the constants to the device
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for smoothing in smoothings:
            everything(theta, z, y, limit, smoothing)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@needs_gpu
@pytest.mark.parametrize("kind", [*CONSTRAINTS, "choices", "budgets"])
def test_capture_in_a_cuda_graph(regularizer, kind):
    limit, smoothing, shape = SMALL[kind](), SMOOTHINGS[regularizer](0.7), (3, 2, 2) if kind == "choices" else (3, 4)
    theta, z = close_scores(*shape).requires_grad_(), close_scores(*shape, seed=1)

    def step() -> tuple[Tensor, ...]:
        y = kg.relax(theta, limit, smoothing)
        (slope,) = torch.autograd.grad(y, theta, z)
        return y.detach(), slope, kg.solve(theta, limit), kg.frontier(theta.detach(), FREE.get(kind, limit), smoothing)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3):
        with torch.no_grad():
            theta.copy_(close_scores(*shape, seed=seed))
            z.copy_(close_scores(*shape, seed=seed + 10))
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@needs_gpu
def test_another_stream(regularizer):
    limit, smoothing = kg.Knapsack([2, 1, 0, 2], 4), SMOOTHINGS[regularizer]()
    theta, z = close_scores(3, 4), close_scores(3, 4, seed=1)
    expected = gradient(lambda x: kg.relax(x, limit, smoothing), theta, z)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a kernel on the wrong stream would be early
        late = theta + 0.0
        actual = gradient(lambda x: kg.relax(x, limit, smoothing), late, z)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(actual, expected)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device(regularizer):
    limit, smoothing, theta = kg.Knapsack([2, 1, 0, 2], 4), SMOOTHINGS[regularizer](), close_scores(3, 4)
    z = close_scores(3, 4, seed=1)
    for call in (lambda x: kg.relax(x, limit, smoothing), lambda x: kg.value(x, limit, smoothing)[:, None] * z.to(x)):
        actual = gradient(call, theta.to("cuda:1"), z.to("cuda:1"))
        assert actual.device == torch.device("cuda:1")
        torch.testing.assert_close(actual.to("cuda:0"), gradient(call, theta, z), rtol=0, atol=0)


@needs_gpu
def test_memory_does_not_grow_with_the_batch(regularizer):
    shape, limit = (8192, 100), SIZES["a hundred items"][1]()
    theta = scores(shape, torch.float32).cuda().requires_grad_()
    z = torch.ones_like(theta)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(kg.relax(theta, limit, SMOOTHINGS[regularizer]()), theta, z)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 400e6


@needs_gpu
@pytest.mark.parametrize("limit", [kg.TopK(3), kg.Knapsack([2, 1, 0, 2], 5, at_least=4)], ids=["top-k", "at least"])
def test_an_infeasible_instance_is_nan_alone(limit, regularizer):
    smoothing, theta = SMOOTHINGS[regularizer](), close_scores(4, 4)
    z = close_scores(4, 4, seed=1)
    y = kg.solve(theta, limit)
    broken = theta.clone()
    broken[2, :2] = -torch.inf
    torch.manual_seed(0)
    clean = everything(theta, z, y, limit, smoothing)
    torch.manual_seed(0)
    for expected, actual in zip(clean, everything(broken, z, y, limit, smoothing)):
        bad, good = (actual[:, 2], actual[:, [0, 1, 3]]) if actual.dim() == 3 else (actual[2], actual[[0, 1, 3]])
        same = expected[:, [0, 1, 3]] if actual.dim() == 3 else expected[[0, 1, 3]]
        torch.testing.assert_close(good, same, rtol=1e-12, atol=1e-13)
        assert bad.isnan().any() or (bad == 0).all()
    assert kg.relax(broken, limit, smoothing)[2].isnan().all()
    assert kg.value(broken, limit, smoothing)[2].isnan()


NOT_VALID = {
    "knapsack": (kg.Knapsack([2, 1, 3, 1, 2], 6), 5),
    "a least weight": (kg.Knapsack([2, 1, 3, 1, 2], 6, at_least=4), 5),
    "top-k": (kg.TopK(3), 5),
    "options": (kg.MultipleChoice([[1, 2], [0, 3], [2, 2]], 6), 6),
    "two budgets": (kg.MultiKnapsack([[1, 1, 1, 1, 1], [2, 0, 1, 3, 9]], [2, 4]), 5),
    "three budgets": (kg.MultiKnapsack([[1, 0, 2, 1, 3], [2, 0, 1, 1, 1], [1, 1, 0, 2, 1]], [2, 1, 2]), 5),
}


def check_a_capacity_that_is_not_valid(name: str) -> None:
    """NaN, in that instance alone: where constraints are made of tensors in compiled code, nobody has looked at it."""
    constraint, n = NOT_VALID[name]
    lattice = on_device(constraint.lattice(n))
    goal = int(lattice.capacity)
    given = lattice.replace(capacity=tensor([goal, -1, goal], "int64")), np.array(0.5), "gini"
    theta, z = scores((3, n)).to(DEVICE), scores((3, n), seed=1).to(DEVICE)
    drawn = from_torch.sample(theta, scores((2, 3, n)).abs().to(DEVICE) % 1, *given)
    results = [*from_torch.operator(theta, *given), from_torch.vjp(theta, z, *given), drawn[0]]
    results += [from_torch.entropy(theta, *given), from_torch.solve(theta, given[0]), from_torch.mode(theta, *given)]
    results += [from_torch.log_prob(theta, drawn.nan_to_num(), *given)[0]]
    for result in results:
        assert host(result.isnan()).reshape(3, -1).all(1).tolist() == [False, True, False]
        assert not np.isnan(host(result)[[0, 2]]).any()
    nothing = {"knapsack": 0.0, "two budgets": 0.0, "a least weight": np.nan}  # if there are no items
    if name in nothing:
        slack = None if lattice.slack is None else lattice.slack - goal  # a capacity is cut to the total, and so is it
        empty = given[0].replace(weights=lattice.weights[:0], capacity=tensor([0, -1, 0], "int64"), slack=slack)
        value = from_torch.operator(theta[:, :0], empty, *given[1:])[0]
        np.testing.assert_array_equal(host(value), [nothing[name], np.nan, nothing[name]])


@pytest.mark.parametrize("name", NOT_VALID)
def test_a_capacity_that_is_not_valid_is_nan_alone(name, path):
    check_a_capacity_that_is_not_valid(name)
