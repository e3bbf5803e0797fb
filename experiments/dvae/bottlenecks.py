"""The hidden layers that are compared: scores (batch, 10) to a selection of 3, hard or relaxed.

Each is one small class: ``forward`` selects, ``penalty`` is what keeps the scores near a uniform prior, 0 if the method
has none. Random numbers come from the generator that is given to a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import knapgrad as kg


class Bottleneck(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """The selection (batch, n), which adds up to k."""
        raise NotImplementedError

    def penalty(self, theta: Tensor) -> Tensor:
        """(batch,)."""
        return torch.zeros_like(theta[:, 0])


class Smoothed(Bottleneck):
    """Our relaxed top-k, or samples with the exact gradient of their mean; the penalty is the Fenchel-Young divergence.

    Shannon's samples are SIMPLE (Ahmed et al., 2023), and its divergence the Kullback-Leibler one.
    """

    def __init__(self, k: int, regularizer: type[kg.Regularizer], stochastic: bool, gamma: float = 1.0) -> None:
        super().__init__(k)
        self.layer = (kg.torch.Sample if stochastic else kg.torch.Relax)(kg.TopK(k), regularizer(gamma))
        self.stochastic = stochastic

    def forward(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        return self.layer(theta, generator=generator) if self.stochastic else self.layer(theta)

    def penalty(self, theta: Tensor) -> Tensor:
        return kg.divergence(theta, self.layer.constraint, self.layer.regularizer)


class SparseSoft(Bottleneck):
    """The sparse soft top-k mask of Sander et al. (2023): argmax of <theta, y> - sum(y^p) / p, 0 <= y <= 1, sum k."""

    def __init__(self, k: int, p: float) -> None:
        super().__init__(k)
        self.p = p

    def forward(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        return SparseSoftMask.apply(theta, self.k, self.p)

    def penalty(self, theta: Tensor) -> Tensor:
        """Its Fenchel-Young divergence from theta = 0, where all n have k / n."""
        y, n = SparseSoftMask.apply(theta, self.k, self.p), theta.shape[-1]
        return y.pow(self.p).sum(-1) / self.p - n * (self.k / n) ** self.p / self.p


class SparseSoftMask(torch.autograd.Function):
    """y_i = min(max(theta_i - tau, 0)^(1 / (p - 1)), 1), with the tau at which they add up to k.

    tau is bracketed by sections: each round tries 63 points between its bounds at once.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, k: int, p: float) -> Tensor:
        def mask(tau: Tensor) -> Tensor:
            return (theta[..., None, :] - tau[..., None]).clamp(0, 1).pow(1 / (p - 1))

        low = theta.amin(-1, keepdim=True) - 1  # all n are selected
        width = theta.amax(-1, keepdim=True) - low  # at its end, none is
        steps = torch.arange(64, device=theta.device, dtype=theta.dtype) / 64
        for _ in range(5 if theta.dtype is torch.float32 else 10):
            enough = (mask(low + width * steps).sum(-1) >= k).sum(-1, keepdim=True)  # falls with tau
            low, width = low + width * (enough - 1).clamp(min=0) / 64, width / 64
        y = mask(low + width / 2).squeeze(-2)
        ctx.save_for_backward(y)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """dy = s (dtheta - dtau), where s is the slope of items strictly between 0 and 1, and dtau keeps the sum."""
        (y,) = ctx.saved_tensors
        inside = (y > 0) & (y < 1)
        slope = torch.where(inside, torch.where(inside, y, 1.0).pow(2 - ctx.p) / (ctx.p - 1), 0.0)
        total = slope.sum(-1, keepdim=True)
        mean = (slope * grad).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
        return slope * (grad - mean), None, None


class StraightThrough(Bottleneck):
    """Hard top-k, with Gumbel noise or without, whose gradient is passed on as it comes."""

    def __init__(self, k: int, temperature: float) -> None:
        super().__init__(k)
        self.temperature = temperature

    def forward(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        scores = theta.detach()
        if self.temperature:
            uniform = torch.rand(theta.shape, generator=generator, device=theta.device, dtype=theta.dtype)
            scores = scores - self.temperature * (-uniform.clamp(min=1e-30).log()).log()
        hard = torch.zeros_like(scores).scatter(-1, scores.topk(self.k).indices, 1.0)
        return hard + (theta - theta.detach())


BOTTLENECKS: dict[str, Callable[[int], Bottleneck]] = {
    "Shannon": partial(Smoothed, regularizer=kg.Shannon, stochastic=False),
    "Gini": partial(Smoothed, regularizer=kg.Gini, stochastic=False),
    "Tsallis": partial(Smoothed, regularizer=kg.Tsallis, stochastic=False),
    "Shannon, sampled (SIMPLE)": partial(Smoothed, regularizer=kg.Shannon, stochastic=True),
    "Gini, sampled": partial(Smoothed, regularizer=kg.Gini, stochastic=True),
    "Tsallis, sampled": partial(Smoothed, regularizer=kg.Tsallis, stochastic=True),
    "FSD, p = 2": partial(SparseSoft, p=2.0),
    "FSD, p = 4/3": partial(SparseSoft, p=4 / 3),
    "hard top-k, ST": partial(StraightThrough, temperature=0.0),
    "Gumbel top-k, ST": partial(StraightThrough, temperature=1.0),
}
