"""A regularizer is one class and one row: every backend that runs here takes one that is added at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from backends import BACKENDS
from instances import EDGES, lattice
from knapgrad import reference, regularizers
from knapgrad.regularizers import Regularizer

xp: Any = np  # as in knapgrad.regularizers


class Halved(Regularizer):
    """Gini of half the strength, so that its truth is known: ``Gini(gamma / 2)`` is ``Halved(gamma)``."""

    name = "halved"

    @staticmethod
    def value(delta):
        smaller = 0.5 * (1.0 - 2.0 * xp.abs(delta))
        smaller = xp.where(smaller < 0.0, 0.0, smaller)
        return 0.5 * smaller * smaller

    @staticmethod
    def prob(delta):
        q = 0.5 * (1.0 + 2.0 * delta)
        return xp.where(q < 0.0, 0.0, xp.where(q > 1.0, 1.0, q))

    @staticmethod
    def dprob(q):
        return xp.where(q * (1.0 - q) > 0.0, 1.0, 0.0 * q)


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(regularizers.REGULARIZERS, Halved.name, Halved)
    yield


CASES = ["a least weight", "k for each instance", "no batch"]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("edge", CASES)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "jax-x64"])
def test_every_operation(name, edge, one_row):
    backend = BACKENDS[name]
    if not backend.available:
        pytest.skip(backend.reason)
    problem = EDGES[edge]
    theta, constraint = backend.asarray(problem.theta, "float32"), problem.constraint  # whose kernels serve all
    with backend.active():
        for operation in (kg.relax, kg.value, kg.entropy, kg.divergence):
            halved, gini = (backend.to_numpy(operation(theta, constraint, r)) for r in (Halved(1.0), kg.Gini(0.5)))
            np.testing.assert_allclose(halved, gini, rtol=1e-6, atol=1e-6, err_msg=operation.__name__)
        y = kg.sample(theta, constraint, Halved(1.0), num_samples=4, rng=backend.rng(0))
        same = kg.sample(theta, constraint, kg.Gini(0.5), num_samples=4, rng=backend.rng(0))
        np.testing.assert_array_equal(backend.to_numpy(y), backend.to_numpy(same))
        probabilities = (backend.to_numpy(kg.log_prob(theta, y, constraint, r)) for r in (Halved(1.0), kg.Gini(0.5)))
        np.testing.assert_allclose(*probabilities, rtol=1e-5, atol=1e-5)


def test_gradients_in_torch_and_jax(one_row):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    problem = EDGES["a least weight"]
    slopes = []
    for smoothing in (Halved(1.0), kg.Gini(0.5)):
        theta = torch.tensor(problem.theta, dtype=torch.float32, requires_grad=True)
        kg.relax(theta, problem.constraint, smoothing).square().sum().backward()
        slopes.append(theta.grad.numpy())

        def loss(theta: Any, smoothing: Any = smoothing) -> Any:
            return (kg.relax(theta, problem.constraint, smoothing) ** 2).sum()

        slopes.append(jax.grad(loss)(jax.numpy.asarray(problem.theta)))
    for slope in slopes[1:]:
        np.testing.assert_allclose(slope, slopes[0], atol=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "jax-x64"])
def test_frontier_and_warmup(name, one_row):
    backend = BACKENDS[name]
    if not backend.available:
        pytest.skip(backend.reason)
    problem = EDGES["no batch"]
    theta = backend.asarray(problem.theta, backend.widest)
    with backend.active():
        rows = (backend.to_numpy(kg.frontier(theta, problem.constraint, r)) for r in (Halved(1.0), kg.Gini(0.5)))
        np.testing.assert_allclose(*rows, rtol=1e-6, atol=1e-6)
        kg.warmup(theta, problem.constraint, Halved())


def test_torch(one_row):
    """torch.compile, a layer with a gamma to learn, and the distribution."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    theta, limit = torch.tensor(EDGES["no batch"].theta), EDGES["no batch"].constraint
    expected = kg.relax(theta, limit, kg.Gini(0.5))
    relax = torch.compile(lambda x, r: kg.relax(x, limit, r), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(relax(theta, Halved(1.0)), expected)
    layer = kg.torch.Relax(limit, Halved(torch.nn.Parameter(torch.tensor(1.0))))
    torch.testing.assert_close(layer(theta).detach(), expected)
    assert "Halved(gamma=learnable)" in repr(layer)
    again = kg.torch.Relax(limit, Halved(torch.nn.Parameter(torch.tensor(3.0))))
    again.load_state_dict(layer.state_dict())
    assert type(again.regularizer) is Halved and torch.equal(again(theta), layer(theta))
    laws = [kg.torch.SubsetDistribution(theta, limit, r) for r in (Halved(1.0), kg.Gini(0.5))]
    for get in (
        lambda law: law.mean, lambda law: law.mode, lambda law: law.entropy(), lambda law: law.log_prob(laws[1].mode),
        lambda law: torch.distributions.kl_divergence(law, kg.torch.SubsetDistribution(theta, limit, kg.Shannon())),
    ):  # fmt: skip
        torch.testing.assert_close(*map(get, laws))


def test_jax(one_row):
    """An argument of a jitted function, a pytree, a derivative by gamma, and the distribution."""
    jax = pytest.importorskip("jax")
    theta, limit = jax.numpy.asarray(EDGES["no batch"].theta, "float32"), EDGES["no batch"].constraint
    relax = jax.jit(lambda theta, regularizer: kg.relax(theta, limit, regularizer))
    np.testing.assert_allclose(relax(theta, Halved(1.0)), kg.relax(theta, limit, kg.Gini(0.5)), atol=1e-6)
    assert jax.tree.map(lambda x: 2 * x, Halved(0.5)) == Halved(1.0)
    value = lambda regularizer: kg.value(theta, limit, regularizer)  # noqa: E731
    slopes = jax.grad(value)(Halved(1.0)).gamma, 0.5 * jax.grad(value)(kg.Gini(0.5)).gamma
    np.testing.assert_allclose(*slopes, rtol=1e-5)
    laws = [kg.jax.SubsetDistribution(theta, limit, r) for r in (Halved(1.0), kg.Gini(0.5))]
    for get in (lambda law: law.mean, lambda law: law.mode, lambda law: law.kl(laws[1])):
        np.testing.assert_allclose(*map(get, laws), atol=1e-5)


def test_the_interpreted_gpu_kernels(one_row):
    torch = pytest.importorskip("torch")
    from_torch = pytest.importorskip("knapgrad.kernels.triton.from_torch", exc_type=ImportError)
    theta, weights, limits, _ = EDGES["a least weight"].rows()[0]
    one = lattice(weights, limits)
    tensors = one.replace(**{name: torch.as_tensor(getattr(one, name)) for name in ("weights", "capacity", "slack")})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = tensors.replace(**{name: getattr(tensors, name).to(device) for name in ("weights", "capacity", "slack")})
    gamma = torch.ones((), dtype=torch.float64)
    value, y = from_torch.operator(torch.tensor(theta, device=device), tensors, gamma, "halved")
    expected_value, expected = reference.operator(theta, one, Halved)
    np.testing.assert_allclose(y.cpu(), expected, atol=1e-9)
    np.testing.assert_allclose(value.cpu(), expected_value, rtol=1e-10)


def test_without_its_row_it_is_refused():
    with pytest.raises(TypeError, match="regularizer must be one of"):
        kg.relax(np.zeros(3), kg.TopK(1), Halved(1.0))


def test_an_unknown_name_is_no_hard_selection():
    """It used to run as if it were Hard."""
    from knapgrad.kernels import numba

    theta, one = np.zeros((1, 3)), kg.TopK(1).lattice(3)
    with pytest.raises(KeyError, match="unknown"):
        numba.operator(theta, one, np.ones(1), "unknown")
    variants = pytest.importorskip("knapgrad.kernels.triton.variants", exc_type=ImportError)
    with pytest.raises(KeyError, match="unknown"):
        variants.functions("unknown")
    with pytest.raises(KeyError, match="unknown"):
        variants.source("unknown")
    jax_scan = pytest.importorskip("knapgrad.kernels.jax_scan")
    with pytest.raises(KeyError, match="unknown"):
        jax_scan.operator(theta[0].astype(np.float32), one, np.float32(1), "unknown")
