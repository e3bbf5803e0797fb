"""Compare the speed of two versions of knapgrad on one machine, cell by cell.

    python -m benchmarks.compare --base ../other-checkout --output result.json
    python -m benchmarks.compare --base ../other-checkout --device cuda "backward gini" solve
    python -m benchmarks.compare "numpy relax" jax --at-least 0.25 0.5 0.9 1.0

The last line compares knapsacks that must weigh at least so much with those that need not, within this version.

Each version runs in a process of its own. They take short turns on the same core, only one computes at a time, and
ratios are formed turn by turn: what slows the machine slows both. Both are restarted several times, since the place
of its memory makes a process some percent faster or slower. A ratio below 1 means that this version is faster.
Only public functions are called, and the code that measures is this checkout's, whichever version is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import knapgrad as kg
from benchmarks import cases, floor
from benchmarks.cases import Case
from measuring import clocks, origin

REGULARIZERS = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}
OWN = Case(8, 60, capacity=200)  # every instance has weights of its own
OPTIONS = Case(32, 100, lightest=0, heaviest=9, capacity=120)  # 25 choices among 4
BOX = Case(32, 20, lightest=1, heaviest=9, capacity=40)  # 40 of one budget and 10 of the other
SPECIAL = {OWN: "own-weights", OPTIONS: "options", BOX: "two-budgets"}
CPU = (*cases.SPEED, OWN, Case(1, 200, lightest=1, heaviest=99, capacity=5000))
GPU = (*cases.GPU, Case(1024, 1000, k=300), Case(2, 200, lightest=1, heaviest=1199, capacity=60000))
BOTH = ("relax", "backward")
THREADS = tuple(case for case in cases.SPEED if case.items >= 100)
SAMPLES = 32
INPUTS = 4  # of a CUDA graph: other scores in turn, so that they are not always in the cache
JAX_REPEATS = 20  # calls inside one compiled function on a GPU
CHUNK = 50  # calls on a GPU after which we wait for it
TURN, RESTARTS = {"cpu": 0.005, "cuda": 0.01}, {"cpu": 5, "cuda": 2}  # seconds of a turn; how often all start anew
Row = dict[str, Any]
Clock = Callable[[float], float]  # about so many seconds of work -> seconds per call


class Cell(NamedTuple):
    framework: str  # numpy, torch, jax, or graph: torch in a CUDA graph, kernels alone
    call: str  # a function of knapgrad, or backward: relax and its backward pass
    case: Case
    regularizer: str = ""
    threads: str = ""

    @property
    def name(self) -> str:
        limit = "" if self.case.capacity is None else f"C={self.case.capacity}"
        special = SPECIAL.get(self.case, "")
        words = (self.framework, self.call, self.case.shape, limit, special, self.regularizer, self.threads)
        return " ".join(filter(None, words))


def cells(device: str) -> list[Cell]:
    if device == "cpu":
        pairs = list(zip(("numpy", "torch"), BOTH))
        found = [Cell(*pair, case, r) for case in CPU for r in REGULARIZERS for pair in pairs]
        found += [Cell(*pair, x, r, "all-threads") for x in THREADS for r in ("shannon", "gini") for pair in pairs]
        found += [Cell(*pair, case, r) for case in (OPTIONS, BOX) for r in REGULARIZERS for pair in pairs]
        shapes = (*cases.SAMPLING, OWN, OPTIONS, BOX)
        framework, calls, in_jax = "numpy", ("value", "sample", "entropy"), cases.JAX
    else:
        found = [Cell("graph", call, case, r) for case in GPU for r in REGULARIZERS for call in BOTH]
        found += [Cell("torch", call, cases.GPU_OVERHEAD, r) for r in REGULARIZERS for call in BOTH]
        framework, calls, shapes, in_jax = "graph", ("sample", "entropy"), (cases.GPU_SAMPLING,), (cases.GPU_SAMPLING,)
    for case in shapes:
        found += [Cell(framework, call, case, r) for call in calls for r in REGULARIZERS]
        found += [Cell(framework, "log_prob", case, "gini"), Cell(framework, "solve", case)]
    # JAX is last: once it is imported, small calls in the other frameworks take longer.
    return found + [Cell("jax", call, case, r) for case in in_jax for r in REGULARIZERS for call in BOTH]


# The process of a version.


def serve(device: str) -> None:
    """Says what it is, then answers commands, a line of JSON each, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not get in between
    cores = sorted(os.sched_getaffinity(0)) if device == "cpu" and hasattr(os, "sched_getaffinity") else []
    known = {cell.name: cell for cell in cells(device)}
    loaded: dict[tuple[str, float | None], Clock] = {}
    reply: Row = {"file": kg.__file__, "gpu": torch.cuda.get_device_name() if device == "cuda" else "none"}
    while True:
        print(json.dumps(reply), file=answers, flush=True)
        command = sys.stdin.readline()
        if not command:  # the parent has ended
            return
        name, at_least, core = json.loads(command)
        try:
            if cores:
                os.sched_setaffinity(0, cores if core is None else {cores[core % len(cores)]})
            if name not in {other for other, _ in loaded}:
                loaded.clear()
                gc.collect()
                torch.cuda.empty_cache()
            if (name, at_least) not in loaded:
                loaded[name, at_least] = load(known[name], at_least, device)
            gc.disable()
            reply = {"seconds": loaded[name, at_least](TURN[device])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        gc.enable()


def load(cell: Cell, at_least: float | None, device: str) -> Clock:
    """The clock of a cell, after some calls: everything is compiled."""
    clocks.set_threads((os.cpu_count() or 1) if cell.threads else 1)
    arguments = constraint_of(cell.case, at_least), REGULARIZERS[cell.regularizer or "shannon"](1.0)
    if cell.framework == "jax":
        repeats = 1 if device == "cpu" else JAX_REPEATS
        return wall_clock(jax_call(cell, *arguments, repeats), repeats)
    place = None if cell.framework == "numpy" else device
    if cell.framework == "graph":
        return graph_clock([make_call(cell, *arguments, place, seed) for seed in range(INPUTS)])
    call = make_call(cell, *arguments, place)

    def chunk() -> None:
        for _ in range(CHUNK):
            call()
        torch.cuda.synchronize()

    return wall_clock(call) if device == "cpu" else wall_clock(chunk, CHUNK)


def constraint_of(case: Case, at_least: float | None) -> Any:
    """In all knapsacks some items weigh just the capacity, so that any lower bound up to it can be met."""
    problem = cases.make(case)
    if problem.exactly:
        return kg.TopK(problem.total)
    weights = problem.weights[0]
    if case == OPTIONS:
        return kg.MultipleChoice(weights.reshape(-1, 4), problem.total)
    if case == BOX:
        return kg.MultiKnapsack([weights, np.ones_like(weights)], [problem.total, 10])
    if case == OWN:
        weights = np.random.default_rng(1).integers(case.lightest, case.heaviest + 1, problem.theta.shape)
    bound = {} if at_least is None else {"at_least": int(at_least * problem.total)}
    return kg.Knapsack(weights, problem.total, **bound)


def make_call(cell: Cell, constraint: Any, smoothing: Any, place: str | None, seed: int = 0) -> Callable[[], Any]:
    problem, rng = cases.make(cell.case, seed), None if place else np.random.default_rng(seed)
    event = (-1, 4) if cell.case == OPTIONS else (-1,)
    arrays = (x.reshape(len(x), *event) for x in (problem.theta, problem.z))
    theta, z = (torch.from_numpy(x).to(place) if place else x for x in arrays)
    sample = partial(kg.sample, theta, constraint, smoothing, num_samples=SAMPLES, rng=rng)
    if cell.call == "backward":
        theta.requires_grad_()
        return lambda: torch.autograd.grad(kg.relax(theta, constraint, smoothing), theta, z)
    if cell.call == "sample":
        return sample
    if cell.call == "log_prob":
        return partial(kg.log_prob, theta, sample(), constraint, smoothing)
    if cell.call == "solve":
        return partial(kg.solve, theta, constraint)
    return partial(getattr(kg, cell.call), theta, constraint, smoothing)


def jax_call(cell: Cell, constraint: Any, smoothing: Any, repeats: int) -> Callable[[], Any]:
    """One compiled function of one call, or of several, each of which needs the result of the one before."""
    import jax

    if repeats > 1 and jax.default_backend() != "gpu":
        raise RuntimeError("JAX sees no GPU")
    problem = cases.make(cell.case)
    theta, z = jax.device_put(problem.theta), jax.device_put(problem.z)

    def once(theta: Any, z: Any) -> Any:
        if cell.call == "relax":
            return (kg.relax(theta, constraint, smoothing),)
        y, pull = jax.vjp(lambda theta: kg.relax(theta, constraint, smoothing), theta)
        return y, pull(z)[0]

    def several(theta: Any, z: Any) -> Any:
        return jax.lax.fori_loop(0, repeats, lambda _, theta: theta + 1e-6 * sum(once(theta, z)), theta)

    compiled = jax.jit(once if repeats == 1 else several)
    return lambda: jax.block_until_ready(compiled(theta, z))


def wall_clock(call: Callable[[], Any], count: int = 1) -> Clock:
    """Times from Python, the median of a turn; ``call`` makes so many calls."""

    def measure() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    estimate = min(measure() for _ in range(4))

    def turn(seconds: float) -> float:
        if estimate < seconds:
            measure()  # the other process has had the caches
        repeats = max(1, min(1000, round(seconds / estimate)))
        return statistics.median([measure() for _ in range(repeats)]) / count

    return turn


def graph_clock(calls: list[Callable[[], Any]]) -> Clock:
    """Times of kernels alone, by events, the median of a turn; a time is that of a replay of all calls."""

    def capture(calls: list[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph, 1e-3 * min(floor.event_times(graph.replay, 5))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    calls = calls * min(16, math.ceil(1e-3 / capture(calls)[1]))  # a replay of a millisecond, if they are short
    graph, estimate = capture(calls)

    def turn(seconds: float) -> float:
        repeats = max(3, min(100, round(seconds / estimate)))
        floor.event_times(graph.replay, max(1, repeats // 4))  # the clock of the device goes up
        return 1e-3 * statistics.median(floor.event_times(graph.replay, repeats)) / len(calls)

    return turn


# The parent.


class Version:
    """A checkout and the process that measures it, which is started when there is none."""

    def __init__(self, checkout: Path, device: str) -> None:
        self.checkout, self.device, self.starts = checkout.resolve(), device, 0
        self.process: Any = None
        self.introduced: Row = {}

    def start(self) -> None:
        path = filter(None, [str(self.checkout / "src"), os.environ.get("PYTHONPATH")])
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        variables |= {"JAX_PLATFORMS": "cpu"} if self.device == "cpu" else {}
        variables |= {"PYTHONHASHSEED": str(self.starts)}  # the dictionaries of both versions are laid out alike
        command = [sys.executable, "-m", "benchmarks.compare", "--serve", self.device]
        pipes: Row = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=origin.ROOT, env=variables, **pipes)
        self.introduced, self.starts = {}, self.starts + 1

    def send(self, cell: Cell, at_least: float | None, core: int | None = None) -> None:
        if self.process is None:
            self.start()
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            print(json.dumps([cell.name, at_least, core]), file=self.process.stdin, flush=True)

    def answer(self) -> Row:
        line = self.process.stdout.readline() if self.process else ""
        if not line:
            self.close()
        reply = json.loads(line or '{"error": "the process ended"}')
        if self.introduced:
            return reply
        if not Path(reply.get("file", "/")).resolve().is_relative_to(self.checkout):
            raise SystemExit(f"knapgrad of {self.checkout} cannot be measured: {reply}")
        self.introduced = reply
        return self.answer()

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


Contestants = dict[str, tuple[Version, float | None]]  # the others are compared with the first


def measure(cell: Cell, contestants: Contestants, seconds: float) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Seconds per call, one number per turn, of the contestants that do not fail, and the errors of the others."""
    for version, at_least in contestants.values():  # all load and compile at the same time; this turn does not count
        version.send(cell, at_least)
    replies = {label: version.answer() for label, (version, _) in contestants.items()}
    errors = {label: reply["error"] for label, reply in replies.items() if "error" in reply}
    times: dict[str, list[float]] = {label: [] for label in contestants if label not in errors}
    first = next(iter(contestants))
    if first in errors or len(times) < 2:
        return {}, errors
    deadline, order = time.perf_counter() + seconds, random.Random(cell.name)
    while time.perf_counter() < deadline or len(times[first]) < 5:
        # What has one thread runs on the same core in all processes, and after some turns on the next one.
        core = len(times[first]) // 4 if cell.framework in ("numpy", "torch") and not cell.threads else None
        for label in order.sample(list(times), len(times)):
            version, at_least = contestants[label]
            version.send(cell, at_least, core)
            reply = version.answer()
            if "error" in reply:
                return {}, {**errors, label: reply["error"]}
            times[label].append(reply["seconds"])
    return {label: np.array(found) for label, found in times.items()}, errors


def summarize(name: str, starts: list[dict[str, np.ndarray]], errors: dict[str, str]) -> Row:
    """Ratios to the first contestant, turn by turn, pooled over the starts."""
    row: Row = {"cell": name, "errors": errors, "median_us": {}, "ratio": {}, "ratio_by_start": {}}
    for label in {label: None for start in starts for label in start}:
        pairs = [(start[label], next(iter(start.values()))) for start in starts if label in start]
        row["median_us"][label] = round(1e6 * float(np.median(np.concatenate([ours for ours, _ in pairs]))), 2)
        pooled = np.concatenate([ours / base for ours, base in pairs])
        row["ratio"][label] = {key: round(x, 4) for key, x in clocks.spread(pooled).items()} | {"turns": len(pooled)}
        row["ratio_by_start"][label] = [round(float(np.median(ours / base)), 4) for ours, base in pairs]
    return row


def overall(rows: list[Row], label: str) -> Row:
    ratios = {row["cell"]: row["ratio"][label]["median"] for row in rows if label in row["ratio"]}
    worst = max(ratios, key=ratios.__getitem__, default=None)
    median = round(statistics.median(ratios.values()), 4) if ratios else None
    return {"cells": len(ratios), "median": median, "worst": ratios.get(worst), "worst_cell": worst}


def show(results: Row, first: str, *others: str) -> None:
    width = max(len(row["cell"]) for row in results["cells"])
    print(f"{'':{width}} {first + ' µs':>14}", *(f"{label + ' µs':>16}  {'ratio (quartiles)':19}" for label in others))
    for row in results["cells"]:
        parts = [f"{row['cell']:{width}} {row['median_us'].get(first, ''):>14}"]
        for label in others:
            x = row["ratio"].get(label)
            ratio = f"{x['median']:.3f} ({x['q1']:.3f}–{x['q3']:.3f})" if x else ""
            parts += [f"{row['median_us'].get(label, ''):>16}  {ratio:19}"]
        print(*parts, *(f"\n    {label} failed: {error}" for label, error in row["errors"].items()))
    for label, x in results["overall"].items():
        print(f"{label} / {first}: median {x['median']} of {x['cells']} cells, worst {x['worst']} ({x['worst_cell']})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("cells", nargs="*", help="only cells with all words of one of these in their names (all; ? lists them)")
    add("--base", type=Path, metavar="PATH", help="checkout of the version to compare with")
    add("--at-least", type=float, nargs="+", metavar="FRACTION", help="at_least of knapsacks, in capacities")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    add("--seconds", type=float, help="for the turns of a cell, after each start (0.4, quick: 0.1)")
    add("--restarts", type=int, help="how often the processes are started (5, cuda: 2, quick: 1)")
    add("--quick", action="store_true", help="a look, not a result")
    add("--commits", nargs=2, metavar=("BASE", "NEW"), help="to record, where checkouts are copies without Git folders")
    add("--output", type=Path, help="JSON file, written after each start")
    options = parser.parse_args()
    if (options.base is None) == (options.at_least is None):
        parser.error("give either --base or --at-least")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU")
    options.seconds = options.seconds or (0.1 if options.quick else 0.4)
    options.restarts = options.restarts or (1 if options.quick else RESTARTS[options.device])
    found = [cell for cell in cells(options.device) if options.base or cell.case.k is None]
    found = [cell for cell in found if cell.framework != "jax" or importlib.util.find_spec("jax")]
    wanted = [set(words.split()) for words in options.cells or [""]]
    options.cells = [cell for cell in found if any(words <= set(cell.name.split()) for words in wanted)]
    if not options.cells:
        parser.error("no such cell; there are\n" + "\n".join(cell.name for cell in found))
    return options


def environment(options: argparse.Namespace, gpu: str) -> Row:
    command = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    found = origin.environment(command, "benchmarks.compare") | {"cuda": torch.version.cuda, "gpu": gpu}
    if options.commits:
        found["base_commit"], found["commit"] = options.commits
    elif options.base and (options.base / ".git").exists():
        describe = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        found["base_commit"] = subprocess.run(describe, cwd=options.base, capture_output=True, text=True).stdout.strip()
    return found


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the other processes are ended
    new = Version(origin.ROOT, options.device)
    if options.base:
        contestants: Contestants = {"base": (Version(options.base, options.device), None), "new": (new, None)}
    else:
        contestants = {"no bound": (new, None)} | {f"at least {x:g}": (new, x) for x in options.at_least}
    starts: dict[str, list[dict[str, np.ndarray]]] = {cell.name: [] for cell in options.cells}
    errors: dict[str, dict[str, str]] = {cell.name: {} for cell in options.cells}
    bar = tqdm(total=options.restarts * len(options.cells), unit="cell", mininterval=2)
    for _ in range(options.restarts):
        try:
            for cell in options.cells:
                bar.set_description(cell.name)
                found, failed = measure(cell, contestants, options.seconds)
                starts[cell.name].append(found)
                errors[cell.name] |= failed
                bar.update()
        finally:
            for version, _ in contestants.values():
                version.close()
        rows = [summarize(name, starts[name], errors[name]) for name in starts]
        results = {"environment": environment(options, new.introduced["gpu"])}
        results |= {"overall": {label: overall(rows, label) for label in list(contestants)[1:]}, "cells": rows}
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    bar.close()
    show(results, *contestants)
    sys.exit(any(errors.values()))


if __name__ == "__main__":
    main()
