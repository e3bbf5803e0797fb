"""Launches that skip Triton's JIT, which looks at every argument for longer than a small kernel runs.

The JIT returns a compiled kernel, which can be launched again with addresses instead of tensors. It is for arguments of
the same types, numbers and alignment; others go through the JIT. So does everything where a version of Triton returns
something else, as its interpreter does.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from knapgrad.kernels.compile_log import mention
from knapgrad.torch import private

ALIGNED = 15  # bits that are 0 in the addresses that a kernel may load vectors from


def on(device: int) -> Any:
    """A context in which Triton launches there: it does on the current device. (-1 is the CPU, for its interpreter.)"""
    return nullcontext() if device < 0 or device == private.current_device() else torch.cuda.device(device)


class Kept:
    """What is worked out once for batches of one shape, and kept with a lattice.

    Attributes:
        ready: an event, after which its arrays are there; None if they are known to be.
        captured: whether a CUDA graph reads its arrays, so that it must stay.
    """

    ready: Any = None
    captured: bool = False


class Launch(Kept):
    """A kernel with all of its arguments but those that change from call to call.

    Args:
        kernel: a Triton function.
        programs: of the grid, along one axis or several.
        arguments: what stays the same, by name; tensors are kept alive.
        settings: how it is compiled and launched, such as num_warps.
        scratch: names, types and lengths of arrays that nobody else needs.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, ...],
        arguments: dict[str, Any],
        settings: dict[str, Any],
        scratch: dict[str, tuple[torch.dtype, int]],
    ) -> None:
        self.kernel, self.arguments, self.settings, self.scratch = kernel, arguments, settings, scratch
        self.grid = programs if isinstance(programs, tuple) else (programs,)
        self.places = {name: place for place, name in enumerate(kernel.arg_names)}
        self.template = [_address(arguments.get(name)) for name in self.places]
        self.offsets, self.bytes = {}, 0
        for name, (dtype, length) in scratch.items():
            self.offsets[name] = self.bytes
            self.bytes += -(-length * dtype.itemsize // 256) * 256
        self.compiled: Any = None

    def __call__(self, given: dict[str, Any]) -> None:
        """Launches it on the current stream of theta's device. What is given may also replace a scratch array."""
        device = given["theta"].get_device()
        if device < 0 or device == private.current_device():
            self._run(device, given)
        else:
            with torch.cuda.device(device):
                self._run(device, given)

    def series(self, given: dict[str, Any], **numbers: range) -> None:
        """Launches it for each of these numbers in turn, without a second look at what is given. It has no scratch."""
        device, places = given["theta"].get_device(), [self.places[name] for name in numbers]
        arguments: list[Any] | None = None
        with on(device):
            for turn in zip(*numbers.values()):
                if arguments is None:
                    self._run(device, given | dict(zip(numbers, turn)))
                    arguments = self._addresses(given["theta"], given)
                    continue
                for place, number in zip(places, turn):
                    arguments[place] = number
                self.compiled(*arguments, stream=private.raw_stream(device))

    def _run(self, device: int, given: dict[str, Any]) -> None:
        theta = given["theta"]
        scratch = torch.empty(self.bytes, dtype=torch.uint8, device=theta.device) if self.bytes else theta
        arguments = self._addresses(scratch, given)
        if arguments is None:
            self._compile(scratch, given)
        else:
            self.compiled(*arguments, stream=private.raw_stream(device))

    def _addresses(self, scratch: Tensor, given: dict[str, Any]) -> list[Any] | None:
        """All arguments in order; None without a compiled kernel, or if they are not aligned as it wants them."""
        if self.compiled is None:
            return None
        arguments, places, begin, bits = self.template.copy(), self.places, scratch.data_ptr(), 0
        for name, offset in self.offsets.items():
            arguments[places[name]] = begin + offset
        for name, x in given.items():
            if isinstance(x, Tensor):
                x = x.data_ptr()
                bits |= x
            arguments[places[name]] = x
        return None if bits & ALIGNED else arguments

    def _compile(self, scratch: Tensor, given: dict[str, Any]) -> None:
        arrays = {
            name: scratch[self.offsets[name] :][: length * dtype.itemsize].view(dtype)
            for name, (dtype, length) in self.scratch.items()
        }
        begin = perf_counter()
        found = self.kernel[self.grid](**self.arguments | arrays | given, **self.settings)
        if found is not None:
            mention(self.kernel, str(given["theta"].dtype).removeprefix("torch."), perf_counter() - begin)
        tensors = [x for x in given.values() if isinstance(x, Tensor)]
        if found is not None and not any(x.data_ptr() & ALIGNED for x in tensors):
            self.compiled = found[(*self.grid, 1, 1)[:3]]


def _address(x: Any) -> Any:
    return x.data_ptr() if isinstance(x, Tensor) else x
