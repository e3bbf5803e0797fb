"""``make check`` runs a test of every file of the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from representatives import REPRESENTATIVES

PACKAGE = Path(__file__).parents[2] / "src" / "knapgrad"


def test_every_file_has_one():
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}
    named = Counter(" ".join(REPRESENTATIVES.values()).split())
    assert named.keys() == files, "tests/representatives.py names each file, beside a test that runs it"
    assert max(named.values()) == 1
