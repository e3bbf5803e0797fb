"""The GPU kernels on several budgets against the reference: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import (  # noqa: F401
    DEVICE,
    EVERY,
    PATHS,
    TILES,
    Call,
    Limits,
    check_frontier,
    check_log_prob_gradient,
    check_log_probs_of_all_selections,
    check_paths,
    check_sweeps,
    host,
    limits,
    needs_gpu,
    on_device,
)

import knapgrad as kg
from boxes import Boxes

torch = pytest.importorskip("torch")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from knapgrad.kernels.triton import from_torch as kernels  # noqa: E402
from knapgrad.kernels.triton import plan  # noqa: E402
from knapgrad.kernels.triton.steps import can_pick, sides_of  # noqa: E402

pytestmark = [test_triton.pytestmark, pytest.mark.usefixtures("unwritten_memory_is_nan")]

_RNG = np.random.default_rng(0)
_THETA = np.random.default_rng(1).normal(size=(3, 5))
_THETA[1, 1] = -np.inf


def _box(weights: Any, capacities: Any) -> Boxes:
    return Boxes(_THETA, weights, capacities, 0.5)  # exact in float32, which the interpreter makes of a number


PROBLEMS: dict[str, Boxes] = {
    "two": _box([[1, 1, 1, 1, 1], [3, 0, 2, 4, 9]], [3, 6]),
    "two of each": _box(_RNG.integers(0, 4, (2, 3, 5)), _RNG.integers(0, 6, (2, 3))),
    "two, and few weights": _box(
        [np.array([[2, 3, 1, 4, 1], [0, 1, 0, 0, 0], [1, 1, 4, 1, 3]]),
         np.array([[1, 2, 3, 1, 2], [2, 0, 1, 0, 3], [1, 1, 1, 1, 1]])], [5, 3],
    ),
    "three": _box([[1, 2, 1, 0, 1], [2, 1, 0, 1, 2], [1, 1, 2, 3, 1]], [2, 2, 3]),
    "many tiles": _box([[3, 9, 8, 1, 5], [1, 1, 1, 0, 1]], [13, 2]),
    "budgets of 0": _box([[0, 0, 0, 1, 0], [2, 1, 3, 1, 4], [0, 0, 0, 0, 0]], [0, 5, 0]),
    "one": _box([[2, 1, 3, 0, 4]], [5]),
}  # fmt: skip


@pytest.fixture(params=[*PATHS, "tiles"])
def path(request: pytest.FixtureRequest, limits: Limits) -> None:  # noqa: F811
    limits(**PATHS.get(request.param, TILES))


def sent(x: np.ndarray) -> Any:
    return torch.from_numpy(x).to(DEVICE)


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


@pytest.mark.thinned(15)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_sweeps_against_the_reference(name, dtype, regularizer, path):
    check_sweeps(PROBLEMS[name], regularizer, dtype)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", PROBLEMS)
def test_paths_against_the_reference(name, regularizer, path):
    check_paths(PROBLEMS[name], regularizer, "float64")


@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_gradient_of_log_prob_by_differences(name, regularizer, path):
    check_log_prob_gradient(PROBLEMS[name], regularizer, "float64")


@pytest.mark.parametrize("name", ["two", "three"])
def test_log_probs_of_all_selections(name, regularizer, limits):  # noqa: F811
    check_log_probs_of_all_selections(PROBLEMS[name], regularizer)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_frontier_against_the_reference(name, regularizer):
    check_frontier(PROBLEMS[name], regularizer)


@pytest.mark.thinned(5)
def test_a_broken_instance_is_nan_alone(regularizer, path):
    call = Call(PROBLEMS["two"], regularizer, "float32")
    names = ["value", "relax", "vjp", "sample", "mode", "frontier"]
    clean = host(EVERY["relax"](call))
    call.theta[0, 4], call.theta[2, 0] = np.nan, np.inf  # the first never fits
    for name in names:
        result = host(EVERY[name](call)).reshape(3, -1)
        assert np.isnan(result[[0, 2]]).all(), name
        assert not np.isnan(result[1]).any(), name
    np.testing.assert_array_equal(host(EVERY["relax"](call))[1], clean[1])


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
