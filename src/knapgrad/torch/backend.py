"""torch tensors: what :mod:`knapgrad.ops` asks of every framework."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knapgrad.constraints import Constraint
from knapgrad.torch import operators
from knapgrad.torch.operators import entropy, operator

__all__ = ["entropy", "operator"]

where, broadcast_to = torch.where, torch.broadcast_to


@torch.no_grad()
def sample(*arguments: Any) -> Tensor:
    return operators.sample(*arguments, None)


@torch.no_grad()
def solve(*arguments: Any) -> Tensor:
    return operators.solve(*arguments)


def log_prob(*arguments: Any) -> Tensor:
    return operators.log_prob(*arguments, None)


def is_floating(x: Tensor) -> bool:
    if not (x.is_cpu or x.is_cuda or x.is_meta):
        raise NotImplementedError(f"theta is on {x.device}, and knapgrad runs on CPU and CUDA devices; use theta.cpu()")
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def differentiates(*tensors: Any) -> bool:
    """Whether a gradient will be asked for."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def detached(x: Tensor) -> Tensor:
    return x.detach()


def may_be_selection(y: Tensor) -> bool:
    """False if it can be seen, without stalling a device or breaking a trace, that it is not of zeros and ones."""
    if y.is_cuda or torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(y):
        return True
    return bool(((y == 0) | (y == 1)).all())


def computable(x: Tensor) -> Tensor:
    """Half precision is computed in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def double(x: Tensor) -> Tensor:
    return x.double()


def sum_double(x: Tensor) -> Tensor:
    """The sum over items, in float64."""
    return x.sum(-1, dtype=torch.float64)


def as_type(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)


def array(x: Any, like: Tensor, name: str) -> Tensor:
    """Numbers of any origin as a tensor beside ``like``."""
    if isinstance(x, (int, float)):
        return like.new_full((), x)  # without a copy that the device would have to wait for
    if not isinstance(x, Tensor):
        return torch.as_tensor(x, device=like.device)
    if x.device != like.device and (x.dim() > 0 or not x.is_cpu):
        raise ValueError(f"{name} is on {x.device} and theta on {like.device}: use {name}.to(theta.device)")
    return x


def constants(constraint: Constraint, like: Tensor) -> tuple[Any, Any]:
    """Weights and capacity for operators on a tensor (*batch, n). On a device they are kept with the constraint:
    copying them there in every call would make it wait."""
    weights, capacity = constraint.weights_of(like.shape[-1]), constraint.capacity
    if not like.is_cuda:
        return weights, capacity
    key = like.device.index, like.shape[-1]
    event = (*key, "copied")
    copies = constraint.copies.get(key)
    if torch.compiler.is_compiling():
        return copies or (_sent(weights, like.device), _sent(capacity, like.device))
    capturing = torch.cuda.is_current_stream_capturing()
    if copies is None:
        if capturing:
            raise RuntimeError(
                "weights and capacity are not on the device yet, and cannot go there while a CUDA graph is captured; "
                "make one call with this constraint, and a theta of this shape, before"
            )
        with torch.inference_mode(False):
            copies = _sent(weights, like.device), _sent(capacity, like.device)
        if type(copies[0]) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(copies[0]):
            constraint.copies[key] = copies
            constraint.copies[event] = torch.cuda.current_stream(like.device).record_event()
    elif not capturing and event in constraint.copies:  # by another stream, perhaps
        if constraint.copies[event].query():
            del constraint.copies[event]
        else:
            torch.cuda.current_stream(like.device).wait_event(constraint.copies[event])
    return copies


def _sent(x: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(x).to(device, non_blocking=True)


def uniforms(rng: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers in [0, 1) from a torch Generator, or from torch's global one."""
    if rng is not None and not isinstance(rng, torch.Generator):
        raise TypeError(
            f"rng must be a torch.Generator or None for torch tensors, got {type(rng).__name__}; "
            "for a seed use torch.Generator(theta.device).manual_seed(seed)"
        )
    if rng is not None and rng.device.type != like.device.type:
        raise ValueError(
            f"rng is a generator on {rng.device} and theta is on {like.device}; use torch.Generator(theta.device)"
        )
    return torch.rand(shape, generator=rng, dtype=like.dtype, device=like.device)
