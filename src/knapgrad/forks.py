"""A fork waits for locks that another thread holds. The child does not have that thread, and would wait for ever."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  before our handlers are registered: those of logging and of pools must
import logging  # noqa: F401  run inside of ours, since an import may wait for their locks
import os
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import Any

_PATIENCE = 60.0  # seconds, if a fork waits for an import that waits for what the forking thread holds
_imports = RLock()  # held while a call imports a part of the library
_locks: list[Any] = []
_held: list[Any] = []  # by a fork


def imported(name: str) -> ModuleType:
    """A module that is imported when it is first used, by whichever thread that is."""
    with _imports:
        return import_module(name)


def wait_for(lock: Any) -> None:
    """Lets forks wait for a lock that a thread can take again. A thread may take it during an import, but must not
    import while it has it."""
    _locks.append(lock)


def _take() -> None:
    if _imports.acquire(timeout=_PATIENCE):
        _held.append(_imports)
    for lock in _locks:
        lock.acquire()
        _held.append(lock)


def _give_back() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_give_back, after_in_child=_give_back)
