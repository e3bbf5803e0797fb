"""Contestants of the JAX section: knapgrad, autodiff through the same scan, and the plain scan of jax_scan.py.

Each is a pair of jitted functions: ``forward(theta) -> value, relax`` and ``both(theta, z) -> value, relax, product``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import knapgrad as kg
from benchmarks import jax_scan as plain_scan
from benchmarks.cases import Instances
from knapgrad.jax import backend
from knapgrad.kernels import jax_scan
from knapgrad.regularizers import REGULARIZERS

Functions = tuple[Callable[..., Any], Callable[..., Any]]


def enter(problem: Instances, regularizer: str) -> dict[str, Functions]:
    return {
        "ours": ours(problem, regularizer),
        "same scan": same_scan(problem, regularizer),
        "plain scan": plain_scan.make(problem.weights[0], problem.total, problem.exactly, regularizer),
    }


def ours(problem: Instances, regularizer: str) -> Functions:
    constraint = problem.constraint
    smoothing = REGULARIZERS[regularizer](1.0)
    return derived(lambda theta: kg.value(theta, constraint, smoothing))


def same_scan(problem: Instances, regularizer: str) -> Functions:
    """The V sweep of knapgrad, rows in float64 and all; its derivatives left to JAX."""
    lattice = backend.lattice(problem.constraint, problem.theta)

    def value(row: Any) -> Any:
        return jax_scan.value(row, lattice, jnp.float32(1), regularizer)

    return derived(jax.vmap(value), partial(jax_scan.float64, True))


def derived(values: Callable[..., Any], context: Callable[[], Any] = nullcontext) -> Functions:
    """relax is the gradient of the values, the product that of relax."""

    def relax(theta: Any) -> Any:
        with context():
            optimum, pull = jax.vjp(values, theta)
            return pull(jnp.ones_like(optimum))[0], optimum

    def both(theta: Any, z: Any) -> Any:
        with context():
            y, pull, optimum = jax.vjp(relax, theta, has_aux=True)
            return optimum, y, pull(z)[0]

    return jax.jit(lambda theta: relax(theta)[::-1]), jax.jit(both)
