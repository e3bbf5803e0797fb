"""Try an installed knapgrad: every operation once, against enumeration. With --torch and --jax, those paths as well;
with --lowest, on the lowest versions that it asks for."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from importlib import metadata, resources

import numpy as np

import knapgrad as kg

assert "torch" not in sys.modules and "jax" not in sys.modules, "importing knapgrad must import no framework"
assert resources.files("knapgrad").joinpath("py.typed").is_file(), "the wheel lacks py.typed"

# No difference between scores is a threshold of the sparse regularizers, where derivatives jump.
theta = np.array([[1.03, 0.42, -0.35, 0.81], [0.13, 2.09, 0.74, 0.57]])
weights, capacity = np.array([2, 0, 1, 3]), 4
budget = kg.Knapsack(weights, capacity)
subsets = np.array([y for y in itertools.product([0.0, 1.0], repeat=4) if np.dot(weights, y) <= capacity])


def gibbs(theta: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed optimum and mean selection under Shannon, by listing every feasible subset."""
    scores = theta @ subsets.T / gamma
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    value = gamma * (np.log(exp.sum(-1)) + scores.max(-1))
    return value, exp @ subsets / exp.sum(-1, keepdims=True)


def check_numpy() -> None:
    value, mean = gibbs(theta, 0.7)
    np.testing.assert_allclose(kg.value(theta, budget, kg.Shannon(0.7)), value, rtol=1e-10)
    np.testing.assert_allclose(kg.relax(theta, budget, kg.Shannon(0.7)), mean, atol=1e-10)
    best = subsets[np.argmax(theta @ subsets.T, axis=-1)]
    np.testing.assert_array_equal(kg.solve(theta, budget), best)
    np.testing.assert_array_equal(kg.solve(theta, kg.TopK(2)).sum(-1), [2.0, 2.0])
    for regularizer in (kg.Shannon(0.5), kg.Gini(0.5), kg.Tsallis(0.5)):
        samples = kg.sample(theta, budget, regularizer, num_samples=5, rng=0)
        assert samples.shape == (5, 2, 4) and (samples @ weights <= capacity).all()
        total = np.exp(kg.log_prob(np.broadcast_to(theta[0], subsets.shape), subsets, budget, regularizer)).sum()
        np.testing.assert_allclose(total, 1.0, rtol=1e-10)
        assert (kg.entropy(theta, budget, regularizer) >= 0).all()
        assert (kg.fenchel_young_loss(theta, best, budget, regularizer) >= -1e-12).all()
        assert (kg.divergence(theta, budget, regularizer) >= -1e-12).all()


def check_torch() -> None:
    import torch

    import knapgrad.torch as kgt

    scores = torch.tensor(theta, requires_grad=True)
    for regularizer in (kg.Shannon(0.7), kg.Gini(0.7), kg.Tsallis(0.7)):
        relaxed = kg.relax(scores, budget, regularizer)
        np.testing.assert_allclose(relaxed.detach().numpy(), kg.relax(theta, budget, regularizer), atol=1e-12)
        assert torch.autograd.gradcheck(lambda t, r=regularizer: kg.relax(t, budget, r), (scores,))
        loss = kgt.FenchelYoungLoss(budget, regularizer)(scores, kg.solve(scores.detach(), budget))
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        assert torch.isfinite(gradient).all()


def check_jax() -> None:
    import jax
    import jax.numpy as jnp

    scores = jnp.asarray(theta, jnp.float32)
    _, mean = gibbs(theta, 0.7)
    np.testing.assert_allclose(kg.relax(scores, budget, kg.Shannon(0.7)), mean, atol=1e-6)
    for regularizer in (kg.Shannon(0.5), kg.Gini(0.5), kg.Tsallis(0.5)):
        gradient = jax.jit(jax.grad(lambda x, r=regularizer: kg.relax(x, budget, r)[..., 0].sum()))(scores)
        assert bool(jnp.isfinite(gradient).all())


def versions() -> str:
    """Of what is installed here."""
    names = ("numpy", "numba", "llvmlite", "torch", "jax")
    found = {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}
    promised = dict(re.findall(r"(?m)^(\w+)>=([\d.]+)", "\n".join(metadata.requires("knapgrad") or [])))
    for name, version in found.items() if "--lowest" in sys.argv[1:] else []:
        is_newer = name == "numpy" and "jax" in found  # which JAX asks for
        assert is_newer or f"{version}.".startswith(f"{promised[name]}."), f"{promised[name]} is promised: {version}"
    return ", ".join(f"{name} {version}" for name, version in found.items())


check_numpy()
done = "NumPy"
if "--torch" in sys.argv[1:]:
    check_torch()
    done += ", PyTorch"
if "--jax" in sys.argv[1:] and sys.version_info >= (3, 11):
    check_jax()
    done += ", JAX"
print(f"knapgrad {metadata.version('knapgrad')} works with {done} on Python {sys.version.split()[0]} ({versions()})")
