"""Every private call of torch has a public stand-in: the library works with each of them missing, and with all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import knapgrad as kg

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad, gradcheck  # noqa: E402
from torch.func import grad, vmap  # noqa: E402

from knapgrad.torch import private, registration  # noqa: E402

THETA = torch.tensor([[0.3, -0.2, 0.9, 0.1], [1.0, 0.4, -0.6, 0.2]], dtype=torch.float64)
BUDGET = kg.Knapsack([2, 1, 3, 1], 4, at_least=2)


OF_CUDA = () if torch.cuda.is_available() else ("stream", "device")  # other builds of torch do not have them


@pytest.fixture(params=[*(name for name in private.FOUND if name not in OF_CUDA), "all"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    names = [name for name in private.FOUND if name not in OF_CUDA]
    for name in names if request.param == "all" else [request.param]:
        assert private.FOUND[name] is not None, f"this torch has no {name}: its stand-in is in use"
        monkeypatch.setitem(private.FOUND, name, None)
    yield request.param


def test_operations_and_derivatives(missing):
    theta = THETA.clone().requires_grad_()
    expected = kg.relax(THETA.numpy(), BUDGET, kg.Tsallis())
    torch.testing.assert_close(kg.relax(theta, BUDGET, kg.Tsallis()).detach().numpy(), expected)
    assert gradcheck(lambda theta: kg.relax(theta, BUDGET, kg.Tsallis()), theta)
    assert gradcheck(lambda theta: kg.log_prob(theta, kg.solve(THETA, BUDGET), BUDGET, kg.Shannon()), theta)
    with torch.no_grad():
        np.testing.assert_array_equal(kg.relax(theta, BUDGET, kg.Tsallis()), expected)


def test_transforms_and_forward_mode(missing):
    expected = kg.relax(THETA, BUDGET, kg.Gini())
    torch.testing.assert_close(vmap(lambda theta: kg.relax(theta, BUDGET, kg.Gini()))(THETA), expected)
    torch.testing.assert_close(grad(lambda theta: kg.value(theta, BUDGET, kg.Gini()).sum())(THETA), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(THETA, torch.ones_like(THETA))
        tangent = forward_ad.unpack_dual(kg.value(dual, BUDGET, kg.Gini())).tangent
    torch.testing.assert_close(tangent, expected.sum(-1))


def test_the_distribution_and_its_table(missing):
    distribution = kg.torch.SubsetDistribution(THETA.clone(), BUDGET, kg.Gini())
    before = distribution.mean
    distribution.theta.mul_(-1)
    torch.testing.assert_close(distribution.mean, kg.relax(-THETA, BUDGET, kg.Gini()))
    assert not torch.equal(before, distribution.mean)
    assert BUDGET.contains(distribution.sample((5,))).all()


def test_batched_numbers_are_refused(missing):
    with pytest.raises(TypeError, match=r"capacity.*torch.func.vmap"):
        vmap(lambda capacity: kg.relax(THETA[0], kg.Knapsack([2, 1, 3, 1], capacity), kg.Gini()))(torch.tensor([3, 4]))


def test_eager_calls_run_the_kernel_itself(monkeypatch):
    """Else all of the above would test stand-ins."""
    found = []
    arrays_of = private.arrays_of
    monkeypatch.setattr(registration.private, "arrays_of", lambda *a: found.append(arrays_of(*a)) or found[-1])
    kg.relax(THETA, BUDGET, kg.Gini())
    assert len(found) == 1 and found[0] is not None


@pytest.mark.parametrize("kind", ["negated", "zeros"])
def test_tensors_that_are_computed_when_they_are_read(kind):
    """They are plain on the CPU, where numpy() computes them."""
    lazy = torch.complex(THETA, -THETA).conj().imag if kind == "negated" else torch._efficientzerotensor(THETA.shape)
    expected = THETA if kind == "negated" else torch.zeros_like(THETA, dtype=lazy.dtype)
    assert lazy.is_neg() or lazy._is_zerotensor()
    torch.testing.assert_close(kg.relax(lazy, BUDGET, kg.Gini()), kg.relax(expected, BUDGET, kg.Gini()))
    theta = THETA.to(lazy.dtype).requires_grad_()
    found, right = (torch.autograd.grad(kg.relax(theta, BUDGET, kg.Gini()), theta, z)[0] for z in (lazy, expected))
    torch.testing.assert_close(found, right)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_operators():
    theta = THETA.clone().requires_grad_()
    y = kg.relax(theta, BUDGET, kg.Gini())
    with Seen() as seen:
        kg.relax(theta, BUDGET, kg.Gini())
        y.backward(THETA)
    assert {"knapgrad.relax.default", "knapgrad.vjp.default"} <= set(seen.names)


def test_a_profile_names_the_operations():
    theta = THETA.clone().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kg.relax(theta, BUDGET, kg.Gini()).square().sum().backward()
        kg.solve(THETA, BUDGET)
        kg.value(theta, BUDGET, kg.Gini())
    names = {event.key for event in profile.key_averages()}
    assert {"knapgrad::relax", "knapgrad::vjp", "knapgrad::solve", "knapgrad::value_and_relax"} <= names
