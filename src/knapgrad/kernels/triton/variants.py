"""What a kernel is compiled for: the functions of a regularizer, and what a tangent sweep follows, as Triton functions.

Kernels take them as constants (VALUE, PROB, DPROB, SOURCE), so a new regularizer needs nothing here, and a name that is
not in the tables is a KeyError.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton

from knapgrad import regularizers
from knapgrad.kernels.triton import math


def _compiled(function: Callable[..., Any]) -> Any:
    return triton.jit(regularizers.rebind(function, math))


@cache
def functions(regularizer: str) -> dict[str, Any]:
    """VALUE, PROB and DPROB of a regularizer."""
    return {name.upper(): _compiled(f) for name, f in regularizers.functions(regularizer).items()}


@cache
def source(direction: str | None) -> Any:
    """SOURCE of a tangent sweep; None where there is none."""
    return None if direction is None else _compiled(regularizers.DIRECTIONS[direction])
