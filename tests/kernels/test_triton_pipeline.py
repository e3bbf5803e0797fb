"""The pipeline over tiles of capacities against the reference: on a GPU if there is one, else in Triton's interpreter,
where programs run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import (
    DEVICE,
    NOT_VALID,
    RESULTS,
    SMOOTHINGS,
    TILES,
    USUAL_GROUP,
    Call,
    Limits,
    assert_within,
    check_a_capacity_that_is_not_valid,
    check_paths,
    check_sweeps,
    forget_plans,
    gradient,
    host,
    needs_gpu,
    on_device,
    scores,
    tensor,
)

import knapgrad as kg
from backends import TOLERANCES
from instances import Problem

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from knapgrad.kernels.triton import from_torch, plan  # noqa: E402
from knapgrad.kernels.triton.pipeline import Pipeline, Segmented  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # of the interpreter's NumPy
limits = test_triton.limits


@pytest.fixture
def tiles(limits: Limits) -> Limits:
    limits(**TILES)
    return limits


@pytest.fixture
def segments(tiles: Limits) -> None:
    """Items are cut into as many segments as there are pairs of them."""
    tiles(SEGMENTED=(1 << 20, 2))


RNG = np.random.default_rng(3)
LIGHT = RNG.integers(0, 5, (2, 9))
PROBLEMS = {
    "top-k of each instance, all items among them": Problem(RNG.standard_normal((2, 9)), None, np.array([5, 9]), 1.3),
    "from and to": Problem(RNG.standard_normal((2, 7)), None, np.array([6, 5]), np.array([0.7, 1.6]), np.array([4, 0])),
    "the last cell of a tile": Problem(RNG.standard_normal((1, 6)), None, 3),
    "the first cell of a tile": Problem(RNG.standard_normal((1, 6)), None, 4),
    "one item": Problem(RNG.standard_normal((2, 1)), None, 1),
    "top 0": Problem(RNG.standard_normal((1, 3)), None, 0),
    "knapsack": Problem(RNG.standard_normal((2, 9)), LIGHT, np.array([9, 12]), np.array([1.1, 0.6])),
    "weights of a whole tile": Problem(RNG.standard_normal((1, 5)), [4, 4, 3, 4, 1], 11),
    "a least weight": Problem(RNG.standard_normal((2, 9)), LIGHT, np.array([9, 12]), 0.9, np.array([8, 5])),
    "picks beyond the next tile": Problem(RNG.standard_normal((2, 7)), RNG.integers(0, 30, (2, 7)), np.array([60, 33])),
    "far picks, a least weight": Problem(RNG.standard_normal((1, 6)), [20, 9, 1, 33, 40, 8], 41, 0.8, 37),
    "capacity above the total": Problem(RNG.standard_normal((1, 4)), [2, 1, 3, 1], 20, 1.0, 5),
    "masked": Problem(np.where(np.arange(7) % 3 == 1, -np.inf, RNG.standard_normal((1, 7))), None, 5),
    "batch of rank 2": Problem(RNG.standard_normal((2, 1, 5)), None, np.array([[2], [5]])),
}


def of(name: str) -> tuple[str, str]:
    """A regularizer and a type; those of other problems are others."""
    place = list(PROBLEMS).index(name)
    return list(SMOOTHINGS)[place % 3], ("float32", "float64")[place // 3 % 2]


@pytest.mark.parametrize("name", PROBLEMS)
def test_sweeps_against_the_reference(name, tiles):
    check_sweeps(PROBLEMS[name], *of(name))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PROBLEMS)
def test_segments_against_the_reference(name, segments):
    """Under Shannon; what may stay unused, strengths of each instance, and numbers of items that are no power of 2."""
    check_sweeps(PROBLEMS[name], "shannon", of(name)[1])
    assert Call(PROBLEMS[name], "shannon", of(name)[1]).operator()[1].is_contiguous()


@pytest.mark.parametrize("regularizer", SMOOTHINGS)
def test_every_regularizer(regularizer, tiles):
    check_sweeps(Problem(scores((1, 6)).numpy(), None, 5, 0.8), regularizer, "float64")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PROBLEMS)
def test_paths_against_the_reference(name, tiles):
    check_paths(PROBLEMS[name], *of(name))


def test_it_is_a_pipeline(tiles):
    """What the tests above are about."""

    def kind_of(weights: Any, capacity: int) -> type:
        call = Call(Problem(np.zeros((2, 5)), weights, capacity), "gini", "float64")
        call.operator(relaxed=False)
        (launch,) = call.lattice.memo.values()
        return type(launch)

    far = [1, 2, 3, 2, plan.TILE + 1]
    assert kind_of(None, 5) is kind_of([1, 2, 3, 2, 1], 6) is kind_of(far, 60) is Pipeline
    tiles(PIPELINED_FAR=(0, 0, 0, 0))
    assert kind_of([1, 2, 3, 2, 1], 6) is Pipeline is not kind_of(far, 60)


def test_it_is_cut_into_segments(segments):
    """Where a table is not needed, and all of them fit."""

    def kind_of(name: str, regularizer: str = "shannon") -> type:
        call = Call(PROBLEMS["from and to"], regularizer, "float64")
        RESULTS[name](call)
        (launch,) = call.lattice.memo.values()
        return type(launch)

    assert kind_of("relax") is kind_of("vjp") is Segmented
    assert kind_of("relax", "gini") is kind_of("entropy") is kind_of("sample") is Pipeline


def test_boxes_are_not_cut_into_segments(segments):
    """States of which are not added."""
    box = on_device(kg.MultiKnapsack([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], [1, 2]).lattice(5))
    theta = scores((1, 5)).to(DEVICE)
    y = from_torch.relax(theta, box, np.ones(()), "shannon")
    assert [type(x) for x in box.memo.values()] == [Pipeline]
    expected = kg.relax(theta.cpu(), kg.MultiKnapsack([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], [1, 2]), kg.Shannon())
    np.testing.assert_allclose(host(y), host(expected), atol=1e-12)


@pytest.mark.parametrize("operation", ["relax", "vjp", "entropy", "sample", "sample from a kept table", "log_prob_vjp"])
def test_parts_are_the_whole(operation, tiles):
    """Instances one by one, and their items a few at a time; rows are set aside between them."""
    problem = Problem(scores((2, 5)).numpy(), LIGHT[:, :5], np.array([5, 7]), 0.9, np.array([2, 0]))
    call = Call(problem, "tsallis", "float64", samples=1)
    call.y = call.sample()
    whole = RESULTS[operation](call)
    tiles(ITEM_SCRATCH=800)
    call.lattice.memo.clear()
    torch.testing.assert_close(RESULTS[operation](call), whole, rtol=1e-13, atol=1e-15)
    assert all(x.layout.instances == 1 and x.layout.items < 5 for x in call.lattice.memo.values())


@pytest.mark.parametrize("regularizer", ["gini", "shannon"])
def test_a_broken_instance_is_nan_alone(regularizer, segments):
    """NaN, plus infinity, out of range, and no feasible selection, with a clean instance between."""
    problem = Problem(scores((5, 5)).numpy(), None, np.array([4, 5, 3, 2, 4]), 0.7)
    call = Call(problem, regularizer, "float64", samples=1)
    call.y = call.solve()[None]
    names = "value", "relax", "vjp", "entropy", "entropy_grad", "sample", "mode", "log_prob", "log_prob_vjp"
    clean = {name: RESULTS[name](call) for name in names}
    assert not any(result.isnan().any() for result in clean.values())
    call.theta[0, 4], call.theta[1, 0], call.theta[3, 1], call.theta[4, :2] = torch.nan, torch.inf, 1e300, -torch.inf
    for name in names:
        dirty = RESULTS[name](call)
        assert dirty[[0, 1, 3, 4]].isnan().all(), name
        assert torch.equal(dirty[2], clean[name][2]), name


def test_a_nan_of_the_bits_that_say_absent(tiles):
    """It is sent as another one: nobody waits for it forever."""
    call = Call(PROBLEMS["top-k of each instance, all items among them"], "shannon", "float32")
    call.z[0, 0] = torch.tensor(-1, dtype=torch.int32, device=DEVICE).view(torch.float32)
    assert call.vjp()[0].isnan().any() and call.vjp()[1].isfinite().all()


@pytest.mark.parametrize("name", NOT_VALID)
def test_a_capacity_that_is_not_valid_is_nan_alone(name, tiles):
    check_a_capacity_that_is_not_valid(name)


@pytest.mark.parametrize("regularizer", ["gini", "shannon"])
def test_bad_strengths(regularizer, segments):
    call = Call(PROBLEMS["the first cell of a tile"], regularizer, "float64")
    for bad in (0.0, -1.0, float("nan")):
        for gamma in (torch.tensor(bad), tensor([bad])):
            call.gamma = gamma
            assert call.operator()[0].isnan().all() and call.operator()[1].isnan().all()


def test_the_rule(limits):
    """Few instances of many items, fewer if picks move further than a tile; memory is bounded, whatever the shape."""
    assert plan.tiles(16, 4096, 512, 1, 1, 4, 132) is not None
    assert plan.tiles(16, 4096, 20, 1, 1, 4, 132) is None
    assert plan.tiles(16, 20, 512, 1, 1, 4, 132) is None
    assert plan.tiles(16, 4096, 512, plan.TILE + 1, 1, 4, 132) is None
    assert plan.tiles(8192, 4096, 512, 1, 1, 4, 132) is None
    assert plan.tiles(16, 500, 5000, 39, 1, 4, 132) is not None is not plan.tiles(8, 1000, 50_000, 200, 2, 4, 132)
    assert plan.tiles(16, 500, 1_000_000, 39_999, 1, 4, 132) is None is plan.tiles(32, 500, 5000, 39, 1, 4, 132)
    assert plan.tiles(16, 100, 5000, 199, 1, 4, 132) is None is plan.tiles(16, 500, 2000, 39, 1, 4, 132)
    assert plan.segments(64, 1024, 128, 1, 1, 4, 132) is None is plan.segments(132, 4096, 512, 1, 1, 4, 132)
    assert plan.segments(1, 4096, 5000, 39, 1, 4, 132) is None
    for (batch, n, k), count in {(16, 4096, 512): 4, (4, 32768, 2048): 8, (1, 131072, 2048): 32}.items():
        found = plan.segments(batch, n, k, 1, 1, 4, 132)
        assert found is not None and found[0] == count and found[1].instances == batch * count
    for batch, n, k in [(1, 131072, 2048), (4, 100_000, 10_000), (16, 1 << 20, 130)]:
        for tables in (1, 2):
            found = plan.tiles(batch, n, k, 1, tables, 4, 132)
            assert found is not None and k < found.width <= k + plan.TILE
            table = tables * found.instances * found.items * found.width * 4
            assert table <= plan.ITEM_SCRATCH
            assert table > plan.ITEM_SCRATCH / 4 or (found.instances, found.items) == (batch, n)


# With a real device, by the public functions.


def large(
    shape: tuple[int, int], constraint_of: Callable[[], Any], regularizer: str, dtype: Any = torch.float32
) -> None:
    """Against the CPU."""
    constraint, smoothing = constraint_of(), SMOOTHINGS[regularizer](0.6)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    theta, z = scores(shape, dtype), scores(shape, dtype, seed=1)
    y = kg.relax(theta.cuda(), constraint, smoothing)
    assert np.abs(host(y) - host(kg.relax(theta.double(), constraint, smoothing))).max() <= tolerance.relax
    slopes = [
        gradient(lambda x: kg.relax(x, constraint, smoothing), *x) for x in ((theta.cuda(), z.cuda()), (theta, z))
    ]
    assert_within(host(slopes[0]), host(slopes[1]), 2 * tolerance.vjp, 0.1, "vjp")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_many_tiles(dtype, tiles, regularizer):
    large((5, 1500), lambda: kg.TopK(700), regularizer, dtype)
    large((3, 900), lambda: kg.TopK(640, at_least=500), regularizer, dtype)
    for heaviest in (33, 900):
        weights = np.random.default_rng(0).integers(0, heaviest, 600)
        large((3, 600), lambda: kg.Knapsack(weights, 3000, at_least=2900), regularizer, dtype)


@needs_gpu
def test_cuda_more_programs_than_the_device_holds(tiles):
    """132 multiprocessors hold some 4000 warps; here are 6600 programs, of which many wait for others."""
    tiles(GROUP=USUAL_GROUP)
    large((400, 520), lambda: kg.TopK(500), "gini")


@needs_gpu
def test_cuda_beside_a_busy_stream(tiles):
    """Programs start late, and few at a time, while another stream has the device."""
    constraint, smoothing, theta = kg.TopK(300), kg.Tsallis(0.7), scores((64, 600), torch.float32).cuda()
    expected = kg.relax(theta, constraint, smoothing)
    other, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(40):
            x = (x @ x).clamp(-1, 1)
    found = [kg.relax(theta, constraint, smoothing) for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


@needs_gpu
def test_cuda_two_pipelines_at_once(tiles):
    """On two streams, each with more tiles than half of the device holds."""
    smoothing, theta = kg.Gini(0.7), scores((200, 520), torch.float32).cuda()
    constraints = kg.TopK(500), kg.TopK(400)
    expected = [kg.relax(theta, constraint, smoothing) for constraint in constraints]
    streams, found = (torch.cuda.Stream(), torch.cuda.Stream()), []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, constraint in zip(streams, constraints):
            with torch.cuda.stream(stream):
                found.append(kg.relax(theta, constraint, smoothing))
    torch.cuda.synchronize()
    for place, y in enumerate(found):
        assert torch.equal(y, expected[place % 2])


@needs_gpu
def test_cuda_segments(tiles):
    large((3, 4099), lambda: kg.TopK(700), "shannon")
    large((1, 2500), lambda: kg.TopK(300, at_least=250), "shannon", torch.float64)


@needs_gpu
def test_cuda_the_first_call_on_another_stream(tiles):
    """What is kept is complete before others read it."""
    theta, smoothing = scores((4, 300), torch.float32).cuda(), kg.Gini(0.7)
    expected = kg.relax(theta, kg.TopK(100), smoothing)
    for _ in range(5):
        forget_plans()
        constraint, streams, found = kg.TopK(100), [torch.cuda.Stream() for _ in range(3)], []
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(kg.relax(theta, constraint, smoothing))
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in found)


@needs_gpu
def test_cuda_what_is_captured_is_not_kept(tiles):
    """A shape that was first seen in a graph, called before that is replayed."""
    constraint, smoothing = kg.TopK(100), kg.Gini(0.7)
    small, theta = scores((2, 300), torch.float32).cuda(), scores((4, 300), torch.float32).cuda()
    expected = kg.relax(theta, kg.TopK(100), smoothing)
    forget_plans()
    kg.relax(small, constraint, smoothing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kg.relax(theta, constraint, smoothing)
    assert torch.equal(kg.relax(theta, constraint, smoothing), expected)
    graph.replay()
    assert torch.equal(captured, expected)


@needs_gpu
def test_cuda_what_a_graph_reads_stays(tiles):
    """However many shapes come after it."""
    tiles(SEGMENTED=(0, 1))
    constraint, smoothing = kg.TopK(100), kg.Gini(0.7)
    theta = scores((4, 300), torch.float32).cuda()
    expected = kg.relax(theta, constraint, smoothing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kg.relax(theta, constraint, smoothing)
    for batch in range(5, 6 + from_torch._LARGEST_MEMO):
        from_torch._way_of("operator", theta.new_zeros(batch, 300), constraint.copies[0, 300], np.ones(()), "gini")
    torch.cuda.synchronize()
    garbage = [torch.full((count,), -1, device="cuda", dtype=torch.int32) for count in range(1, 4000)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected) and garbage


@needs_gpu
def test_cuda_graphs(tiles, regularizer):
    """Edges are empty again in every replay."""
    constraint, smoothing = kg.TopK(100), SMOOTHINGS[regularizer](0.7)
    theta, z = scores((4, 300), torch.float32).cuda().requires_grad_(), scores((4, 300), torch.float32, seed=1).cuda()

    def step() -> tuple[Any, Any]:
        y = kg.relax(theta, constraint, smoothing)
        return y.detach(), torch.autograd.grad(y, theta, z)[0]

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
            theta.copy_(scores((4, 300), torch.float32, seed=seed))
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@needs_gpu
def test_cuda_the_paths(tiles, regularizer):
    constraint, smoothing = kg.TopK(150, at_least=140), SMOOTHINGS[regularizer](0.8)
    theta = scores((4, 400))
    assert torch.equal(kg.solve(theta.cuda(), constraint).cpu(), kg.solve(theta, constraint))
    y = kg.sample(theta.cuda(), constraint, smoothing, num_samples=2000)
    assert constraint.contains(y).all()
    mean = host(kg.relax(theta, constraint, smoothing))
    assert (np.abs(host(y).mean(axis=0) - mean) <= 6 * np.sqrt(mean * (1 - mean) / 2000) + 10 / 2000).all()
    log_prob = kg.log_prob(theta.cuda(), y[:5], constraint, smoothing)
    expected = kg.log_prob(theta, y[:5].cpu(), constraint, smoothing)
    assert_within(host(log_prob), host(expected), TOLERANCES["float64"].log_prob, 1.0)


@needs_gpu
def test_cuda_memory_is_bounded(tiles):
    """An instance of 100,000 items and 10,000 capacities, in pieces."""
    theta, z = (scores((1, 100_000), torch.float32, seed=seed).cuda() for seed in (0, 1))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    slope = gradient(lambda x: kg.relax(x, kg.TopK(10_000), kg.Shannon()), theta, z)
    torch.cuda.synchronize()
    assert slope.isfinite().all() and torch.cuda.max_memory_allocated() < 6e9


def test_lattices_on_the_device_are_cut(tiles):
    """A capacity above the total weight, which only the device knows."""
    call = Call(Problem(np.array([[0.4, -0.3, 0.8, 0.1]]), [2, 1, 3, 1], 7, at_least=5), "tsallis", "float64")
    expected = call.operator()
    uncut = call.lattice.replace(capacity=tensor([20], "int64"), slack=tensor([15], "int64"), reach=20)
    torch.testing.assert_close(from_torch.operator(call.theta, uncut, call.gamma, "tsallis"), expected)
