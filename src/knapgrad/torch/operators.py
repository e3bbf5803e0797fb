"""The kernels as torch operators: fake implementations, derivatives and vmap rules, under the namespace ``knapgrad``.

Every operator takes theta (*batch, n) already divided by gamma, in float32 or float64, int64 weights broadcastable to
it and an int64 capacity broadcastable to the batch. Autograd keeps theta and results, never a table: backward sweeps
recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knapgrad.kernels import numba_cpu

_PROBLEM = "Tensor weights, Tensor capacity, str regularizer, bool exactly"
_library = torch.library.Library("knapgrad", "DEF")


def _define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    setup: Callable[..., Any] = lambda *_: None,
    backward: Callable[..., Any] | None = None,
    sample_dims: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """Registers ``torch.ops.knapgrad.<name>`` with its CPU kernel, shape rule, vmap rule and derivative, and returns
    what to call.

    ``sample_dims`` maps the position of an argument to the number of sample dimensions it has before the batch.

    The derivative is put together three times from the same parts: registered with the operator, for torch.compile;
    as an autograd.Function with a vmap rule, because torch.func's transforms do not see the first; and as a plain
    autograd.Function, because eager calls through either of the others spend tens of microseconds more than a small
    kernel takes.
    """
    qualified = f"knapgrad::{name}"
    torch.library.define(qualified, schema, lib=_library, tags=[torch.Tag.pt2_compliant_tag])
    torch.library.impl(qualified, "CPU", _on_cpu(name), lib=_library)
    torch.library.register_fake(qualified, fake, lib=_library)
    operator = getattr(torch.ops.knapgrad, name).default
    if backward is None:
        torch.library.register_vmap(qualified, _vmap_rule(name, operator, sample_dims or {}), lib=_library)
        return operator
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)

    def below_autograd(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = below_autograd(*arguments)
        setup(ctx, arguments, output)
        return output

    eager = _autograd_function(name, forward=forward, backward=backward)
    functional = _autograd_function(name, forward=lambda *a: operator(*a), setup_context=setup, backward=backward)
    functional.vmap = staticmethod(_vmap_rule(name, functional.apply, sample_dims or {}))  # type: ignore[method-assign]
    torch.library.register_vmap(qualified, functional.vmap, lib=_library)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if torch._C._are_functorch_transforms_active():
            return functional.apply(*arguments)
        return eager.apply(*arguments) if torch.is_grad_enabled() else below_autograd(*arguments)

    return call


def _autograd_function(name: str, **parts: Callable[..., Any]) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(part) for key, part in parts.items()}
    return type(f"knapgrad_{name}", (torch.autograd.Function,), methods)


def _on_cpu(name: str) -> Callable[..., Any]:
    kernel, select = _KERNELS[name]

    def implementation(*arguments: Any) -> Any:
        arrays = [_as_numpy(x) if isinstance(x, Tensor) else x for x in arguments]
        results = select(kernel(*arrays))
        if isinstance(results, tuple):
            return tuple(torch.from_numpy(x) for x in results)
        return torch.from_numpy(results)

    return implementation


def _as_numpy(x: Tensor) -> Any:
    return (x.detach() if x.requires_grad else x).numpy()


def _everything(results: Any) -> Any:
    return results


def _first(results: Any) -> Any:
    return results[0]


def _second(results: Any) -> Any:
    return results[1]


# Operator -> the CPU kernel and what of its results is returned.
_cpu: Any = numba_cpu
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "operator": (_cpu.operator, _everything),
    "tabulate": (_cpu.tabulate, _everything),
    "vjp": (_cpu.vjp, _everything),
    "surrogate": (lambda theta, y, *_: y.copy(), _everything),
    "sample": (_cpu.sample, _everything),
    "mode": (_cpu.mode, _everything),
    "solve": (_cpu.solve, _everything),
    "log_prob": (lambda *a: _cpu.log_prob(*a[:-1], None, a[-1]), _first),
    "log_prob_vjp": (lambda theta, y, cotangent, *problem: _cpu.log_prob(theta, y, *problem, cotangent), _second),
    "entropy": (_cpu.entropy, _first),
    "entropy_grad": (lambda *a: _cpu.entropy(*a, True), _second),
}


def _vmap_rule(name: str, call: Callable[..., Any], sample_dims: dict[int, int]) -> Callable[..., Any]:
    """The batch may have any rank, so a vmapped dimension is one more: before the batch, after the samples."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        rank = arguments[0].dim() - (in_dims[0] is not None)  # of theta, as the operator was called
        moved = []
        for position, (x, dim) in enumerate(zip(arguments, in_dims)):
            if not isinstance(x, Tensor):
                moved.append(x)
                continue
            front = sample_dims.get(position, 0)
            # Weights and capacity broadcast when they are not batched; all else must have the dimension.
            if dim is None and position not in _constants_of(name):
                x = x.unsqueeze(front).expand(*x.shape[:front], info.batch_size, *x.shape[front:])
            elif dim is not None:
                x = x.movedim(dim, front)
                if position in _constants_of(name):  # fill up so that the new dimension is left of the whole batch
                    full = rank if position == _constants_of(name)[0] else rank - 1
                    x = x.reshape(x.shape[0], *[1] * (full - x.dim() + 1), *x.shape[1:])
            moved.append(x)
        results = call(*moved)
        out = 1 if name in ("surrogate", "sample", "log_prob") else 0
        return results, (out,) * len(results) if isinstance(results, tuple) else out

    return rule


def _constants_of(name: str) -> tuple[int, int]:
    """The positions of weights and capacity: after theta and what else depends on the instance."""
    first = {"vjp": 2, "surrogate": 2, "sample": 2, "log_prob": 2, "log_prob_vjp": 3}.get(name, 1)
    return first, first + 1


def _no_derivative(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"knapgrad has no {what}; differentiate once less, or detach theta where this derivative is not wanted"
    )


# operator: value and relax.


def _operator_fake(theta, weights, capacity, regularizer, exactly, relaxed):
    return theta.new_empty(theta.shape[:-1], dtype=torch.float64), torch.empty_like(
        theta, memory_format=torch.contiguous_format
    )


def _operator_setup(ctx, inputs, output):
    theta, weights, capacity, ctx.regularizer, ctx.exactly, ctx.relaxed = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(theta, weights, capacity, *([output[1]] if ctx.relaxed else []))


def _operator_backward(ctx, grad_value, grad_y):
    theta, weights, capacity, *saved = ctx.saved_tensors
    problem = weights, capacity, ctx.regularizer, ctx.exactly
    gradient = None
    if grad_value is not None:
        y = saved[0] if saved else operator(theta, *problem, True)[1]
        gradient = grad_value.unsqueeze(-1).to(y.dtype) * y
    if grad_y is not None:
        product = vjp(theta, grad_y, *problem)
        gradient = product if gradient is None else gradient + product
    return gradient, None, None, None, None, None


_schema = f"(Tensor theta, {_PROBLEM}, bool relaxed) -> (Tensor, Tensor)"
operator = _define("operator", _schema, _operator_fake, _operator_setup, _operator_backward)


# vjp: the Hessian of value times z, linear and symmetric in z.


def _like_theta(theta, *_):
    return torch.empty_like(theta, memory_format=torch.contiguous_format)


def _vjp_setup(ctx, inputs, output):
    theta, _, weights, capacity, ctx.regularizer, ctx.exactly = inputs
    ctx.save_for_backward(theta, weights, capacity)


def _vjp_backward(ctx, grad):
    if ctx.needs_input_grad[0]:
        raise _no_derivative("second derivative of relax (the third of value)")
    theta, weights, capacity = ctx.saved_tensors
    return None, vjp(theta, grad, weights, capacity, ctx.regularizer, ctx.exactly), *[None] * 4


vjp = _define("vjp", f"(Tensor theta, Tensor z, {_PROBLEM}) -> Tensor", _like_theta, _vjp_setup, _vjp_backward)


# surrogate: a copy of selections y (samples, *batch, n) forwards, the VJP of relax backwards; the paper's stochastic
# layer.


def _like_second(theta, y, *_):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _surrogate_setup(ctx, inputs, output):
    theta, _, weights, capacity, ctx.regularizer, ctx.exactly = inputs
    ctx.save_for_backward(theta, weights, capacity)


def _surrogate_backward(ctx, grad):
    theta, weights, capacity = ctx.saved_tensors
    return vjp(theta, grad.sum(0), weights, capacity, ctx.regularizer, ctx.exactly), *[None] * 5


_schema = f"(Tensor theta, Tensor y, {_PROBLEM}) -> Tensor"
surrogate = _define("surrogate", _schema, _like_second, _surrogate_setup, _surrogate_backward, {1: 1})


# sample, mode, solve and tabulate: without derivatives.

sample = _define(
    "sample", f"(Tensor theta, Tensor uniforms, {_PROBLEM}, Tensor? table) -> Tensor", _like_second, sample_dims={1: 1}
)
mode = _define("mode", f"(Tensor theta, {_PROBLEM}) -> Tensor", _like_theta)
solve = _define("solve", "(Tensor theta, Tensor weights, Tensor capacity, bool exactly) -> Tensor", _like_theta)


def _tabulate_fake(theta, *_):
    cells = torch.library.get_ctx().new_dynamic_size()
    groups = torch.library.get_ctx().new_dynamic_size()
    return theta.new_empty(theta.shape[:-1], dtype=torch.float64), _like_theta(theta), theta.new_empty((groups, cells))


tabulate = _define("tabulate", f"(Tensor theta, {_PROBLEM}) -> (Tensor, Tensor, Tensor)", _tabulate_fake)


# log_prob and entropy: first derivatives, each by one more sweep.


def _log_prob_fake(theta, y, *_):
    return theta.new_empty(y.shape[:-1])


def _log_prob_setup(ctx, inputs, output):
    theta, y, weights, capacity, ctx.regularizer, ctx.exactly, _ = inputs
    ctx.save_for_backward(theta, y, weights, capacity, output)


def _log_prob_backward(ctx, grad):
    theta, y, weights, capacity, log_prob = ctx.saved_tensors
    grad = torch.where(torch.isneginf(log_prob), 0.0, grad)
    gradient = log_prob_vjp(theta, y, grad, weights, capacity, ctx.regularizer, ctx.exactly)
    return gradient, *[None] * 6


def _nothing(ctx, inputs, output):
    pass


def _raises(what: str) -> Callable[..., Any]:
    def backward(ctx, *_):
        raise _no_derivative(what)

    return backward


_schema = f"(Tensor theta, Tensor y, {_PROBLEM}, Tensor? table) -> Tensor"
log_prob = _define("log_prob", _schema, _log_prob_fake, _log_prob_setup, _log_prob_backward, {1: 1})

_schema = f"(Tensor theta, Tensor y, Tensor cotangent, {_PROBLEM}) -> Tensor"
_missing = _raises("second derivative of log_prob")
log_prob_vjp = _define("log_prob_vjp", _schema, _like_theta, _nothing, _missing, {1: 1, 2: 1})


def _entropy_fake(theta, *_):
    return theta.new_empty(theta.shape[:-1])


def _entropy_setup(ctx, inputs, output):
    theta, weights, capacity, ctx.regularizer, ctx.exactly = inputs
    ctx.save_for_backward(theta, weights, capacity)


def _entropy_backward(ctx, grad):
    theta, *constants = ctx.saved_tensors
    gradient = entropy_grad(theta, *constants, ctx.regularizer, ctx.exactly)
    return grad.unsqueeze(-1) * gradient, *[None] * 4


_schema = f"(Tensor theta, {_PROBLEM}) -> Tensor"
entropy = _define("entropy", _schema, _entropy_fake, _entropy_setup, _entropy_backward)
entropy_grad = _define("entropy_grad", _schema, _like_theta, _nothing, _raises("second derivative of entropy"))
