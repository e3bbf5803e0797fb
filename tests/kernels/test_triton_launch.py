"""Launches that skip Triton's JIT, by a kernel that only writes down what it is given; and on a GPU, by real ones."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import knapgrad as kg
from knapgrad.constraints import base
from knapgrad.kernels import compile_log
from knapgrad.torch import backend, private

pytest.importorskip("triton")

from knapgrad.kernels.triton import from_torch, launch
from knapgrad.kernels.triton.launch import Launch

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Kernel:
    """Returns itself as the compiled kernel, or nothing, as Triton's interpreter does."""

    __name__ = "some_kernel"
    arg_names = ("theta", "weights", "scale", "y", "rows", "table", "BLOCK")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.through_jit, self.direct = compiles, [], []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.run if len(grid) == 1 else self.run_compiled

    def run(self, **arguments: Any) -> Any:
        self.through_jit.append(arguments)
        return self if self.compiles else None

    def run_compiled(self, *arguments: Any, stream: int) -> None:
        self.direct.append((dict(zip(self.arg_names, arguments)), stream))


@pytest.fixture
def prepare(monkeypatch):
    monkeypatch.setattr(launch.private, "raw_stream", lambda device: 7)
    weights = torch.arange(4)

    def prepare(kernel: Kernel) -> Launch:
        scratch = {"rows": (torch.float64, 3), "table": (torch.float32, 5)}
        return Launch(kernel, 2, {"weights": weights, "BLOCK": 32}, {"num_warps": 4}, scratch)

    prepare.weights = weights
    return prepare


def test_the_second_launch_takes_addresses(prepare):
    kernel = Kernel()
    prepared, y = prepare(kernel), torch.zeros(4)
    for scale in (0.5, 0.25):
        theta = torch.zeros(4)
        prepared({"theta": theta, "scale": scale, "y": y})
    (first,), ((second, stream),) = kernel.through_jit, kernel.direct
    assert first["theta"].shape == (4,) and first["scale"] == 0.5 and first["y"] is y and first["num_warps"] == 4
    assert first["rows"].dtype == torch.float64 and first["rows"].shape == (3,)
    assert first["table"].dtype == torch.float32 and first["table"].shape == (5,)
    assert second["theta"] == theta.data_ptr() and second["y"] == y.data_ptr() and second["scale"] == 0.25
    assert second["weights"] == prepare.weights.data_ptr() and second["BLOCK"] == 32 and stream == 7
    assert second["table"] - second["rows"] >= 3 * 8 and second["table"] % 256 == second["rows"] % 256


def test_other_alignments_go_through_the_jit(prepare):
    kernel = Kernel()
    prepared, y, whole = prepare(kernel), torch.zeros(4), torch.zeros(9)
    aligned, shifted = whole[:4], whole[1:5]
    assert aligned.data_ptr() % 16 == 0 and shifted.data_ptr() % 16 == 4
    for theta in (shifted, shifted, aligned, aligned, shifted):
        prepared({"theta": theta, "scale": 1.0, "y": y})
    assert [x["theta"].data_ptr() for x in kernel.through_jit] == [
        x.data_ptr() for x in (shifted, shifted, aligned, shifted)
    ]
    assert [x["theta"] for x, _ in kernel.direct] == [aligned.data_ptr()]


def test_what_is_given_replaces_scratch(prepare):
    kernel = Kernel()
    prepared, table = prepare(kernel), torch.zeros(5)
    for _ in range(2):
        prepared({"theta": torch.zeros(4), "scale": 1.0, "y": table, "table": table})
    assert kernel.through_jit[0]["table"] is table and kernel.direct[0][0]["table"] == table.data_ptr()


def test_without_a_compiled_kernel_the_jit_launches(prepare):
    kernel = Kernel(compiles=False)
    prepared = prepare(kernel)
    for _ in range(3):
        prepared({"theta": torch.zeros(4), "scale": 1.0, "y": torch.zeros(4)})
    assert len(kernel.through_jit) == 3 and not kernel.direct


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_series_differs_in_its_numbers_alone(shift, compiles, prepare):
    kernel = Kernel(compiles)
    prepared, theta = Launch(kernel, 2, {"weights": prepare.weights}, {}, {}), torch.zeros(9)[shift : shift + 4]
    prepared.series({"theta": theta, "y": theta}, scale=range(5, 0, -2), BLOCK=range(3))
    seen = [(x["scale"], x["BLOCK"]) for x in (*kernel.through_jit, *(x for x, _ in kernel.direct))]
    assert seen == [(5, 0), (3, 1), (1, 2)]
    assert len(kernel.direct) == (2 if compiles and not shift else 0)
    weights = prepare.weights.data_ptr()
    assert all((x["theta"], x["y"], x["weights"]) == (*[theta.data_ptr()] * 2, weights) for x, _ in kernel.direct)


@pytest.mark.parametrize("limit, said", [(-1.0, True), (60.0, False)])
def test_a_first_launch_that_waits_for_the_compiler_says_so_once(limit, said, prepare, monkeypatch, caplog):
    monkeypatch.setattr(compile_log, "LONG", limit)
    prepared = prepare(Kernel())
    with caplog.at_level(logging.WARNING, "knapgrad"):
        for _ in range(2):
            prepared({"theta": torch.zeros(4), "scale": 1.0, "y": torch.zeros(4)})
    assert ["compiled some_kernel for float32" in record.getMessage() for record in caplog.records] == [True] * said


# On a GPU.

CONSTRAINTS = {
    "knapsack": kg.Knapsack([3, 1, 2, 2, 4], 6),
    "top-k": kg.TopK(2),
    "at least": kg.Knapsack([3, 1, 2, 2, 4], 6, at_least=3),
}


@CUDA
@pytest.mark.parametrize("way", ["compiled", "jit", "stand-ins", "not aligned", "transposed"])
@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_every_way_to_launch_gives_the_same_on_cuda(constraint, way, monkeypatch):
    rng = np.random.default_rng(0)
    scores = torch.tensor(rng.normal(size=(3, 5)), dtype=torch.float32)
    gammas: list[Any] = [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5, 0.5]).cuda(), torch.tensor(0.5).cuda()]
    if way == "jit":
        monkeypatch.setattr(Launch, "_addresses", lambda *_: None)
    if way == "stand-ins":
        monkeypatch.setitem(private.FOUND, "stream", None)
        monkeypatch.setitem(private.FOUND, "device", None)
    constraint = type(constraint)(**constraint.arguments)
    expected_y = kg.relax(scores, constraint, kg.Gini(0.5))
    for gamma in gammas:
        for _ in range(3):
            theta = scores.cuda()
            if way == "not aligned":
                theta = torch.cat([theta.new_zeros(1), theta.flatten()])[1:].view(3, 5)
                assert theta.data_ptr() % 16
            if way == "transposed":
                theta = theta.T.contiguous().T
            theta.requires_grad_()
            cpu = scores.clone().requires_grad_()
            on_host = gamma.cpu() if isinstance(gamma, torch.Tensor) else gamma
            y, reference = kg.relax(theta, constraint, kg.Gini(gamma)), kg.relax(cpu, constraint, kg.Gini(on_host))
            torch.testing.assert_close(y.detach().cpu(), expected_y)
            (y**2).sum().backward()
            (reference**2).sum().backward()
            torch.testing.assert_close(theta.grad.cpu(), cpu.grad, atol=1e-5, rtol=1e-5)
            assert torch.equal(kg.solve(theta, constraint).cpu(), kg.solve(scores, constraint))


@CUDA
def test_a_second_call_does_not_go_through_the_jit_on_cuda(monkeypatch):
    theta, constraint = torch.randn(3, 5, device="cuda", requires_grad=True), kg.TopK(2)
    kg.relax(theta, constraint, kg.Gini()).sum().backward()

    def refuse(*_: Any) -> None:
        raise AssertionError("Triton's JIT was asked again")

    monkeypatch.setattr(Launch, "_compile", refuse)
    kg.relax(theta, constraint, kg.Gini(0.3)).sum().backward()


@CUDA
def test_a_constraint_that_is_made_in_every_call_is_sent_once_on_cuda(monkeypatch):
    theta, weights = torch.randn(3, 5, device="cuda", requires_grad=True), [3, 1, 2, 2, 7]
    expected = kg.relax(theta, kg.Knapsack(weights, 6), kg.Gini())
    expected.sum().backward()

    def refuse(*_: Any) -> None:
        raise AssertionError("it was sent, or planned, again")

    monkeypatch.setattr(backend, "_sent", refuse)
    monkeypatch.setattr(from_torch, "_prepared", refuse)
    y = kg.relax(theta, kg.Knapsack(torch.tensor(weights), 6), kg.Gini())
    y.sum().backward()
    assert torch.equal(y, expected)


class Stream:
    """As much of a stream as is asked for, and its events, which are over when ``done`` says so."""

    def __init__(self) -> None:
        self.done, self.waited = False, 0

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.done

    def wait_event(self, event: Stream) -> None:
        self.waited += 1


@pytest.fixture
def streams(monkeypatch):
    """Two, and a function that makes one of them current; what is sent stays where it is, and is a new lattice."""
    streams, state = [Stream(), Stream()], {"current": 0, "capturing": False}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[state["current"]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(private, "raw_stream", lambda _: state["current"])
    tensors = {name: torch.ones(1, dtype=torch.int64) for name in ("weights", "capacity")}
    monkeypatch.setattr(backend, "_sent", lambda plain, _: plain.replace(**tensors))
    base._first_equal.cache_clear()
    yield streams, state
    base._first_equal.cache_clear()


def copy_of(constraint: Any, n: int = 3) -> Any:
    return backend._lattice_on_device(constraint, torch.zeros(2, n), (0, n))


def test_equal_constraints_share_their_copies(streams):
    (first, second), state = streams
    a, b, other = kg.TopK(2), kg.TopK(2), kg.TopK(1)
    sent = copy_of(a)
    assert copy_of(b) is sent is copy_of(kg.TopK(2)) and copy_of(other) is not sent
    first.done = True
    assert copy_of(b) is sent and (0, 3, "event") not in b.copies  # known to be there
    assert copy_of(a, 4) is copy_of(b, 4) is not sent
    state["current"] = 1
    waited = second.waited
    assert copy_of(b) is sent and copy_of(kg.TopK(2)) is not sent  # the stream on which it is made has its own
    assert second.waited == waited + 1  # for its own


def test_another_stream_waits_for_copies(streams):
    (first, second), state = streams
    a, b = kg.TopK(2), kg.TopK(2)
    sent = copy_of(a)
    assert copy_of(b) is sent
    state["current"] = 1
    assert copy_of(b) is sent and second.waited == 1
    first.done = True
    assert copy_of(b) is sent and second.waited == 1


def test_what_a_constraint_has_is_never_taken_from_it(streams):
    """A graph may read it."""
    first, a = kg.TopK(2), kg.TopK(2)
    copy_of(first)
    a.copies["widest"] = None
    kept = copy_of(a, 4)
    for k in range(100):
        copy_of(kg.Knapsack([1, 2, 3], k))  # more than are remembered
    copy_of(kg.TopK(2))
    copy_of(a, 5)
    assert copy_of(a, 4) is kept and "widest" in a.copies


def test_a_copy_is_not_sent_while_a_graph_is_captured(streams):
    _, state = streams
    a = kg.TopK(2)
    copy_of(a)
    state["capturing"] = True
    assert copy_of(a) is a.copies[0, 3]
    with pytest.raises(RuntimeError, match="make one call with this constraint"):
        copy_of(kg.TopK(2))


def test_launches_that_graphs_read_do_not_push_others_out(monkeypatch):
    made = []

    def prepare(*_: Any) -> Any:
        made.append(Launch(Kernel(True), 1, {}, {}, {}))
        return made[-1]

    monkeypatch.setattr(from_torch, "_prepared", prepare)
    monkeypatch.setattr(from_torch, "_LARGEST_MEMO", 4)
    lattice = kg.TopK(2).lattice(3)

    def launch_of(batch: int) -> Any:
        return from_torch._way_of("operator", torch.zeros(batch, 3), lattice, np.ones(()), "gini")

    read = [launch_of(batch) for batch in range(10, 13)]
    for kept in read:
        kept.captured = True
    passing = [launch_of(batch) for batch in range(4)]
    assert [launch_of(batch) for batch in range(4)] == passing and len(made) == 7
    launch_of(5)
    assert [launch_of(batch) for batch in range(10, 13)] == read and launch_of(0) is not passing[0]


@CUDA
def test_launches_run_on_the_current_stream_on_cuda():
    constraint, stream = kg.TopK(2), torch.cuda.Stream()
    theta = torch.randn(3, 5, device="cuda")
    expected = kg.relax(theta, constraint, kg.Gini())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.cuda._sleep(10_000_000)
            later = theta + 1.0  # the kernel must wait for it
            result = kg.relax(later, constraint, kg.Gini())
    stream.synchronize()
    torch.testing.assert_close(result, expected)
