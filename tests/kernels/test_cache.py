"""Compiled kernels on disk: damaged files, a full disk or no disk at all never stop a call."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numba
import pytest

import knapgrad
from knapgrad.kernels.numba import private


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a kernel from a file, as a new process would."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(private, "_is_said", False)
    source = tmp_path / "plus.py"
    source.write_text("def plus(x):\n    return x + 1\n")

    def make() -> Any:
        spec: Any = importlib.util.spec_from_file_location("plus", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return private.cached(numba.njit(module.plus))

    return make


def files(tmp_path: Path, ending: str) -> list[Path]:
    found = list((tmp_path / "cache").rglob(f"*.{ending}"))
    assert found
    return found


def loads(kernel: Any) -> bool:
    """Whether a call finds compiled code on disk."""
    assert kernel(1) == 2
    return bool(kernel.stats.cache_hits)


DAMAGES = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "garbage": lambda content: bytes(range(256)) * 4,
    "something else": lambda content: b"\x80\x04N.\x80\x04N.",  # None, twice
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_file_is_replaced(ending, damage, made, tmp_path):
    assert not loads(made()) and loads(made())
    for path in files(tmp_path, ending):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert not loads(made()) and loads(made())


def test_code_of_another_signature_is_not_taken(made, tmp_path):
    """As when two processes saved at the same time."""
    kernel = made()
    assert kernel(1) == 2 and kernel(1.5) == 2.5
    one, other = sorted(files(tmp_path, "nbc"))
    one.write_bytes(other.read_bytes())
    kernel = made()
    assert kernel(1) == 2 and kernel(1.5) == 2.5
    assert len(kernel.stats.cache_misses) == 1


@pytest.mark.parametrize("size", [0, 1000], ids=["nothing fits", "the index fits"])
def test_a_full_disk_is_mentioned_once(size, made, tmp_path, caplog):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kernel = made()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert kernel(1) == 2 and kernel(1.5) == 2.5 and made()(1) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.getMessage() and not private.is_kept(kernel)
    assert not list((tmp_path / "cache").rglob("*.nbi")), "the index names a file that was not written"
    assert not loads(made()) and loads(made())


def test_an_interrupt_while_saving_leaves_no_index(made, tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    kernel = made()
    with monkeypatch.context() as patch:
        patch.setattr(type(kernel._cache._cache_file), "_save_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kernel(1)
    assert not list((tmp_path / "cache").rglob("*.nbi"))
    assert not loads(made()) and loads(made())


def test_another_version_of_numba_keeps_its_own_cache(made, monkeypatch):
    monkeypatch.setattr(private, "FunctionCache", object)
    assert not loads(made()) and loads(made())


def test_without_any_folder_to_write_to(tmp_path):
    """A file where the folder would be stops root too."""
    package = Path(knapgrad.__file__).parent
    shutil.copytree(package, tmp_path / "knapgrad", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "knapgrad/kernels/numba/__pycache__").touch()
    code = """
        import numpy as np, knapgrad as kg
        print(kg.__file__)
        print(kg.solve(np.array([3.0, 2.0, 2.0]), kg.Knapsack([3, 2, 2], 4)))
    """
    environment = {name: x for name, x in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "LOCALAPPDATA": "/dev/null"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [str(tmp_path / "knapgrad/__init__.py"), "[0. 1. 1.]"]
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1 and "kept on disk. " not in done.stderr
