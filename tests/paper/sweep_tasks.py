"""Functions for the sweeps of test_experiments.py: in a module of their own, which a worker imports in no time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def square(number: int) -> dict[str, Any]:
    return {"square": number**2}


def killed_once(number: int, folder: str) -> dict[str, Any]:
    """Kills the process that it runs in, once a number that is a multiple of 3."""
    mark = Path(folder) / str(number)
    if number % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": number**2}


def fails(number: int) -> dict[str, Any]:
    if number == 3:
        raise ArithmeticError("no such number")
    return square(number)
