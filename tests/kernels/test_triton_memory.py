"""What the programs of a launch do with memory, in Triton's interpreter: each keeps to its arrays, none touches what
another one writes, and what programs of a pipeline send to each other may arrive at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_triton
from interpreter import Fault, Watch
from test_triton import DEVICE, PATHS, RESULTS, TILES, Call, scores

import knapgrad as kg
from instances import Problem

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from knapgrad.kernels.triton import from_torch  # noqa: E402

pytestmark = [
    test_triton.pytestmark,
    pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter; on a GPU: python -m benchmarks.sanitize"),
]
limits = test_triton.limits

WEIGHTS, LIMITS = [4, 0, 7, 1, 12], np.array([13, 8])
PROBLEMS = {
    "knapsack": Problem(scores((2, 5)).numpy(), WEIGHTS, LIMITS, 0.8),
    "at least": Problem(scores((2, 5)).numpy(), WEIGHTS, LIMITS, 0.8, np.array([11, 0])),
    "top-k": Problem(scores((2, 5)).numpy(), None, np.array([4, 5]), 1.3),
}
#: with further limits
PIPELINES: dict[str, tuple[Problem, dict[str, Any]]] = {
    "picks beyond the next tile": (PROBLEMS["at least"], {}),
    "picks of a tile at most": (Problem(scores((2, 6)).numpy(), [3, 4, 0, 1, 4, 2], np.array([11, 9])), {}),
    "top-k": (PROBLEMS["top-k"], {}),
    "segments": (PROBLEMS["top-k"], {"SEGMENTED": (1 << 20, 2)}),
    "items a few at a time": (PROBLEMS["top-k"], {"ITEM_SCRATCH": 800}),
}

CHOICES = np.array([[2, 5, 0], [1, 4, 3], [6, 2, 2]])
ANY, ITEMS = ["narrow"], [*PATHS, "tiles"]  # where rows of options live does not depend on the limits
#: with the number of their items, and how they are laid out
OTHERS = {
    "options": (kg.MultipleChoice(CHOICES, 8), 9, ANY),
    "options, at least": (kg.MultipleChoice(CHOICES, 8, at_least=7, optional=True), 12, ANY),
    "many options": (kg.MultipleChoice(np.arange(18).reshape(1, 18), 9), 18, ANY),
    "two budgets": (kg.MultiKnapsack([[1, 1, 1, 1], [3, 0, 2, 4]], [2, 5]), 4, ITEMS),
    "three budgets": (kg.MultiKnapsack([[1, 0, 2], [3, 0, 2], [1, 1, 0]], [2, 3, 1]), 3, ["wide", "tiles"]),
}


def every_result(call: Call) -> dict[str, Any]:
    call.y = call.sample()
    return {name: result(call) for name, result in RESULTS.items()}


def check_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", PATHS)
def test_programs_keep_to_their_memory(name, path, limits):
    limits(**PATHS[path])
    with Watch() as watch:
        found = every_result(Call(PROBLEMS[name], "gini", "float32"))
    assert watch.launches and not watch.received
    check_the_same(found, every_result(Call(PROBLEMS[name], "gini", "float32")))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name, path", [(name, path) for name in OTHERS for path in OTHERS[name][2]])
def test_programs_of_choices_and_budgets_keep_to_their_memory(name, path, limits):
    limits(**(TILES if path == "tiles" else PATHS[path]))
    constraint, n, _ = OTHERS[name]
    lattice, theta = test_triton.on_device(constraint.lattice(n)), scores((2, n))
    given, uniforms, z = (lattice, np.array(0.7), "tsallis"), scores((3, 2, n)).abs() % 1, scores((2, n), seed=1)

    def results() -> dict[str, Any]:
        y, table = from_torch.sample(theta, uniforms, *given), from_torch.tabulate(theta, *given)[2]
        values = from_torch.frontier(theta, *given)
        return {
            "sample": y,
            "sample from a kept table": from_torch.sample(theta, uniforms, *given, table),
            "vjp": from_torch.vjp(theta, z, *given),
            "entropy": from_torch.entropy(theta, *given),
            "entropy_grad": from_torch.entropy_grad(theta, *given),
            "solve": from_torch.solve(theta, lattice),
            "mode": from_torch.mode(theta, *given),
            "log_prob": from_torch.log_prob(theta, y, *given),
            "log_prob_vjp": from_torch.log_prob_vjp(theta, y, z[None, :, 0].expand(3, -1), *given),
            "frontier": values,
            "frontier_vjp": from_torch.frontier_vjp(theta, values.nan_to_num(0, 0, 0), *given),
        }

    expected = results()
    with Watch(late=0.5) as watch:
        found = results()
    assert watch.launches and (watch.waits > 0) == (path == "tiles")
    check_the_same(found, expected)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_whatever_arrives_late(name, limits):
    """Its programs keep to their memory too, and nothing changes, to the last bit."""
    problem, more = PIPELINES[name]
    limits(**TILES, **more)
    regularizer, dtype = ("shannon", "float32") if name == "segments" else ("tsallis", "float64")
    expected = every_result(Call(problem, regularizer, dtype))
    with Watch(late=0.8) as watch:
        found = every_result(Call(problem, regularizer, dtype))
    assert watch.received > 100 and watch.waits > 100
    check_the_same(found, expected)


# The watch itself: programs with a fault each.


@triton.jit
def beyond(x, y):
    tl.store(y + tl.arange(0, 8), tl.load(x + 1 + tl.arange(0, 8)))


@triton.jit
def across(x, y):
    tl.store(y.to(tl.pointer_type(tl.int8)).to(tl.pointer_type(tl.float32)), 0.0)
    tl.store((y.to(tl.int64) + 2).to(tl.pointer_type(tl.float32)), 0.0)


@triton.jit
def race(x, y):
    """Each program writes the cell that the next one reads."""
    tl.store(y + tl.program_id(0) + 1, tl.load(y + tl.program_id(0)))


@triton.jit
def race_backwards(x, y):
    """Each program writes the cell that the one before has read."""
    tl.store(y + tl.program_id(0), tl.load(y + tl.program_id(0) + 1))


@triton.jit
def both_write(x, y):
    tl.store(y, 1.0)


@triton.jit
def add_and_read(x, y):
    tl.atomic_add(y, 1.0)
    tl.store(x + tl.program_id(0), tl.load(y))


@triton.jit
def sent_twice(x, y):
    number = tl.program_id(0)
    if number == 0:
        tl.store(y, 1.0)
        tl.store(y, 2.0)
    else:
        tl.store(x, tl.load(y, volatile=True))


@triton.jit
def sent_again(x, y):
    number = tl.program_id(0)
    if number == 1:
        tl.store(x, tl.load(y, volatile=True))
    elif number == 0:
        tl.store(y, 1.0)
    else:
        tl.store(y, 2.0)


@triton.jit
def sent_by_many_lanes(x, y):
    if tl.program_id(0) == 0:
        tl.store(y + 0 * tl.arange(0, 4), tl.arange(0, 4).to(tl.float32))
    else:
        tl.store(x, tl.load(y, volatile=True))


@triton.jit
def sent_in_parts(x, y):
    if tl.program_id(0) == 0:
        tl.store(y + tl.arange(0, 2), tl.zeros([2], tl.float32))
    else:
        tl.store(x, tl.load(y.to(tl.pointer_type(tl.int64)), volatile=True).to(tl.float32))


@triton.jit
def looked_at_early(x, y):
    if tl.program_id(0) == 0:
        tl.store(x, tl.load(y, volatile=True))
    else:
        tl.store(y, 1.0)


@triton.jit
def swap(x, y):
    tl.atomic_cas(y.to(tl.pointer_type(tl.int32)), 0, 1)


@triton.jit
def never_sent(x, y):
    tl.store(x, tl.load((y + 2).to(tl.pointer_type(tl.int32)), volatile=True).to(tl.float32))


@triton.jit
def all_is_well(x, y):
    number = tl.program_id(0)
    tl.store(y + number, tl.load(x + 7) + number)
    if number > 0:
        tl.store(x + number - 1, tl.load(y + number - 1, volatile=True))
    tl.atomic_add(y + 5, 1.0)


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "beyond": (beyond, "leaves its arrays"),
    "across": (across, "goes across elements"),
    "race": (race, "reads what another one writes"),
    "race backwards": (race_backwards, "writes what another one reads"),
    "both write": (both_write, "writes what another one reads or writes"),
    "atomics": (add_and_read, "reads what others add to|adds to what another one reads"),
    "sent twice": (sent_twice, "receives what is written more than once"),
    "sent by many lanes": (sent_by_many_lanes, "receives what is written more than once"),
    "sent in parts": (sent_in_parts, "in parts"),
    "looked at early": (looked_at_early, "writes what another one reads"),
    "swap": (swap, "swaps"),
    "sent again": (sent_again, "writes what another one reads or writes|writes again"),
    "never sent": (never_sent, "waits for what no program before it has sent"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    kernel, what = FAULTS[name]
    x, y = torch.zeros(24).split(8)[::2]
    y.view(torch.int32)[2] = -1
    with Watch(), pytest.raises(Exception, match=what) as caught:
        kernel[(3,)](x, y)
    assert isinstance(caught.value.__cause__ or caught.value, Fault)


def test_what_is_no_fault():
    x, y = torch.arange(8.0), torch.zeros(8)
    with Watch() as watch:
        all_is_well[(3,)](x, y)
    assert y.tolist() == [7, 8, 9, 0, 0, 3, 0, 0] and x[:2].tolist() == [7, 8]
    assert (watch.launches, watch.received, watch.waits) == (1, 2, 0)


@triton.jit
def add_one(x):
    tl.store(x, tl.load(x) + 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_beyond_32_bits_are_found(dtype):
    x = torch.tensor([2**31 - 1], dtype=dtype)
    if dtype == torch.int32:
        with pytest.raises(Exception, match="int32 overflow"):
            add_one[(1,)](x)
    else:
        add_one[(1,)](x)
        assert x.item() == 2**31
