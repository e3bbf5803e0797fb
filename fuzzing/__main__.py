"""Random instances of every constraint, operation, regularizer and dtype against an oracle in long double.

    make fuzz                                                # minutes
    python -m fuzzing --instances 20000 --backends numpy     # a look
    python -m fuzzing --seed 7 --output fuzz.json
    python -m fuzzing --fence                                # whether anything ends the process (fuzzing/fence.py)

A case is a batch of instances and all operations on it. The oracle (fuzzing/oracle.py) enumerates selections where they
are few, and has a plain sweep in long double for the rest; it shares no code with the library. A failure is made
smaller, and printed as code to paste. The same seed gives the same cases. Exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import fence
from fuzzing.cases import Case, draw
from fuzzing.checks import Failure, code_of, failures, smallest

SHARES = {"numpy": 0.5, "torch": 0.45, "cuda": 0.3, "jax": 0.05}  # of the instances; JAX compiles for most of its time


def available() -> list[str]:
    found = ["numpy"]
    if importlib.util.find_spec("torch"):
        import torch

        found += ["torch", "cuda"] if torch.cuda.is_available() else ["torch"]
    return found + (["jax"] if importlib.util.find_spec("jax") else [])


def case_of(seed: int, backend: str, number: int, largest_batch: int = 2500, few_kernels: bool = False) -> Case:
    rng = np.random.default_rng([seed, list(SHARES).index(backend), number])
    return draw(rng, backend, largest_batch, few_kernels=few_kernels)


def fuzz(
    instances: int,
    seed: int,
    backends: list[str],
    largest_batch: int = 2500,
    bar: Any = None,
    few_kernels: bool = False,
) -> dict[str, Any]:
    """The report, with at most one failure per operation and backend, made smaller."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    found: dict[tuple[str, str], Failure] = {}
    total, begin = 0, time.perf_counter()
    for backend in backends:
        share = SHARES[backend] / sum(SHARES[name] for name in backends) * instances
        done = number = 0
        while done < share:
            case = case_of(seed, backend, number, largest_batch, few_kernels)
            size, number = max(len(case.theta), 1), number + 1
            for operation, failure in failures(case):
                categories = {
                    "operation": operation, "constraint": case.kind, "regularizer": case.regularizer,
                    "dtype": case.dtype, "backend": backend, "content": case.content, "layout": case.layout,
                    "threads": str(case.threads),
                }  # fmt: skip
                for category, value in categories.items():
                    counts[f"{category}: {value}"].update(calls=1, instances=size, failures=failure is not None)
                if failure is not None and (operation, backend) not in found:
                    found[operation, backend] = failure
            done, total = done + size, total + size
            if bar is not None:
                bar.update(size)
    shrunk = [smallest(failure) for failure in found.values()]
    shrunk.sort(key=lambda failure: (failure.case.theta.size, failure.check.operation))
    return {
        "instances": total,
        "calls": sum(count["calls"] for name, count in counts.items() if name.startswith("backend")),
        "failures": sum(count["failures"] for name, count in counts.items() if name.startswith("backend")),
        "seconds": round(time.perf_counter() - begin, 1),
        "categories": {name: dict(counts[name]) for name in sorted(counts)},
        "failing": [{"operation": failure.check.operation, "code": code_of(failure)} for failure in shrunk],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m fuzzing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200_000, help="at least so many (200000)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--backends", nargs="+", choices=list(SHARES), help="(all that are there)")
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    parser.add_argument("--fence", action="store_true", help="dirty input, and memory between guard pages")
    given = parser.parse_args(arguments)
    from tqdm import tqdm

    if given.fence:
        return behind_the_fence(given, tqdm(total=given.instances, unit=" instances"))
    with tqdm(total=given.instances, unit=" instances") as bar:
        report = fuzz(given.instances, given.seed, given.backends or available(), bar=bar)
    print(f"{'':50} {'calls':>9} {'instances':>11} {'failures':>9}")
    for name, count in report["categories"].items():
        print(f"{name:50} {count['calls']:9,} {count['instances']:11,} {count['failures']:9,}")
    print(
        f"{report['instances']:,} instances, {report['calls']:,} calls, {report['failures']:,} of them wrong, "
        f"in {report['seconds']:,.0f} s"
    )
    for failing in report["failing"][:1]:
        print(f"\nThe smallest that fails ({len(report['failing'])} operations do):\n\n{failing['code']}")
    if given.output is not None:
        from measuring.origin import environment

        origin = environment(sys.argv[1:] if arguments is None else arguments, "fuzzing")
        given.output.write_text(json.dumps({"environment": origin, **report}, indent=1) + "\n")
    return 1 if report["failures"] else 0


def behind_the_fence(given: argparse.Namespace, bar: Any) -> int:
    with bar:
        report = fence.run(given.seed, given.backends or [x for x in available() if x != "cuda"], given.instances, bar)
    for call, count in report["operations"].items():
        print(f"{call:70} {count:9,}")
    print(
        f"{report['calls']:,} calls, {len(report['found'])} of them ended the process, or raised what they should not"
    )
    for crash in report["found"][:3]:
        print(f"\n{crash['code']}")
    if given.output is not None:
        from measuring.origin import environment

        given.output.write_text(
            json.dumps({"environment": environment(sys.argv[1:], "fuzzing"), **report}, indent=1) + "\n"
        )
    return 1 if report["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
