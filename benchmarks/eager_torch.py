"""Baseline (b): what one would write in eager PyTorch, with derivatives left to autograd.

One row of V over batch and capacity, a Python loop over items; relax is the gradient of the value, the VJP is the
gradient of that. Infeasible states hold a large negative number, since -inf makes NaN in the backward passes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

INFEASIBLE = -1e10


# The smoothed maxima are written without abs or clamp around a tie: their second derivatives there would be lost.
def shannon_max(pick: Tensor, skip: Tensor) -> Tensor:
    delta = pick - skip
    return torch.where(delta.abs() < 60, skip + softplus(delta, threshold=60), torch.maximum(pick, skip))


def gini_max(pick: Tensor, skip: Tensor) -> Tensor:
    delta = pick - skip
    return torch.where(delta.abs() < 1, skip + 0.25 * (1 + delta) ** 2, torch.maximum(pick, skip))


def tsallis_max(pick: Tensor, skip: Tensor) -> Tensor:
    delta = pick - skip
    half = (0.5 * delta).clamp(-1, 1)
    smooth = skip + half + (4 - (2 - half * half) ** 1.5) / 3
    return torch.where(delta.abs() < 2, smooth, torch.maximum(pick, skip))


def shannon_prob(delta: Tensor) -> Tensor:
    return torch.sigmoid(delta)


def gini_prob(delta: Tensor) -> Tensor:
    return (0.5 * (1 + delta)).clamp(0, 1)


def tsallis_prob(delta: Tensor) -> Tensor:
    s = (0.5 * delta).clamp(-1, 1)
    return 0.5 * (1 + s * (2 - s * s).sqrt())


MAX = {"shannon": shannon_max, "gini": gini_max, "tsallis": tsallis_max}
PROB = {"shannon": shannon_prob, "gini": gini_prob, "tsallis": tsallis_prob}


def first_row(theta: Tensor, capacity: int, exactly: bool) -> Tensor:
    row = theta.new_zeros(len(theta), capacity + 1)
    if exactly:
        row[:, 1:] = INFEASIBLE
    return row


def value(theta: Tensor, weights: list[int], capacity: int, exactly: bool, regularizer: str) -> Tensor:
    """Smoothed optimum ``(batch,)``."""
    smooth_max = MAX[regularizer]
    row = first_row(theta, capacity, exactly)
    for i, w in enumerate(weights):
        if w > capacity:
            continue
        skip = row[:, w:]
        pick = row[:, : capacity + 1 - w] + theta[:, i, None]
        row = torch.cat([row[:, :w], smooth_max(pick, skip)], dim=1)
    return row[:, capacity]


def relax(theta: Tensor, weights: list[int], capacity: int, exactly: bool, regularizer: str) -> tuple[Tensor, Tensor]:
    """Value and selection; the selection can be differentiated once more if ``theta`` requires a gradient."""
    again = theta.requires_grad
    if not again:
        theta = theta.detach().requires_grad_()
    optimum = value(theta, weights, capacity, exactly, regularizer)
    (selection,) = torch.autograd.grad(optimum.sum(), theta, create_graph=again)
    return optimum, selection


@torch.no_grad()
def sample(
    theta: Tensor, uniforms: Tensor, weights: list[int], capacity: int, exactly: bool, regularizer: str
) -> Tensor:
    """0/1 selections ``(samples, batch, n)``, one for each row of ``uniforms``."""
    smooth_max, prob = MAX[regularizer], PROB[regularizer]
    row = first_row(theta, capacity, exactly)
    probs = []
    for i, w in enumerate(weights):
        q = torch.zeros_like(row)
        if w <= capacity:
            skip = row[:, w:]
            pick = row[:, : capacity + 1 - w] + theta[:, i, None]
            q[:, w:] = prob(pick - skip)
            row = torch.cat([row[:, :w], smooth_max(pick, skip)], dim=1)
        probs.append(q)
    out = torch.empty_like(uniforms)
    left = torch.full(uniforms.shape[:2], capacity)
    for i in reversed(range(len(weights))):
        out[..., i] = (uniforms[..., i] < probs[i].T[left, torch.arange(len(theta))]).to(theta.dtype)
        left -= out[..., i].long() * weights[i]
    return out
