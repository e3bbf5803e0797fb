"""Layers, for Equinox, Flax and plain functions alike: dataclasses that are pytrees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax import Array

from knapgrad import ops
from knapgrad.constraints import Constraint
from knapgrad.jax.distribution import SubsetDistribution
from knapgrad.regularizers import Regularizer

_pytree = partial(
    jax.tree_util.register_dataclass, data_fields=["constraint", "regularizer"], meta_fields=["hard"]
)  # fmt: skip


@_pytree
@dataclass(frozen=True)
class Relax:
    """Scores to the relaxed selection.

    Args:
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`.
        regularizer: with its gamma, which is learned if it is an array.
        hard: whether the result is the best selection, zeros and ones, with the derivative of the relaxed one. It is
            what ``straight_through=True`` of :class:`knapgrad.torch.Relax` does in training, and ``hard_eval=True`` in
            evaluation: JAX has no such modes, so ``dataclasses.replace(layer, hard=True)`` makes the layer for use.

    >>> import jax.numpy as jnp, knapgrad as kg
    >>> layer = kg.jax.Relax(kg.TopK(1), kg.Gini(1.0))
    >>> layer(jnp.array([2.0, 1.5, 0.0])).tolist()
    [0.75, 0.25, 0.0]
    """

    constraint: Constraint
    regularizer: Regularizer
    hard: bool = False

    def __call__(self, theta: Array) -> Array:
        if self.hard:
            return SubsetDistribution(theta, self.constraint, self.regularizer).straight_through()
        return ops.relax(theta, self.constraint, self.regularizer)


@partial(jax.tree_util.register_dataclass, data_fields=["constraint", "regularizer"], meta_fields=[])
@dataclass(frozen=True)
class Sample:
    """Scores and a key to a random selection, with the derivative of its mean.

    Args:
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`.
        regularizer: with its gamma.

    >>> import jax, jax.numpy as jnp, knapgrad as kg
    >>> layer = kg.jax.Sample(kg.TopK(2), kg.Shannon())
    >>> layer(jnp.zeros((3, 4)), jax.random.key(0)).sum(-1).tolist()
    [2.0, 2.0, 2.0]
    """

    constraint: Constraint
    regularizer: Regularizer

    def __call__(self, theta: Array, key: Array) -> Array:
        return SubsetDistribution(theta, self.constraint, self.regularizer).rsample(key)
