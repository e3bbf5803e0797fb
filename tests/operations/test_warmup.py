"""What is compiled ahead, and what is said when a first call has to wait."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import knapgrad as kg
from knapgrad.kernels import compile_log
from knapgrad.kernels.numba import entries, launch
from knapgrad.kernels.numba.variants import regularizer_of


def test_warmup_compiles_what_calls_need_and_draws_nothing(backend, monkeypatch):
    if backend.name == "jax-x64":
        pytest.skip("as jax")
    theta = backend.asarray(np.full((2, 3), np.nan), "float32")
    if backend.name == "numpy":
        np.random.seed(3)  # noqa: NPY002
        state = np.random.get_state()[1].copy()  # noqa: NPY002
    kg.warmup(theta, kg.Knapsack([1, 2, 1], 3), kg.Gini())
    if backend.name == "numpy":
        assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    if backend.is_jax or backend.name == "cuda":
        return

    def refuse(kernel, types, arguments):
        raise AssertionError(f"{kernel.__name__} was not called by warmup for {types}")

    monkeypatch.setattr(launch, "call_first", refuse)
    scores, limit = backend.asarray(np.zeros((4, 3)), "float32"), kg.Knapsack([1, 1, 1], 2)
    y = kg.solve(scores, limit)
    kg.sample(scores, limit, kg.Gini(), rng=backend.rng(0))
    for call in (kg.value, kg.relax, kg.entropy, kg.frontier):
        call(scores, limit, kg.Gini())
    kg.log_prob(scores, y, limit, kg.Gini())
    with pytest.raises(AssertionError, match="was not called"):
        monkeypatch.setattr(entries, "_entries", {})
        kg.relax(scores, kg.Knapsack([1, 1, 1], 2), kg.Gini())


class Kernel:
    """A kernel that is compiled when it is first called."""

    __name__ = "some_kernel"

    def __init__(self):
        self.overloads = {}
        self.calls = []

    def __call__(self, *arguments):
        self.overloads.setdefault(len(arguments), object())
        self.calls.append(arguments)


@pytest.mark.parametrize("limit, said", [(-1.0, True), (60.0, False)])
def test_a_first_call_that_waits_for_the_compiler_says_so_once(limit, said, monkeypatch, caplog):
    monkeypatch.setattr(compile_log, "LONG", limit)
    monkeypatch.setattr(entries, "_entries", {})
    kernel = Kernel()
    with caplog.at_level(logging.WARNING, "knapgrad"):
        types = regularizer_of("gini"), "f"
        entries.call_first(kernel, types, (1, 2))
        entries.entry_of(kernel, types)(1, 2)
    assert kernel.calls == [(1, 2)] * 2  # a kernel without the private entry is called as it is
    assert [record.name for record in caplog.records] == ["knapgrad"] * said
    assert all("some_kernel" in record.getMessage() and "warmup" in record.getMessage() for record in caplog.records)
