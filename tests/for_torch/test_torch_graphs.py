"""torch.compile and torch.export, as a training loop meets them: numbers that change, constraints that are made inside,
batches of any size."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import knapgrad as kg  # noqa: E402

WEIGHTS = [1, 2, 3, 1, 2, 1]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gradient(function: Callable[..., Tensor], theta: Tensor, *rest: Any) -> list[Tensor]:
    leaf = theta.clone().requires_grad_()
    result = function(leaf, *rest)
    return [result, *torch.autograd.grad(result.sum(), leaf)] if result.requires_grad else [result]


def check_calls(function: Callable[..., Tensor], calls: list[tuple[Any, ...]], graphs: int = 1) -> None:
    """Every call is as in eager mode, and only the first ones may compile."""
    run = compiled(function)
    for i, arguments in enumerate(calls):
        with torch.compiler.set_stance("default" if i < graphs else "fail_on_recompile"):
            found = with_gradient(run, *arguments)
        torch.testing.assert_close(found, with_gradient(function, *arguments), rtol=1e-12, atol=1e-13)


# Numbers that change.


CHANGING: dict[str, Callable[[int], Any]] = {
    "capacity": lambda i: kg.Knapsack(WEIGHTS, 1 + i),
    "capacity beyond the sum": lambda i: kg.Knapsack(WEIGHTS, 8 + i),
    "weights": lambda i: kg.Knapsack([*WEIGHTS[:-1], i], 5),
    "capacity of each instance": lambda i: kg.Knapsack(WEIGHTS, [i, 3, 2 * i, 4]),
    "least weight": lambda i: kg.Knapsack(WEIGHTS, 4 + i, at_least=1 + i),
    "k": lambda i: kg.TopK(i % 7),
    "least k": lambda i: kg.TopK(2 + i % 5, at_least=1),
    "bound": lambda i: kg.TopK(2, max_capacity=2 + i),
    "capacity of choices": lambda i: kg.MultipleChoice([[1, 2], [1, 3], [1, 1 + i]], 4 + i),
    "options of all groups": lambda i: kg.MultipleChoice([1, 2 + i], 6 + i),
    "optional choices": lambda i: kg.MultipleChoice([1, 2 + i], i, optional=True),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("operation", [kg.relax, kg.value, kg.entropy], ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("what", CHANGING)
def test_a_new_number_is_no_new_graph(what, operation):
    shape = (4, 3, 2) if "cho" in what or "options" in what else (4, 6)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        theta = numbers(*shape).to(device)
        check_calls(operation, [(theta, CHANGING[what](i), kg.Gini(0.3 + i)) for i in range(10)])


def test_a_layer_whose_gamma_and_budget_change_is_one_graph():
    layer, theta = kg.torch.Relax(kg.Knapsack(WEIGHTS, 4), kg.Gini(1.0)), numbers(4, 6)
    run = compiled(layer)
    schedule = kg.torch.GammaSchedule(layer, 0.01, steps=4)
    for i in range(12):
        if i > 5:
            layer.constraint = kg.Knapsack(WEIGHTS, 1 + i)
        if i > 8:
            layer.regularizer = kg.Gini(0.1 * i)
        with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
            torch.testing.assert_close(run(theta), kg.relax(theta, layer.constraint, layer.regularizer))
        schedule.step()


@pytest.mark.parametrize(
    "call, values",
    [
        (lambda theta, k: kg.relax(theta, kg.TopK(k), kg.Gini(0.5)), [2, 3, 4, 5, 6]),
        (lambda theta, c: kg.relax(theta, kg.Knapsack(WEIGHTS, c), kg.Gini(0.5)), [2, 3, 4, 5, 20]),
        (lambda theta, gamma: kg.value(theta, kg.TopK(2), kg.Shannon(gamma)), [0.1, 0.2, 0.3, 0.4]),
    ],
    ids=["k", "capacity", "gamma"],
)
def test_a_number_that_is_an_argument_becomes_open(call, values):
    """torch.compile itself takes a first number as fixed, and opens it when it sees a second one."""
    check_calls(call, [(numbers(4, 6), value) for value in values], graphs=2)


def test_batches_of_any_size_are_two_graphs():
    rng = np.random.default_rng(0)
    sizes = [4, 5, 6, 7, 12]
    limits = [kg.Knapsack(rng.integers(0, 4, (size, 6)), rng.integers(1, 9, size)) for size in sizes]
    calls = [(numbers(size, 6), limit) for size, limit in zip(sizes, limits)]
    check_calls(lambda theta, limit: kg.relax(theta, limit, kg.Tsallis(0.5)), calls, graphs=2)


def test_other_uses_do_not_disturb_a_graph():
    theta, limit = numbers(4, 6), kg.Knapsack(WEIGHTS, 4)
    run = compiled(lambda theta, limit: kg.relax(theta, limit, kg.Gini()))
    run(theta, limit)
    kg.relax(theta, limit, kg.Gini())
    kg.relax(theta.numpy(), limit, kg.Gini())
    kg.relax(nn.Parameter(theta), kg.TopK(2), kg.Gini())
    with torch.compiler.set_stance("fail_on_recompile"):
        run(theta, limit)


def test_the_first_use_of_the_library_may_be_compiled():
    code = """
        import knapgrad as kg, torch
        run = torch.compile(lambda x, limit: kg.relax(x, limit, kg.Gini()), backend="aot_eager", fullgraph=True)
        for k in range(3):
            with torch.compiler.set_stance("default" if k == 0 else "fail_on_recompile"):
                print(run(torch.zeros(4), kg.TopK(k)).sum().item())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0.0", "1.0", "2.0"], done.stderr


@pytest.mark.parametrize(
    "make",
    [
        lambda c, least: kg.Knapsack([2**59] * 31 + [3], c, at_least=least, max_capacity=10),
        lambda c, least: kg.MultipleChoice([[0, 2**59]] * 31 + [[0, 3]], c, at_least=least, max_capacity=10),
        lambda c, least: kg.MultipleChoice([2**59, 3], c, at_least=least, optional=True, max_capacity=10),
    ],
    ids=["knapsack", "choices", "optional"],
)
def test_a_sum_of_weights_beyond_64_bits_is_not_wrapped(make):
    call = lambda theta, c, least: kg.relax(theta, make(c, least), kg.Gini())  # noqa: E731
    theta = numbers(32) if make(9, 2).event_dims == 1 else numbers(32, 2)
    arguments = theta, torch.tensor(9), torch.tensor(2)
    torch.testing.assert_close(compiled(call)(*arguments), call(*arguments), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 2), (2,)], ids=["own", "of all groups"])
def test_a_sum_of_lightest_options_beyond_64_bits_is_not_wrapped(shape):
    """It would be 0, and fit."""
    call = lambda theta, weights: kg.relax(theta, kg.MultipleChoice(weights, 9, max_capacity=10), kg.Gini())  # noqa: E731
    theta, weights = numbers(4, 2), torch.arange(2).expand(shape)
    torch.testing.assert_close(compiled(call)(theta, weights), call(theta, weights), rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="limit that is not valid"):
        compiled(call)(theta, weights + 2**62)


# Constraints that are made inside.


COST, BUDGET = torch.tensor(WEIGHTS), torch.tensor([3, 4, 5, 6])
OPTIONS = torch.tensor([[1, 2], [1, 3], [2, 1]])
INSIDE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "tensors": (lambda cost, budget: kg.Knapsack(cost, budget, max_capacity=9), (COST, BUDGET)),
    "costs of each instance": (
        lambda cost, budget: kg.Knapsack(cost, budget, max_capacity=9), (COST + torch.arange(4)[:, None], BUDGET),
    ),
    "small integers": (lambda cost, budget: kg.Knapsack(cost, budget, max_capacity=9), (COST.to(torch.int8), BUDGET)),
    "least weight": (
        lambda cost, budget: kg.Knapsack(cost, budget, at_least=budget - 2, max_capacity=9), (COST, BUDGET),
    ),
    "k": (lambda: kg.TopK(3), ()),
    "k and a least number": (lambda: kg.TopK(3, at_least=1), ()),
    "k of each instance": (lambda k: kg.TopK(k), (BUDGET,)),
    "lists": (lambda: kg.Knapsack(WEIGHTS, 4), ()),
    "known weights": (lambda budget: kg.Knapsack(np.array(WEIGHTS), budget), (BUDGET,)),
    "known weights, and room": (lambda budget: kg.Knapsack(WEIGHTS, budget, at_least=1), (BUDGET + 8,)),
    "choices": (lambda cost, budget: kg.MultipleChoice(cost, budget, max_capacity=9), (OPTIONS, BUDGET + 2)),
    "optional choices": (
        lambda cost, budget: kg.MultipleChoice(cost, budget, optional=True, max_capacity=9), (OPTIONS, BUDGET),
    ),
    "choices as lists": (lambda: kg.MultipleChoice([[1, 2]], 7), ()),
    "known choices": (lambda budget: kg.MultipleChoice(np.array([1, 2]), budget), (BUDGET,)),
    "several budgets": (
        lambda cost, budget: kg.MultiKnapsack([torch.ones_like(cost), cost], budget[:2], max_capacities=[3, 9]),
        (COST, BUDGET - 1),
    ),
}  # fmt: skip
OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "relax": lambda theta, limit: kg.relax(theta, limit, kg.Gini(0.7)),
    "solve": lambda theta, limit: kg.solve(theta, limit),
    "loss": lambda theta, limit: kg.fenchel_young_loss(theta, kg.solve(theta, limit), limit, kg.Shannon(0.3)),
    "log_prob": lambda theta, limit: kg.log_prob(theta, kg.solve(theta, limit), limit, kg.Shannon(0.3)),
    "divergence": lambda theta, limit: kg.divergence(theta, limit, kg.Tsallis(0.2)),
    "contains": lambda theta, limit: limit.contains((theta > 0).to(theta.dtype)),
}


@pytest.mark.thinned(14)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("what", INSIDE)
def test_a_constraint_made_inside_is_the_one_made_outside(what, operation):
    make, arguments = INSIDE[what]
    theta = numbers(4, 3, 2) if "choices" in what else numbers(4, 6)
    call = OPERATIONS[operation]
    found = with_gradient(compiled(lambda theta, *rest: call(theta, make(*rest))), theta, *arguments)
    expected = with_gradient(lambda theta: call(theta, make(*arguments)), theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_several_budgets_that_change_are_one_graph():
    def layer(theta: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
        limit = kg.MultiKnapsack([torch.ones_like(cost), cost], budget, max_capacities=[3, 9])
        return kg.relax(theta, limit, kg.Gini())

    drawn = [np.random.default_rng(seed).integers(0, 4, 8) for seed in range(4)]
    check_calls(layer, [(numbers(2, 6), torch.tensor(x[:6]), torch.tensor(x[6:])) for x in drawn])


MADE = kg.MultipleChoice(OPTIONS, 7), kg.MultipleChoice(OPTIONS, [7, 5, 6, 8])


@pytest.mark.parametrize(
    "limit",
    [
        lambda: kg.TopK(4),
        lambda: kg.Knapsack(WEIGHTS, 4),
        lambda: kg.Knapsack(COST, BUDGET, max_capacity=9),
        lambda: MADE[0],
        lambda: MADE[1],
        lambda: kg.MultipleChoice([[1, 2], [1, 3], [2, 1]], 7),
        lambda: kg.MultipleChoice(OPTIONS, BUDGET, max_capacity=9),
    ],
)
def test_frontiers_inside_a_graph(limit):
    theta = numbers(4, 3, 2) if limit().event_dims == 2 else numbers(4, 6)
    check_calls(lambda theta: kg.frontier(theta, limit(), kg.Gini(0.5)), [(theta,)] * 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kg.Knapsack(COST, BUDGET), "give max_capacity="),
        (lambda: kg.MultipleChoice(OPTIONS, BUDGET), "give max_capacity="),
        (lambda: kg.MultiKnapsack([COST, COST], BUDGET[:2]), "max_capacities"),
        (lambda: kg.Knapsack(COST * 1.5, BUDGET, max_capacity=9), "weights must be integers.*call from_real outside"),
        (lambda: kg.Knapsack.from_real(COST * 1.5, 4.0), "call it outside of the function"),
        (lambda: kg.TopK(-1), "k must not be negative"),
        (lambda: kg.Knapsack(WEIGHTS, 5, max_capacity=4), "max_capacity is 4, and capacity has 5"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_when_it_is_compiled(make, message):
    theta = numbers(4, 3, 2) if "Multiple" in str(make.__code__.co_names) else numbers(4, 6)
    with pytest.raises(Exception, match=message):
        compiled(lambda theta: kg.relax(theta, make(), kg.Gini()))(theta)


@pytest.mark.parametrize(
    "make",
    [
        lambda budget: kg.Knapsack(COST, budget + 9, max_capacity=9),
        lambda budget: kg.Knapsack(COST, budget - 9, max_capacity=9),
        lambda budget: kg.Knapsack(COST - 2, budget, max_capacity=9),
        lambda budget: kg.TopK(budget + 3),
        lambda budget: kg.Knapsack(COST, budget + 90, at_least=budget + 80, max_capacity=200),
    ],
    ids=["above max_capacity", "negative capacity", "negative weight", "k above n", "all too light"],
)
def test_what_is_wrong_with_values_is_said_when_the_graph_runs(make):
    with pytest.raises(ValueError, match=r"instance \d .* has a limit that is not valid: .* without compiling it"):
        compiled(lambda theta, budget: kg.relax(theta, make(budget), kg.Gini()))(numbers(4, 6), BUDGET)


def test_a_gamma_that_is_not_positive_is_said_when_the_graph_runs():
    relax = compiled(lambda theta, gamma: kg.relax(theta, kg.TopK(2), kg.Gini(gamma)))
    relax(numbers(4, 6), torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"gamma must be positive, got -0\.5"):
        relax(numbers(4, 6), torch.tensor(-0.5))


# torch.export.


class WithInputs(nn.Module):
    def forward(self, theta: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
        return kg.relax(theta, kg.Knapsack(cost, budget, max_capacity=12), kg.Gini(0.5))


class WithLiterals(nn.Module):
    def forward(self, theta: Tensor) -> tuple[Tensor, ...]:
        return kg.relax(theta, kg.TopK(3), kg.Shannon(0.5)), kg.value(theta, kg.Knapsack(WEIGHTS, 4), kg.Gini())


EXPORTED: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "a layer": lambda: (kg.torch.Relax(kg.Knapsack(WEIGHTS, 4), kg.Gini(0.5)), (numbers(4, 6),)),
    "a hard layer": lambda: (kg.torch.Relax(kg.TopK(2), kg.Gini(), hard_eval=True).eval(), (numbers(4, 6),)),
    "inputs": lambda: (WithInputs(), (numbers(4, 6), COST.expand(4, 6).clone(), BUDGET)),
    "literals": lambda: (WithLiterals(), (numbers(4, 6),)),
}


@pytest.mark.parametrize("what", EXPORTED)
def test_an_exported_program_takes_any_batch(what):
    module, arguments = EXPORTED[what]()
    batch = torch.export.Dim("batch")
    names = ["theta", "cost", "budget"][: len(arguments)]
    program = torch.export.export(module, arguments, dynamic_shapes={name: {0: batch} for name in names})
    for size in (2, 7):
        larger = [x[torch.arange(size) % 4] for x in arguments]
        torch.testing.assert_close(program.module()(*larger), module(*larger), rtol=1e-12, atol=1e-13)


def test_aot_inductor_runs_what_was_exported(tmp_path):
    module, arguments = EXPORTED["inputs"]()
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in ("theta", "cost", "budget")}
    program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    fast = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }  # half of the time
    with torch._inductor.config.patch(fast):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    larger = [x[torch.arange(7) % 4] for x in arguments]
    found = torch._inductor.aoti_load_package(package)(*larger)
    torch.testing.assert_close(found, module(*larger), rtol=1e-12, atol=1e-13)


def test_torch_jit_is_refused_with_the_remedy():
    layer, theta = kg.torch.Relax(kg.TopK(2), kg.Gini()), numbers(4, 6)
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.script(nn.Sequential(nn.Linear(6, 6), layer))
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.trace(layer, theta)


# Random numbers.


def test_a_compiled_sample_draws_from_a_generator_as_in_eager_mode():
    layer, theta = kg.torch.Sample(kg.TopK(2), kg.Gini(0.5)), numbers(4, 6)
    draw = lambda theta, rng: torch.stack([layer(theta, rng=rng), layer(theta, generator=rng)])  # noqa: E731
    run, one, other = compiled(draw), *(torch.Generator().manual_seed(3) for _ in range(2))
    seen = [run(theta, one) for _ in range(4)]
    torch.testing.assert_close(seen, [draw(theta, other) for _ in range(4)], rtol=0, atol=0)
    assert not torch.equal(seen[0][0], seen[0][1]) or not torch.equal(seen[0], seen[1])
    third, fourth = (torch.Generator().manual_seed(4) for _ in range(2))
    torch.testing.assert_close(run(theta, third), draw(theta, fourth), rtol=0, atol=0)


# On a GPU.


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def placed(*arguments: Any) -> list[Any]:
    return [x.cuda() if isinstance(x, Tensor) else x for x in arguments]


@needs_gpu
@pytest.mark.parametrize("operation", ["relax", "solve", "loss"])
@pytest.mark.parametrize("what", INSIDE)
def test_a_constraint_made_inside_does_not_wait_for_cuda(what, operation):
    make, arguments = INSIDE[what]
    call, theta = OPERATIONS[operation], numbers(4, 3, 2) if "choices" in what else numbers(4, 6)
    run = compiled(lambda theta, *rest: call(theta, make(*rest)))
    given = placed(theta, *arguments)
    with_gradient(run, *given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = with_gradient(run, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = with_gradient(lambda theta: call(theta, make(*arguments)), theta)
    torch.testing.assert_close([x.cpu() for x in found], expected, rtol=1e-10, atol=1e-11)


@needs_gpu
def test_a_compiled_layer_trains_on_cuda():
    """By Inductor, with budgets per sample that change in every step."""
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).cuda()
    x, cost = torch.randn(8, 6, device="cuda"), torch.tensor(WEIGHTS, device="cuda")

    @torch.compile(fullgraph=True)
    def loss_of(x: Tensor, budget: Tensor) -> Tensor:
        return (kg.relax(net(x), kg.Knapsack(cost, budget, max_capacity=9), kg.Gini(0.5)) * x).sum()

    for step in range(4):
        budget = torch.randint(1, 9, (8,), device="cuda")
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            loss = loss_of(x, budget)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
        limit = kg.Knapsack(WEIGHTS, budget.cpu())
        expected = (kg.relax(net(x), limit, kg.Gini(0.5)) * x).sum()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, list(net.parameters())))
