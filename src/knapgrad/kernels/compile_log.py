"""What is said when a call had to wait for a compiler."""

from __future__ import annotations

import logging
from typing import Any

LONG = 1.0  # seconds


def mention(kernel: Any, dtype: str, seconds: float, is_kept: bool = True) -> None:
    """Of a kernel, or what goes by a name."""
    if seconds > LONG:
        logging.getLogger("knapgrad").warning(
            "compiled %s for %s in %.1f s%s. knapgrad.warmup compiles ahead.",
            getattr(kernel, "__name__", kernel), dtype, seconds, "; it is kept on disk" if is_kept else "",
        )  # fmt: skip
