"""CUDA tensors, with several budgets: the functions of :mod:`knapgrad.kernels.triton.from_torch`.

Sweeps are one kernel (:mod:`knapgrad.kernels.triton.boxes`). Paths are followed by operations of torch, item by item,
through tables that the kernel has filled. Nothing waits for the device.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from knapgrad import regularizers
from knapgrad.kernels.triton import boxes, choices, plan
from knapgrad.kernels.triton.from_torch import _UNIT, _flat, multiprocessors
from knapgrad.kernels.triton.launch import on
from knapgrad.lattice import LARGEST, Lattice, fits, moduli_of


def _sweep(
    theta: Tensor, z: Tensor | None, lattice: Lattice, gamma: Any, regularizer: str, direction: str | None = None,
    relaxed: bool = True, keep: bool = False, cotangent: Tensor | None = None, whole: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The results by name: value and tangent (batch,), or of the whole box, y (batch, n) and tables."""
    batch = _flat(theta, lattice, gamma, regularizer)
    flat, (size, n), last = batch.theta, batch.theta.shape, lattice.reach
    cells, count = size * (last + 1), 1 if direction is None else 2
    value = flat.new_zeros(cells if whole else size, dtype=torch.float64)
    results = {"value": value, "tangent": flat.new_zeros(size), "y": torch.zeros_like(flat)}
    width = plan.whole_lines(last + 1)
    table = n * width * flat.itemsize * count
    programs = min(size, 8 * multiprocessors(flat.device), max(plan.ITEM_SCRATCH // max(table, 1), 1))
    results["tables"] = flat.new_empty((size if keep else programs) * n * width * count)
    if n == 0 or size == 0:
        return results
    warps = min(max(plan.power_of_2(width) // 256, 1), 8)
    inner, plane = [*moduli_of(lattice.box), 1, 1][:2]
    constants = {name: batch.constants[name] for name in (
        "weights", "capacity", "gamma", "scale", "weights_step", "capacity_step", "gamma_step", "GAMMAS",
    )}  # fmt: skip
    with on(flat.get_device()):
        boxes.operator_kernel[(programs,)](
            theta=flat, z=flat if z is None else z.to(flat.dtype).reshape(size, n).contiguous(), **constants,
            cotangent=flat if cotangent is None else cotangent.to(flat.dtype).reshape(cells).contiguous(),
            batch=size, n=n, width=width, last=last, inner=inner, plane=plane, **results,
            V_rows=flat.new_empty(programs * 2 * width, dtype=torch.float64),
            rows=flat.new_empty(programs * 6 * width), **choices.functions(regularizer),
            SOURCE=choices.source(direction), RELAXED=relaxed, KEEP=keep, WHOLE=whole, BLOCK=32 * warps,
            num_warps=warps,
        )  # fmt: skip
    return results


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    found = _sweep(theta, None, lattice, gamma, regularizer, relaxed=relaxed)
    return found["value"].reshape(theta.shape[:-1]), found["y"].reshape(theta.shape)


def relax(theta, lattice, gamma, regularizer):
    """The relaxed selection alone."""
    return operator(theta, lattice, gamma, regularizer)[1]


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every instance, for sample and log_prob with the same arguments."""
    found = _sweep(theta, None, lattice, gamma, regularizer, keep=True)
    size, n = prod(theta.shape[:-1]), theta.shape[-1]
    table = found["tables"].reshape(size, n * plan.whole_lines(lattice.reach + 1))
    return found["value"].reshape(theta.shape[:-1]), found["y"].reshape(theta.shape), table


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _sweep(theta, z, lattice, gamma, regularizer, "linear")["y"].reshape(theta.shape)


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    found = _sweep(theta, torch.zeros_like(theta), lattice, gamma, regularizer, "entropy", relaxed=False)
    return found["tangent"].reshape(theta.shape[:-1])


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    return _sweep(theta, torch.zeros_like(theta), lattice, gamma, regularizer, "entropy")["y"].reshape(theta.shape)


def frontier(theta, lattice, gamma, regularizer):
    """The smoothed optimum in every state (*batch, reach + 1) in float64."""
    found = _sweep(theta, None, lattice, gamma, regularizer, relaxed=False, whole=True)
    return found["value"].reshape(*theta.shape[:-1], lattice.reach + 1)


def frontier_vjp(theta, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of those optima weighted by a cotangent (*batch, reach + 1)."""
    return _sweep(theta, None, lattice, gamma, regularizer, cotangent=cotangent, whole=True)["y"].reshape(theta.shape)


# Paths, in order of items from the last to the first: Q (n, batch, states), states (samples, batch).


def _tables(theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, table: Tensor | None) -> Tensor:
    size, n = prod(theta.shape[:-1]), theta.shape[-1]
    if table is None:
        table = _sweep(theta, None, lattice, gamma, regularizer, relaxed=False, keep=True)["tables"]
    return table.reshape(size, n, plan.whole_lines(lattice.reach + 1))[..., : lattice.reach + 1].transpose(0, 1)


def _lattice(theta: Tensor, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Weights (n, batch) and capacity (batch,)."""
    size, n = prod(theta.shape[:-1]), theta.shape[-1]
    weights = lattice.weights.expand(theta.shape).reshape(size, n).T
    return weights, lattice.capacity.expand(theta.shape[:-1]).reshape(size).clamp(0, lattice.reach)


def _drawn(theta: Tensor, uniforms: Tensor, lattice: Lattice, Q: Tensor) -> Tensor:
    weights, capacity = _lattice(theta, lattice)
    u = uniforms.reshape(len(uniforms), len(capacity), len(Q))
    c, y = capacity.expand(len(u), -1), torch.empty_like(u)
    taint = u.new_zeros(c.shape)
    for i in reversed(range(len(Q))):
        q = Q[i].gather(1, c.T).T
        picked = u[..., i] < q
        taint = taint + 0 * q  # NaN stays NaN
        y[..., i] = picked.to(y.dtype) + taint
        c = torch.where(picked, c - weights[i], c)
    return (y + taint[..., None]).reshape(uniforms.shape)


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    return _drawn(theta, uniforms, lattice, _tables(theta, lattice, gamma, regularizer, table))


def solve(theta, lattice):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item."""
    gamma: Any = _UNIT
    if theta.dtype == torch.float64:  # divided by a power of two, large scores are in range
        largest = torch.where(theta.isfinite(), theta.abs(), 0.0)
        gamma = torch.where((largest > LARGEST).any(-1), 2.0**64, 1.0).double()
    half = torch.full_like(theta, 0.5)[None]
    return _drawn(theta, half, lattice, _tables(theta, lattice, gamma, "hard", None))[0]


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    Q = _tables(theta, lattice, gamma, regularizer, None)
    weights, _ = _lattice(theta, lattice)
    c = torch.arange(lattice.reach + 1, device=theta.device)
    M, hard = torch.zeros(Q.shape[1:], dtype=torch.float64, device=theta.device), torch.empty_like(Q)

    def log(p: Tensor) -> Tensor:
        return torch.where(p > 0, torch.where(p > 0, p, 1.0).log(), -1e30)

    for i in range(len(Q)):
        q, w = Q[i].double(), weights[i][:, None]
        inside = fits(c, w, lattice.box)
        pick = torch.where(inside, M.gather(1, (c - w).clamp(0, lattice.reach)) + log(q), -1e30)
        skip = M + log(1 - q)
        M, hard[i] = torch.where(pick > skip, pick, skip), (pick > skip).to(Q.dtype) + 0 * Q[i]
    return _drawn(theta, torch.full_like(theta, 0.5)[None], lattice, hard)[0]


def _path(theta: Tensor, y: Tensor, lattice: Lattice, Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of selections (samples, batch, n): where they are before each decision, the chance of the decision, and its
    derivative by the table, +1 or -1."""
    weights, capacity = _lattice(theta, lattice)
    picked = y.reshape(len(y), len(capacity), len(Q)) != 0
    used = torch.where(picked, weights.T, 0)
    later = used.flip(-1).cumsum(-1).flip(-1) - used
    at = (capacity[:, None] - later).clamp(0, lattice.reach)  # one that was left has had a chance of 0
    q = Q.permute(1, 2, 0).gather(1, at.transpose(0, 1)).transpose(0, 1)
    return at, torch.where(picked, q, 1 - q), torch.where(picked, 1.0, -1.0).to(q.dtype)


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    _, chance, _ = _path(theta, y, lattice, _tables(theta, lattice, gamma, regularizer, table))
    return chance.log().sum(-1).reshape(y.shape[:-1])


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0: an E sweep that receives terms along the paths."""
    Q = _tables(theta, lattice, gamma, regularizer, None)
    (n, size, states), weights = Q.shape, _lattice(theta, lattice)[0]
    dprob = regularizers.rebind(regularizers.functions(regularizer)["dprob"], torch)
    at, chance, sign = _path(theta, y, lattice, Q)
    q = torch.where(sign > 0, chance, 1 - chance)
    weight = cotangent.reshape(len(y), size, 1)
    seed = torch.where(weight == 0, 0.0, weight * sign * dprob(q) / chance)  # (samples, batch, n)
    A, gradient = Q.new_zeros(size, states), Q.new_empty(n, size)
    c = torch.arange(states, device=Q.device)
    for i in reversed(range(n)):
        picked = torch.where(A == 0, 0.0, A * Q[i])  # above the capacity of an instance the table is not written
        up = c + weights[i][:, None]
        inside = (up < states) & fits(up, weights[i][:, None], lattice.box)
        arrived = torch.where(inside, picked.gather(1, up.clamp(max=states - 1)), 0.0)
        A, own = A - picked + arrived, seed[..., i].T
        gradient[i] = picked.sum(-1) + own.sum(-1)
        here = at[..., i].T
        below = (here - weights[i][:, None]).clamp(0, states - 1)
        A = A.scatter_add(1, below, own).scatter_add(1, here, -own)
    return gradient.T.reshape(theta.shape)
