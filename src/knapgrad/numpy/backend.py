"""NumPy arrays: the functions of :class:`knapgrad.backends.Backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod
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
from knapgrad.kernels.numba.launch import FEWER_SAMPLES, room_for
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Regularizer

where, broadcast_to, concatenate = np.where, np.broadcast_to, np.concatenate


def lattice(constraint: Constraint, theta: np.ndarray) -> Lattice:
    return constraint.lattice(theta.shape[-1])


def numbers(x: np.ndarray) -> np.ndarray:
    return x


known = unchanging = numbers


def version(x: np.ndarray) -> None:
    return None  # ours are copies


def integers(x: np.ndarray) -> np.ndarray:
    return x


def factor(regularizer: Regularizer) -> float:
    return regularizer.gamma


def strength(gamma: Any, theta: np.ndarray) -> Any:
    return gamma


def requires_grad(x: np.ndarray) -> bool:
    return False


def is_floating(x: np.ndarray) -> bool:
    return x.dtype in (np.float16, np.float32, np.float64)


def array(x: Any, like: np.ndarray, name: str) -> np.ndarray:
    return backends.concrete(x, like, name)


def as_type(x: Any, like: np.ndarray) -> np.ndarray:
    if x.dtype is like.dtype:  # a small call notices the next line
        return x
    with np.errstate(over="ignore"):  # what is beyond the type is infinite, as in other frameworks
        return np.asarray(x, like.dtype)


def as_total(x: Any, like: np.ndarray) -> np.ndarray:
    """The same, of sums, which may be numbers."""
    return np.asarray(as_type(x, like))


def computable(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == np.float16 else x


def double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64, copy=False)


def exact() -> AbstractContextManager[Any]:
    return nullcontext()


def sum_double(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # of infinite scores of both signs
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
    """From a Generator, a seed, or NumPy's global generator; the same numbers however many are drawn at a time."""
    if rng is not None and not isinstance(rng, (np.random.Generator, int, np.integer, np.random.SeedSequence)):
        raise TypeError(f"rng must be a NumPy Generator, a seed or None for NumPy arrays, got {type(rng).__name__}")
    generator = None if rng is None else np.random.default_rng(rng)
    if generator is not None and prod(shape) <= _AT_A_TIME:
        return generator.random(shape, dtype=like.dtype)
    numbers = room_for(shape, like.dtype, FEWER_SAMPLES)
    flat, below_one = numbers.reshape(-1), np.nextafter(like.dtype.type(1), like.dtype.type(0))
    for begin in range(0, flat.size, _AT_A_TIME):
        part = flat[begin : begin + _AT_A_TIME]
        if generator is None:
            np.minimum(np.random.random_sample(part.size).astype(like.dtype), below_one, out=part)  # noqa: NPY002
        else:
            generator.random(out=part, dtype=like.dtype)
    return numbers


_AT_A_TIME = 1 << 22  # random numbers: Python looks for interrupts in between
