"""The operations under opcheck, torch.compile and torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from calls import SMOOTHED
from knapgrad.regularizers import REGULARIZERS as CLASSES

torch = pytest.importorskip("torch")
from cases import LIMITS, event_of, noise  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402
from instances import CONSTRAINTS  # noqa: E402
from knapgrad.lattice import Lattice  # noqa: E402
from knapgrad.numpy import backend as numpy_backend  # noqa: E402
from knapgrad.torch import operators  # noqa: E402

BATCH, ITEMS, SAMPLES, COPIES, REACH = 3, 4, 2, 5, 9


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Scores so close that the sparse regularizers leave no selection out."""
    return 0.1 * noise(*shape, seed=seed)


def selections(limit: Any, *shape: int, seed: int = 0) -> Tensor:
    return kg.solve(numbers(*shape, seed=seed), limit)


@pytest.fixture(params=LIMITS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The operators themselves, as torch knows them and as the library calls them.

ROUTES: dict[str, Callable[[str], Callable[..., Any]]] = {
    "torch.ops": lambda name: getattr(torch.ops.knapgrad, name).default,
    "library": lambda name: through_library(name),
}


def through_library(name: str) -> Callable[..., Any]:
    """Takes the arguments of the schema, where the lattice is taken apart."""
    names = [argument.name for argument in getattr(torch.ops.knapgrad, name).default._schema.arguments]
    at, end = names.index("weights"), names.index("options") + 1

    def call(*flat: Any) -> Any:
        *arrays, sizes, options = flat[at:end]
        return getattr(operators, name)(*flat[:at], Lattice(*arrays, REACH, 10, options, sizes), *flat[end:])

    return call


@pytest.fixture(params=ROUTES.values(), ids=ROUTES.keys())
def route(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    return request.param


def lattice_of(kind: str) -> Lattice:
    limit = LIMITS[kind]()
    return limit.lattice(limit.flat(numpy_backend, np.zeros(event_of(kind))).size)


TENSORS = "theta", "z", "y", "uniforms", "cotangent", "value", "mean", "gamma", "weights", "capacity", "slack"


def names_of(name: str, kind: str) -> list[str]:
    """Of the tensor arguments of an operator, in its schema. No kernel is called: tests are collected by them."""
    gone = () if lattice_of(kind).slack is not None else ("slack",)
    schema = getattr(torch.ops.knapgrad, name).default._schema
    return [a.name for a in schema.arguments if a.name in TENSORS and a.name not in gone]


def tensors_of(name: str, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """The tensor arguments of an operator, by their names in its schema."""
    lattice, limit = lattice_of(kind), LIMITS[kind]()
    n, y = lattice.weights.shape[-1], selections(limit, SAMPLES, BATCH, *event_of(kind), seed=seed + 2)
    shapes = {"frontier_vjp": (BATCH, REACH + 1), "vjp_grad": (BATCH, n)}
    everything = {
        "theta": numbers(BATCH, n, seed=seed),
        "z": numbers(BATCH, n, seed=seed + 1),
        "y": torch.from_numpy(limit.flat(numpy_backend, y.numpy(), is_selection=True)),
        "uniforms": numbers(SAMPLES, BATCH, n, seed=seed + 3).remainder(1.0),
        "cotangent": numbers(*shapes.get(name, (SAMPLES, BATCH)), seed=seed + 4),
        "value": numbers(BATCH, seed=seed + 5),
        "mean": numbers(BATCH, n, seed=seed + 6),
        "gamma": 1 + numbers(1, seed=seed + 7)[0],
        **{
            part: torch.tensor(x)
            for part in ("weights", "capacity", "slack")
            if (x := getattr(lattice, part)) is not None
        },
    }
    return {key: everything[key] for key in names_of(name, kind)}


def complete(name: str, tensors: dict[str, Tensor], kind: str, regularizer: str) -> tuple[Any, ...]:
    """All arguments in the order of the schema."""
    rest = {"regularizer": regularizer, "sizes": torch.tensor([REACH, 10]), "options": lattice_of(kind).options}
    rest |= {"length": REACH + 1, "slack": None, "relaxed": True, "table": None}
    schema = getattr(torch.ops.knapgrad, name).default._schema
    return tuple(tensors[a.name] if a.name in tensors else rest[a.name] for a in schema.arguments)


#: operator -> whether its theta can be differentiated
OPERATORS = {
    "operator": True,
    "relax": True,
    "recall": True,
    "vjp": False,
    "vjp_grad": False,
    "surrogate": True,
    "sample": False,
    "mode": False,
    "solve": False,
    "tabulate": False,
    "log_prob": True,
    "log_prob_vjp": False,
    "entropy": True,
    "entropy_grad": False,
    "frontier": True,
    "frontier_vjp": False,
}
NOT_OF_A_LATTICE = {"uniforms"}


def test_every_operator_is_tested():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("knapgrad::")}
    assert names == {f"knapgrad::{name}" for name in (*OPERATORS, *NOT_OF_A_LATTICE)}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("constraint", [kind for kind in LIMITS if kind != "budgets"])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name, constraint):
    tensors, regularizer = tensors_of(name, constraint), list(CLASSES)[len(constraint) % 3]
    if OPERATORS[name]:
        tensors["theta"].requires_grad_()
        tensors["gamma"].requires_grad_()
    if name == "vjp":
        tensors["z"].requires_grad_()
    operator = getattr(torch.ops.knapgrad, name).default
    results = torch.library.opcheck(operator, complete(name, tensors, constraint, regularizer))
    assert set(results.values()) == {"SUCCESS"}


def copies_of(name: str, constraint: str) -> list[dict[str, Tensor]]:
    """Different values of all tensor arguments, weights and capacity included."""
    copies = [tensors_of(name, constraint, seed=10 * i) for i in range(COPIES)]
    for i, copy in enumerate(copies):
        if constraint == "at least":
            capacity, slack = ([4, 5, 4, 4, 5], [2, 3, 4, 3, 5]) if "y" in copy else ([2, 3, 4, 2, 4], [2, 1, 2, 0, 1])
            copy["capacity"], copy["slack"] = torch.tensor(capacity[i]), torch.tensor(slack[i])
            continue
        if constraint == "knapsack":
            copy["weights"] = torch.tensor([1 + i % 2, i % 3, 2, 0])
        if "y" not in copy:
            copy["capacity"] = torch.tensor([2, 1, 3, 2, 4][i])
        elif constraint == "knapsack":
            copy["capacity"] = torch.tensor([6, 7, 8, 6, 9][i])
    return copies


def vmapped_against_loop(
    operator: Callable[..., Any],
    name: str,
    constraint: str,
    regularizer: str,
    batched: list[str],
    dims: dict[str, int],
) -> None:
    copies = copies_of(name, constraint)
    shared = {key: x for key, x in copies[0].items() if key not in batched}
    stacked = {key: torch.stack([copy[key] for copy in copies], dims.get(key, 0)) for key in batched}
    schema = getattr(torch.ops.knapgrad, name).default._schema
    in_dims = tuple(dims.get(a.name, 0) if a.name in batched else None for a in schema.arguments)
    result = vmap(operator, in_dims)(*complete(name, {**stacked, **shared}, constraint, regularizer))
    one_by_one = [
        operator(*complete(name, {**{key: copy[key] for key in batched}, **shared}, constraint, regularizer))
        for copy in copies
    ]
    if name == "tabulate":
        result, one_by_one = result[:2], [results[:2] for results in one_by_one]
    expected = tuple(map(torch.stack, zip(*one_by_one))) if isinstance(result, tuple) else torch.stack(one_by_one)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


EACH_ARGUMENT = [
    (name, key, constraint)
    for name in OPERATORS
    for constraint in CONSTRAINTS
    for key in names_of(name, constraint)
    if constraint != "at least" or key == "slack"
]


@pytest.mark.parametrize(("name", "argument", "constraint"), EACH_ARGUMENT)
def test_vmap_over_one_argument_is_a_loop(name, argument, constraint, route):
    vmapped_against_loop(route(name), name, constraint, "tsallis", [argument], {})


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_all_arguments_is_a_loop(name, constraint, route):
    dims = {"theta": 2, "z": 1, "y": 1, "uniforms": 3, "cotangent": 2, "weights": 1}
    vmapped_against_loop(route(name), name, constraint, "gini", list(tensors_of(name, constraint)), dims)


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_constants_of_a_batch_of_their_own(name, route):
    """Weights (batch, n) and capacity (batch,), for each of the copies."""
    operator = route(name)
    tensors = tensors_of(name, "knapsack")
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 3, (COPIES, BATCH, ITEMS), generator=generator)
    capacity = torch.randint(8, 9, (COPIES, BATCH), generator=generator)

    def call(weights, capacity):
        result = operator(*complete(name, {**tensors, "weights": weights, "capacity": capacity}, "knapsack", "gini"))
        return result[:2] if name == "tabulate" else result

    result, one_by_one = vmap(call)(weights, capacity), [call(w, c) for w, c in zip(weights, capacity)]
    expected = tuple(map(torch.stack, zip(*one_by_one))) if isinstance(result, tuple) else torch.stack(one_by_one)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


NESTINGS = {
    "theta, then the constants": (["theta"], ["weights", "capacity"]),
    "the constants, then theta": (["weights", "capacity"], ["theta"]),
    "weights, then capacity": (["weights"], ["capacity"]),
    "capacity, then weights": (["capacity"], ["weights"]),
    "the constants, then the rest": (["weights", "capacity"], ["theta", "z", "y", "uniforms", "cotangent"]),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_nested_vmap_is_a_double_loop(name, nesting, route):
    operator = route(name)
    copies = copies_of(name, "knapsack")
    outer, inner = ([key for key in keys if key in copies[0]] for keys in NESTINGS[nesting])
    outer_copies, inner_copies = copies[:3], copies[1:]

    def call(outer_values, inner_values):
        tensors = {**copies[0], **dict(zip(outer, outer_values)), **dict(zip(inner, inner_values))}
        result = operator(*complete(name, tensors, "knapsack", "gini"))
        return result[0] if name in ("operator", "recall", "tabulate") else result

    def values(keys, copies):
        return [torch.stack([copy[key] for copy in copies]) for key in keys]

    nested = vmap(vmap(call, in_dims=(None, 0)), in_dims=(0, None))(
        values(outer, outer_copies), values(inner, inner_copies)
    )
    looped = torch.stack(
        [
            torch.stack([call([a[key] for key in outer], [b[key] for key in inner]) for b in inner_copies])
            for a in outer_copies
        ]
    )
    torch.testing.assert_close(nested, looped, rtol=1e-12, atol=1e-13)


# The operations under torch.func.

Operation = Callable[[Tensor, Tensor, Any, Any], Tensor]

#: operation -> a call with theta, a further argument of its shape, constraint and regularizer
OPERATIONS: dict[str, Operation] = {name: call for name, call in SMOOTHED.items() if name != "divergence"}


def frontier(theta: Tensor, extra: Any, limit: Any, smoothing: Any) -> Tensor:
    row = kg.frontier(theta, limit, smoothing)
    return torch.where(torch.isneginf(row), 0.0, row)


@pytest.mark.parametrize("operation", [*OPERATIONS, "solve", "frontier"])
def test_vmap_over_theta_is_the_batch(operation, kind, regularizer):
    if operation == "frontier" and kind == "at least":
        pytest.skip("it has none")
    limit, smoothing, shape = LIMITS[kind](), CLASSES[regularizer](), event_of(kind)
    others = {"solve": lambda theta, extra, limit, smoothing: kg.solve(theta, limit), "frontier": frontier}
    call = {**OPERATIONS, **others}[operation]
    theta, extra = numbers(COPIES, BATCH, *shape), selections(limit, COPIES, BATCH, *shape)
    mapped = vmap(lambda theta, extra: call(theta, extra, limit, smoothing), in_dims=(0, 1))
    expected = call(theta, extra, limit, smoothing)
    torch.testing.assert_close(mapped(theta, extra.movedim(0, 1)), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_autograd_through_vmap(operation, kind, regularizer):
    call, limit, smoothing = OPERATIONS[operation], LIMITS[kind](), CLASSES[regularizer]()
    extra = selections(limit, COPIES, BATCH, *event_of(kind))
    gradients = []
    for run in (vmap(call, in_dims=(0, 0, None, None)), call):
        theta = numbers(COPIES, BATCH, *event_of(kind)).requires_grad_()
        result = run(theta, extra, limit, smoothing)
        gradients.append(torch.autograd.grad(result, theta, numbers(*result.shape, seed=3))[0])
    assert gradients[1].any()
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


def scalar(call: Operation, extra: Tensor, limit: Any, smoothing: Any, z: Tensor) -> Callable[[Tensor], Tensor]:
    def function(theta: Tensor) -> Tensor:
        result = call(theta, extra, limit, smoothing)
        return (result * z).sum() if result.shape == z.shape else result.sum()

    return function


@pytest.mark.parametrize("operation", [*OPERATIONS, "frontier"])
def test_vmap_of_grad_is_the_batch(operation, kind, regularizer):
    if operation == "frontier" and kind == "at least":
        pytest.skip("it has none")
    limit, smoothing, shape = LIMITS[kind](), CLASSES[regularizer](), event_of(kind)
    call, theta = {**OPERATIONS, "frontier": frontier}[operation], numbers(COPIES, *shape)
    z, extra = numbers(COPIES, *shape, seed=1), selections(limit, COPIES, *shape)
    mapped = vmap(lambda theta, extra, z: grad(scalar(call, extra, limit, smoothing, z))(theta))(theta, extra, z)
    leaf = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(scalar(call, extra, limit, smoothing, z)(leaf), leaf)
    assert expected.any()
    torch.testing.assert_close(mapped, expected, rtol=1e-12, atol=1e-13)


def test_func_grad_in_gamma(kind, regularizer):
    limit, theta = LIMITS[kind](), numbers(BATCH, *event_of(kind))

    def function(gamma):
        return kg.relax(theta, limit, CLASSES[regularizer](gamma)).square().sum()

    gamma = torch.tensor(0.7, dtype=torch.float64)
    leaf = gamma.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf), leaf)
    assert expected != 0
    torch.testing.assert_close(grad(function)(gamma), expected, rtol=1e-12, atol=0)


def test_jacobians_and_hessians(kind, regularizer):
    """Of one instance, and mapped over a batch."""
    limit, smoothing, theta = LIMITS[kind](), CLASSES[regularizer](0.9), numbers(BATCH, *event_of(kind))
    relax = lambda row: kg.relax(row, limit, smoothing)  # noqa: E731
    value = lambda row: kg.value(row, limit, smoothing)  # noqa: E731
    expected = torch.stack([torch.autograd.functional.jacobian(relax, row) for row in theta])
    assert expected.any()
    flat = expected.reshape(BATCH, ITEMS, ITEMS)
    torch.testing.assert_close(flat, flat.mT, rtol=1e-12, atol=1e-13)
    for function in (jacrev(relax), jacfwd(relax), hessian(value), jacrev(jacrev(value))):
        torch.testing.assert_close(function(theta[0]), expected[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(vmap(function)(theta), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("operation", ["relax", "entropy", "divergence from a prior"])
def test_a_second_derivative_that_is_not_there_raises_under_func(operation, kind):
    limit, shape = LIMITS[kind](), event_of(kind)
    function = scalar(OPERATIONS[operation], numbers(*shape, seed=2), limit, kg.Gini(), numbers(*shape, seed=3))
    with pytest.raises(NotImplementedError, match="knapgrad has no second derivative"):
        grad(lambda theta: grad(function)(theta).square().sum())(numbers(*shape))


def test_a_hessian_of_relax_of_items_under_shannon():
    def loss(theta):
        return kg.relax(theta, kg.TopK(2), kg.Shannon(0.8)).square().sum()

    theta = numbers(BATCH, ITEMS)
    first = grad(loss)
    expected = torch.stack([
        (first(theta[0] + step) - first(theta[0] - step)) / 2e-5 for step in 1e-5 * torch.eye(ITEMS, dtype=theta.dtype)
    ])  # fmt: skip
    for function in (hessian(loss), jacrev(jacrev(loss)), jacrev(jacfwd(loss)), jacfwd(jacfwd(loss))):
        torch.testing.assert_close(function(theta[0]), expected, rtol=0, atol=1e-8)
        torch.testing.assert_close(vmap(function)(theta)[0], expected, rtol=0, atol=1e-8)


def test_gradients_of_each_example_of_a_model(kind):
    torch.manual_seed(0)
    limit, model = LIMITS[kind](), nn.Linear(3, ITEMS).double()
    features, targets = numbers(COPIES, 3), selections(limit, COPIES, *event_of(kind))
    parameters = dict(model.named_parameters())

    def loss(parameters, features, target):
        theta = functional_call(model, parameters, (features,)).unflatten(-1, event_of(kind))
        return kg.fenchel_young_loss(theta, target, limit, kg.Tsallis())

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, targets)
    for i in range(COPIES):
        expected = torch.autograd.grad(loss(parameters, features[i], targets[i]), list(parameters.values()))
        for name, gradient in zip(parameters, expected):
            torch.testing.assert_close(each[name][i], gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_of_sample(randomness, kind, regularizer):
    limit, theta = LIMITS[kind](), numbers(1, *event_of(kind)).expand(50, *event_of(kind))
    y = vmap(lambda theta: kg.sample(theta, limit, CLASSES[regularizer](), num_samples=3), randomness=randomness)(theta)
    assert y.shape == (50, 3, *event_of(kind))
    assert kgt.SubsetDistribution(theta, limit, CLASSES[regularizer]()).support.check(y.movedim(1, 0)).all()
    assert bool((y == y[0]).all()) == (randomness == "same")


@pytest.mark.parametrize("regularizer", ["shannon", "gini"])
def test_vmap_of_a_distribution(kind, regularizer):
    limit, smoothing, shape = LIMITS[kind](), CLASSES[regularizer](), (COPIES, BATCH, *event_of(kind))
    theta, y = numbers(*shape), selections(limit, *shape)
    whole = kgt.SubsetDistribution(theta, limit, smoothing)

    def everything(theta, y):
        part = kgt.SubsetDistribution(theta, limit, smoothing, validate_args=False)
        return part.mean, part.log_prob(y), part.entropy(), part.mode

    expected = whole.mean, whole.log_prob(y), whole.entropy(), whole.mode
    torch.testing.assert_close(vmap(everything)(theta, y), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("regularizer", ["shannon", "gini"])
@pytest.mark.parametrize("used_before", [False, True])
def test_vmap_of_log_prob_over_selections_of_one_distribution(used_before, kind, regularizer):
    limit, shape = LIMITS[kind](), (BATCH, *event_of(kind))
    y = selections(limit, COPIES, *shape)
    one = kgt.SubsetDistribution(numbers(*shape), limit, CLASSES[regularizer](), validate_args=False)
    if used_before:
        one.sample()
    result = vmap(one.log_prob)(y)
    torch.testing.assert_close(result, one.log_prob(y), rtol=1e-12, atol=1e-13)


def test_vmap_of_samples_of_one_distribution(kind, regularizer):
    one = kgt.SubsetDistribution(numbers(BATCH, *event_of(kind)), LIMITS[kind](), CLASSES[regularizer]())
    y = vmap(lambda _: one.sample(), randomness="different")(torch.arange(20))
    assert one.support.check(y).all()
    assert len(y.unique(dim=0)) > 1


# A constraint keeps what a transform or a mode made of it; that must not matter afterwards.


def _fake(call, theta):
    with FakeTensorMode() as mode:
        call(mode.from_tensor(theta))


def _inference(call, theta):
    with torch.inference_mode():
        call(theta)


FIRST_USES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "eager": lambda call, theta: call(theta),
    "inference_mode": _inference,
    "no_grad": lambda call, theta: torch.no_grad()(call)(theta),
    "grad": lambda call, theta: grad(call)(theta),
    "vmap of grad": lambda call, theta: vmap(grad(call))(theta),
    "jacrev of jacrev": lambda call, theta: jacrev(jacrev(call))(theta),
    "compile": lambda call, theta: torch.compile(call, backend="aot_eager", fullgraph=True)(theta),
    "fake tensors": _fake,
}


@pytest.mark.parametrize("first", FIRST_USES)
@pytest.mark.parametrize("then", ["eager", "vmap of grad", "compile"])
def test_a_constraint_is_not_spoilt_by_its_first_use(first, then, fresh_compiler):
    limit, theta = kg.Knapsack([2, 1, 0, 2], 4), numbers(BATCH, ITEMS)

    def value(theta):
        return kg.value(theta, limit, kg.Gini()).sum()

    FIRST_USES[first](value, theta)
    leaf = theta.clone().requires_grad_()
    if then == "eager":
        (gradient,) = torch.autograd.grad(value(leaf), leaf)
    elif then == "vmap of grad":
        gradient = vmap(grad(value))(theta)
    else:
        (gradient,) = torch.autograd.grad(torch.compile(value, backend="aot_eager", fullgraph=True)(leaf), leaf)
    expected = torch.tensor(kg.relax(theta.numpy(), kg.Knapsack([2, 1, 0, 2], 4), kg.Gini()))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


# torch.compile.


def forward_and_backward(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = call(*leaves)
    return result, *torch.autograd.grad(result, leaves, numbers(*result.shape, seed=5).to(result.dtype))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("operation", [*OPERATIONS, "frontier"])
def test_compiled_operations_are_the_eager_ones(operation, kind, fresh_compiler):
    if operation == "frontier" and kind == "at least":
        pytest.skip("it has none")
    limit = LIMITS[kind]()
    extra = selections(limit, BATCH, *event_of(kind))
    smoothing = kg.Gini if kind in ("knapsack", "choices", "budgets") else kg.Tsallis

    def call(theta, gamma):
        return {**OPERATIONS, "frontier": frontier}[operation](theta, extra, limit, smoothing(gamma))

    inputs = numbers(BATCH, *event_of(kind)), torch.tensor(0.8, dtype=torch.float64)
    compiled = forward_and_backward(torch.compile(call, backend="aot_eager", fullgraph=True), *inputs)
    torch.testing.assert_close(compiled, forward_and_backward(call, *inputs), rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(4)
def test_compiled_shannon_operations_are_the_eager_ones(kind, fresh_compiler):
    limit = LIMITS[kind]()
    extra = selections(limit, BATCH, *event_of(kind))

    def call(theta, gamma):
        results = [call(theta, extra, limit, kg.Shannon(gamma)) for call in OPERATIONS.values()]
        return torch.cat([result.reshape(-1) for result in results])

    inputs = numbers(BATCH, *event_of(kind)), torch.tensor([0.8, 1.0, 2.0], dtype=torch.float64)
    compiled = forward_and_backward(torch.compile(call, backend="aot_eager", fullgraph=True), *inputs)
    torch.testing.assert_close(compiled, forward_and_backward(call, *inputs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiled_vmap_is_the_batch(operation, fresh_compiler):
    limit, theta = LIMITS["knapsack"](), numbers(COPIES, BATCH, ITEMS)
    extra = selections(limit, COPIES, BATCH, ITEMS)

    def call(theta, extra):
        return OPERATIONS[operation](theta, extra, limit, kg.Gini())

    compiled = torch.compile(vmap(call), backend="aot_eager", fullgraph=True)(theta, extra)
    torch.testing.assert_close(compiled, call(theta, extra), rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(4)
def test_compiled_solve_and_sample(kind, fresh_compiler):
    limit, theta = LIMITS[kind](), numbers(BATCH, *event_of(kind))

    def call(theta):
        return kg.solve(theta, limit), kg.sample(theta, limit, kg.Gini(), num_samples=6)

    torch.manual_seed(0)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(theta)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled, call(theta), rtol=0, atol=0)


@pytest.mark.thinned(4)
def test_compiled_distribution(kind, fresh_compiler):
    limit = LIMITS[kind]()
    y = selections(limit, BATCH, *event_of(kind))

    def call(theta):
        one = kgt.SubsetDistribution(theta, limit, kg.Tsallis(), validate_args=False)
        parts = one.mean, one.rsample((2,)), one.log_prob(y), one.entropy()
        return torch.cat([part.reshape(-1) for part in parts])

    theta = numbers(BATCH, *event_of(kind))
    torch.manual_seed(0)
    compiled = forward_and_backward(torch.compile(call, backend="aot_eager", fullgraph=True), theta)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled, forward_and_backward(call, theta), rtol=1e-12, atol=1e-13)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Relax": lambda: kgt.Relax(kg.TopK(2), kg.Gini(nn.Parameter(torch.tensor(0.8, dtype=torch.float64)))),
    "Relax, hard": lambda: kgt.Relax(kg.TopK(2), kg.Gini(), hard_eval=True).eval(),
    "Sample": lambda: kgt.Sample(kg.Knapsack([2, 1, 0, 2], 4), kg.Tsallis()),
    "FenchelYoungLoss": lambda: kgt.FenchelYoungLoss(kg.Knapsack([2, 1, 0, 2], 4), kg.Shannon()),
}


@pytest.mark.parametrize("name", MODULES)
def test_compiled_modules_are_the_eager_ones(name, fresh_compiler):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, ITEMS).double(), MODULES[name]()])
    model.train(name != "Relax, hard")
    features, target = numbers(BATCH, 3), torch.zeros(BATCH, ITEMS, dtype=torch.float64)

    def call(features):
        theta = model[0](features)
        return model[1](theta, target) if name == "FenchelYoungLoss" else (model[1](theta) * theta).sum()

    results = []
    for run in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        torch.manual_seed(1)
        model.zero_grad()
        loss = run(features)
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in model.parameters())))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


@pytest.mark.thinned(4)
def test_new_batch_sizes_do_not_compile_again(kind, fresh_compiler):
    limit, counter = LIMITS[kind](), CompileCounterWithBackend("aot_eager")

    def call(theta):
        return kg.relax(theta, limit, kg.Gini())

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for batch in (3, 5, 8, 13):
        results = (forward_and_backward(run, numbers(batch, *event_of(kind))) for run in (compiled, call))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
        counts.append(counter.frame_count)
    assert counts[1] == counts[-1]


def test_inductor_trains_as_eager_does(fresh_compiler):
    budget = kg.Knapsack([2, 1, 0, 2], 4)
    features, target = numbers(8, 3), selections(budget, 8, ITEMS)
    losses = []
    for transform in (torch.compile, lambda call, fullgraph: call):
        torch.manual_seed(0)
        model = nn.Linear(3, ITEMS).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step(model=model):
            return kg.fenchel_young_loss(model(features), target, budget, kg.Gini()).mean()

        step, history = transform(step, fullgraph=True), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = step()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(*losses, rtol=1e-10)


def test_a_compiled_function_takes_other_constraints(fresh_compiler):
    """Weights of all groups make a lattice once the number of groups is known, which cannot be traced."""
    compiled = torch.compile(
        lambda theta, limit: kg.relax(theta, limit, kg.Gini()), backend="aot_eager", fullgraph=True
    )
    theta = numbers(2, 3, 3)
    for limit in (kg.MultipleChoice([2, 1, 3], 6), kg.MultipleChoice([1, 2, 3], 6), kg.MultipleChoice([1, 2, 3], 5)):
        expected = kg.relax(theta, limit, kg.Gini())
        torch.testing.assert_close(compiled(theta, limit), expected, rtol=1e-12, atol=1e-13)
