"""Relax, Sample and FenchelYoungLoss as modules: modes, buffers, saving, training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from knapgrad.regularizers import REGULARIZERS as CLASSES

torch = pytest.importorskip("torch")
from cases import BUFFERS, LIMITS, OTHERS, event_of, noise  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils.parametrize import register_parametrization  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402

MODULES = {"Relax": kgt.Relax, "Sample": kgt.Sample, "FenchelYoungLoss": kgt.FenchelYoungLoss}


def scores(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return noise(*shape, seed=seed).to(dtype)


def run(module: nn.Module, theta: Tensor) -> Tensor:
    """A call that gives the same result each time."""
    torch.manual_seed(0)
    return module(theta, torch.zeros_like(theta)) if isinstance(module, kgt.FenchelYoungLoss) else module(theta)


@pytest.fixture(params=MODULES.values(), ids=MODULES.keys())
def kind(request: pytest.FixtureRequest) -> type[nn.Module]:
    return request.param


@pytest.fixture(params=LIMITS)
def constraint(request: pytest.FixtureRequest) -> str:
    """Any kind."""
    return request.param


@pytest.mark.parametrize("hard_eval", [False, True])
def test_relax_in_training_and_evaluation(hard_eval, constraint, regularizer):
    limit, smoothing, theta = LIMITS[constraint](), CLASSES[regularizer](0.5), scores(3, *event_of(constraint))
    layer = kgt.Relax(limit, smoothing, hard_eval=hard_eval)
    soft, hard = kg.relax(theta, limit, smoothing), kg.solve(theta, limit)
    assert not torch.equal(soft, hard)
    assert torch.equal(layer(theta), soft)
    assert torch.equal(layer.eval()(theta), hard if hard_eval else soft)
    assert torch.equal(layer.train()(theta), soft)


def test_sample_in_training_and_evaluation(constraint, regularizer):
    limit, theta = LIMITS[constraint](), 0.1 * scores(200, *event_of(constraint))
    support = kgt.SubsetDistribution(theta, limit, kg.Shannon()).support
    layer = kgt.Sample(limit, CLASSES[regularizer](), hard_eval=True)
    y = layer(theta)
    assert support.check(y).all()
    assert len(y.unique(dim=0)) > 1
    assert torch.equal(layer.eval()(theta), kg.solve(theta, limit))
    assert len(kgt.Sample(limit, CLASSES[regularizer]()).eval()(theta).unique(dim=0)) > 1


def test_sample_repeats_for_a_generator(constraint, regularizer):
    layer, theta = kgt.Sample(LIMITS[constraint](), CLASSES[regularizer](3.0)), scores(50, *event_of(constraint))
    first, again, other = (layer(theta, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sample_follows_the_global_generator(constraint):
    layer, theta = kgt.Sample(LIMITS[constraint](), kg.Gini(3.0)), scores(50, *event_of(constraint))
    assert torch.equal(run(layer, theta), run(layer, theta))
    assert not torch.equal(layer(theta), layer(theta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_sample_is_that_of_relax(dtype, constraint, regularizer):
    limit, smoothing = LIMITS[constraint](), CLASSES[regularizer](2.0)
    theta, z = (
        scores(6, *event_of(constraint), dtype=dtype).requires_grad_(),
        scores(6, *event_of(constraint), seed=1, dtype=dtype),
    )
    y = kgt.Sample(limit, smoothing)(theta)
    assert y.dtype == dtype
    assert ((y == 0) | (y == 1)).all()
    (gradient,) = torch.autograd.grad(y, theta, z)
    (expected,) = torch.autograd.grad(kg.relax(theta, limit, smoothing), theta, z)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_reductions(constraint, regularizer):
    limit, smoothing, theta = LIMITS[constraint](), CLASSES[regularizer](), scores(2, 3, *event_of(constraint))
    target = kg.solve(scores(2, 3, *event_of(constraint), seed=1), limit)
    losses = kg.fenchel_young_loss(theta, target, limit, smoothing)
    assert losses.shape == (2, 3)
    for reduction, expected in {"none": losses, "mean": losses.mean(), "sum": losses.sum()}.items():
        torch.testing.assert_close(kgt.FenchelYoungLoss(limit, smoothing, reduction)(theta, target), expected)
    torch.testing.assert_close(kgt.FenchelYoungLoss(limit, smoothing)(theta, target), losses.mean())


@pytest.mark.parametrize("reduction", ["average", None, "Mean"])
def test_bad_reduction(reduction):
    with pytest.raises(ValueError, match='reduction must be "mean", "sum" or "none"'):
        kgt.FenchelYoungLoss(kg.TopK(1), kg.Gini(), reduction)


def test_bad_arguments(kind):
    with pytest.raises(TypeError, match=r"constraint must be a knapgrad\.TopK"):
        kind(3, kg.Gini())
    with pytest.raises(TypeError, match="regularizer must be one of"):
        kind(kg.TopK(1), 0.5)


REPRS = {
    "Relax(TopK(k=2), Gini(gamma=0.5), hard_eval=False)": lambda: kgt.Relax(kg.TopK(2), kg.Gini(0.5)),
    "Relax(Knapsack(weights=[2, 1], capacity=3), Tsallis(gamma=0.1), hard_eval=True)": lambda: kgt.Relax(
        kg.Knapsack([2, 1], 3), kg.Tsallis(0.1), hard_eval=True
    ),
    "Sample(TopK(k=2), Shannon(gamma=learnable), hard_eval=False)": lambda: kgt.Sample(
        kg.TopK(2), kg.Shannon(nn.Parameter(torch.tensor(1.0)))
    ),
    "FenchelYoungLoss(TopK(k=[1, 2]), Gini(gamma=1.0), reduction=sum)": lambda: kgt.FenchelYoungLoss(
        kg.TopK([1, 2]), kg.Gini(), "sum"
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_repr(text):
    module = REPRS[text]()
    assert repr(module) == text
    assert module.extra_repr() in repr(nn.Sequential(module))


def test_the_constraint_is_in_the_buffers(kind, constraint):
    module = kind(LIMITS[constraint](), kg.Gini())
    buffers = dict(module.named_buffers())
    assert set(buffers) == set(module.state_dict()) == BUFFERS[constraint]
    for name, buffer in buffers.items():
        np.testing.assert_array_equal(buffer.numpy(), getattr(module.constraint, name))
    assert not list(module.parameters())


def test_state_dict_round_trip_changes_the_constraint(kind, constraint):
    theta = scores(3, *event_of(constraint))
    source, target = kind(OTHERS[constraint], kg.Gini(2.0)), kind(LIMITS[constraint](), kg.Gini(2.0))
    assert not torch.equal(run(source, theta), run(target, theta))
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(target) == repr(source)
    assert torch.equal(run(target, theta), run(source, theta))


def test_loading_leaves_the_constraint_that_was_given_alone(kind, constraint):
    given = LIMITS[constraint]()
    module, neighbour = kind(given, kg.Gini()), kind(given, kg.Gini())
    module.load_state_dict(kind(OTHERS[constraint], kg.Gini()).state_dict())
    assert repr(module.constraint) == repr(OTHERS[constraint])
    assert repr(neighbour.constraint) == repr(given) == repr(LIMITS[constraint]())


def test_a_parent_loads_the_constraint_of_its_child(constraint):
    theta = scores(3, *event_of(constraint))
    source, target = (nn.Sequential(kgt.Relax(x, kg.Gini())) for x in (OTHERS[constraint], LIMITS[constraint]()))
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(theta), source(theta))


def test_a_bad_state_dict_is_refused():
    module = kgt.Relax(kg.Knapsack([2, 1], 3), kg.Gini())
    before = {name: x.clone() for name, x in module.state_dict().items()}
    zero = torch.tensor(0)
    for weights, message in (
        (torch.tensor([2, -1]), "weights must not be negative"),
        (torch.tensor([2.0, 1.0]), "weights must be integers"),
        (torch.tensor([2, 1, 1]), "size mismatch for weights"),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict({"weights": weights, "capacity": torch.tensor(5), "at_least": zero})
        assert module.constraint == kg.Knapsack([2, 1], 3)
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        kgt.Relax(kg.Knapsack([2, 1], 3), kg.Gini()).load_state_dict({})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": np.array([1, 1])}, "expected torch.Tensor"),
        ({"weights": torch.empty(2, dtype=torch.long, device="meta")}, "weights is on the meta device"),
        ({"gamma": torch.tensor(-1.0)}, "gamma must be positive, got -1.0"),
        ({"gamma": torch.tensor(torch.nan)}, "gamma must be positive, got nan"),
        ({"gamma": torch.ones(3)}, "size mismatch for gamma"),
        ({"units": [[0.5, 0.0, 1.0]]}, r"units must be a real tensor \(1, 3, .*got list"),
        ({"units": np.array([[0.5, 0.0, 1.0]])}, "units must be a real tensor .*got ndarray"),
        ({"units": torch.ones(1, 3, dtype=torch.complex64)}, "units must be a real tensor .*got torch.complex64"),
        ({"units": torch.empty(1, 3, device="meta")}, "units is on the meta device"),
        ({"units": torch.ones(3)}, r"units must have the shape \(1, 3, .*got \(3,\)"),
        ({"units": torch.ones(2, 3)}, r"units must have the shape \(1, 3, .*got \(2, 3\)"),
        ({"units": torch.tensor([[-0.5, 0.0, 1.0]])}, r"units must be positive and finite, got .*-0\.5"),
        ({"units": torch.tensor([[0.5, torch.nan, 1.0]])}, "units must be positive and finite, got .*nan"),
    ],
)
def test_what_is_refused_is_refused_whole(change, message):
    module = kgt.Relax(kg.Knapsack([2, 1], 3), kg.Gini(nn.Parameter(torch.tensor(0.5))))
    state = {"weights": torch.tensor([1, 1]), "capacity": torch.tensor(2), "at_least": torch.tensor(1)}
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state | {"gamma": torch.tensor(0.7)} | change)
    assert module.constraint == kg.Knapsack([2, 1], 3) and module.gamma.item() == 0.5
    assert module.weights.tolist() == [2, 1] and module.capacity == 3


def test_the_constraint_is_what_the_buffers_say():
    """Also if only some of the keys are there."""
    module = kgt.Relax(kg.Knapsack([2, 1], 3), kg.Gini())
    module.load_state_dict({"capacity": torch.tensor(2)}, strict=False)
    assert module.constraint == kg.Knapsack([2, 1], 2) and module.capacity == 2
    with pytest.raises(AttributeError, match=r"capacity cannot be set.*assign \.constraint"):
        module.capacity = torch.tensor(1)
    module.load_state_dict(module.state_dict(), assign=True)
    assert module.capacity == 2


def test_two_names_of_the_random_source():
    with pytest.raises(TypeError, match="rng and generator are two names"):
        kgt.Sample(kg.TopK(1), kg.Gini())(scores(3, 4), rng=torch.Generator(), generator=torch.Generator())


def test_assigning_a_constraint(kind, constraint):
    theta, module = scores(3, *event_of(constraint)), kind(LIMITS[constraint](), kg.Gini(2.0))
    before = run(module, theta)
    module.constraint = OTHERS[constraint]
    fresh = kind(OTHERS[constraint], kg.Gini(2.0))
    assert not torch.equal(run(module, theta), before)
    assert torch.equal(run(module, theta), run(fresh, theta))
    assert all(torch.equal(x, fresh.state_dict()[name]) for name, x in module.state_dict().items())
    with pytest.raises(TypeError, match="constraint must be"):
        module.constraint = 3


def test_assigning_a_constraint_of_the_other_kind_leaves_no_buffers_behind(kind):
    module = kind(LIMITS["knapsack"](), kg.Gini())
    module.constraint = LIMITS["top-k"]()
    assert set(module.state_dict()) == BUFFERS["top-k"]
    kind(LIMITS["top-k"](), kg.Gini()).load_state_dict(module.state_dict())


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: _saved_and_loaded(module),
}


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_copies(how, used, kind, constraint):
    theta, gamma = scores(3, *event_of(constraint)), nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    module = kind(LIMITS[constraint](), kg.Tsallis(gamma)).eval()
    if used:
        run(module, theta)
    twin = COPIES[how](module)
    assert torch.equal(run(twin, theta), run(module, theta))
    assert repr(twin) == repr(module)
    assert not twin.training
    with torch.no_grad():
        twin.gamma.mul_(100)
    twin.constraint = OTHERS[constraint]
    assert module.gamma.item() == 0.7
    assert repr(module.constraint) == repr(LIMITS[constraint]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_to_a_dtype_and_device(dtype, kind, constraint):
    gamma = torch.tensor(0.5, dtype=torch.float64)
    module = kind(LIMITS[constraint](), kg.Gini(gamma)).to("cpu", dtype)
    buffers = dict(module.named_buffers())
    assert buffers.pop("gamma").dtype == dtype
    assert set(buffers) == BUFFERS[constraint]
    assert {buffer.dtype for buffer in buffers.values()} == {torch.int64}
    theta = scores(3, *event_of(constraint), dtype=dtype)
    result = run(module, theta)
    assert result.dtype == dtype
    assert torch.equal(result, run(kind(LIMITS[constraint](), kg.Gini(0.5)), theta))


def test_a_gamma_for_each_instance_is_a_buffer(constraint):
    gamma, theta = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64), scores(3, *event_of(constraint))
    layer = kgt.Relax(LIMITS[constraint](), kg.Gini(gamma))
    assert torch.equal(layer.state_dict()["gamma"], gamma)
    expected = [kg.relax(row, LIMITS[constraint](), kg.Gini(float(g))) for row, g in zip(theta, gamma)]
    torch.testing.assert_close(layer(theta), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_gamma_is_a_parameter_and_learns(constraint, regularizer):
    limit, theta = LIMITS[constraint](), scores(8, *event_of(constraint))
    gamma = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    layer = kgt.Relax(limit, CLASSES[regularizer](gamma))
    assert [name for name, _ in layer.named_parameters()] == ["gamma"]
    wanted = kg.relax(theta, limit, CLASSES[regularizer](1.0))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (layer(theta) - wanted).square().sum().backward()
        optimizer.step()
    assert gamma.item() == pytest.approx(1.0, abs=0.02)


def test_a_gamma_that_became_negative_is_refused():
    layer = kgt.Relax(kg.TopK(1), kg.Gini(nn.Parameter(torch.tensor(1.0))))
    with torch.no_grad():
        layer.gamma.fill_(-1.0)
    with pytest.raises(ValueError, match="gamma must be positive"):
        layer(torch.zeros(3))


def train(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], features: Tensor, target: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    history = []
    for _ in range(60):
        optimizer.zero_grad()
        value = loss(model(features), target)
        value.backward()
        optimizer.step()
        history.append(value.item())
    return history


def decisions(constraint: str) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """A constraint, a model that gives scores, features, and the decisions of another model."""
    torch.manual_seed(0)
    limit, unflatten = LIMITS[constraint](), nn.Unflatten(-1, event_of(constraint))
    features = scores(64, 3, dtype=torch.float32)
    target = kg.solve(unflatten(features @ scores(3, 4, seed=5, dtype=torch.float32)), limit)
    return limit, nn.Sequential(nn.Linear(3, 4), unflatten), features, target


def test_training_with_the_loss(constraint, regularizer):
    limit, model, features, target = decisions(constraint)
    history = train(model, kgt.FenchelYoungLoss(limit, CLASSES[regularizer](0.5)), features, target)
    assert history[-1] < 0.5 * history[0]
    assert (kg.solve(model(features), limit) == target).float().mean() > 0.9


@pytest.mark.parametrize("layer", ["Relax", "Sample"])
def test_training_through_a_layer(layer, constraint):
    limit, model, features, target = decisions(constraint)
    model = nn.Sequential(model, MODULES[layer](limit, kg.Shannon(0.5)))
    history = train(model, lambda y, target: (y - target).square().flatten(1).sum(-1).mean(), features, target)
    assert np.mean(history[-5:]) < 0.5 * history[0]


def test_autocast(kind, constraint):
    limit, model, features, target = decisions(constraint)
    module, weight = kind(limit, kg.Gini()), model[0].weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theta = model(features)
        result = module(theta, target) if kind is kgt.FenchelYoungLoss else (module(theta) * target).sum()
    assert theta.dtype == torch.bfloat16
    result.backward()
    half = weight.grad.clone()
    assert half.dtype == torch.float32
    assert half.isfinite().all()
    if kind is not kgt.Sample:
        model.zero_grad()
        theta = model(features)
        result = module(theta, target) if kind is kgt.FenchelYoungLoss else (module(theta) * target).sum()
        result.backward()
        assert (half - weight.grad).norm() < 0.1 * weight.grad.norm()


def test_a_constraint_given_to_the_call_stands_in():
    theta, others = scores(3, 4), kg.Knapsack([[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 1]], [3, 4, 2])
    layer, draw = kgt.Relax(kg.TopK(2), kg.Gini(0.5)), kgt.Sample(kg.TopK(2), kg.Gini(0.5))
    assert torch.equal(layer(theta, others), kg.relax(theta, others, kg.Gini(0.5)))
    loads = (torch.from_numpy(others.weights) * draw(theta, others)).sum(-1)
    assert (loads <= torch.from_numpy(others.capacity)).all()
    loss = kgt.FenchelYoungLoss(kg.TopK(2), kg.Gini(0.5), reduction="none")
    assert torch.equal(loss(theta, theta, others), kg.fenchel_young_loss(theta, theta, others, kg.Gini(0.5)))


@pytest.mark.parametrize("kind", [kg.torch.Relax, kg.torch.Sample, kg.torch.FenchelYoungLoss])
def test_without_a_constraint_each_call_brings_one(kind):
    module, usual = kind(None, kg.Gini()), kind(kg.TopK(2), kg.Gini())
    theta, more = torch.randn(3, 5), (torch.zeros(3, 5),) if kind is kg.torch.FenchelYoungLoss else ()
    torch.manual_seed(0)
    expected = usual(theta, *more)
    torch.manual_seed(0)
    torch.testing.assert_close(module(theta, *more, kg.TopK(2)), expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"constraint must be given with the call"):
        module(theta, *more)
    assert module.state_dict() == {} and "None" in repr(module)
    module.load_state_dict({})
    module.constraint = kg.TopK(2)
    assert module.state_dict().keys() == {"k"}


def test_a_gamma_with_history_is_refused():
    with pytest.raises(ValueError, match=r"gamma.*log_gamma"):
        kgt.Relax(kg.TopK(1), kg.Gini(nn.Parameter(torch.tensor(0.0)).exp()))


# Changing gamma and the regularizer.


def test_assigning_gamma_and_the_regularizer(kind):
    module, theta = kind(kg.TopK(2), kg.Gini(2.0)), scores(3, 4)
    module.gamma = 0.5
    assert module.regularizer == kg.Gini(0.5) and module.gamma == 0.5
    assert torch.equal(run(module, theta), run(kind(kg.TopK(2), kg.Gini(0.5)), theta))
    module.regularizer = kg.Tsallis(0.2)
    assert torch.equal(run(module, theta), run(kind(kg.TopK(2), kg.Tsallis(0.2)), theta))
    module.regularizer = kg.Shannon(nn.Parameter(torch.tensor(0.3)))
    assert list(dict(module.named_parameters())) == ["gamma"]
    module.gamma = 0.4  # no parameter any more
    assert not list(module.parameters()) and module.regularizer == kg.Shannon(0.4)
    with pytest.raises(AttributeError, match="cannot be set"):
        module.regularizer.gamma = 0.1
    for wrong, error in ((-1.0, ValueError), ("soft", TypeError)):
        with pytest.raises(error, match="gamma must be"):
            module.gamma = wrong
    with pytest.raises(TypeError, match="regularizer must be"):
        module.regularizer = kg.Gini
    assert module.regularizer == kg.Shannon(0.4)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.log()


def test_a_gamma_that_torch_computes(kind):
    """By a parametrization, and in the copies of nn.DataParallel, whose parameters are plain tensors."""
    theta = scores(3, 4)
    module = kind(kg.TopK(2), kg.Shannon(nn.Parameter(torch.tensor(0.3, dtype=torch.float64))))
    expected = run(module, theta)
    replica = module._replicate_for_data_parallel()
    replica.gamma = module.gamma * 1
    assert torch.equal(run(replica, theta), expected)
    register_parametrization(module, "gamma", Exp())
    torch.testing.assert_close(run(module, theta), expected)
    with torch.no_grad():
        module.parametrizations.gamma.original.add_(1)
    torch.testing.assert_close(run(module, theta), run(kind(kg.TopK(2), kg.Shannon(0.3 * np.e)), theta))
    if kind is not kgt.Sample:
        run(module, theta.requires_grad_()).sum().backward()
        assert module.parametrizations.gamma.original.grad is not None


def test_modules_made_on_the_meta_device_load(kind):
    state = kind(kg.Knapsack([2, 1], 3), kg.Gini()).state_dict()
    with torch.device("meta"):
        module = kind(kg.Knapsack([1, 1], 1), kg.Gini())
    assert module.weights.is_meta
    module.load_state_dict(state, assign=True)
    assert module.constraint == kg.Knapsack([2, 1], 3) and torch.equal(module.weights, state["weights"])
    theta = scores(3, 2)
    assert torch.equal(run(module, theta), run(kind(kg.Knapsack([2, 1], 3), kg.Gini()), theta))


# From soft to hard.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_straight_through_is_hard_forwards_and_relaxed_backwards(constraint, dtype):
    limit, theta, z = (
        LIMITS[constraint](),
        scores(3, *event_of(constraint)).to(dtype),
        scores(3, *event_of(constraint), seed=1).to(dtype),
    )
    hard, soft = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    gammas = [nn.Parameter(torch.tensor(0.7, dtype=torch.float64)) for _ in range(2)]
    y = kgt.Relax(limit, kg.Shannon(gammas[0]), straight_through=True)(hard)
    assert torch.equal(y, kg.solve(theta, limit)) and y.dtype == dtype
    found = torch.autograd.grad((y * z).sum(), [hard, gammas[0]])
    expected = torch.autograd.grad((kg.relax(soft, limit, kg.Shannon(gammas[1])) * z).sum(), [soft, gammas[1]])
    torch.testing.assert_close(found, expected)
    assert found[0].abs().sum() > 0


def test_a_schedule_lowers_gamma_by_the_same_factor():
    model = nn.Sequential(kgt.Relax(kg.TopK(2), kg.Gini(1.0)), nn.Sequential(kgt.Sample(kg.TopK(1), kg.Gini(4.0))))
    schedule, seen = kgt.GammaSchedule(model, last=0.01, steps=2), []
    for _ in range(4):
        seen.append([model[0].gamma, model[1][0].gamma])
        schedule.step()
    np.testing.assert_allclose(seen, [[1.0, 4.0], [0.1, 0.2], [0.01, 0.01], [0.01, 0.01]], rtol=1e-12)
    other = nn.Sequential(kgt.Relax(kg.TopK(2), kg.Gini(1.0)), kgt.Relax(kg.TopK(2), kg.Gini(1.0)))
    again = kgt.GammaSchedule(other, last=1.0, steps=1)
    again.load_state_dict(schedule.state_dict())
    assert other[0].gamma == model[0].gamma and again.state_dict() == schedule.state_dict()
    with pytest.raises(ValueError, match="no layers"):
        kgt.GammaSchedule(nn.Linear(2, 2), 0.1, 3)
    with pytest.raises(ValueError, match="gamma must be a number"):
        kgt.GammaSchedule(kgt.Relax(kg.TopK(2), kg.Gini(nn.Parameter(torch.tensor(1.0)))), 0.1, 3)
    with pytest.raises(ValueError, match="steps must be"):
        kgt.GammaSchedule(model, 0.1, 0)
    with pytest.raises(ValueError, match="the state is of 2 layers"):
        kgt.GammaSchedule(model[0], 0.1, 3).load_state_dict(schedule.state_dict())
