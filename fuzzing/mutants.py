"""Whether the fence finds a bound that is missing: each is taken away in a copy of the sources.

    python -m fuzzing.mutants
    python -m fuzzing.mutants "row of a path" boxes

A path may only go on from states of its row, and only look up decisions that the table has. Some bounds are there
twice (a state that is cut to its row is always in the table of options): without one of two, nothing happens. Kernels
are compiled anew for every mutant, so this takes some minutes. Exit status 1 if one is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import knapgrad


class Mutant(NamedTuple):
    name: str
    file: str  # below kernels/numba
    text: str
    instead: str
    kinds: tuple[str, ...]
    backend: str = "numpy"


ITEMS = ("knapsack, at least", "knapsack, at least, own weights", "knapsack, exactly", "top-k, at least")
OPTIONS = ("options, at least", "options, own weights", "options, at most one, exactly")
BOXES = ("two budgets", "three budgets")
_TOP = ("bands.py", "    c = min(c, top)\n", "")
MUTANTS = (
    Mutant("items leave the row of a path", *_TOP, ITEMS),
    Mutant("options leave the row of a path", *_TOP, OPTIONS),
    Mutant("items leave the row of a path, XLA", *_TOP, ITEMS[:1], "jax"),
    Mutant("items are drawn outside of the table", "rows.py", "if c >= start:", "if c >= -(2**40):", ITEMS),
    Mutant("boxes leave their row", "boxes.py", "min(c, high[2])", "c", BOXES),
    Mutant("boxes are drawn outside of the table", "boxes.py", "b >= low[1] and c >= low[2]", "b >= low[1]", BOXES),
)


def is_found(mutant: Mutant, instances: int) -> bool:
    with TemporaryDirectory() as folder:
        package = Path(folder) / "knapgrad"
        shutil.copytree(Path(str(knapgrad.__file__)).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / "kernels/numba" / mutant.file
        source = path.read_text()
        if mutant.text not in source:
            raise RuntimeError(f"{mutant.text!r} is not in {mutant.file}: change the mutant {mutant.name!r} too")
        path.write_text(source.replace(mutant.text, mutant.instead))
        code = (
            "import sys; from fuzzing import fence; "
            f"report = fence.run(0, [{mutant.backend!r}], {instances}, kinds={list(mutant.kinds)!r}); "
            "print(len(report['found']), [x['call'] for x in report['found']][:3]); sys.exit(bool(report['found']))"
        )
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folder})
        return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m fuzzing.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only mutants with one of these in their names (all)")
    parser.add_argument("--instances", type=int, default=4000, help="for each (4000)")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.names or any(name in m.name for name in given.names)]
    missed = []
    for mutant in chosen:
        found = is_found(mutant, given.instances)
        print(f"{mutant.name}: {'found' if found else 'NOT FOUND'}", flush=True)
        missed += [] if found else [mutant.name]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
