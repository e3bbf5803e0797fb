"""torch tensors: the functions of :class:`knapgrad.backends.Backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapgrad import backends
from knapgrad.constraints import Constraint
from knapgrad.constraints.base import first_equal
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Regularizer
from knapgrad.torch import operators, private
from knapgrad.torch.operators import entropy as entropy
from knapgrad.torch.operators import operator as operator
from knapgrad.torch.operators import relax as relax
from knapgrad.torch.registration import as_tensor, open_integer

where, broadcast_to, concatenate = torch.where, torch.broadcast_to, torch.cat
_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def sample(theta: Tensor, uniforms: Tensor, lattice: Lattice, gamma: Any, regularizer: str) -> Tensor:
    return operators.sample(theta, uniforms, lattice, gamma, regularizer, None)


def rsample(theta: Tensor, uniforms: Tensor, lattice: Lattice, gamma: Any, regularizer: str, table: Any) -> Tensor:
    """Selections (samples, *batch, n), with the vector-Jacobian product of the mean as their gradient."""
    problem = lattice, gamma, regularizer
    with torch.no_grad():
        drawn = operators.sample(theta, uniforms, *problem, table)
    return operators.surrogate(theta, drawn.to(theta.dtype), *problem)


@torch.no_grad()
def solve(theta: Tensor, lattice: Lattice) -> Tensor:
    return operators.solve(theta, lattice)


def log_prob(theta: Tensor, y: Tensor, lattice: Lattice, gamma: Any, regularizer: str) -> Tensor:
    return operators.log_prob(theta, y, lattice, gamma, regularizer, None)


def frontier(theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str) -> Tensor:
    return operators.frontier(theta, lattice, gamma, regularizer, lattice.reach + 1)


def is_floating(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64, *_HALF)


def differentiates(*tensors: Any) -> bool:
    """Whether a gradient will be asked for."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def take(rows: Tensor, index: Any) -> Tensor:
    index = torch.as_tensor(index, device=rows.device)
    return rows.gather(-1, index.expand(*rows.shape[:-1], index.shape[-1]))


def detached(x: Tensor) -> Tensor:
    return x.detach()


def numbers(x: Tensor) -> np.ndarray:
    if x.is_meta:
        raise TypeError("it is on the meta device, and has no values")
    try:
        x = x.detach().cpu()
        return (x.double() if x.dtype is torch.bfloat16 else x).numpy()  # NumPy does not know the type
    except RuntimeError:
        raise TypeError(
            "it belongs to a transform such as torch.func.vmap; give it a batch dimension instead"
        ) from None


def known(x: Tensor) -> np.ndarray | None:
    if x.is_cuda or x.is_meta or torch.compiler.is_compiling() or private.is_transforming():
        return None
    return numbers(x)


def unchanging(x: Tensor) -> None:
    return None


def version(x: Tensor) -> Any:
    return object() if x.is_inference() else private.version_of(x)


def integers(x: Any) -> Tensor | None:
    """Numbers that are written in compiled code become tensors too."""
    if isinstance(x, int):
        return open_integer(x)
    if isinstance(x, tuple):
        return torch.stack([open_integer(number) for number in x])
    if not isinstance(x, Tensor):
        x = as_tensor(x) if isinstance(x, np.ndarray) else torch.as_tensor(x)
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool:
        return None
    return x if x.dtype in (torch.int32, torch.int64) else x.long()


def open_number(x: float) -> Tensor:
    """A number that torch.compile may keep open."""
    return open_integer(x) if isinstance(x, int) else x * torch.ones((), dtype=torch.float64)


def factor(regularizer: Regularizer) -> Any:
    return as_tensor(regularizer._strength) if torch.compiler.is_compiling() else regularizer.gamma


def strength(gamma: Any, theta: Tensor) -> Any:
    return gamma


def requires_grad(x: Tensor) -> bool:
    return x.requires_grad


def computable(x: Tensor) -> Tensor:
    """Half precision is computed in float32."""
    return x.float() if x.dtype in _HALF else x


def double(x: Tensor) -> Tensor:
    return x.double()


def exact() -> AbstractContextManager[Any]:
    return nullcontext()


def sum_double(x: Tensor) -> Tensor:
    """The sum over items, in float64."""
    return x.sum(-1, dtype=torch.float64)


def as_type(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dtype == like.dtype else x.to(like.dtype)


def as_total(x: Tensor, like: Tensor) -> Tensor:
    """Under autocast, sums such as losses are float32, as torch's own are."""
    is_half = like.dtype in _HALF
    return x.float() if is_half and torch.is_autocast_enabled(like.device.type) else as_type(x, like)


def array(x: Any, like: Tensor, name: str) -> Tensor:
    """Numbers or an array of any framework as a tensor on the device of ``like``."""
    if isinstance(x, (int, float)):
        return like.new_full((), x)  # without a copy from the host, for which the call would wait
    if not isinstance(x, Tensor):
        x = x if isinstance(x, np.ndarray) else backends.concrete(x, like, name)
        return torch.as_tensor(as_tensor(x), device=like.device)
    if x.device != like.device and (x.dim() > 0 or not x.is_cpu):
        raise ValueError(f"{name} is on {x.device} and theta on {like.device}: use {name}.to(theta.device)")
    return x


def lattice(constraint: Constraint, theta: Tensor) -> Lattice:
    n = theta.shape[-1]
    if theta.is_cpu and type(n) is int:  # a tensor while torch.jit traces
        plain = constraint.lattice(n)
        if type(plain.weights) is np.ndarray:  # the same whether torch.compile traces or not: asking takes time
            return plain
    if torch.compiler.is_compiling():
        return _lattice_in_graph(constraint, theta)
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError("knapgrad's operations cannot be traced by torch.jit; use torch.export")
    if theta.is_cpu or theta.is_meta:
        return constraint.lattice(theta.shape[-1])
    if not theta.is_cuda:
        raise NotImplementedError(
            f"theta is on {theta.device}, and knapgrad runs on CPU and CUDA devices; use theta.cpu()"
        )
    key = theta.get_device(), theta.shape[-1]
    copy = constraint.copies.get(key)
    return _lattice_on_device(constraint, theta, key) if copy is None or (*key, "event") in constraint.copies else copy


def _lattice_in_graph(constraint: Constraint, theta: Tensor) -> Lattice:
    plain = constraint.lattice(theta.shape[-1])
    if not isinstance(plain.weights, np.ndarray):
        return _sent(plain, theta.device)
    if not theta.is_cuda:
        return plain
    copy = constraint.copies.get((theta.device.index, theta.shape[-1]))
    return _sent(plain, theta.device) if copy is None else copy


def _lattice_on_device(constraint: Constraint, theta: Tensor, key: tuple[int, int]) -> Lattice:
    """The arrays are kept with the constraint, and with all that are equal and first used on the same stream: copying
    them in every call would wait for the device. An event tells other streams when they are there."""
    capturing, event, copies = torch.cuda.is_current_stream_capturing(), (*key, "event"), constraint.copies
    copy = copies.get(key)
    if copy is None:
        if capturing:
            raise RuntimeError(
                "weights and capacity are not on the device yet, and cannot go there while a CUDA graph is captured; "
                "make one call with this constraint, and a theta of this shape, before"
            )
        device, n = key
        shared = first_equal(constraint, n, (device, private.raw_stream(device))).copies
        copy = shared.get(key)
        if copy is None:
            with torch.inference_mode(False):
                copy = _sent(constraint.lattice(n), theta.device)
            if type(copy.weights) is not Tensor or private.is_wrapped(copy.weights):
                return copy
            shared[event], shared[key] = torch.cuda.current_stream(theta.device).record_event(), copy
        if (sent := shared.get(event)) is not None:
            copies[event] = sent
        copies[key] = copy
    if not capturing and (sent := copies.get(event)) is not None:
        if sent.query():
            copies.pop(event, None)
        else:
            torch.cuda.current_stream(theta.device).wait_event(sent)
    return copy


def _sent(plain: Lattice, device: torch.device) -> Lattice:
    def sent(x: Any) -> Any:
        if x is None:
            return None
        return (as_tensor(x) if isinstance(x, np.ndarray) else x).to(device, non_blocking=True)

    arrays = {"weights": sent(plain.weights), "capacity": sent(plain.capacity), "slack": sent(plain.slack)}
    return plain.replace(**arrays, sizes=plain.sizes)


def differentiate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        result = function(x)
    return torch.autograd.grad(result, x, torch.zeros_like(result))[0]


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
    if rng is not None and torch.compiler.is_compiling():
        return operators.uniforms(like, list(shape), private.handle_of(rng))
    if rng is None:
        return torch.rand(shape, dtype=like.dtype, device=like.device)  # torch.export cannot take generator=None
    return torch.rand(shape, generator=rng, dtype=like.dtype, device=like.device)
