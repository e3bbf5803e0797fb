"""The record of speeds over time: ``python -m benchmarks.record FILE...`` appends what result files have measured.

A row of benchmarks/results/record.jsonl has the date, the commit, the machine and the versions of a run, and the
median of each call in microseconds. A run that is there already is not added again. The site draws the rows.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "record.jsonl"


def times(found: dict[str, Any]) -> dict[str, float]:
    """Medians in microseconds, by what was measured, of a file of `benchmarks`, `benchmarks.gpu` or `.small_calls`."""
    named = {}
    for row in found.get("speed", []):
        if row.get("threads", 1) != 1:
            continue
        name = f"{row.get('case') or row['shape']}, {row['regularizer']}"
        for part, suffix in (("forward", "relax"), ("both", "relax and VJP")):
            unit = 1.0 if "ours_us" in row[part] else 1000.0
            ours = row[part].get("ours_us") or row[part]["ours_ms"]
            named[f"{name}, {suffix}"] = round(unit * ours["median"], 3)
    for row in found.get("rows", []):
        for call in ("relax, forward", "relax, both"):
            named[f"small call {row['batch']} x {row['n']}, {call}"] = row["microseconds"][call]["median"]
    return named


def as_row(found: dict[str, Any]) -> dict[str, Any]:
    environment = found["environment"]
    machine = environment.get("gpu") or f"{environment['cpu']}, {environment['cores']} cores"
    known = {name: environment[name] for name in ("date", "commit", "python", "versions")}
    command = re.sub(r" --(output|commit) \S+", "", environment["command"])  # where it was run is nobody's business
    return {**known, "command": command, "machine": machine, "microseconds": times(found)}


def append(path: Path, found: dict[str, Any], record: Path = RECORD) -> bool:
    """Whether the run was new."""
    row = as_row(found)
    if not row["microseconds"]:
        raise SystemExit(f"{path} has no times that the record keeps")
    rows = read(record)
    if any((old["date"], old["machine"]) == (row["date"], row["machine"]) for old in rows):
        return False
    rows = sorted([*rows, row], key=lambda each: each["date"])
    record.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return True


def read(record: Path = RECORD) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="result files")
    for path in parser.parse_args().files:
        print(f"{path}: {'added' if append(path, json.loads(path.read_text())) else 'in the record already'}")


if __name__ == "__main__":
    main()
