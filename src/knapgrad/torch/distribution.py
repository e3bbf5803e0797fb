"""The distribution over feasible selections whose mean is the relaxed selection."""

from __future__ import annotations

from itertools import product
from math import inf, prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from knapgrad import ops
from knapgrad.constraints import Constraint, broadcasts
from knapgrad.reference import INFEASIBLE
from knapgrad.regularizers import Regularizer, rebind
from knapgrad.torch import backend, operators


class SubsetDistribution(Distribution):
    """Selections under a budget as a :class:`torch.distributions.Distribution` over zeros and ones (n,).

    One table, computed in float64 on first use, serves the mean, all samples and all log-probabilities; gradients
    recompute what they need. Sampling and log-probabilities are exact. ``kl_divergence`` of two is exact too: at once
    between two of Shannon's, but by slow sweeps in plain torch, with all rows in memory, where another takes part.

    Args:
        theta: scores (*batch, n).
        constraint: a :class:`knapgrad.TopK` or :class:`knapgrad.Knapsack`.
        regularizer: with its gamma. For :class:`knapgrad.Shannon`, p(y) is proportional to exp(<theta, y> / gamma).
        validate_args: as for every torch distribution; if False, an infeasible selection has log-probability -inf.

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
        _, self._gamma, self._problem = ops.prepare(theta, constraint, regularizer)
        self.theta, self.constraint, self.regularizer = theta, constraint, regularizer
        self._table: tuple[Tensor, Tensor, Tensor] | None = None
        self._versions: list[int] = []
        super().__init__(theta.shape[:-1], theta.shape[-1:], validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SubsetDistribution:
        theta = self.theta.expand(*batch_shape, *self.event_shape)
        return SubsetDistribution(theta, self.constraint, self.regularizer, self._validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return FeasibleSelections(self.constraint, *self._problem[:2])

    @property
    def mean(self) -> Tensor:
        """The relaxed selection (*batch, n), differentiable."""
        return self._recalled[1].to(self.theta.dtype)

    @property
    def variance(self) -> Tensor:
        """Of each item by itself (*batch, n)."""
        return self.mean * (1 - self.mean)

    @property
    def mode(self) -> Tensor:
        """The most probable selection (*batch, n); for Shannon :func:`knapgrad.solve`, else it may differ."""
        with torch.no_grad():
            if self.regularizer.name == "shannon":
                best = operators.solve(self._scores, *self._problem[:2], *self._problem[4:])
            else:
                best = operators.mode(self._scores, *self._problem)
        return best.to(self.theta.dtype)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Selections (*sample_shape, *batch, n), detached."""
        return self._drawn(sample_shape, generator).to(self.theta.dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Selections (*sample_shape, *batch, n) whose gradient is the vector-Jacobian product of the mean.

        Discrete forwards, exact in expectation backwards for losses that are linear in the selection, else a surrogate.
        """
        drawn = self._drawn(sample_shape, generator)
        flat = drawn.double().reshape(torch.Size(sample_shape).numel(), *self.theta.shape)
        return operators.surrogate(self._scores, flat, *self._problem).reshape(drawn.shape).to(self.theta.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """(*samples, *batch) for selections (*samples, *batch, n), differentiable in theta and gamma."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape, self.theta.shape)
        batch_shape = shape[len(shape) - self.theta.dim() : -1]
        if batch_shape != self.batch_shape:  # the value enlarges dimensions of size 1
            return self.expand(batch_shape).log_prob(value)
        value = value.expand(shape)
        if self.regularizer.name == "shannon":
            y, optimum = value.double(), self._recalled[0]
            result = ops.gibbs_log_prob(backend, self._scores, y, optimum, self._gamma, self._problem)
        else:
            y = value.double().reshape(prod(value.shape[: value.dim() - self.theta.dim()]), *self.theta.shape)
            result = operators.log_prob(self._scores, y, *self._problem, self._known_table)
        return result.reshape(value.shape[:-1]).to(self.theta.dtype)

    def entropy(self) -> Tensor:
        """Shannon entropy (*batch,) in nats, differentiable."""
        return operators.entropy(self._scores, *self._problem).to(self.theta.dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All feasible selections, (cardinality, *batch, n); with expand=False (cardinality, 1, ..., 1, n).

        The whole batch must share one constraint. A sparse regularizer may give some of them probability 0.
        """
        n = self.event_shape[0]
        if n > self._largest_enumeration:
            raise ValueError(
                f"enumerate_support lists 2^n selections: n = {n} is above {self._largest_enumeration}; sample instead"
            )
        weights, capacity = self.constraint.weights_of(n), self.constraint.capacity
        if weights.size > n or capacity.size > 1:
            raise NotImplementedError("enumerate_support needs the same weights and capacity for the whole batch")
        y = np.array(list(product((0, 1), repeat=n)), dtype=np.int64).reshape(-1, n)
        load = y @ weights.reshape(n)
        feasible = load == capacity.item() if self.constraint.exactly else load <= capacity.item()
        support = torch.as_tensor(y[feasible], dtype=self.theta.dtype, device=self.theta.device)
        support = support.reshape(-1, *[1] * len(self.batch_shape), n)
        return support.expand(-1, *self.batch_shape, n) if expand else support

    @property
    def _scaled(self) -> Tensor:
        """theta / gamma, with a finite derivative by gamma where theta is -inf."""
        out = torch.isneginf(self.theta)
        return torch.where(out, -inf, operators._divide(torch.where(out, 0.0, self._scores), self._gamma))

    @property
    def _scores(self) -> Tensor:
        """theta in float64, anew each time, so that one backward pass does not free the graph of another."""
        return self.theta.double()

    @property
    def _tabulated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Value, mean and table, all detached, in float64."""
        versions = [x._version for x in (self.theta, self._gamma) if isinstance(x, Tensor) and not x.is_inference()]
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

    def _drawn(self, sample_shape: Any, generator: torch.Generator | None) -> Tensor:
        sample_shape = torch.Size(sample_shape)
        shape = sample_shape.numel(), *self.theta.shape
        uniforms = backend.uniforms(generator, shape, backend.computable(self.theta))
        with torch.no_grad():
            drawn = operators.sample(self._scores, uniforms, *self._problem, self._known_table)
        return drawn.reshape(*sample_shape, *self.theta.shape)


class FeasibleSelections(constraints.Constraint):
    """Zeros and ones within the budget."""

    is_discrete = True
    event_dim = 1

    def __init__(self, constraint: Constraint, weights: Any, capacity: Any) -> None:
        self.constraint, self.weights, self.capacity = constraint, weights, capacity

    def check(self, value: Tensor) -> Tensor:
        weights, capacity = (torch.as_tensor(x, device=value.device) for x in (self.weights, self.capacity))
        load = (weights * value.double()).sum(-1)
        within = load == capacity if self.constraint.exactly else load <= capacity
        return ((value == 0) | (value == 1)).all(-1) & within

    def __repr__(self) -> str:
        return f"zeros and ones under {self.constraint}"


@register_kl(SubsetDistribution, SubsetDistribution)
def _kl(p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
    """sum_y p(y) log(p(y) / q(y)), exactly; inf where p draws what q never does."""
    if p.event_shape != q.event_shape or not _same(p.constraint, q.constraint, p.event_shape[0]):
        raise ValueError("kl_divergence needs two distributions under the same constraint; their supports differ")
    if p.regularizer.name == q.regularizer.name == "shannon":
        return _kl_of_gibbs(p, q).to(p.theta.dtype)
    return _PathDivergence.apply(*torch.broadcast_tensors(p._scaled, q._scaled), p, q).to(p.theta.dtype)


def _kl_of_gibbs(p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
    """Two of Shannon's: the difference of the optima, and of the mean scores."""
    (log_p, mean), (log_q, _) = p._recalled, q._recalled
    never = torch.isneginf(q.theta)  # drawn by p, if it does not mask the item too
    score_q = torch.where(never, 0.0, q._scaled)
    divergence = log_q - log_p + ops.inner(backend, p._scaled, mean) - ops.inner(backend, score_q, mean)
    return torch.where((never & (mean > 0)).any(-1), inf, divergence)


def _same(a: Constraint, b: Constraint, n: int) -> bool:
    def equal(x: np.ndarray, y: np.ndarray) -> bool:
        fits = broadcasts(x.shape, y.shape) or broadcasts(y.shape, x.shape)
        return fits and bool(np.all(x == y))

    return a.exactly == b.exactly and equal(a.weights_of(n), b.weights_of(n)) and equal(a.capacity, b.capacity)


class _PathDivergence(torch.autograd.Function):
    """Any two regularizers: the expected divergence of the decisions along p's paths, [E] times that of the two Q.

    Plain torch sweeps, not fast, differentiated by autograd on the spot.
    """

    @staticmethod
    def forward(ctx: Any, theta_p: Tensor, theta_q: Tensor, p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
        with torch.enable_grad():
            thetas = theta_p.detach().requires_grad_(), theta_q.detach().requires_grad_()
            weights, capacity = (torch.as_tensor(x, device=theta_p.device) for x in p._problem[:2])
            if not p.constraint.exactly:
                capacity = torch.minimum(capacity, weights.sum(-1))
            rows_p, rows_q = (_decisions(theta, x, weights, capacity) for theta, x in zip(thetas, (p, q)))
            divergence = theta_p.new_zeros(theta_p.shape[:-1])
            E = torch.nn.functional.one_hot(
                capacity.expand(divergence.shape), rows_p[0].shape[-1] if rows_p else 1
            ).double()
            for i in range(len(rows_p) - 1, -1, -1):
                a, b = rows_p[i], rows_q[i]
                local = _relative(a, b) + _relative(1 - a, 1 - b)
                divergence = divergence + torch.where(E > 0, E * torch.where(E > 0, local, 0.0), 0.0).sum(-1)
                picked, _ = _shifted(E * a, -weights[..., i], 0.0)
                E = E - E * a + picked
            gradients = torch.autograd.grad(divergence.sum(), thetas, allow_unused=True, materialize_grads=True)
        finite = torch.isfinite(divergence.detach()).unsqueeze(-1)
        ctx.save_for_backward(theta_p, theta_q, *(torch.where(finite, gradient, 0.0) for gradient in gradients))
        return divergence.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *thetas, gradient_p, gradient_q = ctx.saved_tensors
        gradients = (_Once.apply(gradient, *thetas) for gradient in (gradient_p, gradient_q))
        return *(grad.unsqueeze(-1) * gradient for gradient in gradients), None, None


class _Once(torch.autograd.Function):
    """A gradient that depends on the thetas in a way that is not known: to differentiate it raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *thetas: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise operators._no_derivative("second derivative of this divergence")


def _decisions(theta: Tensor, x: SubsetDistribution, weights: Tensor, capacity: Tensor) -> list[Tensor]:
    """Q[i] (*batch, C + 1) for every item, with first derivatives that do not trip over the kinks of abs at ties."""
    value, prob, dprob = (rebind(getattr(type(x.regularizer), name), torch) for name in ("value", "prob", "dprob"))
    V = theta.new_zeros((*theta.shape[:-1], x._problem[-1] + 1))
    if x.constraint.exactly:
        V[..., 1:] = INFEASIBLE
    rows = []
    for i in range(theta.shape[-1]):
        item = theta[..., i, None]
        shifted, fits = _shifted(V, weights[..., i], INFEASIBLE)
        pick = shifted + torch.where(item == -inf, INFEASIBLE, item)
        delta = pick - V
        q = torch.where(fits, prob(delta.detach()), 0.0)
        larger = torch.where(delta > 0, pick, V).detach() + torch.where(fits, value(delta.detach()), 0.0)
        V = larger + q * (pick - pick.detach()) + (1 - q) * (V - V.detach())
        rows.append(q + dprob(q) * (delta - delta.detach()))
    return rows


def _shifted(row: Tensor, w: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """``row[c - w]`` for every c, and where that exists; ``fill`` elsewhere."""
    index = torch.arange(row.shape[-1], device=row.device) - w.unsqueeze(-1)
    fits = ((index >= 0) & (index < row.shape[-1])).expand(row.shape)
    index = index.clamp(0, row.shape[-1] - 1).expand(row.shape)
    return torch.where(fits, row.gather(-1, index), fill), fits


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """a log(a / b), 0 where a is."""
    safe = torch.where(a > 0, a, 1.0)
    return torch.where(a > 0, safe * (safe.log() - torch.where(a > 0, b, 1.0).log()), 0.0)
