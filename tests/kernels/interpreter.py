"""Triton's interpreter, faster, and watched. What is private in Triton is named here alone."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

_GRANULE = 4  # bytes
_GAP = 4096  # bytes between arrays
_MANY = -1  # programs


@contextlib.contextmanager
def faster() -> Iterator[None]:
    """3.5 times: what the interpreter works out again and again is worked out once. Nothing, without it or with
    another version of it."""
    if not importlib.util.find_spec("triton") or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    is_builtin, semantic = getattr(tl.core, "is_builtin", None), getattr(interpreter, "interpreter_semantic", None)
    if None in (replace, scope, is_builtin, semantic):
        yield
        return

    def replace_once(function: Any) -> Any:
        """Its own functions are put into triton.language for each launch, and once more for each function that a kernel
        calls. The second does nothing where the first was done."""
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        return replace(function) if any(is_builtin(x.load) for x in languages) else scope()

    numpy_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type_once(dtype: Any) -> Any:
        """It makes a table of all types for each question."""
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    make_block, blocks = tl.core.block_type.__init__, dict[Any, Any]()

    def block_once(self: Any, element: Any, shape: Any) -> None:
        key = str(element), *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element, shape)
            self.sizes = tl.core.tuple([tl.constexpr(size) for size in self.shape]), tl.constexpr(self.numel)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    no_sizes = tl.core.tuple([]), tl.constexpr(1)

    def tensor_of_sizes(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.sizes if type.is_block() else no_sizes

    broadcast = type(semantic).broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        shapes = [x.type.shape.values if x.type.is_block() else None for x in (left, right)]
        return (left, right) if shapes[0] == shapes[1] else broadcast(self, left, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
        patch.setattr(tl.core.block_type, "__init__", block_once)
        patch.setattr(tl.core.tensor, "__init__", tensor_of_sizes)
        patch.setattr(type(semantic), "broadcast_impl_value", broadcast_if_needed)
        yield


class Fault(Exception):
    """What a program must not do."""


class Watch:
    """Looks at every access to memory, of all launches while it is on.

    Each array of a launch stands alone, far from any other, and an access outside of all arrays, or across elements, is
    a fault. So are these, within one launch:

    - A program reads or writes what another one wrote, or writes what another one reads, or either of what others add
      to by atomics. In the interpreter one program runs after the other, on a device at any time.
    - A volatile load of what another program wrote, if it is written more than once, or in parts: then it is not clear
      what arrives. One of what another program writes later is like any other load.
    - A volatile load of ABSENT. A program may only wait for programs that started before it, so for it all is there.
    - An atomic compare-and-swap, which is not looked at.

    If there is no fault, then whatever the device does, each volatile load finds either what is there in the end, or
    ABSENT. With ``late`` it is ABSENT so often, until it is found for the first time: all that can happen on a device.

    Args:
        late: how probable it is that a cell of another program is not there yet.
    """

    def __init__(self, late: float = 0.0) -> None:
        self.late, self.rng = late, np.random.default_rng(0)
        self.launches = self.received = self.waits = 0

    def __enter__(self) -> Watch:
        from triton.runtime import interpreter

        from knapgrad.kernels.triton import tiles

        self.absent = tiles.ABSENT.value
        self.patch, builder = pytest.MonkeyPatch(), interpreter.InterpreterBuilder
        plain = {
            name: getattr(builder, name)
            for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "set_grid_idx")
        }
        given = interpreter.GridExecutor._init_args_hst

        def load(builder: Any, address: Any, mask: Any, *rest: Any) -> Any:
            found = plain["create_masked_load"](builder, address, mask, *rest)
            is_volatile = rest[-1]
            self._receive(address, mask, found) if is_volatile else self._load(address, mask)
            return found

        def store(builder: Any, address: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._store(address, mask)
            return plain["create_masked_store"](builder, address, value, mask, *rest)

        def atomic(builder: Any, operation: Any, address: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._atomic(address, mask)
            return plain["create_atomic_rmw"](builder, operation, address, value, mask, *rest)

        def place(builder: Any, *index: int) -> None:
            plain["set_grid_idx"](builder, *index)
            self.program += 1
            self.found[:] = False

        def begin(executor: Any, positional: Any, named: Any) -> Any:
            return self._begin(executor.fn.__name__, *given(executor, positional, named))

        def end(*_: Any) -> None:
            self._end()

        def swap(*_: Any) -> None:
            self._fault("swaps")

        hooks = {"create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": atomic}
        hooks["create_atomic_cas"] = swap
        for name, hook in (hooks | {"set_grid_idx": place}).items():
            self.patch.setattr(builder, name, hook)
        self.patch.setattr(interpreter.GridExecutor, "_init_args_hst", begin)
        self.patch.setattr(interpreter.GridExecutor, "_restore_args_dev", end)
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def _begin(self, kernel: str, positional: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Tensors that overlap are moved together, all others apart."""
        import torch

        self.kernel, self.program = kernel, 0
        tensors = [x for x in (*positional, *named.values()) if isinstance(x, torch.Tensor)]
        regions: list[list[int]] = []
        for first, last in sorted(_span(x) for x in tensors):
            if regions and first < regions[-1][1]:
                regions[-1][1] = max(regions[-1][1], last)
            elif first < last:
                regions.append([first, last])
        self.homes, self.kept = regions, []
        starts = []
        for first, last in regions:
            memory = torch.zeros(last - first + 2 * _GAP, dtype=torch.uint8)
            shift = _GAP + (first - memory.data_ptr() - _GAP) % 64  # aligned as before
            self.kept.append((memory, shift))
            starts.append(memory.data_ptr() + shift)
            ctypes.memmove(starts[-1], first, last - first)

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.numel() == 0:
                return x
            at = next(i for i, (first, last) in enumerate(regions) if first <= x.data_ptr() < last)
            memory, shift = self.kept[at]
            storage, offset = memory.untyped_storage(), shift + x.data_ptr() - regions[at][0]
            assert offset % x.itemsize == 0
            return torch.tensor([], dtype=x.dtype).set_(storage, offset // x.itemsize, x.size(), x.stride())

        order = np.argsort(starts)
        self.starts = np.array(starts, np.int64)[order]
        sizes = np.array([last - first for first, last in regions], np.int64)[order]
        self.ends = self.starts + sizes
        counts = -(-sizes // _GRANULE)
        self.offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if len(counts) else counts
        total = int(counts.sum())
        self.writer, self.reader, self.adder = (np.zeros(total, np.int32) for _ in range(3))
        self.stores, self.width = np.zeros(total, np.int32), np.zeros(total, np.int32)
        self.sent, self.found = np.zeros((2, total), bool)
        self.launches += 1
        return [moved(x) for x in positional], {name: moved(x) for name, x in named.items()}

    def _end(self) -> None:
        for (first, last), (memory, shift) in zip(self.homes, self.kept):
            ctypes.memmove(first, memory.data_ptr() + shift, last - first)

    def _fault(self, what: str) -> None:
        raise Fault(f"program {self.program} of {self.kernel} {what}")

    def _cells(self, address: Any, mask: Any) -> np.ndarray:
        """The numbers of the granules (lanes, granules per element) of those lanes."""
        width = address.get_element_ty().primitive_bitwidth // 8
        at = address.data[mask.data.astype(bool)].astype(np.int64)
        region = np.searchsorted(self.starts, at, "right") - 1
        if (region < 0).any() or (at + width > self.ends[region]).any():
            self._fault("leaves its arrays")
        if (at % width).any():
            self._fault("goes across elements")
        first = self.offsets[region] + (at - self.starts[region]) // _GRANULE
        return first[:, None] + np.arange(max(width // _GRANULE, 1))

    def _others(self, who: np.ndarray) -> np.ndarray:
        return (who != 0) & (who != self.program)

    def _load(self, address: Any, mask: Any) -> None:
        at = self._cells(address, mask)
        if self._others(self.writer[at]).any():
            self._fault("reads what another one writes")
        if self._others(self.adder[at]).any():
            self._fault("reads what others add to")
        self.reader[at] = np.where(self._others(self.reader[at]), _MANY, self.program)

    def _store(self, address: Any, mask: Any) -> None:
        at = self._cells(address, mask)
        if any(self._others(who[at]).any() for who in (self.writer, self.reader, self.adder)):
            self._fault("writes what another one reads or writes")
        if self.sent[at].any():
            self._fault("writes again what was received")
        self.writer[at], self.width[at] = self.program, at.shape[1]
        np.add.at(self.stores, at, 1)

    def _atomic(self, address: Any, mask: Any) -> None:
        at = self._cells(address, mask)
        if any(self._others(who[at]).any() for who in (self.writer, self.reader)):
            self._fault("adds to what another one reads or writes")
        self.adder[at] = np.where(self._others(self.adder[at]), _MANY, self.program)

    def _receive(self, address: Any, mask: Any, found: Any) -> None:
        """A cell that was found stays found."""
        at, lanes = self._cells(address, mask), mask.data.astype(bool)
        if self._others(self.adder[at]).any():
            self._fault("reads what others add to")
        values, writers = found.data[lanes], self.writer[at[:, 0]]
        if (values == self.absent).any():
            self._fault("waits for what no program before it has sent")
        is_sent, early = self._others(writers), at[writers == 0]
        if (self.stores[at[is_sent]] > 1).any() or (self.width[at[is_sent]] != at.shape[1]).any():
            self._fault("receives what is written more than once, or in parts")
        self.reader[early] = np.where(self._others(self.reader[early]), _MANY, self.program)
        self.sent[at[is_sent]] = True
        self.received += int(is_sent.sum())
        is_late = is_sent & ~self.found[at[:, 0]] & (self.rng.random(len(values)) < self.late)
        self.found[at[~is_late]] = True
        self.waits += int(is_late.sum())
        if is_late.any():
            found.data = found.data.copy()
            found.data[lanes] = np.where(is_late, self.absent, values)


def _span(x: Any) -> tuple[int, int]:
    """The bytes of a tensor, from where to where."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * step for size, step in zip(x.size(), x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize
