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
    "top-k": Problem(scores((2, 7)).numpy(), None, np.array([5, 7]), 1.3),
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
#: with the number of their items
OTHERS = {
    "options": (kg.MultipleChoice(CHOICES, 8), 9),
    "options, at least": (kg.MultipleChoice(CHOICES, 8, at_least=7, optional=True), 12),
    "many options": (kg.MultipleChoice(np.arange(18).reshape(1, 18), 9), 18),
    "two budgets": (kg.MultiKnapsack([[1, 1, 1, 1], [3, 0, 2, 4]], [2, 5]), 4),
    "three budgets": (kg.MultiKnapsack([[1, 0, 2], [3, 0, 2], [1, 1, 0]], [2, 3, 1]), 3),
}


def every_result(call: Call) -> dict[str, Any]:
    call.y = call.sample()
    return {name: result(call) for name, result in RESULTS.items()}


def check_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", PATHS)
def test_programs_keep_to_their_memory(name, path, limits):
    limits(**PATHS[path])
    with Watch() as watch:
        found = every_result(Call(PROBLEMS[name], "gini", "float32"))
    assert watch.launches > len(RESULTS) and not watch.received
    check_the_same(found, every_result(Call(PROBLEMS[name], "gini", "float32")))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("path", ["narrow", "wide", "tiles"])
def test_programs_of_choices_and_budgets_keep_to_their_memory(name, path, limits):
    limits(**(TILES if path == "tiles" else PATHS[path]))
    constraint, n = OTHERS[name]
    lattice, theta = test_triton.on_device(constraint.lattice(n)), scores((2, n))
    given, y = (lattice, np.array(0.7), "tsallis"), scores((3, 2, n)).abs() % 1
    with Watch() as watch:
        drawn = from_torch.sample(theta, y, *given)
        from_torch.vjp(theta, scores((2, n), seed=1), *given)
        from_torch.mode(theta, *given)
        from_torch.log_prob(theta, drawn, *given)
        from_torch.log_prob_vjp(theta, drawn, drawn[..., 0], *given)
        from_torch.frontier(theta, *given)
    assert watch.launches >= 6


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_whatever_arrives_late(name, limits):
    """Its programs keep to their memory too, and nothing changes, to the last bit."""
    problem, more = PIPELINES[name]
    limits(**TILES, **more)
    regularizer, dtype = ("shannon", "float32") if name == "segments" else ("tsallis", "float64")
    expected = every_result(Call(problem, regularizer, dtype))
    for late in (0.0, 0.8):
        with Watch(late) as watch:
            found = every_result(Call(problem, regularizer, dtype))
        assert watch.received > 100 and (watch.waits > 100) == (late > 0)
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
