"""CUDA tensors: plans how the kernels work on a batch, and launches them.

Nothing here looks at what is on the device, so nothing waits for it, and every call can be captured in a CUDA graph.

Arguments: theta (*batch, n), a lattice of tensors that broadcast to it, gamma that broadcasts to the batch, the name of
    a regularizer. All are functions of theta / gamma.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapgrad.kernels.triton import instances, paths, plan, variants
from knapgrad.kernels.triton.batch import flat, is_number, laid
from knapgrad.kernels.triton.by_item import ByItem
from knapgrad.kernels.triton.frontier import frontier_kernel
from knapgrad.kernels.triton.kernels import Kernel, kernel_of
from knapgrad.kernels.triton.launch import on
from knapgrad.kernels.triton.pipeline import Limits, Pipeline, Segmented
from knapgrad.kernels.triton.ways import Given, Tabled, Whole, scratch_of
from knapgrad.lattice import LARGEST, Lattice

_LARGEST_MEMO = 64  # launches, and those that CUDA graphs read


def _way_of(
    name: str, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, samples: int = 0
) -> Whole | Tabled:
    """The way for batches like theta, which is kept with the lattice."""
    kind = None if is_number(gamma) else (gamma.dtype, gamma.numel() == 1)
    key = name, theta.shape, theta.dtype, regularizer, kind, samples
    memo, capturing = lattice.memo, theta.is_cuda and torch.cuda.is_current_stream_capturing()
    way = memo.get(key)
    if way is None:
        passing = [other for other, kept in list(memo.items()) if not kept.captured]
        for other in passing if len(passing) >= _LARGEST_MEMO else ():
            memo.pop(other, None)
        way = _prepared(kernel_of(name), theta, lattice, gamma, regularizer, samples)
        if capturing:
            return way  # its arrays belong to the graph: they are filled when it is replayed
        if theta.is_cuda:
            way.ready = torch.cuda.current_stream(theta.device).record_event()
        memo[key] = way
    elif capturing:  # which begins when all arrays are there
        way.captured = True
    elif (ready := way.ready) is not None:  # another thread may set it to None
        if ready.query():
            way.ready = None
        else:
            torch.cuda.current_stream(theta.device).wait_event(ready)
    return way


def _prepared(
    kernel: Kernel, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, samples: int
) -> Whole | Tabled:
    """The way is chosen here: a launch of whole instances, or a pipeline for few instances of many items, perhaps of
    segments of the items, or where rows or tables are too large for one program, and for nothing, a launch per item."""
    batch, constants = flat(theta, lattice, gamma, regularizer), kernel.constants
    (size, n), source = batch.theta.shape, constants.get("SOURCE")
    if not theta.numel():
        return ByItem(batch, source)
    if not batch.options:
        sizes = batch.sizes(kernel.tables, batch.heaviest)
        is_joined = regularizer == "shannon" and kernel.is_sweep and source != "entropy"
        is_whole = constants.get("KEEP") or batch.constants["BOX"]  # states of a box do not add up
        if is_joined and not is_whole and (segments := plan.segments(*sizes)) is not None:
            return Segmented(batch, *segments, source)
        if (tiles := plan.tiles(*sizes)) is not None:
            return Pipeline(batch.theta, Limits.of(batch), regularizer, tiles, source)
        if plan.is_shared(n, batch.reach, kernel.tables * theta.itemsize):
            return ByItem(batch, source)
    layout = batch.plan(kernel.tables)
    scratch = {name: (theta.dtype, prod(shape)) for name, shape in layout.scratch(n).items()}
    scratch["V_rows"] = torch.float64, scratch["V_rows"][1]
    if kernel.is_sweep:
        function, later = instances.operator_kernel, layout.later and not constants["KEEP"]
        constants = constants | {"SOURCE": variants.source(source), "LATER": later}
        scratch |= {"value": (torch.float64, size), "tangent": (theta.dtype, size), "y": (theta.dtype, 1)}
        if layout.narrow:  # rows are in registers
            scratch |= {"V_rows": (torch.float64, 1), "rows": (theta.dtype, 1)}
        if constants["KEEP"]:  # tables are given
            del scratch["tables"]
    else:
        function = getattr(paths, kernel.name)
        constants = constants | {"whole": size, "samples": samples, "FILLED": False, "LANES": plan.lanes(samples)}
    every = batch.constants | variants.functions(regularizer) | constants | layout.settings
    every |= {"batch": size, "n": n, "width": layout.width}
    if is_number(gamma):
        every["gamma"] = every["capacity"]  # never read
    else:
        del every["gamma"]
    arguments = {name: x for name, x in every.items() if name in function.arg_names}
    settings = {name: x for name, x in every.items() if name not in function.arg_names}
    return Whole(function, layout.programs, arguments, settings, scratch)


def _swept(
    name: str, theta: Tensor, z: Tensor | None, lattice: Lattice, gamma: Any, regularizer: str, *results: str
) -> list[Tensor]:
    """The results of those names, of value, tangent, y and tables."""
    theta = laid(theta, theta)
    z = theta if z is None else laid(z, theta)
    return _way_of(name, theta, lattice, gamma, regularizer).results(kernel_of(name), theta, z, gamma, results)


def operator(theta, lattice, gamma, regularizer, relaxed=True):
    """The smoothed optimum (*batch,) in float64, and its gradient, the relaxed selection (*batch, n)."""
    return tuple(_swept("operator" if relaxed else "value", theta, None, lattice, gamma, regularizer, "value", "y"))


def relax(theta, lattice, gamma, regularizer):
    """The relaxed selection alone."""
    return _swept("operator", theta, None, lattice, gamma, regularizer, "y")[0]


def tabulate(theta, lattice, gamma, regularizer):
    """As operator, and the table Q of every instance, for sample and log_prob with the same arguments."""
    return tuple(_swept("tabulate", theta, None, lattice, gamma, regularizer, "value", "y", "tables"))


def vjp(theta, z, lattice, gamma, regularizer):
    """The symmetric Jacobian of the relaxed selection, times z (*batch, n)."""
    return _swept("vjp", theta, z, lattice, gamma, regularizer, "y")[0]


def entropy(theta, lattice, gamma, regularizer):
    """The Shannon entropy (*batch,) of the distribution over selections."""
    return _swept("entropy", theta, torch.zeros_like(theta), lattice, gamma, regularizer, "tangent")[0]


def entropy_grad(theta, lattice, gamma, regularizer):
    """The gradient (*batch, n) of that entropy."""
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
    batch = flat(theta, lattice, gamma, regularizer)
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
        settings = {name: x for name, x in layout.settings.items() if name != "NARROW"}  # no rows are in registers
        with on(theta.get_device()):
            frontier_kernel[(layout.programs,)](
                theta=theta, cotangent=given, **batch.constants, batch=size, n=n, width=layout.width, values=values,
                y=y, tables=tables, **scratch_of(layout, theta), **variants.functions(regularizer),
                BACKWARDS=backwards, **settings,
            )  # fmt: skip
    return y if backwards else values


def _with_skips(x: Tensor) -> Tensor:
    """A 0 before each entry."""
    return torch.stack([torch.zeros_like(x), x], -1).flatten(-2)


def sample(theta, uniforms, lattice, gamma, regularizer, table=None):
    """Selections (samples, *batch, n) from uniform numbers in [0, 1) of that shape."""
    given = laid(uniforms, theta)
    y = torch.empty_like(given)
    _along_paths("sample", theta, lattice, gamma, regularizer, {"uniforms": given, "y": y}, table)
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
    _along_paths(name, theta, lattice, gamma, regularizer, {"uniforms": y, "y": y})
    return y[0]


def log_prob(theta, y, lattice, gamma, regularizer, table=None):
    """Log-probabilities (samples, *batch) of selections y (samples, *batch, n)."""
    result = theta.new_zeros(y.shape[:-1])
    given = {"selections": laid(y, theta), "cotangent": result, "log_prob": result, "gradient": result}
    _along_paths("log_prob", theta, lattice, gamma, regularizer, given, table)
    return result


def log_prob_vjp(theta, y, cotangent, lattice, gamma, regularizer):
    """The gradient (*batch, n) of the sum of the log-probabilities weighted by a cotangent (samples, *batch), which
    must be 0 for selections of probability 0."""
    cotangent, gradient = laid(cotangent, theta), theta.new_zeros(1, *theta.shape)
    given = {"selections": laid(y, theta), "cotangent": cotangent, "log_prob": cotangent, "gradient": gradient}
    _along_paths("log_prob_vjp", theta, lattice, gamma, regularizer, given)
    return gradient[0]


_UNIT = np.ones(())


def _along_paths(
    name: str, theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str, given: dict[str, Any],
    table: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs a kernel of paths. Arrays are given as (samples, *batch, ...)."""
    theta, samples = laid(theta, theta), len(next(iter(given.values())))
    if samples == 0 or theta.numel() == 0:
        return
    way = Given(table) if table is not None else _way_of(name, theta, lattice, gamma, regularizer, samples)
    way.along_paths(kernel_of(name), theta, lattice, gamma, regularizer, given)
