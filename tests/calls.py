"""The operations as calls of one form, so that a test names one by a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import knapgrad as kg

#: (theta, selection or prior, constraint, regularizer) -> what may be differentiated by theta and gamma
SMOOTHED: dict[str, Callable[..., Any]] = {
    "value": lambda theta, y, limit, smoothing: kg.value(theta, limit, smoothing),
    "relax": lambda theta, y, limit, smoothing: kg.relax(theta, limit, smoothing),
    "entropy": lambda theta, y, limit, smoothing: kg.entropy(theta, limit, smoothing),
    "log_prob": lambda theta, y, limit, smoothing: kg.log_prob(theta, y, limit, smoothing),
    "fenchel_young_loss": lambda theta, y, limit, smoothing: kg.fenchel_young_loss(theta, y, limit, smoothing),
    "divergence": lambda theta, y, limit, smoothing: kg.divergence(theta, limit, smoothing),
    "divergence from a prior": lambda theta, y, limit, smoothing: kg.divergence(theta, limit, smoothing, prior=y),
}

#: the same, and those that select, with a random source
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: lambda *given, rng=None, call=call: call(*given) for name, call in SMOOTHED.items()},
    "solve": lambda theta, y, limit, smoothing, rng=None: kg.solve(theta, limit),
    "sample": lambda theta, y, limit, smoothing, rng=None: kg.sample(theta, limit, smoothing, rng=rng),
}
