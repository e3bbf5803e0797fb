"""CUDA tensors: plans how the kernels work on a batch, and launches them.

Nothing here looks at what is on the device, so nothing waits for it, and every call can be captured in a CUDA graph.

Arguments: theta (*batch, n), a lattice of tensors that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from knapgrad.kernels.triton import choices, instances, option_instances, option_paths, paths, plan, shared
from knapgrad.lattice import FEASIBLE, INFEASIBLE, Lattice

REGISTERS = 128  # per thread, for choices: more would leave fewer warps resident


class Batch(NamedTuple):
    """A flat batch; what all instances share has one row, and a step of 0 from instance to instance."""

    theta: Tensor  # (batch, n)
    reach: int
    regularizer: str
    options: int  # how many items make one choice; 0 if each is picked or not
    constants: dict[str, Any]  # the arguments for the lattice and gamma that all kernels take, by name

    def part(self, first: int, last: int) -> Batch:
        """Some of the instances."""
        names = [name for name in ("weights", "capacity", "slack", "gamma") if self.constants[f"{name}_step"]]
        some = {name: self.constants[name][first:last] for name in names}
        return self._replace(theta=self.theta[first:last], constants=self.constants | some)

    def options_of(self, layout: plan.Plan) -> dict[str, int]:
        """Of a launch."""
        return {**layout.options, "maxnreg": REGISTERS} if self.options else layout.options

    def plan(self, tables: int) -> plan.Plan:
        theta = self.theta
        return plan.plan(*theta.shape, self.reach, tables, theta.itemsize, multiprocessors(theta.device), self.options)


def _flat(theta: Tensor, lattice: Lattice, gamma: Tensor, regularizer: str) -> Batch:
    *shape, n = theta.shape
    theta = theta.reshape(prod(shape), n).contiguous()
    weights, own = lattice.weights, lattice.weights.numel() != n
    constants: dict[str, Any] = {
        "weights": (weights.expand(*shape, n).reshape(-1, n) if own else weights.reshape(1, n)).contiguous(),
        "weights_step": n if own else 0,
        "reach": lattice.reach,
        "SLACK": lattice.slack is not None,
        "scale": 1.0,
        "GAMMAS": True,
    }
    in_memory = {"capacity": lattice.capacity}
    if lattice.slack is not None:
        in_memory["slack"] = lattice.slack
    if gamma.is_cuda or gamma.numel() != 1:
        in_memory["gamma"] = gamma.to(theta.device)
    else:  # a number that is known to the host
        number = float(gamma)
        constants["scale"], constants["GAMMAS"] = 1.0 / number if number > 0 else float("nan"), False
        constants["gamma"], constants["gamma_step"] = theta, 0
    for name, x in in_memory.items():
        shared = x.numel() == 1
        constants[name] = (x if shared else x.expand(shape)).reshape(-1).contiguous()
        constants[f"{name}_step"] = 0 if shared else 1
    if lattice.slack is None:
        constants["slack"], constants["slack_step"] = constants["capacity"], constants["capacity_step"]
    return Batch(theta, lattice.reach, regularizer, lattice.options, constants)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    there = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if there else torch.cuda.device(device)


def _scratch(theta: Tensor, layout: plan.Plan) -> dict[str, Tensor]:
    """Rows of a kernel."""
    shapes = layout.scratch(theta.shape[1])
    return {"V_rows": theta.new_empty(shapes["V_rows"], dtype=torch.float64), "rows": theta.new_empty(shapes["rows"])}


def _sweep(batch: Batch, z: Tensor, direction: str | None, relaxed: bool, keep: bool = False) -> tuple[Tensor, ...]:
    """Value, tangent (only in a direction), y, and the tables, one per instance if they are kept."""
    theta = batch.theta
    size, n = theta.shape
    value, y = theta.new_empty(size, dtype=torch.float64), torch.empty_like(theta)
    tangent = y if direction is None else theta.new_empty(size)
    if n == 0 or size == 0:
        value.zero_()
        if batch.constants["SLACK"]:
            value.masked_fill_(batch.constants["slack"] < 0, torch.nan)
        return value, 0 * value.to(theta.dtype), y, theta.new_empty(size, 0)
    count = 1 if direction is None else 2
    if not batch.options and plan.is_shared(n, batch.reach, count * theta.itemsize):
        return _sweep_by_item(batch, z, direction, relaxed, keep)
    layout = batch.plan(count)
    tables = theta.new_empty((size, n * layout.width) if keep else layout.scratch(n)["tables"])
    rows = {"V_rows": value, "rows": y} if layout.narrow else _scratch(theta, layout)  # narrow ones are in registers
    kernel = option_instances.operator_kernel if batch.options else instances.operator_kernel
    with _on(theta.device):
        kernel[(layout.programs,)](
            theta=theta, z=z, **batch.constants, batch=size, n=n, width=layout.width,
            value=value, tangent=tangent, y=y, tables=tables, **rows, **choices.functions(batch.regularizer),
            SOURCE=choices.source(direction), RELAXED=relaxed, KEEP=keep, LATER=layout.later and not keep,
            **batch.options_of(layout),
        )  # fmt: skip
    return value, tangent, y, tables


def _sweep_by_item(batch: Batch, z: Tensor, direction: str | None, relaxed: bool, keep: bool) -> tuple[Tensor, ...]:
    """The same for rows that many programs share. A table that is too large is filled again, piece by piece, from rows
    that were set aside."""
    theta, constants = batch.theta, batch.constants
    (size, n), width, block = theta.shape, plan.whole_lines(batch.reach + 1), 1024
    count = 1 if direction is None else 2
    row_size = count * width * theta.itemsize
    group = min(max(plan.ITEM_SCRATCH // (row_size * (n + 6)), 1), 1 << 15)  # including the rows themselves
    if size > group and not keep:
        parts = range(0, size, group)
        results = [_sweep_by_item(batch.part(k, k + group), z[k : k + group], direction, relaxed, keep) for k in parts]
        return tuple(torch.cat(x) for x in zip(*results))
    # How many rows of the table are there at a time.
    length = n if keep else min(max(plan.ITEM_SCRATCH // row_size, 1), n)
    capacity = constants["capacity"].clamp(max=batch.reach)
    prefix = torch.minimum(constants["weights"], capacity[:, None] + 1).cumsum(-1).expand(size, n)
    prefix = torch.nn.functional.pad(prefix, (1, 0)).contiguous()
    goal = torch.minimum(prefix[:, -1], capacity)
    slack = goal
    if constants["SLACK"]:
        slack = torch.minimum((constants["slack"] - (constants["capacity"] - goal)).clamp(min=-1), goal)
    tiles = triton.cdiv(width, block)
    y, above = theta.new_zeros(size, n, tiles), theta.new_zeros(size, tiles, 2, block)
    V_rows, rows = theta.new_zeros(size, 2, width, dtype=torch.float64), theta.new_zeros(size, 6, width)
    V_rows[:, 0, 0].masked_fill_(slack < 0, INFEASIBLE)
    tables = theta.new_empty(size, count, length, width)
    common = {
        "prefix": prefix, "goal": goal, "slack": slack, "rows": rows, "tables": tables, "n": n, "width": width,
        "length": length, "SOURCE": choices.source(direction), "SLACK": constants["SLACK"], "BLOCK": block,
        "num_warps": 4,
    }  # fmt: skip
    strength = {name: constants[name] for name in ("gamma", "gamma_step", "scale", "GAMMAS")}

    def fill(first: int) -> None:
        for i in range(first, min(first + length, n)):
            shared.fill_item_kernel[(tiles, size)](
                theta=theta, z=z, V_rows=V_rows, i=i, row=i - first, **strength, **common,
                **choices.functions(batch.regularizer),
            )  # fmt: skip

    with _on(theta.device):
        starts, aside = range(0, n, length), []
        for first in starts:
            if len(starts) > 1:
                aside.append((V_rows[:, first % 2].clone(), rows[:, 4 + first % 2].clone()))
            fill(first)
        value = V_rows[:, n % 2].gather(1, goal[:, None])[:, 0]
        value = torch.where(value < FEASIBLE, torch.nan, value)
        tangent = rows[:, 4 + n % 2].gather(1, goal[:, None])[:, 0] + 0 * value.to(theta.dtype)
        last = tables[:, 0, (n - 1) % length]
        last.scatter_add_(1, goal[:, None], 0 * value[:, None].to(theta.dtype))  # a NaN reaches all that follows
        rows[:, n % 2].scatter_(1, goal[:, None], 1.0)
        for first in reversed(starts if relaxed else []):
            if first != starts[-1]:
                V_rows[:, first % 2], rows[:, 4 + first % 2] = aside[first // length]
                fill(first)
            for i in reversed(range(first, min(first + length, n))):
                shared.collect_item_kernel[(tiles, size)](parts=y, above=above, i=i, row=i - first, **common)
    y = y.sum(-1) if direction is not None else y.sum(-1).clamp(max=1)
    return value, tangent, y, tables.reshape(size, -1)


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    batch = _flat(theta, lattice, gamma, regularizer)
    value, _, y, _ = _sweep(batch, batch.theta, None, relaxed)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape)


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every instance, for sample and log_prob with the same arguments."""
    batch = _flat(theta, lattice, gamma, regularizer)
    value, _, y, tables = _sweep(batch, batch.theta, None, True, keep=True)
    return value.reshape(theta.shape[:-1]), y.reshape(theta.shape), tables


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    batch = _flat(theta, lattice, gamma, regularizer)
    return _sweep(batch, _beside(z, batch), "linear", True)[2].reshape(theta.shape)


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    batch = _flat(theta, lattice, gamma, regularizer)
    return _sweep(batch, torch.zeros_like(batch.theta), "entropy", False)[1].reshape(theta.shape[:-1])


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    batch = _flat(theta, lattice, gamma, regularizer)
    return _sweep(batch, torch.zeros_like(batch.theta), "entropy", True)[2].reshape(theta.shape)


def frontier(theta, lattice, gamma, regularizer):
    """The smoothed optimum at every capacity (*batch, reach + 1) in float64; -inf where nothing is feasible."""
    values = _frontier(theta, None, lattice, gamma, regularizer)
    return values.reshape(*theta.shape[:-1], lattice.reach + 1)


def frontier_vjp(theta, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of those optima weighted by a cotangent (*batch, reach + 1)."""
    return _frontier(theta, cotangent, lattice, gamma, regularizer).reshape(theta.shape)


def _frontier(theta: Tensor, cotangent: Tensor | None, lattice: Lattice, gamma: Tensor, regularizer: str) -> Tensor:
    """Items are choices between two: to skip one, and to pick it."""
    if not lattice.options:
        doubled = _with_skips(theta), lattice.replace(weights=_with_skips(lattice.weights), options=2)
        result = _frontier(doubled[0], cotangent, doubled[1], gamma, regularizer)
        return result if cotangent is None else result[:, 1::2]
    batch = _flat(theta, lattice, gamma, regularizer)
    theta, cells = batch.theta, lattice.reach + 1
    (size, n), backwards = theta.shape, cotangent is not None
    values, y = theta.new_zeros(0 if backwards else size, cells, dtype=torch.float64), torch.empty_like(theta)
    if n == 0 and batch.constants["SLACK"]:
        unused = torch.arange(cells, device=theta.device) > batch.constants["slack"][:, None]
        values.masked_fill_(unused, -torch.inf)
    if n and size:
        layout = batch.plan(1)
        given = values if cotangent is None else cotangent.to(theta.dtype).reshape(size, cells).contiguous()
        tables = theta.new_empty(layout.scratch(n)["tables"] if backwards else 1)
        with _on(theta.device):
            option_instances.frontier_kernel[(layout.programs,)](
                theta=theta, cotangent=given, **batch.constants, batch=size, n=n, width=layout.width, values=values,
                y=y, tables=tables, **_scratch(theta, layout), **choices.functions(regularizer), BACKWARDS=backwards,
                **batch.options_of(layout),
            )  # fmt: skip
    return y if backwards else values


def _with_skips(x: Tensor) -> Tensor:
    """A 0 before each entry."""
    return torch.stack([torch.zeros_like(x), x], -1).flatten(-2)


def _beside(x: Tensor, batch: Batch, *samples: int) -> Tensor:
    """(*samples, batch, n), of theta's type."""
    return x.to(batch.theta.dtype).reshape(*samples, *batch.theta.shape).contiguous()


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    batch = _flat(theta, lattice, gamma, regularizer)
    flat = _beside(uniforms, batch, len(uniforms))
    y = torch.empty_like(flat)
    _walk(_paths(batch).sample_kernel, batch, {"uniforms": flat}, {"y": y}, table, DRAW=True, HARDEN=False)
    return y.reshape(uniforms.shape).to(uniforms.dtype)


def solve(theta, lattice):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item."""
    return _likeliest(_flat(theta, lattice, torch.ones((), dtype=torch.float64), "hard"), False).reshape(theta.shape)


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    return _likeliest(_flat(theta, lattice, gamma, regularizer), True).reshape(theta.shape)


def _likeliest(batch: Batch, harden: bool) -> Tensor:
    y = batch.theta.new_empty(1, *batch.theta.shape)
    _walk(_paths(batch).sample_kernel, batch, {"uniforms": y}, {"y": y}, None, DRAW=False, HARDEN=harden)
    return y


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    batch = _flat(theta, lattice, gamma, regularizer)
    result = theta.new_zeros(len(y), batch.theta.shape[0])
    inputs = {"selections": _beside(y, batch, len(y)), "cotangent": result}
    _walk(
        _paths(batch).log_prob_kernel, batch, inputs, {"log_prob": result, "gradient": result}, table, BACKWARDS=False
    )
    return result.reshape(y.shape[:-1])


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    batch = _flat(theta, lattice, gamma, regularizer)
    flat = _beside(y, batch, len(y))
    cotangent = cotangent.to(theta.dtype).reshape(flat.shape[:2]).contiguous()
    gradient = theta.new_zeros(1, *batch.theta.shape)
    inputs, outputs = {"selections": flat, "cotangent": cotangent}, {"log_prob": cotangent, "gradient": gradient}
    _walk(_paths(batch).log_prob_kernel, batch, inputs, outputs, None, BACKWARDS=True)
    return gradient.reshape(theta.shape)


def _paths(batch: Batch) -> Any:
    """The module of the kernels that follow paths."""
    return option_paths if batch.options else paths


def _walk(
    kernel: Any,
    batch: Batch,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    table: Tensor | None,
    **options: bool,
) -> None:
    """Runs a kernel that follows paths. Inputs and outputs are (samples, batch, ...)."""
    theta, flat = batch.theta, next(iter(inputs.values()))
    (size, n), samples = theta.shape, flat.shape[0]
    if samples == 0 or size == 0 or n == 0:
        return
    if table is None and not batch.options and plan.is_shared(n, batch.reach, theta.itemsize):
        group = max(plan.ITEM_SCRATCH // (theta.itemsize * n * plan.whole_lines(batch.reach + 1)), 1)
        for k in range(0, size, group):
            part = batch.part(k, k + group)
            table = _sweep_by_item(part, part.theta, None, False, True)[3]
            some_in, some_out = ({name: x[:, k : k + group] for name, x in xs.items()} for xs in (inputs, outputs))
            _walk(kernel, part, some_in, some_out, table, **options)
        return
    layout = batch.plan(1)
    tables = theta.new_empty(layout.scratch(n)["tables"]) if table is None else table
    with _on(theta.device):
        kernel[(layout.programs,)](
            theta=theta, **inputs, **batch.constants, batch=size, whole=flat.stride(0) // n, samples=samples, n=n,
            width=layout.width, **outputs, tables=tables, **_scratch(theta, layout),
            **choices.functions(batch.regularizer), **options, FILLED=table is not None, LANES=plan.lanes(samples),
            **batch.options_of(layout),
        )  # fmt: skip
