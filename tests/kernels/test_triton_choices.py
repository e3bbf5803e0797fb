"""The GPU kernels for choices among options, and frontiers, against the reference: on a GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import assert_within, host, needs_gpu, on_device, tensor

import knapgrad as kg
from backends import TOLERANCES
from knapgrad import reference
from knapgrad.lattice import FEASIBLE, Lattice
from knapgrad.regularizers import REGULARIZERS as CLASSES
from knapgrad.regularizers import Hard

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from knapgrad.kernels.triton import from_torch, plan  # noqa: E402

pytestmark = test_triton.pytestmark
limits = test_triton.limits

OPTIONS = (1, 2, 3, 5, 8)
KINDS = ("at most", "at least", "optional")


@dataclass(frozen=True)
class Groups:
    """A batch of scores (batch, groups, options), and its constraint."""

    theta: np.ndarray
    constraint: Any
    gamma: Any = 1.0

    @property
    def flat(self) -> np.ndarray:
        theta = self.theta
        if self.constraint.optional:
            theta = np.concatenate([np.zeros_like(theta[..., :1]), theta], -1)
        return theta.reshape(len(theta), theta.shape[1] * theta.shape[2])

    @property
    def lattice(self) -> Lattice:
        return self.constraint.lattice(self.flat.shape[1])

    def rows(self) -> Iterator[tuple[np.ndarray, Lattice]]:
        """theta / gamma and the lattice of each instance."""
        lattice, theta = self.lattice, self.flat
        size = len(theta)
        gammas = np.broadcast_to(self.gamma, size)
        weights, capacity = np.broadcast_to(lattice.weights, theta.shape), np.broadcast_to(lattice.capacity, size)
        slack = None if lattice.slack is None else np.broadcast_to(lattice.slack, size)
        for b in range(size):
            own = {
                "weights": weights[b],
                "capacity": int(capacity[b]),
                "slack": None if slack is None else int(slack[b]),
            }
            yield theta[b] / gammas[b], lattice.replace(**own)


def groups_of(kind: str, options: int, groups: int = 3, batch: int = 2, factor: int = 1, seed: int = 0) -> Groups:
    """Weights, capacity and gamma for each instance; options that are not there, or never fit, among them."""
    rng = np.random.default_rng([seed, options, groups, len(kind)])
    theta = rng.standard_normal((batch, groups, options))
    weights = rng.integers(0, 6, theta.shape)
    lightest, heaviest = weights.min(-1).sum(-1), weights.max(-1).sum(-1)
    capacity = lightest + ((heaviest - lightest) * rng.uniform(0.4, 0.8, batch)).astype(int)
    if options > 2:
        theta[0, 0, np.argsort(weights[0, 0])[1]] = -np.inf
        weights[-1, -1, weights[-1, -1].argmax()] = 90
    least: Any = 0
    if kind == "at least":
        possible = [[sum(picks) for picks in product(*rows)] for rows in weights]
        least = np.array([max(w for w in all_of if w <= c) for all_of, c in zip(possible, capacity)])
        theta = np.where(np.isinf(theta), -2.0, theta)  # which might be of the only selection that is so heavy
    limit = kg.MultipleChoice(
        factor * weights, factor * capacity, at_least=factor * least, optional=kind == "optional" and options > 1
    )
    return Groups(theta, limit, rng.uniform(0.8, 2.0, batch))


class Call:
    """The kernels on one problem, with further arguments from a seed."""

    def __init__(self, problem: Groups, regularizer: str, dtype: str = "float64", samples: int = 2) -> None:
        rng = np.random.default_rng(5)
        theta, self.problem = problem.flat, problem
        self.theta, self.z = tensor(theta, dtype), tensor(rng.standard_normal(theta.shape), dtype)
        self.lattice, self.regularizer = on_device(problem.lattice), regularizer
        gamma = torch.tensor(problem.gamma, dtype=torch.float64)
        self.gamma = gamma.to(self.theta.device) if gamma.dim() else gamma
        self.uniforms = tensor(rng.random((samples, *theta.shape)) * 0.999, dtype)
        self.cotangent = tensor(rng.standard_normal((samples, len(theta))), dtype)
        self.y = torch.zeros_like(self.uniforms)

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(from_torch, name)(self.theta, *arguments, self.lattice, self.gamma, self.regularizer, **options)

    def solve(self) -> Tensor:
        return from_torch.solve(self.theta, self.lattice)


#: operation -> its result, with the batch in front
RESULTS: dict[str, Callable[[Call], Tensor]] = {
    "value": lambda call: call("operator", relaxed=False)[0],
    "relax": lambda call: call("operator")[1],
    "vjp": lambda call: call("vjp", call.z),
    "entropy": lambda call: call("entropy"),
    "entropy_grad": lambda call: call("entropy_grad"),
    "sample": lambda call: call("sample", call.uniforms).movedim(0, -1),
    "sample from a kept table": lambda call: call("sample", call.uniforms, table=call("tabulate")[2]).movedim(0, -1),
    "solve": Call.solve,
    "mode": lambda call: call("mode"),
    "log_prob": lambda call: call("log_prob", call.y).movedim(0, -1),
    "log_prob_vjp": lambda call: call("log_prob_vjp", call.y, call.cotangent),
    "frontier": lambda call: call("frontier"),
}


def check_sweeps(problem: Groups, regularizer: str, dtype: str) -> None:
    problem, tolerance = replace(problem, theta=problem.theta.astype(dtype).astype(float)), TOLERANCES[dtype]
    call = Call(problem, regularizer, dtype)
    value, y = call("operator")
    assert value.dtype == torch.float64 and y.dtype == call.theta.dtype and y.shape == call.theta.shape
    product, entropy, slopes, z = (
        *(host(RESULTS[name](call)) for name in ("vjp", "entropy", "entropy_grad")),
        host(call.z),
    )
    for b, (theta, lattice) in enumerate(problem.rows()):
        expected, expected_y = reference.operator(theta, lattice, CLASSES[regularizer])
        assert expected > FEASIBLE
        largest = np.abs(theta[np.isfinite(theta)]).max()
        assert_within(host(value)[b], expected, tolerance.value, largest, "value")
        assert_within(host(y)[b], expected_y, tolerance.relax, 1.0, "relax")
        assert_within(product[b], reference.vjp(theta, z[b], lattice, CLASSES[regularizer]), tolerance.vjp, 0.1, "vjp")
        expected, slope = reference.entropy(theta, lattice, CLASSES[regularizer])
        assert_within(entropy[b], expected, tolerance.value, 1.0, "entropy")
        assert_within(slopes[b], slope, tolerance.vjp, 1.0, "entropy_grad")


def check_paths(problem: Groups, regularizer: str, dtype: str) -> None:
    problem, tolerance = replace(problem, theta=problem.theta.astype(dtype).astype(float)), TOLERANCES[dtype]
    call = Call(problem, regularizer, dtype)
    call.y = call("sample", call.uniforms)
    table = call("tabulate")[2]
    assert torch.equal(call("sample", call.uniforms, table=table), call.y)
    log_prob = call("log_prob", call.y)
    assert torch.equal(call("log_prob", call.y, table=table), log_prob)
    assert log_prob.shape == call.y.shape[:-1] and log_prob.dtype == call.theta.dtype
    best, mode, drawn, uniforms = host(call.solve()), host(call("mode")), host(call.y), host(call.uniforms)
    for b, (theta, lattice) in enumerate(problem.rows()):
        smoothing = CLASSES[regularizer]
        np.testing.assert_array_equal(best[b], reference.solve(theta, lattice))
        for s in range(len(drawn)):
            np.testing.assert_array_equal(drawn[s, b], reference.sample(theta, uniforms[s, b], lattice, smoothing))
            expected = reference.log_prob(theta, drawn[s, b], lattice, smoothing)
            assert_within(host(log_prob)[s, b], expected, 10 * tolerance.log_prob, 1.0, "log_prob")
            assert reference.log_prob(theta, mode[b], lattice, smoothing) >= expected - 1e-4


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_sweeps_against_the_reference(options, regularizer, limits):
    number = OPTIONS.index(options) + list(CLASSES).index(regularizer)
    problem = groups_of(KINDS[number % 3], options, groups=2 if options > 4 else 3)
    check_sweeps(problem, regularizer, ("float32", "float64")[number // 3 % 2])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_paths_against_the_reference(options, limits):
    number = OPTIONS.index(options)
    check_paths(groups_of(KINDS[(number + 1) % 3], options, seed=1), list(CLASSES)[number % 3], "float64")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", KINDS)
def test_many_options_in_loops(kind, limits):
    limits(UNROLLED=0)
    options, regularizer = {"at most": 3, "at least": 5, "optional": 2}[kind], list(CLASSES)[KINDS.index(kind)]
    check_sweeps(groups_of(kind, options, groups=2), regularizer, "float64")
    check_paths(groups_of(kind, options, groups=2, seed=1), regularizer, "float64")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind, loops", [("at most", False), ("at least", False), ("at least", True)])
def test_several_tiles(kind, loops, limits):
    """Weights 30 times as large decide alike. Sums at once, and where it is unrolled at the end."""
    few, many = (Call(groups_of(kind, 3, groups=2, factor=factor, seed=1), "gini") for factor in (1, 30))
    few.y = many.y = few("sample", few.uniforms)
    limits(UNROLLED=0 if loops else 16)
    limits.plan(block=32, later=not loops)
    assert many.lattice.reach > 64
    for name, result in RESULTS.items():
        if name not in ("mode", "frontier"):  # ties; other capacities
            torch.testing.assert_close(result(many), result(few), rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("operation", RESULTS)
def test_one_program_for_all_instances(operation, limits):
    call = Call(groups_of("at most", 3, groups=2, batch=3), "tsallis")
    call.y = call("sample", call.uniforms)
    apart = RESULTS[operation](call)
    limits(SCRATCH=(1, 1), ITEM_SCRATCH=1)
    assert plan.plan(3, 6, 9, 1, 8, 2, 3).programs == 1
    assert torch.equal(RESULTS[operation](call), apart)


def test_plans_of_choices():
    """No turn with a few programs left over; rows of any length by one program; no more warps than a row has work."""
    for options, programs in ((8, 1024), (9, 512)):
        layout = plan.plan(1024, 64 * options, 1000, 2, 4, 132, options)
        assert layout.programs == programs and 15 * 132 < programs * layout.warps <= 16 * 132
    for batch, reach, options in ((3, 10, 2), (1, 10**6, 4), (5000, 300, 3)):
        layout = plan.plan(batch, 40 * options, reach, 2, 8, 132, options)
        assert layout.block == 32 * layout.warps <= layout.width and layout.width > reach
        assert not layout.narrow and 1 <= layout.programs <= batch


def selections(options: int, groups: int, batch: int) -> np.ndarray:
    """Every 0/1 vector, (2^n, batch, n); most have not one pick per group."""
    every = np.array(list(product((0.0, 1.0), repeat=options * groups)))
    return np.repeat(every[:, None], batch, 1)


@pytest.mark.parametrize("kind", ["at most", "at least"])
def test_log_probs_of_all_selections(kind, regularizer, limits):
    problem = groups_of(kind, 3, groups=2, seed=3)
    call = Call(problem, regularizer)
    every = selections(3, 2, 2)
    log_prob, mode = host(call("log_prob", tensor(every))), host(call("mode"))
    for b, (theta, lattice) in enumerate(problem.rows()):
        expected = np.array([reference.log_prob(theta, y, lattice, CLASSES[regularizer]) for y in every[:, b]])
        np.testing.assert_allclose(np.exp(log_prob[:, b]), np.exp(expected), rtol=1e-9, atol=1e-13)
        assert np.isneginf(log_prob[np.isneginf(expected), b]).all()
        best = reference.log_prob(theta, mode[b], lattice, CLASSES[regularizer])
        assert best == pytest.approx(expected.max(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("options", [2, 3, 4])
def test_log_prob_gradient_against_differences(options, regularizer, limits):
    kind = KINDS[(options + list(CLASSES).index(regularizer)) % 2]
    problem = groups_of(kind, options, groups=2, seed=2)
    call = Call(problem, regularizer, samples=3)
    call.y = call("sample", call.uniforms)
    never = torch.zeros_like(call.y[:1])  # with the cotangent 0 that autograd gives it
    call.y, call.cotangent = torch.cat([call.y, never]), torch.cat([call.cotangent, 0 * call.cotangent[:1]])
    gradient, y, cotangent = host(call("log_prob_vjp", call.y, call.cotangent)), host(call.y), host(call.cotangent)
    for b, (theta, lattice) in enumerate(problem.rows()):

        def total(theta: np.ndarray) -> float:
            return sum(
                cotangent[s, b] * reference.log_prob(theta, y[s, b], lattice, CLASSES[regularizer]) for s in range(3)
            )

        shifts = 1e-6 * np.eye(len(theta))
        slopes = [(total(theta + shift) - total(theta - shift)) / 2e-6 for shift in shifts]
        assert_within(gradient[b], slopes, 1e-7, 1.0)


def test_more_samples_than_lanes(limits):
    call = Call(groups_of("at most", 2, groups=2), "gini", samples=130)
    call.y = call("sample", call.uniforms)
    parts = [call("log_prob_vjp", call.y[part], call.cotangent[part]) for part in (slice(0, 60), slice(60, 130))]
    torch.testing.assert_close(call("log_prob_vjp", call.y, call.cotangent), sum(parts), rtol=1e-12, atol=1e-12)
    assert torch.equal(call("sample", call.uniforms[100:]), call.y[100:])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loops", [False, True], ids=["trees", "loops"])
def test_a_broken_instance_is_nan_alone(loops, limits):
    """NaN of an option that is too heavy, plus infinity, a least weight that no selection has, all options of a group
    masked, and none that fit."""
    limits(UNROLLED=0 if loops else 16)
    rng = np.random.default_rng(0)
    theta, weights = rng.standard_normal((6, 2, 3)), np.array([[0, 2, 99], [0, 4, 6]])
    capacity, least = np.array([9, 7, 5, 8, 6, 7]), np.array([4, 6, 2, 8, 6, 0])
    call = Call(Groups(theta, kg.MultipleChoice(weights, capacity, at_least=least)), "gini", "float32")
    call.y = call("sample", call.uniforms)
    names = ["relax", "vjp", "solve"] if loops else [name for name in RESULTS if name != "frontier"]
    clean = {name: RESULTS[name](call) for name in names}
    assert not any(result.isnan().any() for result in clean.values())
    least[1] = 7
    call.lattice = on_device(kg.MultipleChoice(weights, capacity, at_least=least).lattice(6))
    call.lattice.slack[5] = -1
    call.theta[2, 3:], call.theta[3, 2], call.theta[4, 0] = -torch.inf, torch.nan, torch.inf
    for name in names:
        dirty = RESULTS[name](call)
        assert dirty[1:].isnan().all(), name
        assert torch.equal(dirty[0], clean[name][0]), name


def test_memory_layout_and_batches_of_more_dimensions(limits):
    problem = groups_of("at least", 3, groups=2, batch=4)
    call = Call(problem, "gini")
    call.y = call("sample", call.uniforms)
    names = ("value", "relax", "vjp", "solve")
    plain = {name: RESULTS[name](call) for name in names}

    def apart(x: Tensor) -> Tensor:
        """In a batch of two times two, with other numbers between."""
        x = x.reshape(2, 2, *x.shape[1:])
        return torch.stack([x, torch.full_like(x, -1)], -1)[..., 0]

    call.theta, call.z, call.gamma = (apart(x) for x in (call.theta, call.z, call.gamma))
    call.lattice = call.lattice.replace(
        **{name: apart(getattr(call.lattice, name)) for name in ("weights", "capacity", "slack")}
    )
    for name in names:
        result = RESULTS[name](call)
        assert torch.equal(result.flatten(0, 1), plain[name])


def test_a_capacity_above_the_total_weight(limits):
    """On the host it is cut, and the slack with it, where the weights are known; else that is left to the kernels."""
    theta = np.random.default_rng(0).standard_normal((2, 2, 3))
    problem = Groups(theta, kg.MultipleChoice([0, 1, 3], 20, at_least=5))
    call = Call(problem, "tsallis")
    assert call.lattice.reach == 6
    call.y = call("sample", call.uniforms)
    names = ("value", "relax", "entropy_grad", "sample", "log_prob")
    expected = {name: RESULTS[name](call) for name in names}
    uncut = {"capacity": tensor([20], "int64"), "slack": tensor([15, 15], "int64")}
    for reach in (20, 6):
        call.lattice = call.lattice.replace(**uncut, reach=reach)
        for name in names:
            torch.testing.assert_close(RESULTS[name](call), expected[name], rtol=1e-12, atol=1e-13)


def test_nothing_to_choose(limits):
    for theta in (np.zeros((2, 0, 3)), np.zeros((0, 2, 3))):
        call = Call(Groups(theta, kg.MultipleChoice([0, 1, 2], 3)), "gini")
        assert not RESULTS["value"](call).any() and RESULTS["vjp"](call).shape == call.theta.shape
        assert call.solve().shape == call.theta.shape
        assert call("frontier").shape == (len(theta), call.lattice.reach + 1)


# Frontiers, of choices and of items.


def check_frontier(theta: np.ndarray, lattice: Lattice, regularizer: str, dtype: str = "float64") -> None:
    """Shared weights."""
    smoothing = Hard if regularizer == "hard" else CLASSES[regularizer]
    theta, tolerance = theta.astype(dtype).astype(float), TOLERANCES[dtype]
    given, place = (tensor(theta, dtype), on_device(lattice)), torch.tensor(0.5)
    rows = from_torch.frontier(*given, place, regularizer)
    assert rows.shape == (*theta.shape[:-1], lattice.reach + 1) and rows.dtype == torch.float64
    cotangent = np.random.default_rng(0).standard_normal(rows.shape)
    gradient = from_torch.frontier_vjp(given[0], tensor(cotangent, dtype), given[1], place, regularizer)
    assert gradient.shape == given[0].shape and gradient.dtype == given[0].dtype
    slack = None if lattice.slack is None else 0
    one = lattice.replace(capacity=lattice.reach, slack=slack)
    for b in range(len(theta)):
        expected = reference.frontier(theta[b] / 0.5, one, smoothing)
        feasible = expected > FEASIBLE
        np.testing.assert_array_equal(np.isneginf(host(rows)[b]), ~feasible)
        assert_within(host(rows)[b][feasible], expected[feasible], tolerance.value, 1.0)
        slopes = reference.frontier_vjp(theta[b] / 0.5, np.where(feasible, cotangent[b], 0.0), one, smoothing)
        assert_within(host(gradient)[b], slopes, 10 * tolerance.relax, 1.0)


@pytest.mark.parametrize("regularizer", [*CLASSES, "hard"])
@pytest.mark.parametrize("exactly", [False, True], ids=["at most", "exactly"])
def test_frontiers(regularizer, exactly, limits):
    rng = np.random.default_rng(0)
    choices = kg.MultipleChoice([[2, 4, 3], [6, 1, 3]], 7, at_least=7 if exactly else 0)
    check_frontier(rng.standard_normal((2, 6)), choices.lattice(6), regularizer)
    items = kg.Knapsack([2, 4, 3, 40], 8, at_least=8 if exactly else 0)
    check_frontier(rng.standard_normal((2, 4)), items.lattice(4), regularizer, "float32")


def test_frontiers_in_loops_tiles_and_turns(limits):
    theta = np.random.default_rng(0).standard_normal((3, 6))
    theta[1, 4] = -np.inf
    limits(SCRATCH=(1, 1), ITEM_SCRATCH=1, UNROLLED=2)
    limits.plan(block=32)
    choices = kg.MultipleChoice([[20, 40, 30], [60, 10, 30]], 1000)
    assert choices.lattice(6).reach == 70
    check_frontier(theta, choices.lattice(6).replace(reach=85), "tsallis")
    check_frontier(theta, choices.lattice(6).replace(reach=85, slack=np.array(0)), "shannon")
    check_frontier(theta, kg.TopK(4).lattice(6), "gini")


def test_a_frontier_with_nan(limits):
    """In its instance alone; entries that are infeasible may stay so. Cotangents of infeasible entries do not count."""
    theta, lattice = tensor([[0.5, 1.0, -0.2, 0.1], [0.3, np.nan, 0.2, 0.7]]), kg.Knapsack([3, 2, 3, 2], 8, at_least=8)
    given = theta, on_device(lattice.lattice(4)), torch.tensor(1.0), "gini"
    rows = from_torch.frontier(*given)
    assert rows[0, [0, 2, 3]].isfinite().all() and rows[0, 1].isneginf()
    assert rows[1, 2:].isnan().all() and not rows[0].isnan().any()
    cotangent = torch.where(rows.isneginf(), torch.nan, torch.ones_like(rows))
    gradient = from_torch.frontier_vjp(theta, cotangent, *given[1:])
    assert gradient[0].isfinite().all() and gradient[0].any() and gradient[1].isnan().all()


# With a real device, by the public functions.


def large(groups: int, options: int, capacity: int, **limit: Any) -> Callable[[], Any]:
    weights = np.random.default_rng(groups).integers(0, 2 * capacity // groups, (groups, options))
    return lambda: kg.MultipleChoice(weights, capacity, **limit)


#: what is special -> the shape of theta, and the constraint
SIZES: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    "a hundred groups": ((33, 100, 4), large(100, 4, 700)),
    "many options": ((5, 20, 40), large(20, 40, 500)),
    "wide rows": ((2, 12, 3), large(12, 3, 50_000)),
    "a least weight": ((9, 40, 5), large(40, 5, 600, at_least=590)),
    "optional": ((9, 40, 8), large(40, 8, 600, optional=True)),
}


@needs_gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_what_the_cpu_gives(size, regularizer):
    shape, limit_of = SIZES[size]
    limit, smoothing, tolerance = limit_of(), test_triton.SMOOTHINGS[regularizer](0.8), TOLERANCES["float64"]
    theta, z = (test_triton.scores(shape, seed=seed) for seed in (0, 1))
    y = kg.solve(theta, limit)
    torch.testing.assert_close(kg.solve(theta.cuda(), limit).cpu(), y, rtol=0, atol=0)

    def relax(theta: Tensor) -> Tensor:
        return kg.relax(theta, limit, smoothing)

    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "value": lambda theta, y, z: kg.value(theta, limit, smoothing),
        "relax": lambda theta, y, z: relax(theta),
        "vjp": lambda theta, y, z: test_triton.gradient(relax, theta, z),
        "entropy": lambda theta, y, z: test_triton.gradient(lambda x: kg.entropy(x, limit, smoothing), theta),
        "log_prob": lambda theta, y, z: test_triton.gradient(lambda x: kg.log_prob(x, y, limit, smoothing), theta),
    }
    if size != "a least weight":
        calls["frontier"] = lambda theta, y, z: kg.frontier(theta, limit, smoothing).clamp(min=-1e3)
    for name, call in calls.items():
        on_host, on_gpu = call(theta, y, z), call(theta.cuda(), y.cuda(), z.cuda())
        assert_within(host(on_gpu), host(on_host), 2 * tolerance.vjp, 1.0, name)
    drawn = kg.sample(theta.cuda(), limit, smoothing, num_samples=2000)
    assert limit.contains(drawn).all()
    spread = np.abs(host(drawn).mean(0) - host(relax(theta))).max()
    assert spread < 0.08


@needs_gpu
def test_capture_in_a_cuda_graph_and_no_waiting(regularizer):
    shape, limit_of = SIZES["optional"]
    limit, smoothing = limit_of(), test_triton.SMOOTHINGS[regularizer](0.7)
    theta, z = (test_triton.scores(shape, seed=seed).cuda() for seed in (0, 1))
    theta.requires_grad_()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y, rows = kg.relax(theta, limit, smoothing), kg.frontier(theta, limit, smoothing)
        return y.detach(), *torch.autograd.grad((y * z).sum() + rows[:, -5:].sum(), theta), kg.solve(theta, limit)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        theta.copy_(test_triton.scores(shape, seed=2))
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)
