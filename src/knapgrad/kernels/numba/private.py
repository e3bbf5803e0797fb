"""What is private to Numba: its cache of compiled kernels on disk, which must never stop a call, and its lock.

Numba raises where it finds no folder to write to, a damaged file, or a full disk. Here the kernel is then compiled
without it. Where a version of Numba lacks a name, its public behaviour stays as it is.
"""

import logging
import os
from contextlib import suppress
from typing import Any

from numba import cfunc

from knapgrad import forks

try:
    from numba.core.caching import FunctionCache, NullCache
except ImportError:
    FunctionCache = NullCache = object  # type: ignore[misc, assignment]
try:
    from numba.core.ccallback import CFunc
except ImportError:
    CFunc = None  # type: ignore[assignment, misc]
try:
    from numba.core.compiler_lock import global_compiler_lock
except ImportError:
    global_compiler_lock = None  # type: ignore[assignment]


def cached(dispatcher: Any) -> Any:
    """A dispatcher that keeps compiled code on disk if it can; a plain function is returned as it is."""
    if FunctionCache is not object and hasattr(dispatcher, "_cache"):
        dispatcher._cache = _cache_of(dispatcher.py_func)
    elif hasattr(dispatcher, "enable_caching"):
        with suppress(RuntimeError, OSError):
            dispatcher.enable_caching()
    return dispatcher


def c_function(python: Any, signature: Any, name: str) -> Any:
    """``numba.cfunc``, kept on disk if it can be, in files of that name: Numba takes functions that were made by the
    same code for one, and two processes that save two of them at the same time would write one file."""
    python.__qualname__ = name
    if FunctionCache is object or CFunc is None:
        return cfunc(signature)(python)
    found: Any = CFunc(python, (signature.args, signature.return_type), {}, {})
    found._cache = _cache_of(python)
    found.compile()
    return found


def _cache_of(python: Any) -> Any:
    try:
        return _Cache(python)
    except (RuntimeError, OSError) as error:  # no folder to write to
        return _Nowhere(error)


def is_kept(dispatcher: Any) -> bool:
    """Whether what it compiles goes to disk."""
    return getattr(getattr(dispatcher, "stats", None), "cache_path", None) is not None


class _Cache(FunctionCache):
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # a damaged file makes unpickling raise anything
            return None
        # Two processes that save at the same time may write one file for two signatures.
        return found if found is not None and found.signature.args == _arguments(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        for _ in range(2):  # once more without an index that was damaged
            try:
                return super().save_overload(sig, data)
            except Exception as error:
                self._discard()
                reason = error
            except BaseException:
                self._discard()
                raise
        self.disable()
        self._cache_path = None
        _say(reason)
        return None

    def _discard(self) -> None:
        """The index is written first: it may name a file of old code that was to be replaced."""
        with suppress(OSError):
            os.unlink(self._cache_file._index_path)


def _arguments(signature: Any) -> Any:
    return signature.args if hasattr(signature, "args") else signature


class _Nowhere(NullCache):
    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def save_overload(self, sig: Any, data: Any) -> None:
        _say(self._reason)


_is_said = False


def _say(reason: Exception) -> None:
    global _is_said
    if not _is_said:
        logging.getLogger("knapgrad").warning(
            "compiled kernels cannot be kept on disk (%s), so every process compiles its own; set NUMBA_CACHE_DIR to a "
            "folder that can be written to", reason,
        )  # fmt: skip
    _is_said = True


if global_compiler_lock is not None:
    forks.wait_for(global_compiler_lock)
