"""The derivative of the VJP of relax, for a number of items under Shannon: third cumulants, without a table.

The tags are those of docs/math.md ("Without a table").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knapgrad.lattice import Lattice

_EXPONENT = 30.0  # what is left out is below e^-30
_STEPS = 120  # halves of the bracket of a tilt


def serves(lattice: Lattice, regularizer: str) -> bool:
    """Whether there is a derivative of the VJP."""
    return regularizer == "shannon" and lattice.counts


def gradient(theta: Tensor, z: Tensor, cotangent: Tensor, lattice: Lattice, gamma: Any, regularizer: str) -> Tensor:
    """That of <cotangent, H z> (*batch, n) by theta / gamma. NaN for an instance that is NaN or not feasible."""
    gamma = torch.as_tensor(gamma, dtype=torch.float64, device=theta.device)
    x = theta.double() / (gamma.unsqueeze(-1) if gamma.dim() else gamma)
    batch = theta.shape[:-1]
    k = torch.as_tensor(lattice.capacity, device=theta.device).expand(batch).unsqueeze(-1).double()
    slack = k if lattice.slack is None else torch.as_tensor(lattice.slack, device=theta.device).expand(batch)[..., None]
    free = (x > -math.inf).sum(-1, keepdim=True)
    least = (k - torch.minimum(slack.double(), k)).clamp(min=0)
    is_good = (
        torch.isfinite(x).logical_or(x == -math.inf).all(-1, keepdim=True) & (least <= free) & (slack >= 0) & (k >= 0)
    )
    k = torch.minimum(k, free.double())
    is_single = (k <= 0) | (least >= free)
    known = is_good & ~is_single
    x = torch.where(known, x, -math.inf)
    k, least = torch.where(known, k, 0.0), torch.where(known, least, 0.0)
    found = _third(x, z.double(), cotangent.double(), k, least)
    return torch.where(is_good, torch.where(is_single, 0.0, found), math.nan).to(theta.dtype)


def _third(x: Tensor, z: Tensor, g: Tensor, k: Tensor, least: Tensor) -> Tensor:
    """[Hz'] The gradient of <g, H z> (*batch, n), of least to k items, which are (*batch, 1)."""
    L, free = _EXPONENT, (x > -math.inf).sum(-1, keepdim=True)
    lam = _tilt(x, k, least)
    chances = torch.sigmoid(x - lam)
    mean, s2 = chances.sum(-1, keepdim=True), (chances * torch.sigmoid(lam - x)).sum(-1, keepdim=True)
    r = L / 3 + torch.sqrt(L * L / 9 + 2 * L * s2)
    low, high = torch.maximum(least, (mean - r).floor()), torch.minimum(k, (mean + r).ceil())
    low, high = (torch.where(least == k, k, count) for count in (low, high))
    reach = (L / lam.abs().clamp(min=1e-9)).ceil()
    low = torch.where(lam > 0, torch.maximum(low, high - reach), low)
    high = torch.where(lam < 0, torch.minimum(high, low + reach), high)
    off = torch.maximum((mean - low).abs(), (high - mean).abs())
    period = torch.minimum((r + off).ceil(), torch.maximum(high, free - low) + 1)
    period = period + (period % 2 == 0)  # [nodes] odd, so that no u is 0
    angles = 2 * math.pi * torch.arange(int(period.max()) // 2 + 1, dtype=torch.float64, device=x.device) / period
    is_used = (angles < math.pi) & (s2 * (1 - torch.cos(angles)) <= L + 3)
    last = int(is_used.any(tuple(range(is_used.dim() - 1))).nonzero().max()) + 1
    t, is_used = angles[..., :last, None], is_used[..., :last, None]
    weight = torch.where(t == 0, 1.0, 2.0) * is_used
    lam, low, high = lam.unsqueeze(-1), low.unsqueeze(-1), high.unsqueeze(-1)
    sign, end = torch.where(lam >= 0, -1.0, 1.0), torch.where(lam >= 0, high, low)
    step = sign * torch.complex(lam.expand_as(t), -t)
    length = high - low + 1
    terms = torch.where(
        step == 0, length + 0j, torch.expm1(length * step) / torch.where(step == 0, 1, torch.expm1(step))
    )
    window = weight * terms * torch.exp(-1j * t * end)
    d = torch.exp(1j * t) - 1
    p, q = torch.sigmoid(x.unsqueeze(-2) - lam), torch.sigmoid(lam - x.unsqueeze(-2))
    pq, u = p * q, 1 + p * d  # [node]
    c = torch.exp(torch.log(u).sum(-1, keepdim=True)) * window
    c, v = c / c.real.sum(-2, keepdim=True), 1 / u

    def average(per_node: Tensor) -> Tensor:
        return (c * per_node).real.sum(-2, keepdim=True)

    def sums(z: Tensor) -> tuple[Tensor, Tensor]:
        """[A] of z, which is centered if all selections have as many items."""
        z = z.unsqueeze(-2)
        middle = (z * pq).sum(-1, keepdim=True) / pq.sum(-1, keepdim=True).clamp(min=1e-300)
        z = z - torch.where(low == high, middle, 0.0)
        A = d * (v * (z * pq)).sum(-1, keepdim=True)
        return z, A - average(A)

    (z, Az), (g, Ag) = sums(z), sums(g)
    shift, spread = pq * d * v, pq * (1 + d) * v * v  # of an item at a node: how far from p, and the variance
    B = (spread * (g * z)).sum(-1, keepdim=True)
    own = g * z * average(spread * (1 - 2 * (p + shift))) + z * average(Ag * spread) + g * average(Az * spread)
    return (own + average((B + Ag * Az) * shift) - average(shift) * average(B + Ag * Az)).squeeze(-2)


def _tilt(x: Tensor, k: Tensor, least: Tensor) -> Tensor:
    """[tilt] (*batch, 1)"""
    known = torch.where(x > -math.inf, x, 0.0)
    room = 40 + math.log(max(x.shape[-1], 1))
    low, high = known.amin(-1, keepdim=True) - room, known.amax(-1, keepdim=True) + room
    mean = torch.sigmoid(x).sum(-1, keepdim=True)
    goal = torch.minimum(torch.maximum(mean, least), k)
    for _ in range(_STEPS):
        lam = (low + high) / 2
        is_above = torch.sigmoid(x - lam).sum(-1, keepdim=True) > goal
        low, high = torch.where(is_above, lam, low), torch.where(is_above, high, lam)
    return torch.where(goal == mean, 0.0, (low + high) / 2)
