"""Which kernel runs an operation of :mod:`knapgrad.kernels.operations`, and what it is compiled for."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from knapgrad.kernels.operations import OPERATIONS


class Kernel(NamedTuple):
    """A kernel for whole instances."""

    name: str
    tables: int  # per program
    constants: dict[str, Any]  # SOURCE is the name of a direction

    @property
    def is_sweep(self) -> bool:
        return self.name == "operator_kernel"


@cache
def kernel_of(name: str) -> Kernel:
    """That of an operation. One sweep serves all that need no more; one kernel draws, solves and finds the mode."""
    kernel, row = OPERATIONS[name].kernel, OPERATIONS[name]
    if kernel in ("operator", "tangent"):
        constants = {"SOURCE": row.direction, "RELAXED": row.backwards, "KEEP": "tables" in row.results}
        return Kernel("operator_kernel", row.tables, constants)
    if kernel == "log_prob":
        return Kernel("log_prob_kernel", row.tables, {"BACKWARDS": row.backwards})
    return Kernel("sample_kernel", row.tables, {"DRAW": kernel == "sample", "HARDEN": kernel == "mode"})
