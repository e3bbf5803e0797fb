"""The origin of a result: commit, command, machine and versions, to be saved with it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import knapgrad

ROOT = Path(__file__).resolve().parent.parent


def environment(command: list[str], module: str) -> dict[str, Any]:
    """What a reader needs to know to compare two result files."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *command]),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            "knapgrad": knapgrad.__version__,
            **{name: metadata.version(name) for name in ("numpy", "numba", "llvmlite", "torch")},
            **{name: metadata.version(name) for name in ("jax", "triton") if importlib.util.find_spec(name)},
        },
        "vector_instructions": sorted(flag for flag in cpu_flags() if flag in {"avx", "avx2", "avx512f", "neon"}),
    }


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        status = git("status", "--porcelain", "--untracked-files=all").splitlines()
        results = (".json", ".jsonl", ".png", ".npz", " experiments/README.md")  # these may have changed
        changed = any(not line.endswith(results) for line in status)
        return git("rev-parse", "--short=10", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    return set(cpu_info().get("flags", "").split())
