"""The GPU kernels are compiled for a GPU, by Triton's own compiler, where there is none to run them on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("torch")
pytest.importorskip("triton.backends.nvidia", exc_type=ImportError)


def test_kernels_compile_for_a_gpu(tmp_path):
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_gpu.py")
    run = subprocess.run(
        [sys.executable, script], env=settings | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 15
