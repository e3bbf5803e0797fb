"""CUDA tensors: plans how the kernels work on a batch, and launches them.

Nothing here looks at what is on the device, so nothing waits for it, and every call can be captured in a CUDA graph.

Arguments: theta (*batch, n), a lattice of tensors that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from knapgrad.kernels.triton import choices, instances, option_instances, option_paths, paths, plan, shared
from knapgrad.kernels.triton.launch import Launch, on
from knapgrad.kernels.triton.pipeline import Limits, Pipeline, Segmented, limits_of
from knapgrad.lattice import FEASIBLE, INFEASIBLE, LARGEST, Lattice

REGISTERS = 128  # per thread, for choices: more would leave fewer warps resident


class Batch(NamedTuple):
    """A flat batch; what all instances share has one row, and a step of 0 from instance to instance."""

    theta: Tensor  # (batch, n)
    reach: int
    heaviest: int
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

    def pipeline(self, kernel: Kernel) -> Pipeline | Segmented | None:
        """Where one is used."""
        theta, source = self.theta, kernel.constants.get("SOURCE")
        if self.options or not theta.numel():
            return None
        sizes = *theta.shape, self.reach, self.heaviest, kernel.tables, theta.itemsize, multiprocessors(theta.device)
        is_joined = self.regularizer == "shannon" and kernel.is_sweep and source != "entropy"
        is_whole = kernel.constants.get("KEEP") or self.constants["BOX"]  # states of a box do not add up
        if is_joined and not is_whole and (segments := plan.segments(*sizes)) is not None:
            return Segmented(self, *segments, source)
        tiles = plan.tiles(*sizes)
        return None if tiles is None else Pipeline(theta, Limits.of(self), self.regularizer, tiles, source)

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
        **({} if lattice.options else plan.box_of(lattice.box)),
    }
    in_memory = {"capacity": lattice.capacity}
    if lattice.slack is not None:
        in_memory["slack"] = lattice.slack
    if isinstance(gamma, Tensor) and (gamma.is_cuda or gamma.numel() != 1):
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
    return Batch(theta, lattice.reach, lattice.heaviest, regularizer, lattice.options, constants)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


class Kernel(NamedTuple):
    """A kernel for whole instances, and what it is compiled for."""

    name: str
    tables: int  # per program
    constants: dict[str, Any]

    @property
    def is_sweep(self) -> bool:
        return self.name == "operator_kernel"


def _sweep_of(source: str | None, relaxed: bool, keep: bool = False) -> Kernel:
    constants = {"SOURCE": source, "RELAXED": relaxed, "KEEP": keep}
    return Kernel("operator_kernel", 1 if source is None else 2, constants)


_KERNELS = {
    "value": _sweep_of(None, False),
    "relax": _sweep_of(None, True),
    "tabulate": _sweep_of(None, True, keep=True),
    "vjp": _sweep_of("linear", True),
    "entropy": _sweep_of("entropy", False),
    "entropy_grad": _sweep_of("entropy", True),
    "sample": Kernel("sample_kernel", 1, {"DRAW": True, "HARDEN": False}),
    "solve": Kernel("sample_kernel", 1, {"DRAW": False, "HARDEN": False}),
    "mode": Kernel("sample_kernel", 1, {"DRAW": False, "HARDEN": True}),
    "log_prob": Kernel("log_prob_kernel", 1, {"BACKWARDS": False}),
    "log_prob_vjp": Kernel("log_prob_kernel", 1, {"BACKWARDS": True}),
}
_LARGEST_MEMO = 64  # launches, and those that CUDA graphs read
_UNKNOWN: Any = object()


def _launch_of(
    name: str, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, samples: int = 0
) -> Launch | Pipeline | Segmented | None:
    """A launch for batches like theta, which is kept with the lattice; None if programs share rows, and for nothing."""
    kind = None if _is_number(gamma) else (gamma.dtype, gamma.numel() == 1)
    key = name, theta.shape, theta.dtype, regularizer, kind, samples
    memo, capturing = lattice.memo, theta.is_cuda and torch.cuda.is_current_stream_capturing()
    launch = memo.get(key, _UNKNOWN)
    if launch is _UNKNOWN:
        passing = [other for other, kept in list(memo.items()) if kept is None or not kept.captured]
        for other in passing if len(passing) >= _LARGEST_MEMO else ():
            memo.pop(other, None)
        launch = _prepared(_KERNELS[name], theta, lattice, gamma, regularizer, samples)
        if capturing:
            return launch  # its arrays belong to the graph: they are filled when it is replayed
        if theta.is_cuda and launch is not None:
            launch.ready = torch.cuda.current_stream(theta.device).record_event()
        memo[key] = launch
    elif launch is not None and capturing:  # which begins when all arrays are there
        launch.captured = True
    elif launch is not None and (ready := launch.ready) is not None:  # another thread may set it to None
        if ready.query():
            launch.ready = None
        else:
            torch.cuda.current_stream(theta.device).wait_event(ready)
    return launch


def _is_number(gamma: Any) -> bool:
    """Whether the host knows it."""
    return isinstance(gamma, np.ndarray) or (not gamma.is_cuda and gamma.numel() == 1)


def _strength(gamma: Any, theta: Tensor) -> dict[str, Any]:
    """Gamma as an argument of a launch."""
    if _is_number(gamma):
        number = float(gamma)
        return {"scale": 1.0 / number if number > 0 else float("nan")}
    gamma = gamma if gamma.numel() == 1 else gamma.expand(theta.shape[:-1])
    return {"gamma": gamma.reshape(-1).contiguous().to(theta.device)}


def _prepared(
    kernel: Kernel, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, samples: int
) -> Launch | Pipeline | Segmented | None:
    batch, constants = _flat(theta, lattice, gamma, regularizer), kernel.constants
    size, n = batch.theta.shape
    pipeline = batch.pipeline(kernel)
    if pipeline is not None:
        return pipeline
    is_shared = not batch.options and plan.is_shared(n, batch.reach, kernel.tables * theta.itemsize)
    if n == 0 or size == 0 or is_shared:
        return None
    layout = batch.plan(kernel.tables)
    scratch = {name: (theta.dtype, prod(shape)) for name, shape in layout.scratch(n).items()}
    scratch["V_rows"] = torch.float64, scratch["V_rows"][1]
    if kernel.is_sweep:
        function = (option_instances if batch.options else instances).operator_kernel
        later = layout.later and not constants["KEEP"]
        constants = constants | {"SOURCE": choices.source(constants["SOURCE"]), "LATER": later}
        scratch |= {"value": (torch.float64, size), "tangent": (theta.dtype, size), "y": (theta.dtype, 1)}
        if layout.narrow:  # rows are in registers
            scratch |= {"V_rows": (torch.float64, 1), "rows": (theta.dtype, 1)}
        if constants["KEEP"]:  # tables are given
            del scratch["tables"]
    else:
        function = getattr(_paths(batch), kernel.name)
        constants = constants | {"whole": size, "samples": samples, "FILLED": False, "LANES": plan.lanes(samples)}
    every = batch.constants | choices.functions(regularizer) | constants | batch.options_of(layout)
    every |= {"batch": size, "n": n, "width": layout.width}
    if _is_number(gamma):
        every["gamma"] = every["capacity"]  # never read
    else:
        del every["gamma"]
    arguments = {name: x for name, x in every.items() if name in function.arg_names}
    options = {name: x for name, x in every.items() if name not in function.arg_names}
    return Launch(function, layout.programs, arguments, options, scratch)


def _scratch(theta: Tensor, layout: plan.Plan) -> dict[str, Tensor]:
    """Rows of a kernel."""
    shapes = layout.scratch(theta.shape[1])
    return {"V_rows": theta.new_empty(shapes["V_rows"], dtype=torch.float64), "rows": theta.new_empty(shapes["rows"])}


def _sweep(batch: Batch, z: Tensor, direction: str | None, relaxed: bool, keep: bool = False) -> tuple[Tensor, ...]:
    """Value, tangent (only in a direction), y, and the tables, one per instance if they are kept, where rows are shared
    by programs."""
    theta = batch.theta
    size, n = theta.shape
    if n and size:
        return _sweep_by_item(batch, z, direction, relaxed, keep)
    value = theta.new_zeros(size, dtype=torch.float64)
    value.masked_fill_(limits_of(batch)[1] < 0, torch.nan)
    return value, 0 * value.to(theta.dtype), torch.empty_like(theta), theta.new_empty(size, 0)


_SHARED = "gamma", "gamma_step", "scale", "inner", "plane", "GAMMAS", "SLACK", "BOX"


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
    goal, slack = (x.expand(size).contiguous() for x in limits_of(batch))
    if constants["BOX"]:
        prefix += goal[:, None]  # as steps.first_prefix
    tiles = triton.cdiv(width, block)
    y, above = theta.new_zeros(size, n, tiles), theta.new_zeros(size, tiles, 2, block)
    V_rows, rows = theta.new_zeros(size, 2, width, dtype=torch.float64), theta.new_zeros(size, 6, width)
    V_rows[:, 0, 0].masked_fill_(slack < 0, INFEASIBLE)
    tables = theta.new_empty(size, count, length, width)
    every = {
        **{name: constants[name] for name in _SHARED},
        **choices.functions(batch.regularizer), "SOURCE": choices.source(direction), "BLOCK": block,
        "prefix": prefix, "goal": goal, "slack": slack, "rows": rows, "V_rows": V_rows, "tables": tables,
        "parts": y, "above": above, "z": z, "n": n, "width": width, "length": length,
    }  # fmt: skip

    def launch(kernel: Any) -> Launch:
        """One that is the same for all items but for two numbers."""
        arguments = {name: x for name, x in every.items() if name in kernel.arg_names}
        return Launch(kernel, (tiles, size), arguments, {"num_warps": 4}, {})

    fill_item, collect_item = launch(shared.fill_item_kernel), launch(shared.collect_item_kernel)

    def items(first: int) -> range:
        return range(first, min(first + length, n))

    def fill(first: int) -> None:
        fill_item.series({"theta": theta}, i=items(first), row=range(length))

    with on(theta.get_device()):
        starts, aside = range(0, n, length), []
        for first in starts:
            if len(starts) > 1:
                aside.append((V_rows[:, first % 2].clone(), rows[:, 4 + first % 2].clone()))
            fill(first)
        value = V_rows[:, n % 2].gather(1, goal[:, None])[:, 0]
        value = torch.where(value < FEASIBLE, torch.nan, value) + _taint(theta, constants)
        tangent = rows[:, 4 + n % 2].gather(1, goal[:, None])[:, 0] + 0 * value.to(theta.dtype)
        last = tables[:, 0, (n - 1) % length]
        last.scatter_add_(1, goal[:, None], 0 * value[:, None].to(theta.dtype))  # a NaN reaches all that follows
        rows[:, n % 2].scatter_(1, goal[:, None], 1.0)
        for first in reversed(starts if relaxed else []):
            if first != starts[-1]:
                V_rows[:, first % 2], rows[:, 4 + first % 2] = aside[first // length]
                fill(first)
            each = items(first)
            collect_item.series({"theta": theta}, i=each[::-1], row=range(len(each))[::-1])
    y = y.sum(-1) if direction is not None else y.sum(-1).clamp(max=1)
    return value, tangent, y, tables.reshape(size, -1) if keep else theta.new_empty(size, 0)


def _taint(theta: Tensor, constants: dict[str, Any]) -> Tensor:
    """As taint_of, for all instances."""
    scale = constants["scale"]
    if constants["GAMMAS"]:
        gamma = constants["gamma"].double()[:, None]
        scale = torch.where(gamma > 0, 1.0 / gamma, torch.nan)
    is_good = theta.isneginf() | ((theta.double() * scale).abs() <= LARGEST)
    return torch.where(is_good.all(-1), 0.0, torch.nan)


def _swept(
    name: str, theta: Tensor, z: Tensor | None, lattice: Lattice, gamma: Any, regularizer: str, *results: str
) -> list[Tensor]:
    """The results of those names, of value, tangent, y and tables."""
    theta = _laid(theta, theta)
    z = theta if z is None else _laid(z, theta)
    launch = _launch_of(name, theta, lattice, gamma, regularizer)
    if launch is None:
        batch, constants = _flat(theta, lattice, gamma, regularizer), _KERNELS[name].constants
        found = _sweep(batch, z.view(batch.theta.shape), constants["SOURCE"], constants["RELAXED"], constants["KEEP"])
        shapes = {"value": theta.shape[:-1], "tangent": theta.shape[:-1], "y": theta.shape, "tables": found[3].shape}
        every = dict(zip(shapes, found))
        return [every[result].reshape(shapes[result]) for result in results]
    if not isinstance(launch, Launch):
        flat, constants = theta.view(launch.shape), _KERNELS[name].constants
        strength = _strength(gamma, theta)
        every = launch.sweep(flat, z.view(launch.shape), strength, constants["RELAXED"], constants["KEEP"])
        shapes = {"value": theta.shape[:-1], "tangent": theta.shape[:-1], "y": theta.shape}
        return [every[result].view(shapes.get(result, every[result].shape)) for result in results]
    given = {"theta": theta, "z": z, **_strength(gamma, theta)}
    for result in results:
        if result == "y":
            given[result] = torch.empty_like(theta)
        elif result == "tables":
            size, n = prod(theta.shape[:-1]), theta.shape[-1]
            given[result] = theta.new_empty(size, n * launch.arguments["width"])
        else:
            given[result] = theta.new_empty(theta.shape[:-1], dtype=torch.float64 if result == "value" else theta.dtype)
    launch(given)
    return [given[result] for result in results]


def _laid(x: Tensor, theta: Tensor) -> Tensor:
    """As the kernels want it: contiguous, of theta's type."""
    if x.dtype != theta.dtype:
        x = x.to(theta.dtype)
    return x if x.is_contiguous() else x.contiguous()


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    return tuple(_swept("relax" if relaxed else "value", theta, None, lattice, gamma, regularizer, "value", "y"))


def relax(theta, lattice, gamma, regularizer):
    """The relaxed selection alone."""
    return _swept("relax", theta, None, lattice, gamma, regularizer, "y")[0]


def tabulate(theta, lattice, gamma, regularizer):
    """The same, and the table Q of every instance, for sample and log_prob with the same arguments."""
    return tuple(_swept("tabulate", theta, None, lattice, gamma, regularizer, "value", "y", "tables"))


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _swept("vjp", theta, z, lattice, gamma, regularizer, "y")[0]


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    return _swept("entropy", theta, torch.zeros_like(theta), lattice, gamma, regularizer, "tangent")[0]


def entropy_grad(theta, lattice, gamma, regularizer):
    """Its gradient (*batch, n)."""
    return _swept("entropy_grad", theta, torch.zeros_like(theta), lattice, gamma, regularizer, "y")[0]


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
        with on(theta.get_device()):
            option_instances.frontier_kernel[(layout.programs,)](
                theta=theta, cotangent=given, **batch.constants, batch=size, n=n, width=layout.width, values=values,
                y=y, tables=tables, **_scratch(theta, layout), **choices.functions(regularizer), BACKWARDS=backwards,
                **plan.box_of(lattice.box), **batch.options_of(layout),
            )  # fmt: skip
    return y if backwards else values


def _with_skips(x: Tensor) -> Tensor:
    """A 0 before each entry."""
    return torch.stack([torch.zeros_like(x), x], -1).flatten(-2)


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    flat = _laid(uniforms, theta)
    y = torch.empty_like(flat)
    _follow("sample", theta, lattice, gamma, regularizer, {"uniforms": flat, "y": y}, table)
    return y.to(uniforms.dtype)


def solve(theta, lattice):
    """The best selection (*batch, n), exactly; of ties, the one that skips the later item."""
    gamma: Any = _UNIT
    if theta.dtype == torch.float64:  # divided by a power of two, large scores are in range
        largest = torch.where(theta.isfinite(), theta.abs(), 0.0)
        gamma = torch.where((largest > LARGEST).any(-1), 2.0**64, 1.0).double()
    return _likeliest("solve", theta, lattice, gamma, "hard")


def mode(theta, lattice, gamma, regularizer):
    """The selection (*batch, n) of the highest probability; for Shannon that of the highest score."""
    return _likeliest("mode", theta, lattice, gamma, regularizer)


def _likeliest(name, theta, lattice, gamma, regularizer):
    y = theta.new_empty(1, *theta.shape)
    _follow(name, theta, lattice, gamma, regularizer, {"uniforms": y, "y": y})
    return y[0]


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    result = theta.new_zeros(y.shape[:-1])
    given = {"selections": _laid(y, theta), "cotangent": result, "log_prob": result, "gradient": result}
    _follow("log_prob", theta, lattice, gamma, regularizer, given, table)
    return result


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    cotangent, gradient = _laid(cotangent, theta), theta.new_zeros(1, *theta.shape)
    given = {"selections": _laid(y, theta), "cotangent": cotangent, "log_prob": cotangent, "gradient": gradient}
    _follow("log_prob_vjp", theta, lattice, gamma, regularizer, given)
    return gradient[0]


_UNIT = np.ones(())


def _follow(
    name: str, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, given: dict[str, Any],
    table: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs a kernel that follows paths. Arrays are given as (samples, *batch, ...)."""
    theta, samples = _laid(theta, theta), len(next(iter(given.values())))
    if samples == 0 or theta.numel() == 0:
        return
    launch = _launch_of(name, theta, lattice, gamma, regularizer, samples) if table is None else None
    if isinstance(launch, Launch):
        launch({"theta": theta, **_strength(gamma, theta), **given})
        return
    batch, kernel = _flat(theta, lattice, gamma, regularizer), _KERNELS[name]
    shapes = {theta.dim() + 1: batch.theta.shape, theta.dim(): batch.theta.shape[:1]}
    flat = {name: x.view(len(x), *shapes[x.dim()]) for name, x in given.items()}
    function, constants = getattr(_paths(batch), kernel.name), kernel.constants
    if launch is None:
        _walk(function, batch, samples, flat, table, **constants)
        return
    assert isinstance(launch, Pipeline)
    strength, instances = _strength(gamma, theta), launch.layout.instances
    for k in range(0, len(batch.theta), instances):
        part = slice(k, k + instances)
        some = {name: x[:, part] for name, x in flat.items()}
        _walk(
            function,
            batch.part(k, k + instances),
            samples,
            some,
            launch.tables(batch.theta, strength, part),
            **constants,
        )


def _paths(batch: Batch) -> Any:
    """The module of the kernels that follow paths."""
    return option_paths if batch.options else paths


def _walk(
    kernel: Any, batch: Batch, samples: int, given: dict[str, Tensor], table: Tensor | None, **options: bool
) -> None:
    """The same for a flat batch, with its tables, or where rows are shared by programs."""
    theta = batch.theta
    size, n = theta.shape
    if table is None:
        group = max(plan.ITEM_SCRATCH // (theta.itemsize * n * plan.whole_lines(batch.reach + 1)), 1)
        for k in range(0, size, group):
            part = batch.part(k, k + group)
            table = _sweep_by_item(part, part.theta, None, False, True)[3]
            _walk(kernel, part, samples, {name: x[:, k : k + group] for name, x in given.items()}, table, **options)
        return
    layout, whole = batch.plan(1)._replace(width=table.shape[1] // n), next(iter(given.values())).stride(0) // n
    with on(theta.get_device()):
        kernel[(layout.programs,)](
            theta=theta, **given, **batch.constants, batch=size, whole=whole, samples=samples, n=n, width=layout.width,
            tables=table, **_scratch(theta, layout), **choices.functions(batch.regularizer), **options, FILLED=True,
            LANES=plan.lanes(samples), **batch.options_of(layout),
        )  # fmt: skip
