"""The CPU kernels, in Numba: every sweep of :mod:`knapgrad.reference`, fused per group of instances, in SIMD."""

from knapgrad.kernels.numba.launch import (
    entropy,
    entropy_grad,
    frontier,
    frontier_vjp,
    log_prob,
    log_prob_vjp,
    mode,
    operator,
    relax,
    sample,
    solve,
    tabulate,
    vjp,
)

__all__ = [
    "entropy",
    "entropy_grad",
    "frontier",
    "frontier_vjp",
    "log_prob",
    "log_prob_vjp",
    "mode",
    "operator",
    "relax",
    "sample",
    "solve",
    "tabulate",
    "vjp",
]
