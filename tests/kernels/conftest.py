"""What tests of kernels share: scratch full of NaN, and a faster interpreter of Triton."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import interpreter
import pytest

from knapgrad.kernels.numba import threads


@pytest.fixture
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call finds NaN in its scratch: a cell that is read must have been written."""
    plain = threads.scratch

    def poisoned(*arguments: Any) -> Any:
        memory = plain(*arguments)
        frame = memory.frame.copy()
        memory.frame.base.fill(0xFF)  # NaN in every type, and -1
        memory.frame[:] = frame
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
def faster_interpreter() -> Iterator[None]:
    with interpreter.faster():
        yield


#: tests that look for sums beyond 32 bits, some of every kind of kernel
WITH_OVERFLOW = (
    "test_the_edges", "test_many_tiles", "test_every_regularizer", "test_several_tiles",
    "test_the_frontier_against_the_reference", "test_sums_beyond_32_bits_are_found",
)  # fmt: skip


@pytest.fixture(autouse=True)
def overflow_is_looked_for_in_some_tests(request: pytest.FixtureRequest, faster_interpreter: None) -> Iterator[None]:
    """The interpreter does every sum of integers once more in 64 bits, which is a third of its time, and compares the
    two if it debugs."""
    builder = getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not hasattr(options, "sanitize_overflow"):  # no Triton, or another version of it
        yield
        return
    wanted = request.config.getoption("--all-cases") or request.node.originalname in WITH_OVERFLOW
    for name in ("sanitize_overflow", "debug"):
        object.__setattr__(options, name, wanted)
    yield
    object.__setattr__(options, "sanitize_overflow", True)
    object.__setattr__(options, "debug", False)
