"""All calls of torch that are not public. Each is looked up once, and has a slower public replacement."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from knapgrad.lattice import Lattice


def _find(*path: str) -> Any:
    found: Any = torch._C
    for name in path:
        found = getattr(found, name, None)
    return found


#: What was found, by its name; None where this torch does not have it.
FOUND: dict[str, Any] = {
    "transforms": _find("_are_functorch_transforms_active"),
    "is_wrapped": _find("_functorch", "is_functorch_wrapped_tensor"),
    "below_autograd": _find("_AutoDispatchBelowAutograd"),
    "is_special": _find("_dispatch_isTensorSubclassLike"),
    "keys": _find("_dispatch_keys"),
    "level": forward_ad if hasattr(forward_ad, "_current_level") else None,
    "profiler": profiler if hasattr(profiler, "_is_profiler_enabled") else None,
    "stream": _find("_cuda_getCurrentRawStream"),
    "device": _find("_cuda_getDevice"),
    "apply": getattr(super(torch.autograd.Function, torch.autograd.Function), "apply", None),
    "version": getattr(Tensor, "_version", None),
    "base": getattr(Tensor, "_base", None),
}


def is_transforming() -> bool:
    """Whether a transform of torch.func may be active. Replacement: yes; what works under one works without."""
    return FOUND["transforms"] is None or FOUND["transforms"]()


def is_wrapped(x: Tensor) -> bool:
    """Whether x belongs to a transform of torch.func, and must not outlive it. Replacement: if one may be active."""
    return is_transforming() if FOUND["is_wrapped"] is None else FOUND["is_wrapped"](x)


def below_autograd() -> AbstractContextManager[Any]:
    """Operators called inside do not record a derivative."""
    return torch.no_grad() if FOUND["below_autograd"] is None else FOUND["below_autograd"]()


#: Types that operators take beside tensors. A look into a set is shorter than isinstance(x, Tensor), which is slow for
#: what is no tensor.
CONSTANTS = {Lattice, np.ndarray, str, bool, int, float, type(None)}


def arrays_of(arguments: tuple[Any, ...]) -> list[Any] | None:
    """The arguments with arrays in place of tensors, if the dispatcher would only call the kernel for the CPU; None if
    not. Skipping it saves as much time as a small kernel takes. Replacement: None."""
    is_special, profiler, arrays = FOUND["is_special"], FOUND["profiler"], []
    if is_special is None or (profiler is not None and profiler._is_profiler_enabled):
        return None
    for x in arguments:
        if type(x) not in CONSTANTS:
            if not x.is_cpu or is_special(x):  # a subclass, in a transform, in a mode, or sparse
                return None
            x = x.numpy(force=True)  # it computes tensors that are to be negated or filled with zeros first
        arrays.append(x)
    return arrays


def is_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would only call the kernel for CUDA devices; some tensors may be on the CPU. Replacement:
    no."""
    is_special, keys = FOUND["is_special"], FOUND["keys"]
    if is_special is None or keys is None:
        return False
    for x in arguments:
        if type(x) in CONSTANTS:
            continue
        if is_special(x) or not (x.is_cpu or (x.is_cuda and keys(x) == _plain_keys())):
            return False
    return True


@cache
def _plain_keys() -> Any:
    """Of plain tensors on a CUDA device. Those that are to be negated or filled with zeros first have more."""
    return FOUND["keys"](torch.empty(0, device="cuda"))


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives may be computed. Replacement: yes."""
    return FOUND["level"] is None or FOUND["level"]._current_level >= 0


def is_profiling() -> bool:
    """Whether a profiler records names. Replacement: no; only the names of kernels called directly are missing."""
    return FOUND["profiler"] is not None and FOUND["profiler"]._is_profiler_enabled


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its apply, without the checks for transforms, which the caller has made."""
    return function.apply if FOUND["apply"] is None else super(torch.autograd.Function, function).apply  # type: ignore[misc]


def raw_stream(device: int) -> int:
    """The current stream of a CUDA device, as a number. Replacement: from a Stream, which takes ten times as long."""
    return torch.cuda.current_stream(device).cuda_stream if FOUND["stream"] is None else FOUND["stream"](device)


def current_device() -> int:
    """The current CUDA device. Replacement: the same, after a look whether CUDA is in use."""
    return torch.cuda.current_device() if FOUND["device"] is None else FOUND["device"]()


def version_of(x: Tensor) -> object:
    """Changes whenever x is written to. Replacement: always."""
    return object() if FOUND["version"] is None else x._version


def base_of(x: Tensor) -> Tensor | None:
    """The tensor that x is a view of. Replacement: none."""
    return None if FOUND["base"] is None else x._base


GENERATORS: dict[int, torch.Generator] = {}  # that compiled functions draw from


def handle_of(generator: torch.Generator) -> int:
    """While torch.compile traces: a number for a generator. The compiled function is for that generator alone."""
    handle = id(generator)  # guarded
    _remember(handle)
    return handle


def _remember(handle: int) -> None:
    GENERATORS[handle] = ctypes.cast(handle, ctypes.py_object).value


_remember._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while tracing, not traced
