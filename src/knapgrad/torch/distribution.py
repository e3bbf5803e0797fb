"""The distribution over feasible selections whose mean is the relaxed selection."""

from __future__ import annotations

from itertools import product
from math import inf, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from knapgrad import ops
from knapgrad.constraints import Constraint
from knapgrad.regularizers import Regularizer
from knapgrad.torch import backend, operators, private


class SubsetDistribution(Distribution):
    """Selections under a budget as a :class:`torch.distributions.Distribution` over zeros and ones (n,), or
    (groups, options) for a :class:`knapgrad.MultipleChoice`.

    One table, computed in float64 on first use, serves the mean, all samples and all log-probabilities; gradients
    recompute what they need. Sampling and log-probabilities are exact. ``kl_divergence`` is exact too:
    fast if both distributions use Shannon, else slow, in plain torch with all rows in memory.

    Args:
        theta: scores (*batch, n) or (*batch, groups, options).
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`.
        regularizer: with its gamma. For :class:`knapgrad.Shannon`, p(y) is proportional to exp(<theta, y> / gamma).
        validate_args: as for every torch distribution: if True, the log-probability of an infeasible selection is an
            error, and if False it is -inf. None means torch's global default, which is True until ``torch.compile`` is
            used in the process and False from then on; give True or False to be sure.

    >>> import torch, knapgrad as kg
    >>> pairs = kg.torch.SubsetDistribution(torch.zeros(4), kg.TopK(2), kg.Shannon())
    >>> pairs.mean, len(pairs.enumerate_support()), pairs.entropy().exp().round()
    (tensor([0.5000, 0.5000, 0.5000, 0.5000]), 6, tensor(6.))
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {"theta": constraints.real_vector}
    has_rsample = True
    has_enumerate_support = True
    _largest_enumeration = 20  # items

    def __init__(
        self, theta: Tensor, constraint: Constraint, regularizer: Regularizer, validate_args: bool | None = None
    ) -> None:
        if not isinstance(theta, Tensor):
            raise TypeError(f"theta must be a torch tensor, got {type(theta).__name__}; convert it by torch.as_tensor")
        call = ops.prepare(theta, constraint, regularizer)
        self._call, self._gamma, self._problem = call, call.gamma, call.problem
        self.theta, self.constraint, self.regularizer = theta, call.constraint, call.regularizer
        self._table: tuple[Tensor, Tensor, Tensor] | None = None
        self._versions: list[object] = []
        split = theta.dim() - constraint.event_dims
        super().__init__(theta.shape[:split], theta.shape[split:], validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SubsetDistribution:
        theta = self.theta.expand(*batch_shape, *self.event_shape)
        return SubsetDistribution(theta, self.constraint, self.regularizer, self._validate_args)

    @constraints.dependent_property(is_discrete=True)
    def support(self) -> constraints.Constraint:
        return FeasibleSelections(self.constraint)

    @property
    def mean(self) -> Tensor:
        """The relaxed selection, of theta's shape, differentiable."""
        return self._call.whole(self._recalled[1]).to(self.theta.dtype)

    @property
    def variance(self) -> Tensor:
        """The variance of each item, of theta's shape."""
        return self.mean * (1 - self.mean)

    @property
    def mode(self) -> Tensor:
        """The most probable selection; for Shannon :func:`knapgrad.solve`, else it may differ."""
        with torch.no_grad():
            if self.regularizer.name == "shannon":
                best = operators.solve(self._scores, self._problem.lattice)
            else:
                best = operators.mode(self._scores, *self._problem)
        return self._call.whole(best).to(self.theta.dtype)

    def sample(
        self, sample_shape: Any = (), rng: torch.Generator | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Selections (*sample_shape, *batch, *event), detached. ``generator`` is another name of ``rng``."""
        sample_shape, uniforms = self._uniforms(sample_shape, generator if rng is None else rng)
        with torch.no_grad():
            drawn = operators.sample(self._scores, uniforms, *self._problem, self._known_table)
        return self._call.whole(drawn).reshape(*sample_shape, *self.theta.shape).to(self.theta.dtype)

    def rsample(
        self, sample_shape: Any = (), rng: torch.Generator | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Selections (*sample_shape, *batch, *event) whose gradient is the vector-Jacobian product of the mean.

        The gradient is exact in expectation for losses that are linear in the selection, and a surrogate for others.
        """
        sample_shape, uniforms = self._uniforms(sample_shape, generator if rng is None else rng)
        drawn = backend.rsample(self._scores, uniforms, *self._problem, self._known_table)
        return self._call.whole(drawn).reshape(*sample_shape, *self.theta.shape).to(self.theta.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """(*samples, *batch) for selections (*samples, *batch, *event), differentiable in theta and gamma."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape, self.theta.shape)
        batch_shape = shape[len(shape) - self.theta.dim() : len(shape) - len(self.event_shape)]
        if batch_shape != self.batch_shape:  # the value enlarges dimensions of size 1
            return self.expand(batch_shape).log_prob(value)
        value, scores = value.expand(shape), self._scores
        y = self.constraint.flat(backend, value.double(), is_selection=True)
        if self.regularizer.name == "shannon":
            feasible, optimum = self.constraint.contains(value), self._recalled[0]
            result = ops.gibbs_log_prob(backend, scores, y, optimum, self._gamma, feasible)
        else:
            flat = y.reshape(prod(y.shape[: y.dim() - scores.dim()]), *scores.shape)
            result = operators.log_prob(scores, flat, *self._problem, self._known_table)
        return backend.as_total(result.reshape(y.shape[:-1]), self.theta)

    def entropy(self) -> Tensor:
        """Shannon entropy (*batch,) in nats, differentiable."""
        return backend.as_total(operators.entropy(self._scores, *self._problem), self.theta)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All feasible selections, (cardinality, *batch, *event); with expand=False (cardinality, 1, ..., 1, *event).

        The whole batch must share one constraint. A sparse regularizer may give some of them probability 0.
        """
        event = self.event_shape
        n = event.numel()
        if n > self._largest_enumeration:
            raise ValueError(
                f"enumerate_support lists 2^n selections: n = {n} is above {self._largest_enumeration}; sample instead"
            )
        y = np.array(list(product((0, 1), repeat=n)), dtype=np.int64).reshape(-1, *event)
        try:
            self.constraint.check(event)
        except ValueError:
            raise NotImplementedError(
                "enumerate_support needs the same weights and limits for the whole batch; make one for each instance"
            ) from None
        feasible = self.constraint.contains(y)
        support = torch.as_tensor(y[feasible], dtype=self.theta.dtype, device=self.theta.device)
        support = support.reshape(-1, *[1] * len(self.batch_shape), *event)
        return support.expand(-1, *self.batch_shape, *event) if expand else support

    @property
    def _scaled(self) -> Tensor:
        """theta / gamma, with a finite derivative by gamma where theta is -inf."""
        scores = self._scores
        out = torch.isneginf(scores)
        return torch.where(out, -inf, operators.divide(torch.where(out, 0.0, scores), self._gamma))

    @property
    def _scores(self) -> Tensor:
        """theta in float64, as the kernels take it; converted each time, so that one backward pass does not free the
        graph of another."""
        return self._call.flat(self.theta.double())

    @property
    def _tabulated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Value, mean and table, all detached, in float64."""
        watched = [x for x in (self.theta, self._gamma) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [private.version_of(x) for x in watched]
        if self._table is None or versions != self._versions:  # theta may be updated in place
            with torch.no_grad():
                self._table, self._versions = operators.tabulate(self._scores, *self._problem), versions
        return self._table

    @property
    def _known_table(self) -> Tensor | None:
        return None if torch.compiler.is_compiling() else self._tabulated[2]  # a trace cannot know its size

    @property
    def _recalled(self) -> tuple[Tensor, Tensor]:
        """Value of theta / gamma and mean, differentiable."""
        if torch.compiler.is_compiling():
            return operators.operator(self._scores, *self._problem, True)
        return operators.recall(self._scores, *self._tabulated[:2], *self._problem)

    def _uniforms(self, sample_shape: Any, rng: torch.Generator | None) -> tuple[torch.Size, Tensor]:
        sample_shape = torch.Size(sample_shape)
        shape = sample_shape.numel(), *self._call.theta.shape
        return sample_shape, backend.uniforms(rng, shape, backend.computable(self.theta))


class FeasibleSelections(constraints.Constraint):
    """Zeros and ones within the budget."""

    is_discrete = True

    def __init__(self, constraint: Constraint) -> None:
        self.constraint, self.event_dim = constraint, constraint.event_dims

    def check(self, value: Tensor) -> Tensor:
        return self.constraint.contains(value)

    def __repr__(self) -> str:
        return f"zeros and ones under {self.constraint}"
