"""NumPy arrays: the functions of :class:`knapgrad.backends.Backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from knapgrad import backends
from knapgrad.constraints import Constraint
from knapgrad.kernels.numba import entropy as entropy
from knapgrad.kernels.numba import frontier as frontier
from knapgrad.kernels.numba import log_prob as log_prob
from knapgrad.kernels.numba import operator as operator
from knapgrad.kernels.numba import relax as relax
from knapgrad.kernels.numba import sample as sample
from knapgrad.kernels.numba import solve as solve
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Regularizer

where, broadcast_to, concatenate = np.where, np.broadcast_to, np.concatenate


def lattice(constraint: Constraint, theta: np.ndarray) -> Lattice:
    return constraint.lattice(theta.shape[-1])


def numbers(x: np.ndarray) -> np.ndarray:
    return x


known = unchanging = numbers


def integers(x: np.ndarray) -> np.ndarray:
    return x


def factor(regularizer: Regularizer) -> float:
    return regularizer.gamma


def requires_grad(x: np.ndarray) -> bool:
    return False


def is_floating(x: np.ndarray) -> bool:
    return x.dtype in (np.float16, np.float32, np.float64)


def array(x: Any, like: np.ndarray, name: str) -> np.ndarray:
    return backends.concrete(x, like, name)


def as_type(x: Any, like: np.ndarray) -> np.ndarray:
    return np.asarray(x, like.dtype)


as_total = as_type


def computable(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == np.float16 else x


def double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64, copy=False)


def exact() -> AbstractContextManager[Any]:
    return nullcontext()


def sum_double(x: np.ndarray) -> np.ndarray:
    return x.sum(-1, dtype=np.float64)


def take(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(rows, np.broadcast_to(index, (*rows.shape[:-1], index.shape[-1])), -1)


def detached(x: np.ndarray) -> np.ndarray:
    return x


def differentiates(*arrays: np.ndarray) -> bool:
    return False


def differentiate(function: Callable[[np.ndarray], Any], x: np.ndarray) -> Any:
    return function(x)


def uniforms(rng: Any, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    """From a Generator, a seed, or NumPy's global generator."""
    if rng is None:
        below_one = np.nextafter(like.dtype.type(1), like.dtype.type(0))
        return np.minimum(np.random.random_sample(shape).astype(like.dtype), below_one)  # noqa: NPY002
    if not isinstance(rng, (np.random.Generator, int, np.integer, np.random.SeedSequence)):
        raise TypeError(f"rng must be a NumPy Generator, a seed or None for NumPy arrays, got {type(rng).__name__}")
    return np.random.default_rng(rng).random(shape, dtype=like.dtype)
