"""The GPU kernels for choices among options, and frontiers, against the reference: on a GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import (
    EVERY,
    Call,
    check_frontier,
    check_log_prob_gradient,
    check_log_probs_of_all_selections,
    check_paths,
    check_sweeps,
    on_device,
    tensor,
)

import knapgrad as kg
from choices import Choices
from instances import Problem
from knapgrad.regularizers import REGULARIZERS as CLASSES

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from knapgrad.kernels.triton import from_torch, plan  # noqa: E402

pytestmark = test_triton.pytestmark
limits = test_triton.limits

OPTIONS = (1, 2, 3, 5, 8)
KINDS = ("at most", "at least", "optional")


def groups_of(kind: str, options: int, groups: int = 3, batch: int = 2, factor: int = 1, seed: int = 0) -> Choices:
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
    optional = kind == "optional" and options > 1
    return Choices(theta, factor * weights, factor * capacity, rng.uniform(0.8, 2.0, batch), factor * least, optional)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("options", OPTIONS)
def test_sweeps_against_the_reference(options, regularizer, limits):
    number = OPTIONS.index(options) + list(CLASSES).index(regularizer)
    problem = groups_of(KINDS[number % 3], options, groups=2 if options > 4 else 3)
    check_sweeps(problem, regularizer, ("float32", "float64")[number // 3 % 2])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_paths_against_the_reference(options, limits):
    number = OPTIONS.index(options)
    check_paths(groups_of(KINDS[(number + 1) % 3], options, seed=1), list(CLASSES)[number % 3], "float64")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", KINDS)
def test_many_options_in_loops(kind, limits):
    limits(UNROLLED=0)
    options, regularizer = {"at most": 3, "at least": 5, "optional": 2}[kind], list(CLASSES)[KINDS.index(kind)]
    check_sweeps(groups_of(kind, options, groups=2), regularizer, "float64")
    check_paths(groups_of(kind, options, groups=2, seed=1), regularizer, "float64")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind, loops", [("at most", False), ("at least", False), ("at least", True)])
def test_several_tiles(kind, loops, limits):
    """Weights 30 times as large decide alike. Sums at once, and where it is unrolled at the end."""
    few, many = (Call(groups_of(kind, 3, groups=2, factor=factor, seed=1), "gini", "float64") for factor in (1, 30))
    few.y = many.y = few.sample()
    limits(UNROLLED=0 if loops else 16)
    limits.plan(block=32, later=not loops)
    assert many.lattice.reach > 64
    for name, result in EVERY.items():
        if name not in ("mode", "frontier"):  # ties; other capacities
            torch.testing.assert_close(result(many), result(few), rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("operation", EVERY)
def test_one_program_for_all_instances(operation, limits):
    call = Call(groups_of("at most", 3, groups=2, batch=3), "tsallis", "float64")
    call.y = call.sample()
    apart = EVERY[operation](call)
    limits(SCRATCH=(1, 1), ITEM_SCRATCH=1)
    assert plan.plan(3, 6, 9, 1, 8, 2, 3).programs == 1
    assert torch.equal(EVERY[operation](call), apart)


def test_plans_of_choices():
    """No turn with a few programs left over; rows of any length by one program; no more warps than a row has work."""
    for options, programs in ((8, 1024), (9, 512)):
        layout = plan.plan(1024, 64 * options, 1000, 2, 4, 132, options)
        assert layout.programs == programs and 15 * 132 < programs * layout.warps <= 16 * 132
    for batch, reach, options in ((3, 10, 2), (1, 10**6, 4), (5000, 300, 3)):
        layout = plan.plan(batch, 40 * options, reach, 2, 8, 132, options)
        assert layout.block == 32 * layout.warps <= layout.width and layout.width > reach
        assert not layout.narrow and 1 <= layout.programs <= batch


@pytest.mark.parametrize("kind", ["at most", "at least"])
def test_log_probs_of_all_selections(kind, regularizer, limits):
    check_log_probs_of_all_selections(groups_of(kind, 3, groups=2, seed=3), regularizer)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", [2, 3, 4])
def test_log_prob_gradient_against_differences(options, regularizer, limits):
    kind = KINDS[(options + list(CLASSES).index(regularizer)) % 2]
    check_log_prob_gradient(groups_of(kind, options, groups=2, seed=2), regularizer, "float64")


def test_more_samples_than_lanes(limits):
    call = Call(groups_of("at most", 2, groups=2), "gini", "float64", samples=130)
    call.y = drawn = call.sample()
    whole, uniforms, cotangent, total = call.log_prob_vjp(), call.uniforms, call.cotangent, 0
    for part in (slice(0, 60), slice(60, 130)):
        call.uniforms, call.y, call.cotangent = uniforms[part], drawn[part], cotangent[part]
        assert torch.equal(call.sample(), drawn[part])
        total += call.log_prob_vjp()
    torch.testing.assert_close(whole, total, rtol=1e-12, atol=1e-12)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loops", [False, True], ids=["trees", "loops"])
def test_a_broken_instance_is_nan_alone(loops, limits):
    """NaN of an option that is too heavy, plus infinity, a least weight that no selection has, all options of a group
    masked, and none that fit."""
    limits(UNROLLED=0 if loops else 16)
    rng = np.random.default_rng(0)
    theta, weights = rng.standard_normal((6, 2, 3)), np.array([[0, 2, 99], [0, 4, 6]])
    capacity, least = np.array([9, 7, 5, 8, 6, 7]), np.array([4, 6, 2, 8, 6, 0])
    call = Call(Choices(theta, weights, capacity, at_least=least), "gini", "float32")
    call.y = call.sample()
    names = ["relax", "vjp", "solve"] if loops else [name for name in EVERY if name != "frontier"]
    clean = {name: EVERY[name](call) for name in names}
    assert not any(result.isnan().any() for result in clean.values())
    least[1] = 7
    call.lattice = on_device(kg.MultipleChoice(weights, capacity, at_least=least).lattice(6))
    call.lattice.slack[5] = -1
    call.theta[2, 3:], call.theta[3, 2], call.theta[4, 0] = -torch.inf, torch.nan, torch.inf
    for name in names:
        dirty = EVERY[name](call)
        assert dirty[1:].isnan().all(), name
        assert torch.equal(dirty[0], clean[name][0]), name


def test_memory_layout_and_batches_of_more_dimensions(limits):
    problem = groups_of("at least", 3, groups=2, batch=4)
    call = Call(problem, "gini", "float64")
    names = ("value", "relax", "vjp", "solve")
    plain = {name: EVERY[name](call) for name in names}

    def apart(x: Tensor) -> Tensor:
        """In a batch of two times two, with other numbers between."""
        x = x.reshape(2, 2, *x.shape[1:])
        return torch.stack([x, torch.full_like(x, -1)], -1)[..., 0]

    call.theta, call.z, call.gamma = (apart(x) for x in (call.theta, call.z, call.gamma))
    call.lattice = call.lattice.replace(
        **{name: apart(getattr(call.lattice, name)) for name in ("weights", "capacity", "slack")}
    )
    for name in names:
        result = EVERY[name](call)
        assert torch.equal(result.flatten(0, 1), plain[name])


def test_a_capacity_above_the_total_weight(limits):
    """On the host it is cut, and the slack with it, where the weights are known; else that is left to the kernels."""
    theta = np.random.default_rng(0).standard_normal((2, 2, 3))
    call = Call(Choices(theta, [0, 1, 3], 20, at_least=5), "tsallis", "float64")
    assert call.lattice.reach == 6
    call.y = call.sample()
    names = ("value", "relax", "entropy_grad", "sample", "log_prob")
    expected = {name: EVERY[name](call) for name in names}
    uncut = {"capacity": tensor([20], "int64"), "slack": tensor([15, 15], "int64")}
    for reach in (20, 6):
        call.lattice = call.lattice.replace(**uncut, reach=reach)
        for name in names:
            torch.testing.assert_close(EVERY[name](call), expected[name], rtol=1e-12, atol=1e-13)


def test_nothing_to_choose(limits):
    for theta in (np.zeros((2, 0, 3)), np.zeros((0, 2, 3))):
        call = Call(Choices(theta, [0, 1, 2], 3), "gini", "float64")
        assert not EVERY["value"](call).any() and EVERY["vjp"](call).shape == call.theta.shape
        assert call.solve().shape == call.theta.shape
        assert call.frontier().shape == (len(theta), call.lattice.reach + 1)


# Frontiers, of choices and of items.


@pytest.mark.parametrize("regularizer", [*CLASSES, "hard"])
@pytest.mark.parametrize("exactly", [False, True], ids=["at most", "exactly"])
def test_frontiers(regularizer, exactly, limits):
    theta, least = np.random.default_rng(0).standard_normal((2, 2, 3)), 7 if exactly else 0
    check_frontier(Choices(theta, [[2, 4, 3], [6, 1, 3]], 7, 0.5, at_least=least), regularizer)


def test_frontiers_in_loops_tiles_and_turns(limits):
    theta = np.random.default_rng(0).standard_normal((3, 2, 3))
    theta[1, 1, 1] = -np.inf
    limits(SCRATCH=(1, 1), ITEM_SCRATCH=1, UNROLLED=2)
    limits.plan(block=32)
    problem = Choices(theta, [[20, 40, 30], [60, 10, 30]], 70, 0.5)
    check_frontier(problem, "tsallis", reach=85)
    check_frontier(replace(problem, at_least=70), "shannon", reach=85)
    check_frontier(Problem(theta.reshape(3, 6), None, 4, 0.5), "gini")


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
