"""The kernels, by the names that :mod:`knapgrad.kernels.operations` has for them, and what each takes."""

from typing import Any, NamedTuple

from knapgrad.kernels.numba import quadrature
from knapgrad.kernels.numba.layout import QUADRATURE, TABLE
from knapgrad.kernels.numba.paths import log_prob_kernel, mode_kernel, sample_kernel, solve_kernel
from knapgrad.kernels.numba.sweeps import frontier_kernel, operator_kernel, tangent_kernel


class Kernel(NamedTuple):
    """What it takes after the batch and its groups, in order: ``filled`` and ``backwards`` are flags, ``value`` and
    ``tangent`` one float64 per instance. Of theta's type are ``items`` (batch, n), ``samples`` (samples, batch, n) and
    ``sums`` (samples, batch); of float64 are ``rows`` (batch, capacities)."""

    run: Any
    takes: tuple[str, ...]


KERNELS = {
    TABLE: {
        "operator": Kernel(operator_kernel, ("backwards", "value", "items")),
        "tangent": Kernel(tangent_kernel, ("items", "backwards", "value", "tangent", "items")),
        "sample": Kernel(sample_kernel, ("filled", "samples", "value", "samples")),
        "solve": Kernel(solve_kernel, ("value", "items", "rows")),  # of choices; that of items is a sample
        "mode": Kernel(mode_kernel, ("value", "items")),
        "log_prob": Kernel(log_prob_kernel, ("filled", "samples", "sums", "backwards", "value", "sums", "items")),
        "frontier": Kernel(frontier_kernel, ("rows", "backwards", "rows", "items")),
    }
}
KERNELS[QUADRATURE] = {name: Kernel(run, KERNELS[TABLE][name].takes) for name, run in quadrature.KERNELS.items()}
