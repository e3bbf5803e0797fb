"""Kernels are compiled when they are first used; here, ahead of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from knapgrad import frontiers, ops
from knapgrad.constraints import Constraint
from knapgrad.regularizers import Regularizer


def warmup(theta: Any, constraint: Constraint, regularizer: Regularizer) -> None:
    """Compiles ahead all operations, and their gradients, for calls like this one, so that none of them has to wait.

    On a CPU, NumPy, torch and JAX share kernels that depend on theta's dtype and on the kinds of the constraint and the
    regularizer, and, for numbers of items under Shannon, on whether there are few items or many; they are kept on disk,
    so this takes seconds once per machine and milliseconds later. On a GPU, and for what JAX compiles around them,
    all shapes matter: give a theta of the shape that will be used.

    Args:
        theta: an array or tensor of the dtype, shape and device that will be used; its values are not looked at.
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.warmup(np.zeros((32, 10)), kg.TopK(3), kg.Gini())
    """
    call = ops.prepare(theta, constraint, regularizer)
    backend, constraint = call.backend, call.constraint
    zeros = backend.as_type(backend.array(np.zeros(theta.shape), theta, "theta"), theta)
    y = ops.solve(zeros, constraint)
    call = ops.prepare(zeros, constraint, regularizer)
    scores = backend.computable(call.theta)
    backend.sample(scores, backend.broadcast_to(scores, (1, *scores.shape)), *call.problem)
    operations: list[Callable[[Any], Any]] = [
        lambda x: ops.value(x, constraint, regularizer),
        lambda x: ops.relax(x, constraint, regularizer),
        lambda x: ops.entropy(x, constraint, regularizer),
        lambda x: ops.log_prob(x, y, constraint, regularizer),
    ]
    if constraint.frontier_of(scores.shape[-1]).exactly is not None:
        operations.append(lambda x: frontiers.frontier(x, constraint, regularizer))
    for operation in operations:
        backend.differentiate(operation, zeros)
