"""What tests of kernels share: scratch full of NaN, and Triton's interpreter at nearly twice its speed."""

from __future__ import annotations

import importlib.util
import sys
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


@pytest.fixture
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of torch: a result that depends on it is wrong."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)  # else torch does not fill it
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


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

    numpy_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type_once(dtype: Any) -> Any:
        """It makes a table of all types for each question."""
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
        yield


#: tests that look for sums beyond 32 bits, some of every kind of kernel
WITH_OVERFLOW = (
    "test_the_edges", "test_many_tiles", "test_every_regularizer", "test_several_tiles",
    "test_the_frontier_against_the_reference",
)  # fmt: skip


@pytest.fixture(autouse=True)
def overflow_is_looked_for_in_some_tests(
    request: pytest.FixtureRequest, triton_language_is_replaced_once_per_launch: None
) -> Iterator[None]:
    """The interpreter does every sum of integers once more in 64 bits, which is a third of its time."""
    builder = getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not hasattr(options, "sanitize_overflow"):  # no Triton, or another version of it
        yield
        return
    wanted = request.config.getoption("--all-cases") or request.node.originalname in WITH_OVERFLOW
    object.__setattr__(options, "sanitize_overflow", wanted)
    yield
    object.__setattr__(options, "sanitize_overflow", True)
