"""The kernels as torch operators: fake implementations, derivatives and vmap rules, under the namespace ``knapgrad``.

Every operator takes theta (*batch, n) in float32 or float64, int64 weights broadcastable to it, and capacity (int64)
and gamma broadcastable to the batch, and computes a function of theta / gamma. Autograd keeps theta and results, never
a table: backward sweeps recompute. Constants may be NumPy arrays: they become tensors where torch has to see them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from knapgrad.kernels import numba_cpu

_PROBLEM = "Tensor weights, Tensor capacity, Tensor gamma, str regularizer, bool exactly, int reach"
_library = torch.library.Library("knapgrad", "DEF")

# Operators that only hand on what was computed before; the others are named like their kernels.
_COPIES: dict[str, Callable[..., Any]] = {
    "recall": lambda theta, value, y, *_: (value.clone(), y.clone()),
    "surrogate": lambda theta, y, *_: y.clone(memory_format=torch.contiguous_format),
}

# Operator -> the position of its weights; capacity and gamma follow, and what each instance has its own of precedes.
_CONSTANTS = {"recall": 3, "vjp": 2, "surrogate": 2, "sample": 2, "log_prob": 2, "log_prob_vjp": 3}

# Operator -> the positions of arguments that have a dimension of samples in front of the batch.
_SAMPLED = {"surrogate": (1,), "sample": (1,), "log_prob": (1,), "log_prob_vjp": (1, 2)}


def _define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    setup: Callable[..., Any] = lambda *_: None,
    backward: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers ``torch.ops.knapgrad.<name>`` with kernel, shape rule, vmap rule and derivative; returns what to call.

    The derivative is put together three times from the same parts: registered with the operator, for torch.compile;
    as an autograd.Function with a vmap rule, because torch.func's transforms do not see the first; and as a plain
    autograd.Function, because eager calls through either of the others spend tens of microseconds more than a small
    kernel takes.
    """
    qualified = f"knapgrad::{name}"
    torch.library.define(qualified, schema, lib=_library, tags=[torch.Tag.pt2_compliant_tag])
    kernels = {"CPU": _COPIES.get(name) or _on_cpu(name), "CUDA": _COPIES.get(name) or _on_cuda(name)}
    for device, kernel in kernels.items():
        torch.library.impl(qualified, device, kernel, lib=_library)
    torch.library.register_fake(qualified, fake, lib=_library)
    operator = getattr(torch.ops.knapgrad, name).default
    torch.library.register_vmap(qualified, _vmap_rule(name, operator), lib=_library)

    def call_constant(*arguments: Any) -> Any:
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        device = None if transformed else _plain_device(arguments)
        return kernels[device](*arguments) if device else operator(*_tensors(arguments))

    if backward is None:
        return call_constant
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)

    def below_autograd(*arguments: Any) -> Any:
        device = _plain_device(arguments)
        if device:
            return kernels[device](*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*_tensors(arguments))

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = below_autograd(*arguments)
        setup(ctx, arguments, output)
        return output

    parts = {"backward": backward} | ({"jvp": jvp} if jvp else {})
    function: Any = _autograd_function(name, forward=forward, **parts)
    eager = super(torch.autograd.Function, function).apply  # without its checks for transforms, which are made here
    functional = _autograd_function(name, forward=lambda *a: operator(*a), setup_context=setup, **parts)
    functional.vmap = staticmethod(_vmap_rule(name, functional.apply))  # type: ignore[method-assign]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*_tensors(arguments))
        if torch._C._are_functorch_transforms_active():
            return functional.apply(*_tensors(arguments))
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return eager(*arguments)
        return below_autograd(*arguments)

    return call


def _tensors(arguments: tuple[Any, ...]) -> list[Any]:
    return [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arguments]


def _keep(ctx: Any, *values: Any) -> None:
    """For the backward pass: tensors by autograd's rules, NumPy constants as they are."""
    ctx.kept = [None if isinstance(x, Tensor) else x for x in values]
    ctx.save_for_backward(*[x for x in values if isinstance(x, Tensor)])


def _kept(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if x is None else x for x in ctx.kept]


def _plain_device(arguments: tuple[Any, ...]) -> str | None:
    """The device whose kernel is all that the dispatcher, which takes as long as a small kernel, would find."""
    if torch._C._len_torch_dispatch_stack() > 0 or arguments[0].device.type not in ("cpu", "cuda"):
        return None
    plain = _plain_keys("cpu"), _plain_keys(arguments[0].device.type)
    for x in arguments:
        if isinstance(x, Tensor) and torch._C._dispatch_keys(x) not in plain:
            return None
    return "CUDA" if arguments[0].is_cuda else "CPU"


@cache
def _plain_keys(device: str) -> Any:
    return torch._C._dispatch_keys(torch.empty(0, device=device))


def _autograd_function(name: str, **parts: Callable[..., Any]) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(part) for key, part in parts.items()}
    return type(f"knapgrad_{name}", (torch.autograd.Function,), methods)


def _on_cpu(name: str) -> Callable[..., Any]:
    def implementation(*arguments: Any) -> Any:
        results = getattr(numba_cpu, name)(*[_as_numpy(x) if isinstance(x, Tensor) else x for x in arguments])
        if isinstance(results, tuple):
            return tuple(torch.from_numpy(x) for x in results)
        return torch.from_numpy(results)

    return implementation


def _as_numpy(x: Tensor) -> Any:
    if x.requires_grad:
        x = x.detach()
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()  # of a gamma; NumPy does not know the type


def _on_cuda(name: str) -> Callable[..., Any]:
    def implementation(*arguments: Any) -> Any:
        try:
            from knapgrad.kernels import triton_cuda
        except ImportError as error:
            raise ImportError(
                f"theta is on {arguments[0].device}, and knapgrad's GPU kernels need Triton ({error}); it comes with "
                "torch's CUDA builds for Linux: install one of those, or `pip install triton` (on Windows "
                "`triton-windows`), or use theta.cpu()"
            ) from error
        return getattr(triton_cuda, name)(*_tensors(arguments))

    return implementation


def _vmap_rule(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The batch may have any rank, so a vmapped dimension is one more: before the batch, after the samples."""
    weights, sampled = _CONSTANTS.get(name, 1), _SAMPLED.get(name, ())

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        rank = arguments[0].dim() - (in_dims[0] is not None)  # of theta, as the operator was called
        moved = []
        for position, (x, dim) in enumerate(zip(arguments, in_dims)):
            if not isinstance(x, Tensor):
                moved.append(x)
            elif position < weights:  # what each instance has its own of must have the dimension
                front = int(position in sampled)
                if dim is None:
                    moved.append(x.unsqueeze(front).expand(*x.shape[:front], info.batch_size, *x.shape[front:]))
                else:
                    moved.append(x.movedim(dim, front))
            elif position > weights + 2:
                moved.append(None)  # a table of other batches
            elif dim is None:  # constants broadcast
                moved.append(x)
            else:  # filled up, so that the new dimension is left of the whole batch
                x, full = x.movedim(dim, 0), rank - (position > weights)
                moved.append(x.reshape(x.shape[0], *[1] * (full - x.dim() + 1), *x.shape[1:]))
        results = call(*moved)
        out = int(name in ("surrogate", "sample", "log_prob"))
        return results, (out,) * len(results) if isinstance(results, tuple) else out

    return rule


def _no_derivative(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"knapgrad has no {what}; differentiate once less, or detach theta where this derivative is not wanted"
    )


def _through_scale(theta: Tensor, gamma: Tensor, grad: Tensor, for_gamma: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient in theta / gamma as gradients in theta and in gamma."""
    grad_theta = _divide(grad, gamma)
    if not for_gamma:
        return grad_theta, None
    grad_gamma = -(grad_theta * _finite(theta)).sum(-1) / gamma
    return grad_theta, grad_gamma.sum_to_size(gamma.shape).to(gamma)


def _divide(x: Tensor, gamma: Any) -> Tensor:
    if not isinstance(gamma, Tensor) and np.ndim(gamma) == 0:
        number = float(gamma)
        return x if number == 1 else x / number
    return x / _per_item(torch.as_tensor(gamma).to(x.dtype))


def _per_item(gamma: Tensor) -> Tensor:
    """Broadcastable to theta. A number stays one: on the CPU it goes with tensors on any device."""
    return gamma.unsqueeze(-1) if gamma.dim() else gamma


def _finite(theta: Tensor) -> Tensor:
    """An item that is out contributes nothing to the derivative by gamma, rather than 0 times infinity."""
    return torch.where(torch.isneginf(theta), 0.0, theta)


# operator: value and relax. recall: the same, where both are already known.


def _like_theta(theta, *_):
    return torch.empty_like(theta, memory_format=torch.contiguous_format)


def _operator_fake(theta, *_):
    return theta.new_empty(theta.shape[:-1], dtype=torch.float64), _like_theta(theta)


def _operator_setup(ctx, inputs, output):
    theta, weights, capacity, gamma, *ctx.choices, relaxed = inputs
    ctx.constants = 1
    ctx.set_materialize_grads(False)
    saved = theta, weights, capacity, gamma, *([output[1]] if relaxed else [])
    _keep(ctx, *saved)
    if forward_ad._current_level >= 0:  # only then: it makes a cycle that would keep the output until it is collected
        ctx.save_for_forward(*[x for x in saved if isinstance(x, Tensor)])


def _recall_setup(ctx, inputs, output):
    theta, _, _, *problem = inputs
    _operator_setup(ctx, (theta, *problem, True), output)
    ctx.constants = 3


def _operator_backward(ctx, grad_value, grad_y):
    theta, weights, capacity, gamma, *saved = _kept(ctx)
    problem = weights, capacity, gamma, *ctx.choices
    grad = None
    if grad_value is not None:
        y = saved[0] if saved else operator(theta, *problem, True)[1]
        grad = grad_value.unsqueeze(-1).to(y.dtype) * y
    if grad_y is not None:
        product = vjp(theta, grad_y, *problem)
        grad = product if grad is None else grad + product
    rest = [None] * (ctx.constants + 6)
    if grad is None:
        return None, *rest
    grad_theta, rest[ctx.constants + 1] = _through_scale(theta, gamma, grad, ctx.needs_input_grad[ctx.constants + 2])
    return grad_theta, *rest


def _operator_jvp(ctx, theta_tangent, weights_tangent, capacity_tangent, gamma_tangent, *_):
    theta, weights, capacity, gamma, *saved = _kept(ctx)
    problem = weights, capacity, gamma, *ctx.choices
    y = saved[0] if saved else operator(theta, *problem, True)[1]
    tangent = torch.zeros_like(theta) if theta_tangent is None else _divide(theta_tangent, gamma)
    if gamma_tangent is not None:
        relative = _per_item((gamma_tangent / gamma).to(theta.dtype))
        tangent = tangent - _divide(_finite(theta), gamma) * relative
    return (y * tangent).sum(-1).double(), vjp(theta, tangent, *problem)


_schema = f"(Tensor theta, {_PROBLEM}, bool relaxed) -> (Tensor, Tensor)"
operator = _define("operator", _schema, _operator_fake, _operator_setup, _operator_backward, _operator_jvp)
_schema = f"(Tensor theta, Tensor value, Tensor mean, {_PROBLEM}) -> (Tensor, Tensor)"
recall = _define("recall", _schema, _operator_fake, _recall_setup, _operator_backward)


# vjp: the Hessian of value at gamma = 1 times z, linear and symmetric in z.


def _vjp_setup(ctx, inputs, output):
    theta, _, weights, capacity, gamma, *ctx.choices = inputs
    _keep(ctx, theta, weights, capacity, gamma)


def _vjp_backward(ctx, grad):
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[4]:
        raise _no_derivative("second derivative of relax (the third of value)")
    theta, *constants = _kept(ctx)
    return None, vjp(theta, grad, *constants, *ctx.choices), *[None] * 6


vjp = _define("vjp", f"(Tensor theta, Tensor z, {_PROBLEM}) -> Tensor", _like_theta, _vjp_setup, _vjp_backward)


# surrogate: a copy of selections y (samples, *batch, n) forwards, the VJP of relax backwards: a stochastic layer.


def _like_second(theta, y, *_):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _surrogate_backward(ctx, grad):
    theta, weights, capacity, gamma = _kept(ctx)
    product = vjp(theta, grad.sum(0), weights, capacity, gamma, *ctx.choices)
    grad_theta, grad_gamma = _through_scale(theta, gamma, product, ctx.needs_input_grad[4])
    return grad_theta, None, None, None, grad_gamma, None, None, None


_schema = f"(Tensor theta, Tensor y, {_PROBLEM}) -> Tensor"
surrogate = _define("surrogate", _schema, _like_second, _vjp_setup, _surrogate_backward)


# sample, mode, solve and tabulate: without derivatives.


def _tabulate_fake(theta, *_):
    cells = torch.library.get_ctx().new_dynamic_size()
    groups = torch.library.get_ctx().new_dynamic_size()
    return *_operator_fake(theta), theta.new_empty((groups, cells))


sample = _define("sample", f"(Tensor theta, Tensor uniforms, {_PROBLEM}, Tensor? table) -> Tensor", _like_second)
mode = _define("mode", f"(Tensor theta, {_PROBLEM}) -> Tensor", _like_theta)
solve = _define(
    "solve", "(Tensor theta, Tensor weights, Tensor capacity, bool exactly, int reach) -> Tensor", _like_theta
)
tabulate = _define("tabulate", f"(Tensor theta, {_PROBLEM}) -> (Tensor, Tensor, Tensor)", _tabulate_fake)


# log_prob and entropy: first derivatives, each by one more sweep.


def _log_prob_fake(theta, y, *_):
    return theta.new_empty(y.shape[:-1])


def _log_prob_setup(ctx, inputs, output):
    theta, y, weights, capacity, gamma, *ctx.choices, _ = inputs
    _keep(ctx, theta, y, output, weights, capacity, gamma)


def _log_prob_backward(ctx, grad):
    theta, y, log_prob, weights, capacity, gamma = _kept(ctx)
    grad = torch.where(torch.isneginf(log_prob), 0.0, grad)
    gradient = log_prob_vjp(theta, y, grad, weights, capacity, gamma, *ctx.choices)
    grad_theta, grad_gamma = _through_scale(theta, gamma, gradient, ctx.needs_input_grad[4])
    return grad_theta, None, None, None, grad_gamma, None, None, None, None


def _raises(what: str) -> Callable[..., Any]:
    def backward(ctx, *_):
        raise _no_derivative(what)

    return backward


_schema = f"(Tensor theta, Tensor y, {_PROBLEM}, Tensor? table) -> Tensor"
log_prob = _define("log_prob", _schema, _log_prob_fake, _log_prob_setup, _log_prob_backward)
_schema = f"(Tensor theta, Tensor y, Tensor cotangent, {_PROBLEM}) -> Tensor"
_missing = _raises("second derivative of log_prob")
log_prob_vjp = _define("log_prob_vjp", _schema, _like_theta, backward=_missing)


def _entropy_fake(theta, *_):
    return theta.new_empty(theta.shape[:-1])


def _entropy_setup(ctx, inputs, output):
    theta, weights, capacity, gamma, *ctx.choices = inputs
    _keep(ctx, theta, weights, capacity, gamma)


def _entropy_backward(ctx, grad):
    theta, weights, capacity, gamma = _kept(ctx)
    gradient = entropy_grad(theta, weights, capacity, gamma, *ctx.choices)
    product = grad.unsqueeze(-1) * gradient
    grad_theta, grad_gamma = _through_scale(theta, gamma, product, ctx.needs_input_grad[3])
    return grad_theta, None, None, grad_gamma, None, None, None


_schema = f"(Tensor theta, {_PROBLEM}) -> Tensor"
entropy = _define("entropy", _schema, _entropy_fake, _entropy_setup, _entropy_backward)
entropy_grad = _define("entropy_grad", _schema, _like_theta, backward=_raises("second derivative of entropy"))
