"""The distribution over feasible selections whose mean is the relaxed selection, as a pytree."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from knapgrad import ops
from knapgrad.constraints import Constraint
from knapgrad.jax import backend, divergence, operators
from knapgrad.regularizers import Regularizer

_tabulate, _recall, _surrogate, _mode = (
    jax.jit(function, static_argnums=0)
    for function in (operators.tabulate, operators.recall, operators.surrogate, operators.mode)
)
_walk = jax.jit(operators.walk)


class SubsetDistribution:
    """Selections under a budget, zeros and ones (n,), or (groups, options) for a :class:`knapgrad.MultipleChoice`.

    One table serves the mean, all samples and all log-probabilities; gradients compute again what they need. Everything
    is exact. It is a pytree of theta, constraint and regularizer, so it goes through jit and vmap.

    Args:
        theta: scores (*batch, n) or (*batch, groups, options).
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`.
        regularizer: with its gamma. For :class:`knapgrad.Shannon`, p(y) is proportional to exp(<theta, y> / gamma).

    >>> import jax, jax.numpy as jnp, knapgrad as kg
    >>> pairs = kg.jax.SubsetDistribution(jnp.zeros(4), kg.TopK(2), kg.Shannon())
    >>> pairs.mean.round(3).tolist(), float(jnp.exp(pairs.entropy()).round())
    ([0.5, 0.5, 0.5, 0.5], 6.0)
    >>> pairs.sample(jax.random.key(0), (3,)).sum(-1).tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(self, theta: Array, constraint: Constraint, regularizer: Regularizer) -> None:
        if not isinstance(theta, Array):
            raise TypeError(f"theta must be a JAX array, got {type(theta).__name__}; convert it by jnp.asarray")
        self.theta, self.constraint, self.regularizer = theta, constraint, regularizer
        self._kept: Any = None
        ops.prepare(theta, constraint, regularizer)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.theta.shape[: self.theta.ndim - self.constraint.event_dims]

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.theta.shape[self.theta.ndim - self.constraint.event_dims :]

    @property
    def mean(self) -> Array:
        """The relaxed selection, of theta's shape."""
        return self._whole(self._recalled[1])

    @property
    def variance(self) -> Array:
        """The variance of each item, of theta's shape."""
        return self.mean * (1 - self.mean)

    @property
    def mode(self) -> Array:
        """The most probable selection; for Shannon :func:`knapgrad.solve`, else it may differ."""
        if self.regularizer.name == "shannon":
            return ops.solve(self.theta, self.constraint)
        lattice, gamma, name = self._problem
        return self._whole(_mode(name, self._scores, lattice, gamma))

    def sample(self, key: Array, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Selections (*sample_shape, *batch, *event), without a derivative."""
        sample_shape = _as_shape(sample_shape)
        drawn = self._drawn(key, sample_shape)
        return self._whole(drawn).reshape(*sample_shape, *self.theta.shape)

    def rsample(self, key: Array, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Selections (*sample_shape, *batch, *event) whose derivative is that of the mean.

        Gradients are exact in expectation for losses that are linear in the selection, and surrogates for others.
        """
        sample_shape = _as_shape(sample_shape)
        drawn = self._with_derivative(self._drawn(key, sample_shape))
        return self._whole(drawn).reshape(*sample_shape, *self.theta.shape)

    def straight_through(self) -> Array:
        """The best selection, as :func:`knapgrad.solve`, whose derivative is that of the mean."""
        return self._whole(self._with_derivative(backend.solve(self._scores, self._problem.lattice)[None])[0])

    def log_prob(self, y: Array) -> Array:
        """(*samples, *batch) for selections (*samples, *batch, *event); -inf for those that are never drawn, NaN for
        what is not zeros and ones."""
        return ops.log_prob(self.theta, jnp.asarray(y), self.constraint, self.regularizer)

    def entropy(self) -> Array:
        """Shannon entropy (*batch,) in nats."""
        return ops.entropy(self.theta, self.constraint, self.regularizer)

    def kl(self, other: SubsetDistribution) -> Array:
        """The Kullback-Leibler divergence (*batch,) from another distribution under the same constraint:
        ``sum_y p(y) log(p(y) / q(y))``, inf where this one draws what the other never does."""
        if not isinstance(other, SubsetDistribution):
            raise TypeError(f"other must be a knapgrad.jax.SubsetDistribution, got {type(other).__name__}")
        if self.event_shape != other.event_shape:
            raise ValueError(f"kl needs equal event shapes, got {self.event_shape} and {other.event_shape}")
        ours, theirs = self.constraint, other.constraint
        known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((ours, theirs)))
        if type(ours) is not type(theirs) or (known and ours != theirs):
            raise ValueError(f"kl needs two distributions under the same constraint, got {ours} and {theirs}")
        if self.regularizer.name == other.regularizer.name == "shannon":
            return self._kl_of_gibbs(other)
        return divergence.of_paths(self, other)

    def _kl_of_gibbs(self, other: SubsetDistribution) -> Array:
        """Both under Shannon: the difference of the optima, and of the mean scores."""
        (log_p, mean), (log_q, _) = self._recalled, other._recalled
        never = other._scores == -inf
        score_q = jnp.where(never, 0.0, other._scaled)
        gap = log_q - log_p + ops.inner(backend, self._scaled, mean) - ops.inner(backend, score_q, mean)
        gap = ops.not_negative(backend, gap)
        return jnp.where((never & (mean > 0)).any(-1), inf, gap).astype(self.theta.dtype)

    def __repr__(self) -> str:
        return f"SubsetDistribution({self.theta!r}, {self.constraint!r}, {self.regularizer!r})"

    # What the kernels take and give.

    @property
    def _call(self) -> Any:
        return ops.prepare(self.theta, self.constraint, self.regularizer)

    @property
    def _scores(self) -> Array:
        return backend.computable(self._call.theta)

    @property
    def _problem(self) -> ops.Problem:
        problem = self._call.problem
        return problem._replace(gamma=jnp.asarray(backend.strength(problem.gamma, self._scores), self._scores.dtype))

    @property
    def _scaled(self) -> Array:
        """theta / gamma, with a finite derivative by gamma where theta is -inf."""
        scores, gamma = self._scores, self._problem.gamma
        out = scores == -inf
        return jnp.where(out, -inf, jnp.where(out, 0.0, scores) / gamma[..., None])

    @property
    def _tabulated(self) -> tuple[Array, Array, Array]:
        """Value, mean and tables. They are kept, but not from one trace of JAX to another."""
        state = get_opaque_trace_state(convention="flax")
        if self._kept is None or self._kept[0] != state:
            lattice, gamma, name = self._problem
            self._kept = state, _tabulate(name, self._scores, lattice, gamma)
        return self._kept[1]

    @property
    def _recalled(self) -> tuple[Array, Array]:
        """Value of theta / gamma and mean, differentiable."""
        lattice, gamma, name = self._problem
        return _recall(name, self._scores, lattice, gamma, *self._tabulated[:2])

    def _drawn(self, key: Array, sample_shape: tuple[int, ...]) -> Array:
        scores, (value, _, tables) = self._scores, self._tabulated
        uniforms = backend.uniforms(key, (prod(sample_shape), *scores.shape), scores)
        return _walk(jax.lax.stop_gradient(scores), self._problem.lattice, value, tables, uniforms)

    def _with_derivative(self, y: Array) -> Array:
        lattice, gamma, name = self._problem
        return _surrogate(name, self._scores, lattice, gamma, y)

    def _whole(self, y: Array) -> Array:
        return backend.as_type(self._call.whole(y), self.theta)


def _assembled(_: None, parts: Any) -> SubsetDistribution:
    distribution = object.__new__(SubsetDistribution)
    distribution.theta, distribution.constraint, distribution.regularizer = parts
    distribution._kept = None
    return distribution


def _parts(distribution: SubsetDistribution) -> tuple[Any, None]:
    names = ("theta", "constraint", "regularizer")
    return [(jax.tree_util.GetAttrKey(name), getattr(distribution, name)) for name in names], None


jax.tree_util.register_pytree_with_keys(SubsetDistribution, _parts, _assembled)


def _as_shape(sample_shape: Any) -> tuple[int, ...]:
    """A number of samples, or a shape."""
    return (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
