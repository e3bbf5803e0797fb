"""What the reports of all experiments need: a place for their tables in README.md, and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

PAGE = Path(__file__).parent / "README.md"


def rewrite(experiment: str, tables: str) -> None:
    """Puts tables between the marks of an experiment."""
    begin = f"<!-- {experiment}: begin. Rewritten by its part `report`; write above or below. -->"
    end = f"<!-- {experiment}: end -->"
    old = PAGE.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"{PAGE} needs the lines {begin} and {end}, between which the tables go")
    before, rest = old.split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{tables}\n\n{end}{rest.split(end)[1]}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval; NaN where there are too few."""
    found = np.asarray(values, dtype=float)
    if len(found) < 2:
        return float(found.mean()) if len(found) else float("nan"), float("nan")
    return float(found.mean()), float(stats.t.ppf(0.975, len(found) - 1) * stats.sem(found))


def quartiles(time: dict[str, float]) -> str:
    """Median, and quartiles in brackets."""
    return f"{time['median']:,.0f} ({time['q1']:,.0f}–{time['q3']:,.0f})"


def origin(environment: dict[str, Any]) -> str:
    """Where and by what a result was made, to stand below its table."""
    machine = environment.get("device") or f"{environment['cpu']}, {environment['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    made = f"`{environment['command']}`, commit {environment['commit']}, {environment['date'][:10]}"
    return f"*{machine}, Python {environment['python']}, {versions}; {made}.*"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
