"""The Kullback-Leibler divergence between two distributions over selections."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import register_kl

from knapgrad import ops
from knapgrad.arguments import broadcasts
from knapgrad.lattice import INFEASIBLE, Lattice, fits, tournament
from knapgrad.regularizers import functions, rebind
from knapgrad.torch import backend, operators
from knapgrad.torch.distribution import SubsetDistribution


@register_kl(SubsetDistribution, SubsetDistribution)
def _kl(p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
    """sum_y p(y) log(p(y) / q(y)), exactly; inf where p draws what q never does."""
    if p.event_shape != q.event_shape or not _same(p, q):
        raise ValueError("kl_divergence needs two distributions under the same constraint; their supports differ")
    if p.regularizer.name == q.regularizer.name == "shannon":
        return backend.as_total(_kl_of_gibbs(p, q), p.theta)
    return backend.as_total(_PathDivergence.apply(*torch.broadcast_tensors(p._scaled, q._scaled), p, q), p.theta)


def _kl_of_gibbs(p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
    """Both under Shannon: the difference of the optima, and of the mean scores."""
    (log_p, mean), (log_q, _) = p._recalled, q._recalled
    never = torch.isneginf(q._scores)  # drawn by p, if it does not mask the item too
    score_q = torch.where(never, 0.0, q._scaled)
    divergence = log_q - log_p + ops.inner(backend, p._scaled, mean) - ops.inner(backend, score_q, mean)
    return torch.where((never & (mean > 0)).any(-1), inf, ops.not_negative(backend, divergence))


def _same(p: SubsetDistribution, q: SubsetDistribution) -> bool:
    """Whether the constraints are, in every instance."""

    def equal(x: Any, y: Any) -> bool:
        if x is None or y is None:
            return x is y
        fits = broadcasts(x.shape, y.shape) or broadcasts(y.shape, x.shape)
        return fits and bool(np.all(x == y))

    a, b = (x.constraint.lattice(x._scores.shape[-1]) for x in (p, q))
    return (
        a.options == b.options
        and a.box == b.box
        and all(equal(getattr(a, name), getattr(b, name)) for name in ("weights", "capacity", "slack"))
    )


class _PathDivergence(torch.autograd.Function):
    """Any two regularizers: the expected divergence of the decisions along p's paths, [E] times that of the two Q.

    Plain torch sweeps, not fast, differentiated by autograd on the spot.
    """

    @staticmethod
    def forward(ctx: Any, theta_p: Tensor, theta_q: Tensor, p: SubsetDistribution, q: SubsetDistribution) -> Tensor:
        with torch.enable_grad():
            thetas = theta_p.detach().requires_grad_(), theta_q.detach().requires_grad_()
            lattice = backend.lattice(p.constraint, theta_p)
            weights = backend.array(lattice.weights, theta_p, "weights")
            capacity = backend.array(lattice.capacity, theta_p, "capacity")
            start = theta_p.new_zeros(lattice.reach + 1)
            if lattice.slack is not None:
                slack = backend.array(lattice.slack, theta_p, "slack").unsqueeze(-1)
                start = torch.where(torch.arange(len(start), device=slack.device) > slack, INFEASIBLE, start)
            tables = [_probabilities(theta, x, lattice, weights, start) for theta, x in zip(thetas, (p, q))]
            divergence = theta_p.new_zeros(theta_p.shape[:-1])
            E = torch.nn.functional.one_hot(capacity.expand(divergence.shape), start.shape[-1]).double()
            for k in reversed(range(len(tables[0]))):
                local = sum(_relative(a, b) for a, b in zip(tables[0][k], tables[1][k]))
                divergence = divergence + torch.where(E > 0, E * torch.where(E > 0, local, 0.0), 0.0).sum(-1)
                moves = zip(tables[0][k], _step(weights, k, lattice.options))
                E = torch.stack([_shifted(E * probability, -w, 0.0) for probability, w in moves]).sum(0)
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
    """A gradient that cannot be differentiated again: that raises an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *thetas: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise operators.no_derivative("second derivative of this divergence")


def _step(x: Tensor, k: int, options: int) -> list[Tensor]:
    """Of numbers (..., n) those of the options of step k. An item has two, to skip it and to pick it."""
    if options:
        return [x[..., k * options + o] for o in range(options)]
    return [torch.zeros_like(x[..., k]), x[..., k]]


def _probabilities(
    theta: Tensor, x: SubsetDistribution, lattice: Lattice, weights: Tensor, start: Tensor
) -> list[list[Tensor]]:
    """[P] (*batch, C + 1) of every option of every step, with first derivatives that are right at ties too, where abs
    has a kink."""
    value, prob, dprob = (rebind(f, torch) for f in functions(x.regularizer.name).values())
    scores = torch.where(theta == -inf, INFEASIBLE, theta)
    V = start.expand(*theta.shape[:-1], start.shape[-1])
    table = []
    for k in range(theta.shape[-1] // (lattice.options or 1)):
        moves = zip(_step(scores, k, lattice.options), _step(weights, k, lattice.options))
        nodes = [_shifted(V, w, INFEASIBLE, lattice.box) + score.unsqueeze(-1) for score, w in moves]
        shares = [torch.ones_like(V) for _ in nodes]
        for low, middle, high in tournament(len(nodes)).tolist():
            skip, pick = nodes[low], nodes[middle]
            delta = (pick - skip).detach()
            q = prob(delta)
            larger = torch.where(delta > 0, pick, skip).detach() + value(delta)
            nodes[low] = larger + q * (pick - pick.detach()) + (1 - q) * (skip - skip.detach())
            chance = q + dprob(q) * (pick - skip - delta)
            shares[low:middle] = [share * (1 - chance) for share in shares[low:middle]]
            shares[middle:high] = [share * chance for share in shares[middle:high]]
        V = torch.clamp(nodes[0], min=INFEASIBLE)
        table.append(shares)
    return table


def _shifted(row: Tensor, w: Tensor, fill: float, box: tuple[int, ...] = ()) -> Tensor:
    """``row[c - w]`` for every c, and ``fill`` where that does not exist."""
    c, w = torch.arange(row.shape[-1], device=row.device), w.unsqueeze(-1)
    inside = (fits(c, w, box) & (c - w < row.shape[-1])).expand(row.shape)
    index = (c - w).clamp(0, row.shape[-1] - 1).expand(row.shape)
    return torch.where(inside, row.gather(-1, index), fill)


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """a log(a / b), 0 where a is, inf where only b is 0; without a derivative there, since inf times 0 would be NaN in
    states that p never reaches."""
    safe, never = torch.where(a > 0, a, 1.0), (a > 0) & (b <= 0)
    difference = safe.log() - torch.where((a > 0) & ~never, b, 1.0).log()
    return torch.where(never, inf, torch.where(a > 0, safe * difference, 0.0))
