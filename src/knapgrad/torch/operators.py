"""The kernels as torch operators, with their derivatives.

Every operator takes theta (*batch, n) in float32 or float64, a lattice that broadcasts to it and gamma that broadcasts
to the batch, and computes a function of theta / gamma. Autograd keeps theta and results, never a table: backward
sweeps recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapgrad.torch import private, second_order
from knapgrad.torch.registration import Kept, Signature, define, define_plain, kernel_of


def no_derivative(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"knapgrad has no {what}; differentiate once less, or detach theta where this derivative is not wanted"
    )


def _raises(what: str) -> Callable[..., Any]:
    def backward(kept: Kept, *_: Any) -> Any:
        raise no_derivative(what)

    return backward


def _through_scale(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None]:
    """The gradient in theta / gamma as gradients in theta and in gamma."""
    if grad is None:
        return {}
    theta, gamma = kept.theta, kept.gamma
    grad_theta = divide(grad, gamma)
    if not kept.wants_gamma:
        return {"theta": grad_theta}
    grad_gamma = -(grad_theta * _finite(theta)).sum(-1, dtype=torch.float64) / gamma
    return {"theta": grad_theta.to(theta.dtype), "gamma": grad_gamma.sum_to_size(gamma.shape).to(gamma)}


def _precise(kept: Kept, x: Tensor) -> Tensor:
    """In float64 if a derivative by gamma is wanted: it is a small difference of large terms."""
    return x.double() if kept.wants_gamma else x


def divide(x: Tensor, gamma: Any) -> Tensor:
    """x (*batch, n) / gamma."""
    if (type(gamma) is np.ndarray and gamma.ndim == 0) or isinstance(gamma, float):
        number = float(gamma)
        return x if number == 1.0 else x / number
    return x / _per_item(torch.as_tensor(gamma).to(x.dtype))


def _per_item(gamma: Tensor) -> Tensor:
    """Broadcastable to theta. A number stays one: on the CPU it goes with tensors on any device."""
    return gamma.unsqueeze(-1) if gamma.dim() else gamma


def _finite(theta: Tensor) -> Tensor:
    """An item that is out contributes nothing to the derivative by gamma, rather than 0 times infinity."""
    return torch.where(torch.isneginf(theta), 0.0, theta)


# Shapes of results.


def _like_theta(theta: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(theta, memory_format=torch.contiguous_format)


def _like_second(theta: Tensor, y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _per_instance(theta: Tensor, *_: Any) -> Tensor:
    return theta.new_empty(theta.shape[:-1])


def _value_and_selection(theta: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return theta.new_empty(theta.shape[:-1], dtype=torch.float64), _like_theta(theta)


# operator: value and relax. recall: the same, where both are already known.


def _keep_selection(output: Any, relaxed: bool = True) -> Tensor | None:
    return output[1] if relaxed else None


def _selection(kept: Kept) -> Tensor:
    return operator(kept.theta, *kept.problem, True)[1] if kept.result is None else kept.result


def _operator_backward(kept: Kept, grad_value: Tensor | None, grad_y: Tensor | None) -> dict[str, Tensor | None]:
    grad, theta = None, _precise(kept, kept.theta)
    if grad_value is not None:
        y = kept.result
        if y is None or theta.dtype != y.dtype:
            y = operator(theta, *kept.problem, True)[1]
        grad = grad_value.unsqueeze(-1).to(y.dtype) * y
    if grad_y is not None:
        product = vjp(theta, _precise(kept, grad_y), *kept.problem)
        grad = product if grad is None else grad + product
    return _through_scale(kept, grad)


def _tangent(kept: Kept, tangents: dict[str, Any]) -> Tensor:
    """Of theta / gamma."""
    theta, gamma = kept.theta, kept.gamma
    tangent = torch.zeros_like(theta) if tangents["theta"] is None else divide(tangents["theta"], gamma)
    if tangents["gamma"] is None:
        return tangent
    return tangent - divide(_finite(theta), gamma) * _per_item((tangents["gamma"] / gamma).to(theta.dtype))


def _operator_jvp(kept: Kept, tangents: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tangent = _tangent(kept, tangents)
    return (_selection(kept) * tangent).sum(-1).double(), vjp(kept.theta, tangent, *kept.problem)


operator = define(
    "operator",
    Signature(options={"relaxed": "bool"}, returns="(Tensor, Tensor)"),
    fake=_value_and_selection,
    keep_of=_keep_selection,
    backward=_operator_backward,
    jvp=_operator_jvp,
)
recall = define(
    "recall",
    Signature(own=("theta", "value", "mean"), returns="(Tensor, Tensor)"),
    fake=_value_and_selection,
    kernel=lambda theta, value, mean, *_: (value.clone(), mean.clone()),
    keep_of=_keep_selection,
    backward=_operator_backward,
)


# relax: the same, without the value.


def _relax_backward(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None] | Tensor:
    if grad is None:
        return {}
    if not kept.wants_gamma:
        return divide(vjp(kept.theta, grad, *kept.problem), kept.gamma)
    return _through_scale(kept, vjp(kept.theta.double(), grad.double(), *kept.problem))


def _relax_jvp(kept: Kept, tangents: dict[str, Any]) -> Tensor:
    return vjp(kept.theta, _tangent(kept, tangents), *kept.problem)


relax = define(
    "relax",
    Signature(),
    fake=_like_theta,
    backward=_relax_backward,
    jvp=_relax_jvp,
)


# vjp: the Hessian of value at gamma = 1 times z, linear and symmetric in z.


def _vjp_backward(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    found = {"z": vjp(kept.theta, grad, *kept.problem)}
    if kept.wants_theta or kept.wants_gamma:
        _check_second_order(kept)
        arrays = (_precise(kept, x) for x in (*kept.own, grad))
        found |= _through_scale(kept, vjp_grad(*arrays, *kept.problem))
    return found


def _vjp_jvp(kept: Kept, tangents: dict[str, Any]) -> Tensor:
    """Third cumulants are the same whichever of their three arguments is first."""
    found = [] if tangents["z"] is None else [vjp(kept.theta, tangents["z"], *kept.problem)]
    if tangents["theta"] is not None or tangents["gamma"] is not None:
        _check_second_order(kept)
        found.append(vjp_grad(kept.theta, kept.own[1], _tangent(kept, tangents), *kept.problem))
    return found[0] if len(found) == 1 else found[0] + found[1]


def _check_second_order(kept: Kept) -> None:
    lattice, _, regularizer = kept.problem
    if not second_order.serves(lattice, regularizer):
        raise no_derivative("second derivative of relax (the third of value), but for TopK under Shannon")


vjp = define("vjp", Signature(own=("theta", "z")), fake=_like_theta, keep=2, backward=_vjp_backward, jvp=_vjp_jvp)
vjp_grad = define(
    "vjp_grad",
    Signature(own=("theta", "z", "cotangent")),
    fake=_like_theta,
    kernel=second_order.gradient,
    backward=_raises("third derivative of relax"),
)


# surrogate: a copy of selections y (samples, *batch, n) forwards, the VJP of relax backwards: a stochastic layer.


surrogate = define(
    "surrogate",
    Signature(own=("theta", "y"), sampled=("y",), samples=True),
    fake=_like_second,
    kernel=lambda theta, y, *_: y.clone(memory_format=torch.contiguous_format),
    backward=lambda kept, grad: _relax_backward(kept, None if grad is None else grad.sum(0)),
)


# sample, mode, solve and tabulate: without derivatives.


def _tabulate_fake(theta: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    cells = torch.library.get_ctx().new_dynamic_size()
    groups = torch.library.get_ctx().new_dynamic_size()
    return *_value_and_selection(theta), theta.new_empty((groups, cells))


_TABLE = {"table": "Tensor?"}
sample = define(
    "sample",
    Signature(own=("theta", "uniforms"), sampled=("uniforms",), options=_TABLE, samples=True),
    fake=_like_second,
)
mode = define("mode", Signature(), fake=_like_theta)
solve = define("solve", Signature(smoothed=False), fake=_like_theta)
tabulate = define("tabulate", Signature(returns="(Tensor, Tensor, Tensor)"), fake=_tabulate_fake)


# log_prob and entropy: first derivatives, each by one more sweep.


def _log_prob_backward(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    grad = torch.where(torch.isneginf(kept.result), 0.0, grad)
    return _through_scale(kept, log_prob_vjp(*kept.own, grad, *kept.problem))


log_prob = define(
    "log_prob",
    Signature(own=("theta", "y"), sampled=("y",), options=_TABLE, samples=True),
    fake=lambda theta, y, *_: theta.new_empty(y.shape[:-1]),
    keep=2,
    keep_of=lambda output, table: output,
    backward=_log_prob_backward,
)
log_prob_vjp = define(
    "log_prob_vjp",
    Signature(own=("theta", "y", "cotangent"), sampled=("y", "cotangent")),
    fake=_like_theta,
    backward=_raises("second derivative of log_prob"),
)


def _entropy_backward(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    return _through_scale(kept, grad.unsqueeze(-1) * entropy_grad(kept.theta, *kept.problem))


entropy = define("entropy", Signature(), fake=_per_instance, backward=_entropy_backward)
entropy_grad = define("entropy_grad", Signature(), fake=_like_theta, backward=_raises("second derivative of entropy"))


# frontier: the values at all capacities.


_frontier_kernel = kernel_of("frontier", 1)


def _row_per_instance(theta: Tensor, *arguments: Any) -> Tensor:
    return theta.new_empty((*theta.shape[:-1], arguments[-1]), dtype=torch.float64)


def _frontier_backward(kept: Kept, grad: Tensor | None) -> dict[str, Tensor | None]:
    if grad is None:
        return {}
    theta = _precise(kept, kept.theta)
    return _through_scale(kept, frontier_vjp(theta, grad.to(theta.dtype), *kept.problem))


frontier = define(
    "frontier",
    Signature(options={"length": "SymInt"}),
    fake=_row_per_instance,
    kernel=lambda *arguments: _frontier_kernel(*arguments[:-1]),
    backward=_frontier_backward,
)
frontier_vjp = define(
    "frontier_vjp",
    Signature(own=("theta", "cotangent")),
    fake=_like_theta,
    backward=_raises("second derivative of frontier"),
)


# uniforms: random numbers from a generator, of which torch.compile cannot make an input of a graph.


def _draw(like: Tensor, shape: Sequence[int], handle: int) -> Tensor:
    return torch.rand(shape, generator=private.GENERATORS[handle], dtype=like.dtype, device=like.device)


uniforms = define_plain(
    "uniforms(Tensor like, SymInt[] shape, int handle) -> Tensor",
    _draw,
    fake=lambda like, shape, handle: like.new_empty(shape),
    tags=[torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag],
)
