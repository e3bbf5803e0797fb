"""The GPU kernels on several budgets against the reference: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import DEVICE, PATHS, TILES, Limits, host, limits, needs_gpu, on_device  # noqa: F401

import knapgrad as kg
from knapgrad import reference
from knapgrad.lattice import Lattice
from knapgrad.regularizers import REGULARIZERS as CLASSES

torch = pytest.importorskip("torch")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from knapgrad.kernels.triton import from_torch as kernels  # noqa: E402
from knapgrad.kernels.triton import plan  # noqa: E402
from knapgrad.kernels.triton.steps import can_pick, sides_of  # noqa: E402

pytestmark = [test_triton.pytestmark, pytest.mark.usefixtures("unwritten_memory_is_nan")]

GAMMA = 0.5  # exact in float32, which is what the interpreter makes of a number
_RNG = np.random.default_rng(0)
BOXES: dict[str, tuple[Any, Any]] = {
    "two": ([[1, 1, 1, 1, 1], [3, 0, 2, 4, 9]], [3, 6]),
    "two of each": (_RNG.integers(0, 5, (2, 3, 5)), _RNG.integers(0, 8, (2, 3))),
    "two, and few weights": (
        [[[2, 3, 1, 4, 1], [0, 1, 0, 0, 0], [1, 1, 4, 1, 3]], [[1, 2, 3, 1, 2], [2, 0, 1, 0, 3], [1, 1, 1, 1, 1]]],
        [7, 4],
    ),
    "three": ([[1, 2, 1, 3, 1], [2, 2, 3, 1, 2], [3, 1, 2, 4, 1]], [4, 3, 5]),
    "many tiles": ([[7, 25, 21, 3, 12], [1, 1, 1, 0, 1]], [34, 4]),
    "budgets of 0": ([[0, 0, 0, 1, 0], [2, 1, 3, 1, 4], [0, 0, 0, 0, 0]], [0, 5, 0]),
    "one": ([[2, 1, 3, 0, 4]], [5]),
}


@pytest.fixture(params=[*PATHS, "tiles"])
def path(request: pytest.FixtureRequest, limits: Limits) -> None:  # noqa: F811
    limits(**PATHS.get(request.param, TILES))


def sent(x: np.ndarray) -> Any:
    return torch.from_numpy(x).to(DEVICE)


class Problem:
    """A batch of 3, its lattice on the device, and that of each instance."""

    def __init__(self, box: str, dtype: str) -> None:
        self.constraint = kg.MultiKnapsack(*BOXES[box])
        rng = np.random.default_rng(1)
        self.theta, self.z = rng.normal(size=(3, 5)).astype(dtype), rng.normal(size=(3, 5)).astype(dtype)
        self.theta[1, 1] = -np.inf
        self.uniforms = rng.random((3, 3, 5)).astype(dtype)
        known = self.constraint.lattice(5)
        self.lattice = on_device(known)
        weights, capacity = np.broadcast_to(known.weights, (3, 5)), np.broadcast_to(known.capacity, 3)
        self.rows: list[tuple[np.ndarray, Lattice]] = [
            (self.theta[b].astype(np.float64) / GAMMA, known.replace(weights=weights[b], capacity=int(capacity[b])))
            for b in range(3)
        ]

    def arguments(self, regularizer: str) -> tuple[Any, ...]:
        return self.lattice, np.array(GAMMA), regularizer


def test_where_no_digit_borrows_is_found_exactly_and_without_a_division():
    rng = np.random.default_rng(2)
    edges = [0, 1, 2, 3, 2**30, 2**31 - 2, 2**31 - 1]
    sizes = [2, 3, 4, 2**16, 2**30, 2**30 + 1, 2**31 - 1, *(2 ** rng.uniform(1, 31, 20)).astype(int).tolist()]
    for inner, plane in zip(sizes, sizes[::-1]):
        near = rng.integers(0, 2**31, 24) // inner * inner
        states = np.array([*edges, *rng.integers(0, 2**31, 57), *near, *np.maximum(near, 1) - 1, *edges, *near[:9]])
        c, w = states[None], states[:, None]
        found = torch.zeros(128, 128, dtype=torch.int32, device=DEVICE)
        borrow_kernel[(1,)](sent(states.astype(np.int32)), found, inner, plane, BOX=2)
        expected = (c >= w) & (c % inner >= w % inner) & (c % plane >= w % plane)
        np.testing.assert_array_equal(host(found), expected)


@triton.jit(do_not_specialize=["inner", "plane"])
def borrow_kernel(states, found, inner, plane, BOX: tl.constexpr):
    i = tl.arange(0, 128)
    c, w = tl.load(states + i)[None, :], tl.load(states + i)[:, None]
    tl.store(found + 128 * i[:, None] + i[None, :], can_pick(c, w, sides_of(inner, plane, BOX)).to(tl.int32))


def test_only_digits_that_can_borrow_are_looked_at():
    assert plan.box_of(()) == plan.box_of((7,)) == plan.box_of((7, 1)) == {"BOX": 0, "inner": 1, "plane": 1}
    assert plan.box_of((4, 7)) == plan.box_of((4, 7, 1)) == plan.box_of((4, 1, 7)) == {
        "BOX": 1, "inner": 7, "plane": 1,
    }  # fmt: skip
    assert plan.box_of((4, 5, 7)) == {"BOX": 2, "inner": 7, "plane": 35}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("box", BOXES)
def test_sweeps_against_the_reference(box, dtype, regularizer, path):
    problem, kind = Problem(box, dtype), CLASSES[regularizer]
    theta, z, given = sent(problem.theta), sent(problem.z), problem.arguments(regularizer)
    close = 1e-11 if dtype == "float64" else 2e-5
    value, y = kernels.operator(theta, *given)
    product, entropy = kernels.vjp(theta, z, *given), kernels.entropy(theta, *given)
    slope = kernels.entropy_grad(theta, *given)
    assert y.dtype == theta.dtype
    for b, (row, lattice) in enumerate(problem.rows):
        expected, mean = reference.operator(row, lattice, kind)
        np.testing.assert_allclose(host(value)[b], expected, rtol=close, atol=close)
        np.testing.assert_allclose(host(y)[b], mean, atol=close)
        exact = reference.vjp(row, problem.z[b].astype(np.float64), lattice, kind)
        np.testing.assert_allclose(host(product)[b], exact, atol=5 * close)
        number, gradient = reference.entropy(row, lattice, kind)
        np.testing.assert_allclose(host(entropy)[b], number, atol=5 * close)
        np.testing.assert_allclose(host(slope)[b], gradient, atol=10 * close)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("box", BOXES)
def test_paths_against_the_reference(box, regularizer, path):
    problem = Problem(box, "float64")
    theta, given, kind = sent(problem.theta), problem.arguments(regularizer), CLASSES[regularizer]
    _, _, table = kernels.tabulate(theta, *given)
    drawn = kernels.sample(theta, sent(problem.uniforms), *given)
    assert torch.equal(drawn, kernels.sample(theta, sent(problem.uniforms), *given, table))
    chances = host(kernels.log_prob(theta, drawn, *given, table))
    too_much = host(kernels.log_prob(theta, torch.ones_like(drawn), *given))
    best = host(kernels.solve(theta, problem.lattice))
    for b, (row, lattice) in enumerate(problem.rows):
        expected = [reference.sample(row, u[b].astype(np.float64), lattice, kind) for u in problem.uniforms]
        np.testing.assert_array_equal(host(drawn)[:, b], expected)
        logs = [reference.log_prob(row, y, lattice, kind) for y in expected]
        np.testing.assert_allclose(chances[:, b], logs, atol=1e-10)
        assert (too_much[:, b] == -np.inf).all()
        finite = np.where(np.isneginf(row), 0.0, row)
        assert best[b] @ finite == pytest.approx(reference.solve(row, lattice) @ finite)
    mode = kernels.mode(theta, *given)
    chance = host(kernels.log_prob(theta, mode[None], *given))[0]
    assert (chance >= chances.max(0) - 1e-9).all()
    assert bool(problem.constraint.contains(mode).all())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("box", BOXES)
def test_the_gradient_of_log_prob_by_differences(box, regularizer, path):
    problem = Problem(box, "float64")
    theta, given = sent(problem.theta), problem.arguments(regularizer)
    y = kernels.sample(theta, sent(problem.uniforms), *given)
    cotangent = sent(np.cos(np.arange(9.0)).reshape(3, 3))
    gradient = host(kernels.log_prob_vjp(theta, y, cotangent, *given)) / GAMMA
    step = 1e-6
    for i in range(5):
        moved = torch.zeros_like(theta)
        moved[:, i] = step
        up, down = (kernels.log_prob(theta + sign * moved, y, *given) for sign in (1, -1))
        slope = ((up - down) * cotangent).sum(0) / (2 * step)
        sound = ~np.isneginf(problem.theta[:, i]) & np.isfinite(host(slope))
        np.testing.assert_allclose(gradient[sound, i], host(slope)[sound], atol=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("box", BOXES)
def test_the_frontier_against_the_reference(box, regularizer):
    problem = Problem(box, "float64")
    theta, given, kind = sent(problem.theta), problem.arguments(regularizer), CLASSES[regularizer]
    states = problem.lattice.reach + 1
    cotangent = np.cos(np.arange(3.0 * states)).reshape(3, states)
    rows = host(kernels.frontier(theta, *given))
    gradient = host(kernels.frontier_vjp(theta, sent(cotangent), *given))
    for b, (row, lattice) in enumerate(problem.rows):
        whole = lattice.replace(capacity=states - 1)
        np.testing.assert_allclose(rows[b], reference.frontier(row, whole, kind), atol=1e-11)
        np.testing.assert_allclose(gradient[b], reference.frontier_vjp(row, cotangent[b], whole, kind), atol=1e-10)


def test_a_broken_instance_is_nan_alone(regularizer, path):
    problem = Problem("two", "float32")
    given = problem.arguments(regularizer)
    clean = host(kernels.relax(sent(problem.theta), *given))
    problem.theta[0, 4], problem.theta[2, 0] = np.nan, np.inf  # the first never fits
    theta = sent(problem.theta)
    value, y = kernels.operator(theta, *given)
    results = [host(y), host(kernels.vjp(theta, sent(problem.z), *given)), host(value)[:, None]]
    results += [host(kernels.sample(theta, sent(problem.uniforms), *given))[0], host(kernels.mode(theta, *given))]
    results += [host(kernels.frontier(theta, *given))]
    for result in results:
        assert np.isnan(result[[0, 2]]).all()
        assert not np.isnan(np.delete(result, [0, 2], 0)).any()
    np.testing.assert_array_equal(np.delete(host(y), [0, 2], 0), np.delete(clean, [0, 2], 0))


def test_no_items_and_no_instances(regularizer):
    for shape in ((3, 0), (0, 4)):
        limit = kg.MultiKnapsack(np.zeros((2, shape[1]), int), [3, 4]).lattice(shape[1])
        theta, given = sent(np.zeros(shape)), (on_device(limit), np.array(1.0), regularizer)
        value, y = kernels.operator(theta, *given)
        np.testing.assert_array_equal(host(value), np.zeros(shape[0]))
        likely = kernels.mode(theta, *given), kernels.solve(theta, given[0]), kernels.vjp(theta, theta, *given)
        drawn = kernels.sample(theta, sent(np.zeros((2, *shape))), *given)
        chance = kernels.log_prob(theta, drawn, *given)
        np.testing.assert_array_equal(host(chance), np.zeros((2, shape[0])))
        for result in (y, drawn[0], *likely, kernels.log_prob_vjp(theta, drawn, chance, *given)):
            assert tuple(result.shape) == shape


@needs_gpu
def test_capture_in_a_cuda_graph_and_no_waiting(regularizer):
    problem = Problem("three", "float32")
    theta, given = sent(problem.theta), problem.arguments(regularizer)
    expected = kernels.relax(theta, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.relax(theta, *given)
    graph.replay()
    assert torch.equal(y, expected)
