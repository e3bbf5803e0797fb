"""CUDA tensors: plans how :mod:`knapgrad.kernels.triton_kernels` work on a batch, and launches them.

Nothing here looks at what is on the device, so nothing waits for it, and every call can be captured in a CUDA graph.

Arguments: theta (*batch, n), weights broadcastable to it, capacity and gamma to the batch; all are functions of theta /
    gamma. ``reach`` is the largest capacity that matters. It gives rows their width.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from knapgrad import reference
from knapgrad.kernels import triton_kernels, triton_plan
from knapgrad.kernels.triton_plan import Plan, is_shared, whole_lines


class _Problem(NamedTuple):
    """A flat batch; what all instances share has a step of 0."""

    theta: Tensor  # (batch, n)
    weights: Tensor  # (1 or batch, n)
    capacity: Tensor  # (1 or batch,)
    gamma: Tensor  # (1 or batch,), if GAMMAS
    scale: float  # 1 / gamma, if not
    reach: int
    options: dict[str, Any]  # REGULARIZER, EXACTLY, GAMMAS

    @property
    def steps(self) -> tuple[int, int, int]:
        shared = self.weights.shape[0] == 1, self.capacity.numel() == 1, self.gamma.numel() == 1
        return 0 if shared[0] else self.theta.shape[1], 0 if shared[1] else 1, 0 if shared[2] else 1

    def part(self, first: int, last: int) -> _Problem:
        """Some of the instances."""
        weights, capacity, gamma = (
            x if step == 0 else x[first:last] for x, step in zip((self.weights, self.capacity, self.gamma), self.steps)
        )
        return self._replace(theta=self.theta[first:last], weights=weights, capacity=capacity, gamma=gamma)


def _flat(theta, weights, capacity, gamma, regularizer, exactly, reach) -> _Problem:
    n, batch = theta.shape[-1], theta.shape[:-1]
    if weights.numel() != n:
        weights = weights.expand(theta.shape)
    if capacity.numel() != 1:
        capacity = capacity.expand(batch)
    in_memory = gamma.is_cuda or gamma.numel() != 1
    scale = 1.0
    if not in_memory:
        number = float(gamma)
        scale, gamma = 1.0 / number if number > 0 else float("nan"), theta
    elif gamma.numel() != 1:
        gamma = gamma.to(theta.device).expand(batch)
    return _Problem(
        theta.reshape(prod(batch), n).contiguous(),
        weights.reshape(-1, n).contiguous() if n else weights,
        capacity.reshape(-1).contiguous(),
        gamma.reshape(-1).contiguous() if in_memory else gamma,
        scale,
        reach,
        {"REGULARIZER": regularizer, "EXACTLY": exactly, "GAMMAS": in_memory},
    )


def _plan(problem: _Problem, tables: int) -> Plan:
    theta = problem.theta
    return triton_plan.plan(*theta.shape, problem.reach, tables, theta.itemsize, multiprocessors(theta.device))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if there else torch.cuda.device(device)


def _sweep(problem: _Problem, z: Tensor, direction: str, relaxed: bool, keep: bool = False) -> tuple[Tensor, ...]:
    """Value, tangent, y and, to keep, the tables."""
    theta = problem.theta
    batch, n = theta.shape
    value, tangent, y = theta.new_empty(batch, dtype=torch.float64), theta.new_empty(batch), torch.empty_like(theta)
    if n == 0 or batch == 0:
        return value.zero_(), tangent.zero_(), y, theta.new_empty(batch, 0)
    count = 1 if direction == "none" else 2
    if is_shared(n, problem.reach, count * theta.itemsize):
        return _sweep_by_item(problem, z, direction, relaxed, keep)
    plan = _plan(problem, count)
    tables = theta.new_empty(batch if keep else plan.programs, count * n * plan.width)
    V_rows = theta.new_empty(plan.programs, 0 if plan.narrow else 2 * plan.width, dtype=torch.float64)
    rows = theta.new_empty(plan.programs, 0 if plan.narrow else (2 if direction == "none" else 6) * plan.width)
    with _on(theta.device):
        triton_kernels.operator_kernel[(plan.programs,)](
            theta, z, problem.weights, problem.capacity, problem.gamma,
            problem.scale, batch, n, plan.width, problem.reach, *problem.steps,
            value, tangent, y, V_rows, rows, tables, **problem.options,
            NARROW=plan.narrow, BLOCK=plan.block, DIRECTION=direction, RELAXED=relaxed, KEEP=keep,
            LATER=plan.later and not keep, num_warps=plan.warps,
        )  # fmt: skip
    return value, tangent, y, tables


def _sweep_by_item(problem: _Problem, z: Tensor, direction: str, relaxed: bool, keep: bool) -> tuple[Tensor, ...]:
    """The same for rows that many programs share. A table that is too large is filled again, piece by piece, from rows
    that were set aside."""
    theta = problem.theta
    (batch, n), width, block, warps = theta.shape, whole_lines(problem.reach + 1), 1024, 4
    count = 1 if direction == "none" else 2
    row_size = count * width * theta.itemsize
    group = min(max(triton_plan.ITEM_SCRATCH // (row_size * (n + 6)), 1), 1 << 15)  # the rows themselves are counted in
    if batch > group and not keep:
        parts = range(0, batch, group)
        results = [
            _sweep_by_item(problem.part(k, k + group), z[k : k + group], direction, relaxed, keep) for k in parts
        ]
        return tuple(torch.cat(x) for x in zip(*results))
    # How many rows of the table are there at a time.
    length = n if keep else min(max(triton_plan.ITEM_SCRATCH // row_size, 1), n)
    capacity = problem.capacity.clamp(max=problem.reach)
    prefix = torch.minimum(problem.weights, capacity[:, None] + 1).cumsum(-1).expand(batch, n)
    prefix = torch.nn.functional.pad(prefix, (1, 0)).contiguous()
    goal = torch.minimum(prefix[:, -1], capacity)
    V_rows, rows = theta.new_zeros(batch, 2, width, dtype=torch.float64), theta.new_zeros(batch, 6, width)
    tables = theta.new_empty(batch, count, length, width)
    tiles = triton.cdiv(width, block)
    y, above = theta.new_zeros(batch, n, tiles), theta.new_zeros(batch, tiles, 2, block)
    sizes = n, width, length
    options = {"BLOCK": block, "DIRECTION": direction, "num_warps": warps}

    def fill(first: int) -> None:
        for i in range(first, min(first + length, n)):
            triton_kernels.fill_item_kernel[(tiles, batch)](
                theta, z, prefix, goal, problem.gamma, V_rows, rows, tables, problem.scale, *sizes, i, i - first,
                problem.steps[2], **problem.options | options,
            )  # fmt: skip

    with _on(theta.device):
        starts, aside = range(0, n, length), []
        for first in starts:
            if len(starts) > 1:
                aside.append((V_rows[:, first % 2].clone(), rows[:, 4 + first % 2].clone()))
            fill(first)
        value = V_rows[:, n % 2].gather(1, goal[:, None])[:, 0]
        value = torch.where(value < 0.5 * reference.INFEASIBLE, torch.nan, value)
        tangent = rows[:, 4 + n % 2].gather(1, goal[:, None])[:, 0] + 0 * value.to(theta.dtype)
        last = tables[:, 0, (n - 1) % length]
        last.scatter_add_(1, goal[:, None], 0 * value[:, None].to(theta.dtype))  # a NaN reaches all that follows
        rows[:, n % 2].scatter_(1, goal[:, None], 1.0)
        for first in reversed(starts if relaxed else []):
            if first != starts[-1]:
                V_rows[:, first % 2], rows[:, 4 + first % 2] = aside[first // length]
                fill(first)
            for i in reversed(range(first, min(first + length, n))):
                triton_kernels.collect_item_kernel[(tiles, batch)](
                    prefix, goal, y, above, rows, tables, *sizes, i, i - first, **options
                )
    y = y.sum(-1) if direction != "none" else y.sum(-1).clamp(max=1)
    return value, tangent, y, tables.reshape(batch, -1)


def operator(theta, weights, capacity, gamma, regularizer, exactly, reach, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    value, _, y, _ = _sweep(problem, problem.theta, "none", relaxed)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape)


def tabulate(theta, weights, capacity, gamma, regularizer, exactly, reach):
    """The same, and the table Q of every instance, for sample and log_prob with the same arguments."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    value, _, y, tables = _sweep(problem, problem.theta, "none", True, keep=True)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), tables


def vjp(theta, z, weights, capacity, gamma, regularizer, exactly, reach):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    z = z.to(theta.dtype).reshape(problem.theta.shape).contiguous()
    return _sweep(problem, z, "linear", True)[2].reshape(theta.shape)


def entropy(theta, weights, capacity, gamma, regularizer, exactly, reach):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    return _sweep(problem, problem.theta, "entropy", False)[1].reshape(theta.shape[:-1])


def entropy_grad(theta, weights, capacity, gamma, regularizer, exactly, reach):
    """Its gradient (*batch, n)."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    return _sweep(problem, problem.theta, "entropy", True)[2].reshape(theta.shape)


def sample(theta, uniforms, weights, capacity, gamma, regularizer, exactly, reach, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    flat = uniforms.to(theta.dtype).reshape(len(uniforms), *problem.theta.shape).contiguous()
    return _draw(problem, flat, table).reshape(uniforms.shape).to(uniforms.dtype)


def solve(theta, weights, capacity, exactly, reach):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item."""
    one = torch.ones((), dtype=torch.float64)
    problem = _flat(theta, weights, capacity, one, "hard", exactly, reach)
    return _draw(problem, None, None).reshape(theta.shape)


def mode(theta, weights, capacity, gamma, regularizer, exactly, reach):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    return _draw(problem, None, None).reshape(theta.shape)


def _draw(problem: _Problem, uniforms: Tensor | None, table: Tensor | None) -> Tensor:
    """Samples (samples, batch, n), or (1, batch, n) modes."""
    y = torch.empty_like(uniforms) if uniforms is not None else problem.theta.new_empty(1, *problem.theta.shape)
    _walk(
        triton_kernels.sample_kernel,
        problem,
        (y if uniforms is None else uniforms,),
        (y,),
        table,
        DRAW=uniforms is not None,
    )
    return y


def _walk(kernel: Any, problem: _Problem, inputs: Any, outputs: Any, table: Tensor | None, **options: bool) -> None:
    """Runs a kernel that follows paths; inputs and outputs (samples, batch, ...), of which the first says how many."""
    (batch, n), samples = problem.theta.shape, inputs[0].shape[0]
    if samples == 0 or batch == 0 or n == 0:
        return
    if table is None and is_shared(n, problem.reach, problem.theta.itemsize):
        group = max(triton_plan.ITEM_SCRATCH // (problem.theta.itemsize * n * whole_lines(problem.reach + 1)), 1)
        for k in range(0, batch, group):
            part = problem.part(k, k + group)
            table = _sweep_by_item(part, part.theta, "none", False, True)[3]
            some_inputs, some_outputs = (tuple(x[:, k : k + group] for x in xs) for xs in (inputs, outputs))
            _walk(kernel, part, some_inputs, some_outputs, table, **options)
        return
    theta = problem.theta
    plan = _plan(problem, 1)
    V_rows = theta.new_empty(plan.programs, 2 * plan.width, dtype=torch.float64)
    rows = theta.new_empty(plan.programs, 2 * plan.width)
    filled = table is not None
    tables = theta.new_empty(plan.programs, n * plan.width) if table is None else table
    with _on(theta.device):
        kernel[(plan.programs,)](
            theta, *inputs, problem.weights, problem.capacity, problem.gamma,
            problem.scale, batch, inputs[0].stride(0) // n, samples, n, plan.width, problem.reach, *problem.steps,
            *outputs, V_rows, rows, tables, **problem.options, **options,
            NARROW=plan.narrow, BLOCK=plan.block, FILLED=filled, LANES=triton_plan.lanes(samples), num_warps=plan.warps,
        )  # fmt: skip


def log_prob(theta, y, weights, capacity, gamma, regularizer, exactly, reach, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    flat = y.to(theta.dtype).reshape(len(y), *problem.theta.shape).contiguous()
    result = theta.new_zeros(flat.shape[:2])
    _walk(triton_kernels.log_prob_kernel, problem, (flat, result), (result, result), table, BACKWARDS=False)
    return result.reshape(y.shape[:-1])


def log_prob_vjp(theta, y, cotangent, weights, capacity, gamma, regularizer, exactly, reach):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    problem = _flat(theta, weights, capacity, gamma, regularizer, exactly, reach)
    flat = y.to(theta.dtype).reshape(len(y), *problem.theta.shape).contiguous()
    cotangent = cotangent.to(theta.dtype).reshape(flat.shape[:2]).contiguous()
    gradient = theta.new_zeros(1, *problem.theta.shape)
    _walk(triton_kernels.log_prob_kernel, problem, (flat, cotangent), (cotangent, gradient), None, BACKWARDS=True)
    return gradient.reshape(theta.shape)
