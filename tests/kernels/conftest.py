"""What tests of kernels share: scratch full of NaN, and Triton's interpreter at nearly twice its speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from knapgrad.kernels.numba import threads


@pytest.fixture
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call finds NaN in its scratch: a cell that is read must have been written."""
    plain = threads.scratch

    def poisoned(*arguments: Any) -> Any:
        memory = plain(*arguments)
        for buffer in memory.buffers:
            buffer.fill(np.nan if buffer.dtype.kind == "f" else 1)
        return memory

    monkeypatch.setattr(threads, "scratch", poisoned)


@pytest.fixture(autouse=True, scope="session")
def triton_language_is_replaced_once_per_launch() -> Iterator[None]:
    """The interpreter puts its own functions into ``triton.language`` for each launch, and once more for each function
    that a kernel calls, which is 40% of its time. The second does nothing where the first was done."""
    if not importlib.util.find_spec("triton"):
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    is_builtin = getattr(tl.core, "is_builtin", None)
    if replace is None or scope is None or is_builtin is None:  # another version of Triton
        yield
        return

    def replace_once(function: Any) -> Any:
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        return replace(function) if any(is_builtin(x.load) for x in languages) else scope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
