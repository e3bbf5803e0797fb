"""NumPy arrays: what :mod:`knapgrad.ops` asks of every framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from knapgrad.constraints import Constraint
from knapgrad.kernels.numba_cpu import entropy, log_prob, operator, sample, solve

__all__ = ["entropy", "log_prob", "operator", "sample", "solve"]

where, broadcast_to = np.where, np.broadcast_to


def is_floating(x: np.ndarray) -> bool:
    return x.dtype in (np.float16, np.float32, np.float64)


def differentiates(*arrays: np.ndarray) -> bool:
    """Whether a gradient will be asked for."""
    return False


def detached(x: np.ndarray) -> np.ndarray:
    return x


def may_be_selection(y: np.ndarray) -> bool:
    """False if it can be seen that it is not of zeros and ones."""
    return bool(((y == 0) | (y == 1)).all())


def computable(x: np.ndarray) -> np.ndarray:
    """Half precision is computed in float32."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64, copy=False)


def sum_double(x: np.ndarray) -> np.ndarray:
    """The sum over items, in float64."""
    return x.sum(-1, dtype=np.float64)


def as_type(x: Any, like: np.ndarray) -> np.ndarray:
    return np.asarray(x, like.dtype)


def array(x: Any, like: np.ndarray, name: str) -> np.ndarray:
    """Numbers of any origin as an array beside ``like``."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def constants(constraint: Constraint, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and capacity beside an array (*batch, n)."""
    return constraint.weights_of(like.shape[-1]), constraint.capacity


def uniforms(rng: Any, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1) from a Generator, a seed, or NumPy's global generator."""
    if rng is None:
        below_one = np.nextafter(like.dtype.type(1), like.dtype.type(0))
        return np.minimum(np.random.random_sample(shape).astype(like.dtype), below_one)  # noqa: NPY002
    if not isinstance(rng, (np.random.Generator, int, np.integer, np.random.SeedSequence)):
        raise TypeError(f"rng must be a NumPy Generator, a seed or None for NumPy arrays, got {type(rng).__name__}")
    return np.random.default_rng(rng).random(shape, dtype=like.dtype)
