"""Every kind of constraint is a row here, and every test of an operation sees it: how problems of that kind are drawn,
a problem that is typical of it, and the cases at its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import boxes
import choices
import instances
from backends import Backend
from boxes import Boxes, box_problems
from choices import choice_problems
from instances import Problem

_THETA, _WEIGHTS = np.array([0.5, -0.25, 1.0, 0.3, -0.6, 0.8]), [2, 3, 1, 0, 2, 4]


class Kind(NamedTuple):
    draw: Callable[..., st.SearchStrategy[Any]]  # see instances.problems for its arguments
    typical: Problem  # without a batch, and with many selections


def _items(name: str, *arguments: Any) -> Kind:
    return Kind(lambda **options: instances.problems(name, **options), Problem(_THETA, *arguments))


def _choices(at_least: int | None, optional: bool) -> Kind:
    typical = replace(choices.EDGES["no batch"], capacity=6, at_least=at_least, optional=optional)
    return Kind(lambda **options: choice_problems(at_least is not None, optional, **options), typical)


KINDS: dict[str, Kind] = {
    "knapsack": _items("knapsack", _WEIGHTS, 6),
    "top-k": _items("top-k", None, 3),
    "at least": _items("at least", _WEIGHTS, 6, 1.0, 4),
    "choices": _choices(None, False),
    "choices, at least": _choices(4, False),
    "optional choices": _choices(None, True),
    "optional choices, at least": _choices(4, True),
    "budgets": Kind(box_problems, Boxes(_THETA, [[1] * 6, _WEIGHTS], [3, 6])),
}

EDGES: dict[str, Problem] = {
    **instances.EDGES,
    **{f"choices, {name}": problem for name, problem in choices.EDGES.items()},
    **{f"budgets, {name}": problem for name, problem in boxes.EDGES.items()},
}


def problems(kind: str, **options: Any) -> st.SearchStrategy[Any]:
    return KINDS[kind].draw(**options)


def is_compiled(case: str, dtype: str) -> bool:
    """Whether a case, of that name, has kernels that tests compile, of two seconds each: for choices and for budgets
    those of float64, and of float32 those of Gini. JAX's scan has none."""

    def has(*words: str) -> bool:
        return any(word in f"{case}-{dtype}" for word in words)

    return has("scan") or not (has("float32") and has("choices", "option", "budget") and has("shannon", "tsallis"))


def compiled_dtypes(backend: Backend, name: str, regularizer: str) -> list[str]:
    return [dtype for dtype in backend.wide_dtypes if is_compiled(f"{backend.name}-{name}-{regularizer}", dtype)]
