"""What the command lines of all experiments share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring import origin

PARTS = ("train", "time", "report")
RESULTS = Path(__file__).parent / "results"


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="train, time, report (all, in this order)")
    parser.add_argument("--commit", help="to record, where the code is a copy without its Git folder")
    return parser


def choose(
    parser: argparse.ArgumentParser, kind: str, chosen: Sequence[str] | None, there: Collection[str]
) -> list[str]:
    """What was chosen, once, or all; what does not exist is an error that says what does."""
    unknown = sorted(set(chosen or ()) - set(there))
    if unknown:
        parser.error(f"no such {kind}: {'; '.join(unknown)}; there are {'; '.join(there)}")
    return list(dict.fromkeys(chosen or there))


def usual_output(options: argparse.Namespace) -> Path:
    return RESULTS / "quick" if options.quick else RESULTS


def to_page(options: argparse.Namespace) -> bool:
    """Whether the tables go into README.md: those of the committed results, and no quick ones."""
    return options.output.resolve() == RESULTS.resolve() and not options.quick


def provenance(module: str, packages: Sequence[str], commit: str | None = None, **more: Any) -> dict[str, Any]:
    """How a result came about."""
    known = origin.environment(sys.argv[1:], module)
    return {
        **{name: known[name] for name in ("date", "commit", "command", "cpu", "cores", "python")},
        **({"commit": commit} if commit else {}),
        "versions": {"knapgrad": known["versions"]["knapgrad"]} | {name: metadata.version(name) for name in packages},
        **more,
    }
