"""Calls of compiled kernels that skip Numba's dispatcher, which looks at the type of every argument, for as long as a
small kernel runs.

What it finds after that look is private to Numba. Where a version does not have it, the dispatcher is called.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.ma  # which Numba imports in its first call: here a fork waits for that
from numba import typeof

from knapgrad.kernels.compile_log import mention
from knapgrad.kernels.numba.private import is_kept

_entries: dict[Any, Callable[..., None]] = {}
_mentioned: set[Any] = set()  # by the first of several threads that wait for the same kernel


def entry_of(kernel: Any, types: tuple[Any, ...]) -> Callable[..., None] | None:
    """What to call in place of a kernel, for arguments whose types are told apart by ``types``; None before the first
    call."""
    return _entries.get((kernel, types))


def call_first(kernel: Any, types: tuple[Any, ...], arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Calls a kernel; returns its entry."""
    known, begin = len(kernel.overloads), perf_counter()
    kernel(*arguments)
    seconds = perf_counter() - begin
    if len(kernel.overloads) > known and (kernel, types) not in _mentioned:
        _mentioned.add((kernel, types))
        mention(kernel, np.dtype(next(x for x in types if isinstance(x, str))).name, seconds, is_kept(kernel))
    found = kernel.overloads.get(tuple(map(typeof, arguments)))
    return _entries.setdefault((kernel, types), getattr(found, "entry_point", kernel))


def address_of(kernel: Any, types: tuple[Any, ...]) -> int:
    """Of the code of a kernel, compiled for arguments of these types, as other compiled code calls it. There is no
    public way: where a version of Numba differs, an error says so, and JAX runs its scan."""
    kernel.compile(types)
    compiled = kernel.overloads[types]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
