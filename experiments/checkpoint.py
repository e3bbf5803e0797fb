"""Checkpoints are written completely or not at all: a run that is stopped while it writes keeps the previous file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)
