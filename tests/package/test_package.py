"""What users install: the files of the wheel and of the sdist, their description, and the types as mypy sees them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import knapgrad as kg

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    build = pytest.importorskip("hatchling.build", reason="hatchling builds the package: pip install hatchling")
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build.build_wheel(str(folder)), folder / build.build_sdist(str(folder))


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    about = f"knapgrad-{kg.__version__}.dist-info/"
    package = {name for name in names if not name.startswith(about)}
    assert package == {f"knapgrad/{name}" for name in files(ROOT / "src" / "knapgrad")}
    assert "knapgrad/py.typed" in package
    assert names - package == {about + name for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}


def test_the_sdist_has_what_is_needed_to_build_and_test(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "mkdocs.yml", "docs/index.md"}
    needed |= {"docs/explorer/sweeps.js", "docs/recipes/pyepo.py", "tests/oracles.py", "examples/token_budget.py"}
    assert needed <= names
    assert {f"src/knapgrad/{name}" for name in files(ROOT / "src" / "knapgrad")} <= names
    assert not [name for name in names if re.search(r"\.(png|jsonl|npz|pyc|nbi|nbc)$|^build/|\.venv", name)]
    assert built[1].stat().st_size < 2_000_000


def test_the_version_stands_in_one_place(built):
    assert built[0].name == f"knapgrad-{kg.__version__}-py3-none-any.whl"
    assert f"## [{kg.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("pyproject.toml", "CITATION.cff"):
        assert not re.search(r"^version\b", (ROOT / name).read_text(), re.MULTILINE), name


def test_twine_is_content(built):
    pytest.importorskip("twine", reason="twine checks the description: pip install twine")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


USER = """
from typing_extensions import assert_type
import numpy as np
import torch
import knapgrad as kg

theta = torch.zeros(3, 4)
assert_type(kg.relax(theta, kg.TopK(2), kg.Gini(0.5)), torch.Tensor)
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
assert_type(kg.relax(np.zeros(4), kg.Knapsack([1, 2, 3, 4], 5, at_least=1), kg.Shannon()), Vector)
assert_type(kg.Knapsack.from_real([0.5, 1.5], 2.0), kg.Knapsack)
layer = kg.torch.Relax(kg.MultipleChoice([[1, 2]], 2), kg.Tsallis())
"""
WRONG = {
    "kg.TopK(2, at_last=1)": "at_last",
    "kg.relax(theta, kg.TopK(2))": "regularizer",
    "kg.solve(theta, 3)": "Constraint",
    "kg.knapsack([1], 1)": "not callable",
}


def test_a_users_types_are_checked(built, tmp_path):
    """In an environment that has the wheel, and everything else from this one."""
    pytest.importorskip("mypy", reason="mypy checks the types: pip install mypy")
    pytest.importorskip("torch")
    venv.create(tmp_path / "venv", symlinks=sys.platform != "win32")
    base = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    packages = Path(sysconfig.get_path("purelib", "venv", base))
    zipfile.ZipFile(built[0]).extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = Path(sysconfig.get_path("scripts", "venv", base)) / "python"

    (tmp_path / "user.py").write_text(USER + "\n".join(WRONG))
    options = ["--strict", "--python-executable", str(python), "--cache-dir", os.devnull]
    command = [sys.executable, "-m", "mypy", *options, "user.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""})
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr  # and none in what is right
    for number, (error, word) in enumerate(zip(errors, WRONG.values()), USER.count("\n") + 1):
        assert error.startswith(f"user.py:{number}: ") and word in error
