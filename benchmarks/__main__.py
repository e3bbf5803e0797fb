"""Measure knapgrad on this CPU. Baselines: (a) the paper's layout written plainly in Numba, (b) eager PyTorch.

Every number is a median over turns that the contestants take in one process; ratios are formed turn by turn.
Contestants are checked against each other first, and a wrong one is not timed. Results are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import knapgrad as kg
from benchmarks import authors, cases, contestants, processes
from measuring import origin
from measuring.clocks import microseconds, ratio, set_threads, take_turns

Row = dict[str, Any]
REGULARIZERS = {"shannon": kg.Shannon(1.0), "gini": kg.Gini(1.0), "tsallis": kg.Tsallis(1.0)}
SAMPLES = 32


def main() -> None:
    options = parse()
    theirs = authors.load(options.authors) if options.authors else None
    results: dict[str, Any] = {"environment": origin.environment(sys.argv[1:], "benchmarks")}
    for name, section in SECTIONS.items():
        if name in options.sections:
            results[name] = section(options)
    if theirs:
        results["authors"] = against_authors(options, theirs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nSaved to {options.output}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"which parts to run, of {', '.join(SECTIONS)} (all)")
    parser.add_argument("--quick", action="store_true", help="short turns: a look, not a result")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="what 'all threads' means (all cores)")
    parser.add_argument("--seconds", type=float, help="time for one comparison (2, quick: 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    parser.add_argument("--authors", type=Path, metavar="PATH", help="also time this file; see benchmarks/authors.py")
    parser.add_argument("--output", type=Path, help="JSON file (benchmarks/results/<date>.json)")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    options.sections = options.sections or list(SECTIONS)
    options.seconds = options.seconds or (0.2 if options.quick else 2.0)
    if options.output is None:
        date = datetime.now(timezone.utc).date()
        options.output = origin.ROOT / "benchmarks" / "results" / f"{date}{'-quick' if options.quick else ''}.json"
    return options


def thread_counts(options: argparse.Namespace) -> list[int]:
    return sorted({1, options.threads})


def speed(options: argparse.Namespace) -> list[Row]:
    """Value and relax, then with the VJP, for each shape and regularizer, on one thread and on all."""
    rows = []
    for threads in thread_counts(options):
        set_threads(threads)
        table = []
        for case in cases.SPEED:
            problem = cases.make(case, options.seed)
            for index, regularizer in enumerate(REGULARIZERS):
                entered = contestants.enter(problem, regularizer)
                errors = contestants.check(entered, problem)
                row: Row = {"case": case.name, "batch": case.batch, "capacity": problem.total, "threads": threads}
                row |= {"regularizer": regularizer, "errors": errors}
                for task in ("forward", "both"):
                    times = take_turns({name: getattr(c, task) for name, c in entered.items()}, options.seconds)
                    row[task] = {f"{name}_us": microseconds(t) for name, t in times.items()}
                    row[task] |= {f"over_{name}": ratio(times[name], times["ours"]) for name in ("paper", "eager")}
                target = case.target[index] if case.target and threads == 1 else cases.Target(np.nan)
                row["target"] = {"forward": none_if_nan(target.forward), "both": target.both}
                rows.append(row)
                table.append([case.name, regularizer, *speed_cells(row)])
        header = ["value + relax", "", "(a) µs", "ours µs", "times faster than (a)", "target", "than (b)"]
        header += ["| with VJP (a) µs", "ours µs", "times faster than (a)", "target", "than (b)"]
        show(f"Speed of the kernels on {count(threads)}, float32, batches share their weights", header, table)
    set_threads(options.threads)
    return rows


def speed_cells(row: Row) -> list[str]:
    cells = []
    for task in ("forward", "both"):
        measured, target = row[task], row["target"][task]
        cells += [f"{measured[name]['median']:,.0f}" for name in ("paper_us", "ours_us")]
        reached = "ok" if target is None or measured["over_paper"]["median"] >= target else "missed"
        cells += [with_quartiles(measured["over_paper"]), "" if target is None else f"{target:g} {reached}"]
        cells += [f"{measured['over_eager']['median']:.0f}"]
    return cells


def sampling(options: argparse.Namespace) -> list[Row]:
    """32 subsets for each instance, the value sweep included; the random numbers are given."""
    rows = []
    for threads in thread_counts(options):
        set_threads(threads)
        table = []
        for case in cases.SAMPLING:
            problem = cases.make(case, options.seed)
            for regularizer in REGULARIZERS:
                entered = contestants.enter(problem, regularizer, SAMPLES)
                contestants.check(entered, problem, sampling=True)
                times = take_turns({name: c.sample for name, c in entered.items()}, options.seconds)
                row: Row = {"case": case.name, "batch": case.batch, "threads": threads, "regularizer": regularizer}
                row |= {f"{name}_us": microseconds(t) for name, t in times.items()}
                row |= {f"over_{name}": ratio(times[name], times["ours"]) for name in ("paper", "eager")}
                rows.append(row)
                medians = [f"{row[key]['median']:,.0f}" for key in ("paper_us", "ours_us")]
                over = [with_quartiles(row["over_paper"]), f"{row['over_eager']['median']:.0f}"]
                table.append([case.name, regularizer, *medians, *over])
        show(
            f"Sampling {SAMPLES} subsets per instance on {count(threads)}",
            ["", "", "(a) µs", "ours µs", "times faster than (a)", "than (b)"],
            table,
        )
    set_threads(options.threads)
    return rows


def overhead(options: argparse.Namespace) -> list[Row]:
    """One forward and backward through torch, next to the bare kernels and to an autograd function without content."""

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, theta: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(theta)
            return torch.from_numpy(theta.detach().numpy())

        @staticmethod
        def backward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            (_theta,) = ctx.saved_tensors
            return torch.from_numpy(z.numpy())

    set_threads(1)
    problem = cases.make(cases.OVERHEAD, options.seed)
    theta, z = torch.from_numpy(problem.theta).requires_grad_(), torch.from_numpy(problem.z)
    budget = kg.Knapsack(problem.weights[0], problem.total)

    def forward_backward(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.autograd.grad(function(theta), theta, z)

    rows, table = [], []
    for name, regularizer in REGULARIZERS.items():
        kernels = contestants.enter(problem, name)["ours"].both
        calls = {
            "torch": partial(forward_backward, partial(kg.relax, constraint=budget, regularizer=regularizer)),
            "kernels": kernels,
            "empty": partial(forward_backward, Empty.apply),
        }
        times = take_turns(calls, options.seconds)
        row: Row = {"regularizer": name, **{f"{call}_us": microseconds(t) for call, t in times.items()}}
        row["overhead_us"] = microseconds(times["torch"] - times["kernels"])
        row["target_us"] = 200
        rows.append(row)
        medians = [f"{row[key]['median']:.0f}" for key in ("torch_us", "kernels_us", "overhead_us", "empty_us")]
        table.append([name, *medians, verdict(row["torch_us"]["median"], 200, "µs")])
    set_threads(options.threads)
    show(
        f"One call from torch, forward and backward, {cases.OVERHEAD.name}, batch {cases.OVERHEAD.batch}, one thread",
        ["", "kg.relax µs", "of it kernels", "overhead", "an empty function", "target"],
        table,
    )
    return rows


def startup(options: argparse.Namespace) -> Row:
    """Import time, and the first call cold and with Numba's cache filled."""
    times = 2 if options.quick else 5
    row: Row = {
        "import_knapgrad_s": processes.import_seconds("knapgrad", times),
        "import_numpy_numba_s": processes.import_seconds("numpy, numba", times),
        "first_call": {},
    }
    table = [
        [
            "import knapgrad (no torch)",
            "",
            f"{row['import_knapgrad_s']:.2f}",
            verdict(row["import_knapgrad_s"], 0.6, "s"),
        ]
    ]
    table.append(["import numpy, numba (for comparison)", "", f"{row['import_numpy_numba_s']:.2f}", ""])
    for name in processes.FIRST_CALLS:
        cold, cached = processes.first_call_seconds(name, times)
        row["first_call"][name] = {"cold_s": cold, "cached_s": cached}
        table.append([f"first {name}", f"{cold:.1f}", f"{cached:.2f}", verdict(cached, 1.0, "s")])
    show("Starting up, seconds", ["", "nothing compiled yet", "compiled before", "target"], table)
    return row


def memory(options: argparse.Namespace) -> list[Row]:
    """Bytes that wait for the backward pass, and how far a forward and a backward pass raise the peak."""
    set_threads(1)
    rows, table = [], []
    for case in cases.MEMORY:
        problem = cases.make(case, options.seed)
        budget = kg.Knapsack(problem.weights[0], problem.total)
        kept = {
            "ours": kept_bytes(lambda theta, b=budget: kg.relax(theta, b, kg.Shannon(1.0)), problem),
            "paper": 3 * 8 * case.batch * (case.items + 1) * (problem.total + 1),  # V, Q and E, without touching them
            "eager": kept_bytes(
                lambda theta, p=problem: contestants.eager_torch.relax(
                    theta, p.weights[0].tolist(), p.total, p.exactly, "shannon"
                )[1],
                problem,
            ),
        }
        plain = 2 * problem.theta.nbytes
        row: Row = {"case": case.name, "batch": case.batch, "capacity": problem.total, "theta_and_output_bytes": plain}
        row["kept_bytes"] = kept
        row["peak_bytes"] = {name: processes.peak_bytes(name, case.batch, case.items) for name in kept}
        rows.append(row)
        names = ("ours", "paper", "eager")
        label = f"{case.name}, C={problem.total}, batch {case.batch}"
        table.append(
            [label, megabytes(plain), *(megabytes(row[key][n]) for key in ("kept_bytes", "peak_bytes") for n in names)]
        )
    set_threads(options.threads)
    header = ["", "theta + output", "kept: ours", "(a)", "(b)", "| peak: ours", "(a)", "(b)"]
    show("Memory of value + relax + VJP, Shannon, one thread, MB", header, table)
    return rows


def kept_bytes(function: Callable[[torch.Tensor], torch.Tensor], problem: cases.Instances) -> int:
    """Size of the distinct storages that autograd saves, the output's own included."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    theta = torch.from_numpy(problem.theta).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = function(theta)
        keep(output.detach())
    return sum(storages.values())


def scaling(options: argparse.Namespace) -> list[Row]:
    """Ours on one thread against ours on all: from how much work on do threads help, and do they ever hurt?"""
    rows: list[Row] = []
    table: list[list[str]] = []
    if options.threads == 1:
        return rows

    def on(count: int, call: Callable[[], Any]) -> None:
        torch.set_num_threads(count)
        call()

    for case in cases.THREADS:
        problem = cases.make(case, options.seed)
        for regularizer in ("shannon",) if options.quick else REGULARIZERS:
            ours = contestants.Ours(problem, regularizer, problem.theta[None])
            times = take_turns(
                {"one": partial(on, 1, ours.forward), "all": partial(on, options.threads, ours.forward)},
                options.seconds,
            )
            row: Row = {"case": case.name, "batch": case.batch, "regularizer": regularizer, "threads": options.threads}
            row |= {"one_us": microseconds(times["one"]), "all_us": microseconds(times["all"])}
            row["gain"] = ratio(times["one"], times["all"])
            rows.append(row)
    rows.sort(key=lambda row: row["one_us"]["median"])
    for row in rows:
        target = "at least 0.9 " + ("ok" if row["gain"]["median"] >= 0.9 else "missed")
        table.append(
            [
                f"{row['case']}, batch {row['batch']}",
                row["regularizer"],
                f"{row['one_us']['median']:,.0f}",
                f"{row['all_us']['median']:,.0f}",
            ]
            + [with_quartiles(row["gain"]), target]
        )
    set_threads(options.threads)
    show(
        f"{count(options.threads)} against one, value + relax",
        ["", "", "one µs", "all µs", "times faster", "target"],
        table,
    )
    return rows


def against_authors(options: argparse.Namespace, theirs: authors.Functions) -> list[Row]:
    """The file of --authors, called through torch like ours."""
    case = next(case for case in cases.SPEED if case.name == "knapsack n=100")
    problem = cases.make(case, options.seed)
    budget = kg.Knapsack(problem.weights[0], problem.total)
    theta, z = torch.from_numpy(problem.theta), torch.from_numpy(problem.z)
    theta_grad = theta.clone().requires_grad_()
    rows = []
    for threads in thread_counts(options):
        set_threads(threads)
        table = []
        for name, regularizer in REGULARIZERS.items():
            functions = {
                "authors": authors.as_torch(theirs, problem, name),
                "ours": partial(kg.relax, constraint=budget, regularizer=regularizer),
            }
            outputs = {key: function(theta_grad) for key, function in functions.items()}
            products = {key: torch.autograd.grad(output, theta_grad, z)[0] for key, output in outputs.items()}
            for found in (outputs, products):
                error = float((found["authors"] - found["ours"]).detach().abs().max())
                if not error <= 1e-3:
                    raise SystemExit(
                        f"--authors: {options.authors} and knapgrad differ by {error:.1e} ({name}): not timed"
                    )
            row: Row = {"case": case.name, "batch": case.batch, "threads": threads, "regularizer": name}
            cells = []
            for task, target in (("forward", 35), ("both", 30)):
                if task == "forward":
                    turns = {key: partial(function, theta) for key, function in functions.items()}
                else:
                    turns = {
                        key: lambda function=function: torch.autograd.grad(function(theta_grad), theta_grad, z)
                        for key, function in functions.items()
                    }
                times = take_turns(turns, options.seconds)
                row[task] = {f"{key}_us": microseconds(t) for key, t in times.items()}
                row[task]["over_authors"] = ratio(times["authors"], times["ours"])
                cells += [f"{row[task][key]['median']:,.0f}" for key in ("authors_us", "ours_us")]
                cells += [with_quartiles(row[task]["over_authors"]), str(target) if threads == 1 else ""]
            rows.append(row)
            table.append([name, *cells])
        show(
            f"{options.authors.name} through torch, {case.name}, batch {case.batch}, on {count(threads)}",
            [
                "",
                "relax: theirs µs",
                "ours µs",
                "times faster",
                "target",
                "| with VJP: theirs µs",
                "ours µs",
                "times faster",
                "target",
            ],
            table,
        )
    set_threads(options.threads)
    return rows


def in_jax(options: argparse.Namespace) -> list[Row]:
    """Value and relax, then with the VJP: knapgrad, autodiff through the same scan, and through a plain one."""
    try:
        import jax
    except ImportError:
        print("\nJAX is not installed: its section is left out")
        return []
    from benchmarks import in_jax as jax_contestants

    def run_jax(function: Callable[..., Any], *arguments: Any) -> None:
        jax.block_until_ready(function(*arguments))

    rows, table = [], []
    for case in cases.JAX:
        problem = cases.make(case, options.seed)
        theta, z = jax.numpy.asarray(problem.theta), jax.numpy.asarray(problem.z)
        for name in REGULARIZERS:
            row: Row = {"case": case.name, "batch": case.batch, "capacity": problem.total, "regularizer": name}
            calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "both": {}}
            for who, (forward, both) in jax_contestants.enter(problem, name).items():
                start = time.perf_counter()
                compiled = both.lower(theta, z).compile()
                row[who] = {"compile_s": round(time.perf_counter() - start, 2)}
                row[who]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
                results = compiled(theta, z)
                row[who]["differs"] = max(
                    float(abs(a - b).max()) for a, b in zip(results, row.setdefault("_", results))
                )
                calls["forward"][who] = partial(run_jax, forward, theta)
                calls["both"][who] = partial(run_jax, compiled, theta, z)
            del row["_"]
            for task, functions in calls.items():
                times = take_turns(functions, options.seconds)
                for who, measured in times.items():
                    row[who][f"{task}_us"] = microseconds(measured)
                    row[who][f"{task}_over_ours"] = ratio(measured, times["ours"])
            rows.append(row)
            cells = [f"{row['ours'][f'{task}_us']['median'] / 1e3:.2f}" for task in calls]
            for who in ("same scan", "plain scan"):
                cells += [with_quartiles(row[who][f"{task}_over_ours"]) for task in calls]
            cells += [" / ".join(f"{row[who]['compile_s']:.1f}" for who in calls["both"])]
            cells += [" / ".join(megabytes(row[who]["temporary_bytes"]) for who in calls["both"])]
            table.append([f"{case.name} C={problem.total} {name}", *cells])
    header = ["", "ours ms", "+ VJP", "same scan x", "+ VJP", "plain scan x", "+ VJP", "compile s", "temporary MB"]
    show("JAX on the CPU, batch 32, float32 (without x64): times slower than ours, by autodiff", header, table)
    return rows


SECTIONS = {
    "speed": speed,
    "sampling": sampling,
    "overhead": overhead,
    "startup": startup,
    "memory": memory,
    "threads": scaling,
    "jax": in_jax,
}


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), flush=True)


def count(threads: int) -> str:
    return "one thread" if threads == 1 else f"{threads} threads"


def with_quartiles(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['q1']:.1f}–{values['q3']:.1f})"


def verdict(measured: float, at_most: float, unit: str) -> str:
    return f"at most {at_most:g} {unit} " + ("ok" if measured <= at_most else "missed")


def megabytes(size: int) -> str:
    return "unknown" if size < 0 else f"{size / 1e6:.2f}"


def none_if_nan(number: float) -> float | None:
    return None if np.isnan(number) else number


if __name__ == "__main__":
    main()
