"""``--authors PATH``: time a Numba file of the user's, such as the one that the paper's authors published.

This repository has no copy of that file and cannot know its calling conventions, so PATH names a Python file of
your own with two functions,

    relax(theta, weights, capacity, regularizer, exactly) -> y                (batch, n)
    vjp(theta, z, weights, capacity, regularizer, exactly) -> product         (batch, n)

where theta and z are float64 arrays (batch, n), weights is an int64 array (n,), capacity an int, regularizer one of
"shannon", "gini" and "tsallis" at gamma = 1, and exactly says whether the capacity must be met (top-k). For the
published file that is a short wrapper which imports it; vjp may reuse tables that the last relax has left.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.cases import Instances

Functions = dict[str, Callable[..., np.ndarray]]
EXPECTED = {
    "relax": ("theta", "weights", "capacity", "regularizer", "exactly"),
    "vjp": ("theta", "z", "weights", "capacity", "regularizer", "exactly"),
}


def load(path: Path) -> Functions:
    """The two functions of the file at ``path``, or an exit that says what was found and what was expected."""
    module = import_file(path)
    found = functions(module)
    wrong = [
        f"  {name}({', '.join(names)}): " + ("not there" if name not in found else f"takes ({', '.join(found[name])})")
        for name, names in EXPECTED.items()
        if found.get(name) is None or len(found[name]) != len(names)
    ]
    if wrong:
        listing = "\n".join(f"  {name}({', '.join(names)})" for name, names in found.items()) or "  none"
        raise SystemExit(
            f"--authors: {path} does not have the two functions that are timed.\nMissing:\n" + "\n".join(wrong)
            + f"\nFunctions found there:\n{listing}\n"
            "Write a small file that imports it and defines the two; the top of benchmarks/authors.py says how."
        )  # fmt: skip
    return {name: getattr(module, name) for name in EXPECTED}


def import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SystemExit(f"--authors: there is no file {path}")
    spec = importlib.util.spec_from_file_location("authors_file", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--authors: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Numba looks its functions' modules up
    sys.path.insert(0, str(path.resolve().parent))  # a wrapper imports the file beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"--authors: importing {path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def functions(module: ModuleType) -> dict[str, list[str]]:
    """Names and parameters of the functions a module defines, compiled by Numba or not."""
    found = {}
    for name, member in vars(module).items():
        member = getattr(member, "py_func", member)
        if inspect.isfunction(member) and member.__module__ == module.__name__:
            found[name] = list(inspect.signature(member).parameters)
    return found


def as_torch(theirs: Functions, problem: Instances, regularizer: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The two functions as one differentiable function of a torch tensor."""
    constraint = (problem.weights[0], problem.total, regularizer, problem.exactly)

    class Relax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, theta: torch.Tensor) -> torch.Tensor:
            ctx.theta = theta.detach().numpy().astype(np.float64)
            return torch.from_numpy(np.asarray(theirs["relax"](ctx.theta, *constraint))).to(theta.dtype)

        @staticmethod
        def backward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            product = theirs["vjp"](ctx.theta, z.numpy().astype(np.float64), *constraint)
            return torch.from_numpy(np.asarray(product)).to(z.dtype)

    return Relax.apply
