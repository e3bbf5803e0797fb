"""MultipleChoice and frontier in torch: derivatives, transforms, modules and the distribution."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import TOLERANCES
from choices import EDGES, Choices
from instances import INF
from oracles import REGULARIZERS, ChoiceTruth, chi_square_p_value, mp

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402
from torch.autograd import grad as autograd_grad  # noqa: E402
from torch.distributions import Independent, kl_divergence  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402
from knapgrad.torch import SubsetDistribution, operators  # noqa: E402

CLASSES = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}
WEIGHTS = np.array([[2, 1, 3], [0, 4, 1], [1, 2, 2]])


def _scores(*shape: int, seed: int = 0) -> np.ndarray:
    """Scores without ties, so close that the sparse regularizers keep most of the selections."""
    return np.random.default_rng(seed).normal(scale=0.4, size=shape)


PROBLEMS: dict[str, Choices] = {
    "required": Choices(_scores(2, 3, 3), WEIGHTS, 6, 0.9),
    "optional": Choices(_scores(2, 3, 3, seed=1), WEIGHTS, 5, 0.9, optional=True),
    "at least": Choices(_scores(2, 3, 3, seed=2), WEIGHTS, 7, 0.9, at_least=5),
    "optional, exactly": Choices(_scores(2, 3, 3, seed=3), WEIGHTS, 5, 0.9, at_least=5, optional=True),
    "all for each instance": Choices(
        _scores(2, 1, 3, 3, seed=4),
        np.stack([WEIGHTS, 4 - WEIGHTS])[:, None],
        np.array([[6], [7]]),
        np.array([[0.8], [1.5]]),
    ),
    "no batch": Choices(_scores(2, 5, seed=5), [3, 0, 2, 9, 1], 4, 0.7),
}


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request: pytest.FixtureRequest) -> Choices:
    return request.param


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, requires_grad=True)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(problem: Choices, regularizer: str) -> Tensor:
    """Three selections of each instance, of a probability above 0."""
    theta, rng = torch.tensor(problem.theta), torch.Generator().manual_seed(3)
    return kg.sample(theta, problem.constraint, problem.regularizer(regularizer), num_samples=3, rng=rng)


def target_of(problem: Choices) -> Tensor:
    """A point inside the polytope, without masked options."""
    theta = torch.tensor(problem.theta)
    return kg.relax(torch.where(torch.isneginf(theta), theta, noise(*theta.shape)), problem.constraint, kg.Shannon())


def feasible_part(row: Tensor) -> Tensor:
    return torch.where(torch.isneginf(row), 0.0, row)


def frontier(theta: Tensor, problem: Choices, regularizer: Any) -> Tensor:
    """Of at most c if there is a least weight, which has none."""
    if problem.at_least is not None and np.any(problem.at_least != problem.capacity):
        problem = replace(problem, at_least=None)
    return feasible_part(kg.frontier(theta, problem.constraint, regularizer))


Call = Callable[[Tensor, Choices, Any], Tensor]

#: operation -> a call with theta, the problem and a regularizer
OPERATIONS: dict[str, Call] = {
    "value": lambda theta, p, r: kg.value(theta, p.constraint, r),
    "relax": lambda theta, p, r: kg.relax(theta, p.constraint, r),
    "entropy": lambda theta, p, r: kg.entropy(theta, p.constraint, r),
    "log_prob": lambda theta, p, r: kg.log_prob(theta, drawn(p, r.name), p.constraint, r),
    "fenchel_young_loss": lambda theta, p, r: kg.fenchel_young_loss(theta, target_of(p), p.constraint, r),
    "divergence": lambda theta, p, r: kg.divergence(theta, p.constraint, r, prior=0.3 * target_of(p)),
    "frontier": frontier,
}


# Derivatives.


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradcheck_in_theta_and_gamma(operation, problem, regularizer):
    def call(theta, gamma):
        return OPERATIONS[operation](theta, problem, CLASSES[regularizer](gamma))

    assert gradcheck(call, (leaf(problem.theta), leaf(problem.gamma)))


def test_gradgradcheck_of_value(problem, regularizer):
    def value(theta, gamma):
        return kg.value(theta, problem.constraint, CLASSES[regularizer](gamma))

    assert gradgradcheck(value, (leaf(problem.theta), leaf(problem.gamma)))


@pytest.mark.parametrize(
    ("regularizer", "dtype"), [*((name, "float64") for name in REGULARIZERS), ("tsallis", "float32")]
)
def test_the_product_with_the_jacobian_is_that_of_the_enumeration(regularizer, dtype, problem):
    problem, z = problem.rounded(dtype), noise(*problem.theta.shape)
    theta = leaf(problem.theta, getattr(torch, dtype))
    y = kg.relax(theta, problem.constraint, problem.regularizer(regularizer))
    (product,) = autograd_grad(y, theta, z.to(theta.dtype))
    truths = zip(problem.truths(regularizer), problem.flat(z.numpy()))
    expected = problem.batched([one.vjp(row) for one, row in truths], problem.n)
    assert product.dtype == theta.dtype and np.abs(expected).max() > 1e-2
    assert np.abs(product.numpy() - expected).max() <= TOLERANCES[dtype].vjp * np.abs(expected).max()


def test_the_gradient_of_value_is_relax_exactly(problem, regularizer):
    theta, smoothing = leaf(problem.theta), problem.regularizer(regularizer)
    (gradient,) = autograd_grad(kg.value(theta, problem.constraint, smoothing).sum(), theta)
    expected = kg.relax(theta, problem.constraint, smoothing)
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=1e-15)


def test_the_gradient_of_the_loss_is_relax_minus_target(problem, regularizer):
    theta, smoothing = leaf(problem.theta), problem.regularizer(regularizer)
    target = kg.solve(noise(*theta.shape), problem.constraint)
    (gradient,) = autograd_grad(kg.fenchel_young_loss(theta, target, problem.constraint, smoothing).sum(), theta)
    expected = kg.relax(theta, problem.constraint, smoothing) - target
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("operation", ["relax", "entropy", "frontier", "log_prob"])
def test_second_derivatives_that_are_not_there_raise(operation):
    problem = PROBLEMS["optional"]
    theta = leaf(problem.theta)
    result = OPERATIONS[operation](theta, problem, kg.Gini(0.9))
    (first,) = autograd_grad((result * noise(*result.shape)).sum(), theta, create_graph=True)
    with pytest.raises(NotImplementedError, match="knapgrad has no second derivative"):
        autograd_grad((first * theta).sum(), theta)


@pytest.mark.parametrize("operation", ["value", "relax"])
def test_forward_mode_is_the_directional_derivative(operation, regularizer):
    problem = PROBLEMS["optional"]
    theta, direction = torch.tensor(problem.theta), noise(*problem.theta.shape)
    smoothing = problem.regularizer(regularizer)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(theta, direction)
        tangent = forward_ad.unpack_dual(OPERATIONS[operation](dual, problem, smoothing)).tangent
    up, down = (OPERATIONS[operation](theta + step * direction, problem, smoothing) for step in (1e-6, -1e-6))
    torch.testing.assert_close(tangent, (up - down) / 2e-6, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_masked_options_have_no_gradient(operation, optional, regularizer):
    theta = np.where(np.eye(3) > 0, -INF, PROBLEMS["required"].theta)
    problem = replace(PROBLEMS["required"], theta=theta, optional=optional, capacity=7)
    inputs = leaf(theta), leaf(0.9)
    result = OPERATIONS[operation](inputs[0], problem, CLASSES[regularizer](inputs[1]))
    gradient, by_gamma = autograd_grad(result, inputs, noise(*result.shape))
    assert gradient.isfinite().all() and by_gamma.isfinite() and gradient.any()
    assert not gradient[torch.tensor(theta) == -torch.inf].any()


def test_a_selection_that_is_never_drawn_has_no_gradient(regularizer):
    problem = PROBLEMS["required"]
    y = torch.zeros(problem.theta.shape, dtype=torch.float64)
    y[0, [0, 1, 2], [2, 1, 1]] = 1.0  # too heavy, and no picks in the other
    theta = leaf(problem.theta)
    log_prob = kg.log_prob(theta, y, problem.constraint, problem.regularizer(regularizer))
    assert log_prob.isneginf().all()
    assert not autograd_grad(log_prob.sum(), theta)[0].any()


@pytest.mark.parametrize("name", ["value", "relax", "entropy"])
def test_half_precision_gradients_have_its_dtype(name, regularizer):
    problem = PROBLEMS["optional"]
    for dtype in (torch.float16, torch.bfloat16):
        theta = leaf(problem.theta, dtype)
        (gradient,) = autograd_grad(OPERATIONS[name](theta, problem, CLASSES[regularizer]()).sum(), theta)
        assert gradient.dtype == dtype and gradient.isfinite().all()


# The frontier.


@pytest.mark.parametrize(
    "constraint",
    [
        kg.Knapsack([2, 1, 3, 1], 6),
        kg.Knapsack([2, 1, 3, 1], 5, at_least=5),
        kg.TopK(3),
        kg.MultipleChoice([[2, 1], [0, 3]], 6),
        kg.MultipleChoice([[2, 1], [1, 3]], 6, at_least=6, optional=True),
    ],
    ids=["knapsack", "exactly", "top-k", "choices", "optional choices, exactly"],
)
@pytest.mark.parametrize("regularizer", [None, *REGULARIZERS])
def test_the_gradient_of_an_entry_is_the_selection_at_its_capacity(constraint, regularizer):
    shape = (3, 2, 2) if constraint.event_dims == 2 else (3, 4)
    theta, smoothing = leaf(_scores(*shape)), None if regularizer is None else CLASSES[regularizer](0.9)
    rows = kg.frontier(theta, constraint, smoothing)
    name = "k" if isinstance(constraint, kg.TopK) else "capacity"
    exactly = {"at_least": None} if name == "k" else {}
    for c in range(rows.shape[-1]):
        (gradient,) = autograd_grad(rows[:, c].sum(), theta, retain_graph=True)
        if rows[:, c].isneginf().all():
            assert not gradient.any()
            continue
        if constraint.arguments["at_least"] is not None and np.any(constraint.arguments["at_least"]):
            exactly = {"at_least": c}
        limit = type(constraint)(**{**constraint.arguments, name: c, **exactly})
        expected = kg.solve(theta, limit) if smoothing is None else kg.relax(theta, limit, smoothing)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradcheck_of_the_frontier_of_items(regularizer):
    weights = np.array([[2, 1, 3, 1], [0, 2, 9, 1]])
    for limit in (
        kg.Knapsack(weights, [5, 3]),
        kg.Knapsack(weights, [5, 5], at_least=[5, 5]),
        kg.TopK(3),
        kg.TopK([3, 2], at_least=0),
    ):
        assert gradcheck(
            lambda theta, gamma: feasible_part(kg.frontier(theta, limit, CLASSES[regularizer](gamma))),
            (leaf(_scores(2, 4)), leaf([0.8, 1.3])),
        )


@pytest.mark.parametrize("regularizer", [None, *REGULARIZERS])
@pytest.mark.parametrize(
    ("constraint", "theta"),
    [
        (kg.Knapsack([2, 1, 3, 1], 6), [1.2, 0.4, 1.3, 0.7]),
        (kg.MultipleChoice([[1, 2], [0, 2]], 6), [[0.2, 1.0], [0.1, 0.9]]),
    ],
    ids=["knapsack", "choices"],
)
def test_a_budget_between_two_entries_is_learned_by_interpolation(constraint, theta, regularizer):
    theta, budget = leaf(theta), leaf(3.4)
    smoothing = None if regularizer is None else CLASSES[regularizer](0.5)
    row, whole = kg.frontier(theta, constraint, smoothing), budget.detach().floor().long()
    value = row[whole] + (budget - whole) * (row[whole + 1] - row[whole])
    by_budget, by_theta = autograd_grad(value, (budget, theta), retain_graph=True)
    price = (row[4] - row[3]).detach()
    assert price > 0.05
    torch.testing.assert_close(by_budget, price)
    selections = []
    for c in (3, 4):
        limit = type(constraint)(**{**constraint.arguments, "capacity": c})
        selections.append(kg.solve(theta, limit) if smoothing is None else kg.relax(theta, limit, smoothing))
    torch.testing.assert_close(by_theta, 0.6 * selections[0] + 0.4 * selections[1], rtol=1e-12, atol=1e-13)


def test_a_budget_that_is_learned_finds_its_price():
    """What is bought is worth more than 0.3 a unit up to a budget of 3, and less from there on."""
    theta, limit = torch.tensor([3.0, 0.7, 0.5, 0.2], dtype=torch.float64), kg.Knapsack([2, 1, 2, 1], 6)
    row, budget = kg.frontier(theta, limit), leaf(0.6)
    optimizer = torch.optim.SGD([budget], lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        whole = budget.detach().floor().long().clamp(0, 5)
        (0.3 * budget - row[whole] - (budget - whole) * (row[whole + 1] - row[whole])).backward()
        optimizer.step()
    assert budget.item() == pytest.approx(3.0, abs=0.2)


# torch.func, torch.compile and the operators.


@pytest.mark.parametrize("operation", ["value", "relax", "entropy", "frontier"])
@pytest.mark.parametrize("name", ["required", "optional"])
def test_vmap_is_the_batch(operation, name, regularizer):
    problem, smoothing = PROBLEMS[name], CLASSES[regularizer](0.9)
    theta = torch.tensor(_scores(4, 2, 3, 3))
    mapped = vmap(lambda theta: OPERATIONS[operation](theta, problem, smoothing))(theta)
    expected = OPERATIONS[operation](theta, problem, smoothing)
    torch.testing.assert_close(mapped, expected, rtol=1e-12, atol=1e-13)


def test_vmap_of_solve_sample_and_log_prob(regularizer):
    problem, theta = PROBLEMS["optional"], torch.tensor(_scores(4, 3, 3))
    limit, smoothing = problem.constraint, CLASSES[regularizer](0.9)
    assert torch.equal(vmap(lambda theta: kg.solve(theta, limit))(theta), kg.solve(theta, limit))
    y = vmap(lambda theta: kg.sample(theta, limit, smoothing, num_samples=2), randomness="different")(theta)
    assert y.shape == (4, 2, 3, 3) and limit.contains(y).all()
    mapped = vmap(lambda theta, y: kg.log_prob(theta, y, limit, smoothing))(theta, y)
    expected = kg.log_prob(theta, y.movedim(1, 0), limit, smoothing).T
    torch.testing.assert_close(mapped, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("operation", ["value", "relax", "entropy", "log_prob", "frontier"])
def test_vmap_of_grad_is_autograd(operation, regularizer):
    problem, smoothing = replace(PROBLEMS["optional"], theta=_scores(3, 3)), CLASSES[regularizer](0.9)
    theta, z, y = torch.tensor(_scores(4, 3, 3)), noise(3, 3), drawn(problem, regularizer)

    def scalar(theta):
        if operation == "log_prob":  # random numbers are drawn outside
            result = kg.log_prob(theta, y, problem.constraint, smoothing)
        else:
            result = OPERATIONS[operation](theta, problem, smoothing)
        return (result * z).sum() if result.shape == z.shape else result.square().sum()

    mapped = vmap(grad(scalar))(theta)
    for one, found in zip(theta, mapped):
        (expected,) = autograd_grad(scalar(one := one.clone().requires_grad_()), one)
        assert expected.any()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["required", "optional, exactly"])
def test_jacobians_and_hessians(name, regularizer):
    problem, smoothing = PROBLEMS[name], CLASSES[regularizer](0.9)
    theta = torch.tensor(problem.theta[0])

    def relax(theta):
        return kg.relax(theta, problem.constraint, smoothing)

    def value(theta):
        return kg.value(theta, problem.constraint, smoothing)

    expected = torch.autograd.functional.jacobian(relax, theta)
    assert expected.any()
    flat = expected.reshape(9, 9)
    torch.testing.assert_close(flat, flat.T, rtol=1e-12, atol=1e-13)
    for found in (jacrev(relax)(theta), jacfwd(relax)(theta), hessian(value)(theta), jacrev(jacrev(value))(theta)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    rows = jacrev(lambda theta: frontier(theta, problem, smoothing))(theta)
    assert rows.shape == (problem.capacity + 1, 3, 3)
    torch.testing.assert_close(rows[-1], relax(theta), rtol=1e-12, atol=1e-13)


def test_gradients_of_each_example_of_a_model():
    torch.manual_seed(0)
    limit, model = PROBLEMS["optional"].constraint, nn.Linear(2, 9).double()
    features = noise(4, 2)
    targets = kg.solve(noise(4, 3, 3), limit)
    parameters = dict(model.named_parameters())

    def loss(parameters, features, target):
        theta = functional_call(model, parameters, (features,)).unflatten(-1, (3, 3))
        return kg.fenchel_young_loss(theta, target, limit, kg.Tsallis())

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, targets)
    for i in range(4):
        expected = autograd_grad(loss(parameters, features[i], targets[i]), list(parameters.values()))
        for name, gradient in zip(parameters, expected):
            torch.testing.assert_close(each[name][i], gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("operation", ["value", "relax", "frontier"])
def test_compiled_operations_are_the_eager_ones(operation, fresh_compiler):
    problem = PROBLEMS["optional, exactly" if operation == "frontier" else "optional"]
    limit, function = problem.constraint, getattr(kg, operation)

    def call(theta, gamma):
        return feasible_part(function(theta, limit, kg.Gini(gamma)))

    results = []
    for run in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        inputs = leaf(problem.theta), leaf(0.8)
        result = run(*inputs)
        results.append((result, *autograd_grad(result, inputs, noise(*result.shape))))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


def test_a_compiled_function_takes_other_constraints(fresh_compiler):
    """Weights of all groups make a lattice once the number of groups is known, which cannot be traced."""
    compiled = torch.compile(
        lambda theta, limit: kg.relax(theta, limit, kg.Gini()), backend="aot_eager", fullgraph=True
    )
    theta = torch.tensor(PROBLEMS["required"].theta)
    for limit in (kg.MultipleChoice([2, 1, 3], 6), kg.MultipleChoice([1, 2, 3], 6), kg.MultipleChoice([1, 2, 3], 5)):
        expected = kg.relax(theta, limit, kg.Gini())
        torch.testing.assert_close(compiled(theta, limit), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", ["operator", "vjp", "sample", "solve", "log_prob", "frontier", "frontier_vjp"])
def test_opcheck(name, optional):
    problem = PROBLEMS["optional" if optional else "required"]
    n = problem.n + 3 * optional
    lattice = problem.constraint.lattice(n)
    theta, y = noise(2, n), torch.zeros(3, 2, n, dtype=torch.float64)
    y[..., :: lattice.options] = 1.0
    arguments = {
        "theta": theta,
        "z": noise(2, n, seed=1).requires_grad_(),
        "y": y,
        "uniforms": noise(3, 2, n, seed=2).remainder(1.0),
        "cotangent": noise(2, lattice.reach + 1, seed=3),
        "weights": torch.tensor(lattice.weights),
        "capacity": torch.tensor(lattice.capacity),
        "slack": None,
        "sizes": torch.tensor([lattice.reach, lattice.heaviest]),
        "length": lattice.reach + 1,
        "options": lattice.options,
        "gamma": torch.tensor(0.9, dtype=torch.float64),
        "regularizer": "gini",
        "relaxed": True,
        "table": None,
    }  # fmt: skip
    if name in ("operator", "log_prob", "frontier"):
        arguments["theta"].requires_grad_()
        arguments["gamma"].requires_grad_()
    operator = getattr(torch.ops.knapgrad, name).default
    given = tuple(arguments[argument.name] for argument in operator._schema.arguments)
    assert set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


def test_the_frontier_needs_no_table_that_is_kept():
    """Between forward and backward theta is kept, and nothing as wide as a table."""
    theta, kept = leaf(_scores(40, 3)), []
    limit = kg.MultipleChoice(np.random.default_rng(0).integers(0, 40, (40, 3)), 900)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        kg.frontier(theta, limit, kg.Gini()).sum()
    assert sum(kept) < 12 * 901


# Modules.

MODULES = {"Relax": kgt.Relax, "Sample": kgt.Sample, "FenchelYoungLoss": kgt.FenchelYoungLoss}
LIMIT, OTHER = kg.MultipleChoice(WEIGHTS, 6), kg.MultipleChoice(WEIGHTS[::-1] + 1, 9, at_least=7)
FREE = kg.MultipleChoice(WEIGHTS, 5, optional=True)


@pytest.fixture(params=MODULES.values(), ids=MODULES.keys())
def kind(request: pytest.FixtureRequest) -> type[nn.Module]:
    return request.param


def run(module: nn.Module, theta: Tensor, *more: Any) -> Tensor:
    """A call that gives the same result each time."""
    torch.manual_seed(0)
    given = (torch.zeros_like(theta),) if isinstance(module, kgt.FenchelYoungLoss) else ()
    return module(theta, *given, *more)


@pytest.mark.parametrize("limit", [LIMIT, FREE], ids=["required", "optional"])
def test_layers_in_training_and_evaluation(limit, regularizer):
    theta, smoothing = torch.tensor(_scores(50, 3, 3)), CLASSES[regularizer](0.9)
    soft, hard = kg.relax(theta, limit, smoothing), kg.solve(theta, limit)
    layer, draw = (module(limit, smoothing, hard_eval=True) for module in (kgt.Relax, kgt.Sample))
    assert torch.equal(layer(theta), soft)
    y = draw(theta)
    assert y.shape == theta.shape and limit.contains(y).all() and not torch.equal(y, hard)
    for module in (layer, draw):
        assert torch.equal(module.eval()(theta), hard)
    again = (draw.train()(theta, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(*again)


def test_the_gradient_of_sample_is_that_of_relax(regularizer):
    theta, z, smoothing = leaf(_scores(4, 3, 3)), noise(4, 3, 3), CLASSES[regularizer](0.9)
    (gradient,) = autograd_grad(kgt.Sample(FREE, smoothing)(theta), theta, z)
    (expected,) = autograd_grad(kg.relax(theta, FREE, smoothing), theta, z)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


def test_state_dict_round_trip_changes_the_constraint(kind):
    theta = torch.tensor(_scores(3, 3, 3))
    source, target = kind(OTHER, kg.Gini(2.0)), kind(LIMIT, kg.Gini(2.0))
    assert set(source.state_dict()) == {"weights", "capacity", "at_least"}
    assert not torch.equal(run(source, theta), run(target, theta))
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True))
    assert target.constraint == OTHER and repr(target) == repr(source)
    assert torch.equal(run(target, theta), run(source, theta))
    optional = kind(FREE, kg.Gini())
    optional.load_state_dict(kind(LIMIT, kg.Gini()).state_dict())
    assert optional.constraint == kg.MultipleChoice(WEIGHTS, 6, optional=True)


def test_copies_and_repr(kind):
    module = kind(FREE, kg.Gini(0.5))
    twin = copy.deepcopy(module)
    assert twin.constraint == FREE and repr(twin) == repr(module)
    assert repr(FREE) in repr(module) and "optional=True" in repr(module)


def test_a_constraint_given_to_the_call_stands_in(kind):
    theta = torch.tensor(_scores(2, 3, 3))
    limits = kg.MultipleChoice(np.stack([WEIGHTS, 4 - WEIGHTS]), [6, 7])
    assert torch.equal(run(kind(None, kg.Gini()), theta, limits), run(kind(limits, kg.Gini()), theta))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions(reduction, regularizer):
    theta, target = torch.tensor(_scores(2, 4, 3, 3)), kg.solve(noise(2, 4, 3, 3), LIMIT)
    losses = kg.fenchel_young_loss(theta, target, LIMIT, CLASSES[regularizer]())
    assert losses.shape == (2, 4)
    expected = losses if reduction == "none" else getattr(losses, reduction)()
    found = kgt.FenchelYoungLoss(LIMIT, CLASSES[regularizer](), reduction)(theta, target)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_gamma_learns(regularizer):
    theta, gamma = torch.tensor(_scores(8, 3, 3)), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    layer = kgt.Relax(LIMIT, CLASSES[regularizer](gamma))
    assert [name for name, _ in layer.named_parameters()] == ["gamma"]
    wanted = kg.relax(theta, LIMIT, CLASSES[regularizer](1.0))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (layer(theta) - wanted).square().sum().backward()
        optimizer.step()
    assert gamma.item() == pytest.approx(1.0, abs=0.02)


def test_training_with_the_loss():
    torch.manual_seed(0)
    features = noise(64, 2)
    target = kg.solve((features @ noise(2, 9, seed=5)).unflatten(-1, (3, 3)), LIMIT)
    model = nn.Sequential(nn.Linear(2, 9), nn.Unflatten(-1, (3, 3))).double()
    loss, optimizer = kgt.FenchelYoungLoss(LIMIT, kg.Gini(0.5)), torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(features), target).backward()
        optimizer.step()
    assert (kg.solve(model(features), LIMIT) == target).double().mean() > 0.95


# The distribution.


def distribution(problem: Choices, regularizer: str, theta: Tensor | None = None, **more: Any) -> SubsetDistribution:
    theta = torch.tensor(problem.theta) if theta is None else theta
    return SubsetDistribution(theta, problem.constraint, problem.regularizer(regularizer), **more)


def close(result: Tensor, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


DISTRIBUTED = {
    **PROBLEMS,
    "masked": EDGES["masked"],
    "one option, optional": EDGES["one option, optional"],
    "one option": EDGES["one option"],
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_the_distribution_is_the_enumeration(name, regularizer):
    problem = DISTRIBUTED[name]
    one, truths = distribution(problem, regularizer, validate_args=False), problem.truths(regularizer)
    assert one.batch_shape == problem.batch and one.event_shape == problem.event
    mean = problem.batched([truth.relax for truth in truths], problem.n)
    close(one.mean, mean)
    close(one.variance, mean * (1 - mean))
    close(one.entropy(), problem.batched([truth.entropy for truth in truths]))
    y = problem.selections()
    rows = y.reshape(len(y), problem.size, problem.n)
    expected = np.array([[truth.log_prob(row) for truth, row in zip(truths, each)] for each in rows])
    close(one.log_prob(torch.tensor(y)), expected.reshape(len(y), *problem.batch))
    np.testing.assert_array_equal(one.support.check(torch.tensor(y)).numpy(), problem.contains(y))
    assert one.support.event_dim == 2 and one.support.is_discrete
    mode = problem.flat(one.mode.numpy()).astype(int)
    for picked, truth in zip(mode, truths):
        assert truth.log_probs[tuple(picked)] == pytest.approx(max(truth.log_probs.values()), abs=1e-12)


@pytest.mark.parametrize("regularizer", ["gini", "tsallis"])
def test_the_mode_of_a_sparse_distribution_may_differ_from_the_best_selection(regularizer):
    """Two options that share what one of them would have."""
    theta, limit = torch.tensor([[0.0, 0.02, 0.01]]), kg.MultipleChoice([0, 0, 0], 0)
    one = SubsetDistribution(theta, limit, CLASSES[regularizer]())
    assert one.mode.tolist() == [[1.0, 0.0, 0.0]]
    assert kg.solve(theta, limit).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", ["required", "optional", "all for each instance"])
def test_sample_frequencies(name, regularizer):
    problem = PROBLEMS[name]
    y = distribution(problem, regularizer).sample((4000,), torch.Generator().manual_seed(0)).numpy().astype(int)
    flat = y.reshape(4000, problem.size, problem.n)
    for b, truth in enumerate(problem.truths(regularizer)):
        assert chi_square_p_value(Counter(map(tuple, flat[:, b].tolist())), truth.probabilities) > 1e-3


@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3), (0,)])
def test_shapes_of_samples(sample_shape, problem):
    one = distribution(problem, "gini")
    for draw in (one.sample, one.rsample):
        y = draw(sample_shape)
        assert y.shape == torch.Size(sample_shape) + one.theta.shape and y.dtype == one.theta.dtype
        log_prob = one.log_prob(y)
        assert log_prob.shape == torch.Size(sample_shape) + one.batch_shape and log_prob.isfinite().all()


@pytest.mark.parametrize("sample_shape", [(), (2, 3)])
def test_the_gradient_of_rsample_is_that_of_the_mean(sample_shape, problem, regularizer):
    theta = leaf(problem.theta)
    y = distribution(problem, regularizer, theta).rsample(sample_shape)
    z = noise(*y.shape)
    (gradient,) = autograd_grad(y, theta, z)
    total = z.sum(tuple(range(len(sample_shape)))) if sample_shape else z
    (expected,) = autograd_grad(kg.relax(theta, problem.constraint, problem.regularizer(regularizer)), theta, total)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("what", ["mean", "entropy", "log_prob"])
def test_gradcheck_of_the_distribution(what, regularizer):
    problem = PROBLEMS["optional"]
    y = drawn(problem, regularizer)

    def call(theta, gamma):
        one = SubsetDistribution(theta, problem.constraint, CLASSES[regularizer](gamma), validate_args=False)
        return {"mean": lambda: one.mean, "entropy": one.entropy, "log_prob": lambda: one.log_prob(y)}[what]()

    assert gradcheck(call, (leaf(problem.theta), leaf(0.9)))


def test_one_table_serves_mean_samples_and_log_probs(problem, regularizer, monkeypatch):
    calls: Counter[str] = Counter()
    for name in ("tabulate", "operator"):
        original = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *a, n=name, f=original: calls.update([n]) or f(*a))
    one = distribution(problem, regularizer)
    y = one.sample()
    one.log_prob(torch.stack([y, one.sample(), one.rsample()]))
    assert one.mean.shape == one.variance.shape == y.shape
    assert calls == {"tabulate": 1}


@pytest.mark.parametrize("name", ["required", "optional", "at least", "no batch"])
def test_enumerate_support(name, regularizer):
    problem = PROBLEMS[name]
    one = distribution(problem, regularizer)
    support = one.enumerate_support()
    theta, weights, limits, _ = problem.rows()[0]
    possible = ChoiceTruth(0 * theta, weights, limits, "shannon", 1.0, problem.options, problem.optional).log_probs
    assert support.shape == (len(possible), *one.theta.shape)
    rows = {tuple(row) for row in support.reshape(len(support), -1, problem.n)[:, 0].int().tolist()}
    assert rows == set(possible)
    torch.testing.assert_close(one.log_prob(support).exp().sum(0), torch.ones_like(one.entropy()))
    narrow = one.enumerate_support(expand=False)
    assert narrow.shape == (len(support), *[1] * len(problem.batch), *problem.event)


def test_enumerate_support_has_its_limits():
    with pytest.raises(NotImplementedError, match="same weights and limits"):
        distribution(PROBLEMS["all for each instance"], "gini").enumerate_support()
    with pytest.raises(ValueError, match="n = 21 is above 20"):
        SubsetDistribution(torch.zeros(7, 3), kg.MultipleChoice([1, 1, 1], 9), kg.Gini()).enumerate_support()


def test_expand_and_independent(regularizer):
    for name in ("required", "optional"):
        one = distribution(PROBLEMS[name], regularizer)
        wide = one.expand((4, 2))
        assert wide.batch_shape == (4, 2) and wide.event_shape == (3, 3)
        y = wide.sample((3,))
        assert y.shape == (3, 4, 2, 3, 3)
        torch.testing.assert_close(wide.mean, one.mean.expand(4, 2, 3, 3), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(wide.log_prob(y), one.log_prob(y), rtol=1e-12, atol=1e-14)
        whole = Independent(one, 1)
        torch.testing.assert_close(whole.log_prob(y[:, 0]), one.log_prob(y[:, 0]).sum(-1))


def test_log_prob_of_one_selection_for_the_whole_batch(regularizer):
    one = distribution(PROBLEMS["required"], regularizer, validate_args=False)
    y = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(one.log_prob(y), one.log_prob(y.expand(2, 3, 3)))


def test_validation(regularizer):
    problem = PROBLEMS["required"]
    nothing = torch.zeros(problem.theta.shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="support"):
        distribution(problem, regularizer, validate_args=True).log_prob(nothing)
    assert distribution(problem, regularizer, validate_args=False).log_prob(nothing).isneginf().all()
    optional = distribution(replace(problem, optional=True), regularizer, validate_args=True)
    assert optional.log_prob(nothing).isfinite().all()
    with pytest.raises(ValueError, match="theta"):
        distribution(problem, regularizer, torch.full((2, 3, 3), torch.nan), validate_args=True)


OTHERS = _scores(2, 3, 3, seed=11)


def truth_of_kl(p: ChoiceTruth, q: ChoiceTruth) -> float:
    if any(y not in q.log_probs for y in p.log_probs):
        return np.inf
    return float(sum((mp.exp(log_p) * (log_p - q.log_probs[y]) for y, log_p in p.log_probs.items()), mp.mpf(0)))


@pytest.mark.parametrize("of", REGULARIZERS)
@pytest.mark.parametrize("relative_to", REGULARIZERS)
@pytest.mark.parametrize("name", ["required", "optional", "at least", "all for each instance"])
def test_kl_divergence_against_enumeration(of, relative_to, name):
    p = replace(PROBLEMS[name], theta=0.5 * PROBLEMS[name].theta)
    q = replace(p, theta=0.3 * OTHERS.reshape(p.theta.shape), gamma=1.4)
    result = kl_divergence(distribution(p, of), distribution(q, relative_to))
    expected = p.batched([truth_of_kl(a, b) for a, b in zip(p.truths(of), q.truths(relative_to))])
    assert np.isfinite(expected).all() and expected.max() > 1e-3
    close(result, expected)


@pytest.mark.parametrize("relative_to", ["gini", "tsallis"])
def test_an_infinite_kl_divergence(relative_to):
    p = Choices(np.zeros((2, 1, 3)), [0, 0, 0], 0)
    q = replace(p, theta=np.array([[[9.0, 0.0, 0.0]], [[0.1, 0.0, 0.0]]]))
    theta = leaf(q.theta)
    result = kl_divergence(distribution(p, "gini"), distribution(q, relative_to, theta))
    assert result[0] == torch.inf and result[1].isfinite()
    (gradient,) = autograd_grad(result.sum(), theta)
    assert not gradient[0].any() and gradient[1].any() and gradient.isfinite().all()


@pytest.mark.parametrize("of, relative_to", [("shannon", "shannon"), ("gini", "tsallis"), ("tsallis", "shannon")])
@pytest.mark.parametrize("name", ["required", "optional"])
def test_gradcheck_of_the_kl_divergence(of, relative_to, name):
    problem = PROBLEMS[name]

    def call(theta_p, theta_q, gamma_p, gamma_q):
        p, q = (
            SubsetDistribution(theta, problem.constraint, CLASSES[kind](gamma))
            for theta, kind, gamma in ((theta_p, of, gamma_p), (theta_q, relative_to, gamma_q))
        )
        return kl_divergence(p, q)

    assert gradcheck(call, (leaf(0.3 * problem.theta), leaf(0.3 * OTHERS), leaf(1.0), leaf(1.3)))


@pytest.mark.parametrize(
    "other",
    [
        kg.MultipleChoice(WEIGHTS, 6, optional=True),
        kg.MultipleChoice(WEIGHTS, 7),
        kg.MultipleChoice(WEIGHTS[::-1], 6),
        kg.MultipleChoice(WEIGHTS, 6, at_least=5),
    ],
    ids=["optional", "capacity", "weights", "at_least"],
)
def test_kl_divergence_between_different_constraints_raises(other):
    p, q = (SubsetDistribution(torch.tensor(OTHERS), limit, kg.Gini()) for limit in (LIMIT, other))
    with pytest.raises(ValueError, match="same constraint"):
        kl_divergence(p, q)


def test_kl_divergence_between_options_and_items_of_equal_weights_raises():
    p, q = (
        SubsetDistribution(torch.zeros(2, 1), kg.MultipleChoice([[0], [0]], 0, optional=optional), kg.Gini())
        for optional in (False, True)
    )
    with pytest.raises(ValueError, match="same constraint"):
        kl_divergence(p, q)


def test_kl_divergence_between_equal_constraints_that_are_written_differently():
    limits = LIMIT, kg.MultipleChoice(np.stack([WEIGHTS, WEIGHTS]), [6, 6])
    p, q = (SubsetDistribution(torch.tensor(OTHERS), limit, kg.Tsallis()) for limit in limits)
    close(kl_divergence(p, q), np.zeros(2), 1e-12)
