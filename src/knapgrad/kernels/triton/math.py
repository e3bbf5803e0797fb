"""The functions that :mod:`knapgrad.regularizers` calls ``xp``, for Triton."""

import triton
import triton.language as tl


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def log1p(x):
    """For x in [0, 1], to one rounding of 1 + x. In float32 x times a polynomial (Chebyshev fit, error 2e-8), whose
    terms are independent of each other."""
    if x.dtype == tl.float64:
        return tl.log(1.0 + x)
    else:
        square = x * x
        low = (0.9999999705406569 - 0.4999950151678725 * x) + square * (0.33319271342500406 - 0.2484436989245085 * x)
        high = (0.191114310805017 - 0.13674769705361184 * x) + square * (0.078361668016809 - 0.02958850739179411 * x)
        fourth = square * square
        return x * (low + fourth * (high + fourth * 0.005253457796776874))
