"""Measure knapgrad on a CUDA device, next to eager PyTorch, a jitted JAX scan and a floor (benchmarks/floor.py).

Every shape is first checked against the specification, knapgrad.reference in float64; what is wrong is not timed. Our
own times are those of kernels alone: CUDA graphs of calls on several inputs in turn, between events. Every result is
saved as soon as it is there; a part that fails leaves its error in the file, and the others go on.

    PYTHONPATH=src python -m benchmarks.gpu --output benchmarks/results/h200.json
    python -m benchmarks.gpu --report benchmarks/results/h200.json      (rewrites the tables of docs/gpu.md; no GPU)
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import knapgrad as kg
from benchmarks import cases, eager_torch, floor, gpu_report, jax_scan
from benchmarks.cases import Case, Instances
from knapgrad import reference
from knapgrad.regularizers import REGULARIZERS
from knapgrad.torch import backend, operators
from measuring import clocks, origin

Row = dict[str, Any]
TASKS = ("forward", "both")
RELAX_ALLOWED, VJP_ALLOWED, BASELINE_ALLOWED = 1e-5, 1e-4, 1e-2
TIE_GAMMA = float(np.float32(1e-4))
CHECKED = 4  # instances of each shape: the specification is slow
JAX_REPEATS = 20
INPUTS = 4  # sets of theta and z that take turns, so that they are not always in the cache
SAMPLES = 32


def main() -> None:
    options = parse()
    if options.report:
        gpu_report.write(json.loads(options.report.read_text()), options.page)
        print(f"Wrote {options.page}")
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this section needs one (for the CPU: python -m benchmarks)")
    run = Run(options)
    for name in options.sections:
        run.section(name, SECTIONS[name])
    run.bar.close()
    print("\n\n".join(gpu_report.speed(run.results, task) for task in TASKS if run.results.get("speed")))
    print(f"Saved to {options.output}")
    if run.results["failures"]:
        raise SystemExit("FAILED: " + "; ".join(f"{f['section']}: {f['error']}" for f in run.results["failures"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", help=f"which parts to run, of {', '.join(SECTIONS)} (all, in this order)"
    )
    parser.add_argument("--quick", action="store_true", help="short turns: a look, not a result")
    parser.add_argument("--limit", type=float, help="seconds after which baselines are left out (215, quick: 60)")
    parser.add_argument("--eager-limit", type=float, help="seconds for eager torch (45, quick: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (0)")
    parser.add_argument("--commit", help="to record, where the code is a copy without its Git folder")
    parser.add_argument("--output", type=Path, help="JSON file (benchmarks/results/h200.json, quick: gpu-quick.json)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: rewrite the page from this file")
    parser.add_argument("--page", type=Path, default=origin.ROOT / "docs" / "gpu.md", help="for --report (docs/gpu.md)")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    options.sections = options.sections or list(SECTIONS)
    options.limit = options.limit or (60.0 if options.quick else 215.0)
    options.eager_limit = options.eager_limit or (10.0 if options.quick else 45.0)
    options.seconds = 0.05 if options.quick else 0.2  # of replays for one number
    if options.output is None:
        name = "gpu-quick.json" if options.quick else "h200.json"
        options.output = origin.ROOT / "benchmarks" / "results" / name
    return options


class Run:
    """The results so far, where they are saved, and how much time is left."""

    def __init__(self, options: argparse.Namespace, device: str = "cuda") -> None:
        self.options, self.device, self.start = options, device, time.perf_counter()
        self.results: dict[str, Any] = {"environment": environment(options), "seconds": {}, "failures": []}
        self.bar = tqdm(unit="row", file=sys.stderr, mininterval=10)

    def section(self, name: str, part: Callable[[Run], None]) -> None:
        self.bar.set_description(name)
        start = time.perf_counter()
        try:
            gc.collect()
            torch.cuda.empty_cache()
            part(self)
        except Exception as error:
            self.fail(name, error)
        self.results["seconds"][name] = round(time.perf_counter() - start, 1)
        self.save()

    def fail(self, section: str, error: Exception | str) -> None:
        where = "" if isinstance(error, str) else "".join(traceback.format_exception(error))[-2000:]
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.results["failures"].append({"section": section, "error": text[:500], "traceback": where})
        self.bar.write(f"{section}: {text[:300]}", file=sys.stderr)
        self.save()

    def save(self) -> None:
        self.bar.update()
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        self.options.output.write_text(json.dumps(self.results, indent=1) + "\n")

    def row(self, case: Case, regularizer: str) -> Row:
        """The row of a shape and a regularizer, to which several sections add."""
        rows = self.results.setdefault("speed", [])
        for row in rows:
            if (row["shape"], row["regularizer"]) == (case.shape, regularizer):
                return row
        row = {"shape": case.shape, "batch": case.batch, "items": case.items}
        row["capacity"] = cases.make(case, self.options.seed).total
        row |= {"regularizer": regularizer, "forward": {}, "both": {}}
        if case.bound:
            for task, bound in zip(TASKS, case.bound):
                row[task]["bound_ms"] = bound
        rows.append(row)
        return row

    def out_of_time(self, deadline: float = math.inf) -> bool:
        now = time.perf_counter()
        return now > deadline or now - self.start > self.options.limit

    def pairs(self) -> Iterable[tuple[str, Case]]:
        """Regularizers and shapes, leaving out what was found wrong."""
        wrong = {(e["shape"], e["regularizer"]) for e in self.results.get("correctness", []) if not e["ok"]}
        for name in REGULARIZERS:
            for case in cases.GPU:
                if (case.shape, name) not in wrong:
                    yield name, case


def environment(options: argparse.Namespace) -> dict[str, Any]:
    found = origin.environment([], "benchmarks.gpu")
    found["command"] = f"python -m benchmarks.gpu --limit {options.limit:g} --eager-limit {options.eager_limit:g}"
    found["commit"] = options.commit or found["commit"]
    found["versions"] |= {name: version(name) for name in ("triton", "jax", "jaxlib")}
    found["cuda"] = torch.version.cuda or "none"
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found["driver"] = driver()
    return found


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# Ours, called as the operations call it.


class Ours:
    """Tensors of a problem on the device, and the operators on them."""

    def __init__(self, problem: Instances, regularizer: str, device: str, gamma: float = 1.0) -> None:
        self.theta, self.z = (torch.from_numpy(x).to(device) for x in (problem.theta, problem.z))
        strength = torch.tensor(gamma, dtype=torch.float64)
        self.constants = backend.lattice(problem.constraint, self.theta), strength, regularizer

    @torch.no_grad()
    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return operators.operator(self.theta, *self.constants, True)

    @torch.no_grad()
    def vjp(self) -> torch.Tensor:
        return operators.vjp(self.theta, self.z, *self.constants)

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward()[1], self.vjp()


def near_ties(problem: Instances) -> Instances:
    """Scores that differ from the weights by 1e-4, which is gamma as well: theta / gamma is about 1e4."""
    theta = problem.weights + TIE_GAMMA * problem.theta.astype(np.float64)
    return Instances(theta.astype(np.float32), problem.z, problem.weights, problem.capacity, problem.exactly)


def correctness(run: Run) -> None:
    """Ours in float32 against the specification in float64, on some instances of every shape."""
    rows = run.results["correctness"] = []
    for name in REGULARIZERS:
        for case in cases.GPU:
            problem = cases.make(case, run.options.seed)
            for kind, tried, gamma in (("ordinary", problem, 1.0), ("near-ties", near_ties(problem), TIE_GAMMA)):
                row: Row = {"shape": case.shape, "regularizer": name, "kind": kind, "instances": CHECKED, "ok": False}
                rows.append(row)
                try:
                    row |= errors(tried, name, gamma, run.device)
                except Exception as error:
                    run.fail("correctness", error)
                    continue
                row["ok"] = bool(row["relax"] <= RELAX_ALLOWED and row["vjp"] <= VJP_ALLOWED)  # a NaN is wrong
                if not row["ok"]:
                    off = f"relax off by {row['relax']:.1e}, VJP by {row['vjp']:.1e}: not timed"
                    run.fail("correctness", f"WRONG: {case.shape}, {name}, {kind}: {off}")
                run.save()


def errors(problem: Instances, regularizer: str, gamma: float, device: str) -> Row:
    """Largest errors of value (relative), relax (absolute) and the VJP (relative to its largest entry)."""
    ours = Ours(problem, regularizer, device, gamma)
    value, relaxed, product = (x.double().cpu().numpy() for x in (*ours.forward(), ours.vjp()))
    if not all(np.isfinite(x).all() for x in (value, relaxed, product)):
        raise FloatingPointError(f"NaN or infinity from {regularizer}, theta of shape {tuple(ours.theta.shape)}")
    found: dict[str, list[float]] = {"value": [], "relax": [], "vjp": []}
    largest = 0.0
    for b in np.unique(np.linspace(0, len(problem.theta) - 1, CHECKED).astype(int)):
        rest = problem.constraint.lattice(problem.theta.shape[1]), REGULARIZERS[regularizer]
        theta, z = problem.theta[b].astype(np.float64) / gamma, problem.z[b].astype(np.float64)
        true_value, true_relaxed = reference.operator(theta, *rest)
        true_product = reference.vjp(theta, z, *rest)
        found["value"].append(abs(value[b] - true_value) / max(1.0, abs(true_value)))
        found["relax"].append(np.abs(relaxed[b] - true_relaxed).max())
        found["vjp"].append(np.abs(product[b] - true_product).max())
        largest = max(largest, np.abs(true_product).max())
    row = {key: float(np.max(of_instances)) for key, of_instances in found.items()}
    row["vjp"] /= max(largest, 1e-3)  # an instance that is decided has a product of zero
    return row


# Clocks. All times are in milliseconds.


def replay_times(calls: list[Callable[[], Any]], seconds: float) -> np.ndarray:
    """Milliseconds per call, one number per replay of a graph of all calls in turn; short calls are repeated in it."""
    graph = capture(calls)
    once = float(np.median(floor.event_times(graph.replay, 3)))
    rounds = min(16, max(1, math.ceil(2.0 / once)))
    if rounds > 1:
        graph = capture(calls * rounds)
    count = int(min(300, max(20, 1e3 * seconds / (once * rounds))))
    floor.event_times(graph.replay, max(3, count // 4))  # the clock of the device goes up
    return np.array(floor.event_times(graph.replay, count)) / (len(calls) * rounds)


def capture(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def wall_times(call: Callable[[], Any], wait: Callable[[], Any], chunk: int, seconds: float, least: int) -> np.ndarray:
    """Milliseconds per call, one number per ``chunk`` of calls, after which we ``wait`` for the device."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < seconds and len(times) < 200):
        start = time.perf_counter()
        for _ in range(chunk):
            call()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / chunk)
    return np.array(times)


def milliseconds(times: np.ndarray) -> dict[str, float]:
    return {key: round(value, 6) for key, value in clocks.spread(times).items()} | {"count": len(times)}


# Sections.


def ours(run: Run) -> None:
    """Value and relax, and with the VJP: kernels alone."""
    for name, case in run.pairs():
        row = run.row(case, name)
        inputs = [Ours(cases.make(case, run.options.seed + k), name, run.device) for k in range(INPUTS)]
        for k in inputs[1:]:
            k.constants = inputs[0].constants  # other scores, the same weights
        try:
            for task in TASKS:
                row[task]["ours_ms"] = milliseconds(
                    replay_times([getattr(x, task) for x in inputs], run.options.seconds)
                )
        except Exception as error:
            run.fail(f"ours {case.shape} {name}", error)
        run.save()


def floors(run: Run) -> None:
    """The copy bandwidth, the latency of a step for each shape, and what follows."""
    bandwidth = floor.copy_bandwidth()
    measured = run.results["floor"] = {"copy_bytes_per_s": bandwidth, "step_us": {}}
    for case in cases.GPU:
        problem = cases.make(case, run.options.seed)
        step = floor.step_latency(case.batch, case.items, min(problem.total, int(problem.weights.sum())))
        measured["step_us"][case.shape] = step
        for name in REGULARIZERS:
            row = run.row(case, name)
            for task in TASKS:
                moved = floor.bytes_moved(case.batch, problem.weights[0], problem.total, task)
                row[task]["floor"] = floor.floor_ms(moved, case.items, task, bandwidth, step)
                if "ours_ms" in row[task]:
                    row[task]["over_floor"] = round(row[task]["ours_ms"]["median"] / row[task]["floor"]["ms"], 3)
        run.save()


def overhead(run: Run) -> None:
    """Wall time of a tiny call from Python, and of the same call in a CUDA graph."""
    rows = run.results["overhead"] = []
    problem = cases.make(cases.GPU_OVERHEAD, run.options.seed)
    budget = kg.Knapsack(problem.weights[0], problem.total)
    theta, z = (torch.from_numpy(x).to(run.device) for x in (problem.theta, problem.z))
    with_grad = theta.clone().requires_grad_()
    for name, cls in REGULARIZERS.items():
        regularizer = cls(1.0)
        relax = partial(kg.relax, theta, budget, regularizer)

        def relax_backward(regularizer: Any = regularizer) -> None:
            torch.autograd.grad(kg.relax(with_grad, budget, regularizer), with_grad, z)

        for what, call in (("relax", relax), ("relax + backward", relax_backward)):
            row: Row = {"regularizer": name, "call": what}
            rows.append(row)
            seconds = 2 * run.options.seconds
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            row["call_ms"] = milliseconds(wall_times(call, torch.cuda.synchronize, 200, seconds, 5))
            try:
                graph = capture([call])
                row["replay_ms"] = milliseconds(wall_times(graph.replay, torch.cuda.synchronize, 200, seconds, 5))
                row["device_ms"] = milliseconds(replay_times([call] * INPUTS, run.options.seconds))
            except Exception as error:
                run.fail(f"overhead, graph of {what}", error)
            run.save()


def memory(run: Run) -> None:
    """How far relax and its backward pass raise what torch has allocated."""
    case = cases.GPU_MEMORY
    problem = cases.make(case, run.options.seed)
    budget, regularizer = kg.Knapsack(problem.weights[0], problem.total), kg.Shannon(1.0)
    theta, z = (torch.from_numpy(x).to(run.device) for x in (problem.theta, problem.z))
    theta.requires_grad_()
    torch.autograd.grad(kg.relax(theta, budget, regularizer), theta, z)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = kg.relax(theta, budget, regularizer)
    kept = torch.cuda.memory_allocated() - before
    torch.autograd.grad(y, theta, z)
    torch.cuda.synchronize()
    run.results["memory"] = {
        "shape": case.shape,
        "capacity": problem.total,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "kept_bytes": kept,
        "theta_bytes": problem.theta.nbytes,
        "table_bytes": 4 * case.batch * case.items * (problem.total + 1),
    }


def extras(run: Run) -> None:
    """Sampling, log_prob, entropy and solve by the public functions, kernels alone; the random numbers included."""
    rows = run.results["extras"] = []
    case = cases.GPU_SAMPLING
    problems = [cases.make(case, run.options.seed + k) for k in range(INPUTS)]
    budget = kg.Knapsack(problems[0].weights[0], problems[0].total)
    thetas = [torch.from_numpy(problem.theta).to(run.device) for problem in problems]
    drawn = [kg.sample(theta, budget, kg.Shannon(1.0), num_samples=SAMPLES) for theta in thetas]
    for name, cls in REGULARIZERS.items():
        regularizer = cls(1.0)
        calls: dict[str, list[Callable[[], Any]]] = {
            f"sample, {SAMPLES} per instance": [
                partial(kg.sample, theta, budget, regularizer, num_samples=SAMPLES) for theta in thetas
            ],
            f"log_prob of {SAMPLES} per instance": [
                partial(kg.log_prob, theta, y, budget, regularizer) for theta, y in zip(thetas, drawn)
            ],
            "entropy": [partial(kg.entropy, theta, budget, regularizer) for theta in thetas],
        }
        if name == "shannon":
            calls["solve"] = [partial(kg.solve, theta, budget) for theta in thetas]
        for what, on_inputs in calls.items():
            row: Row = {"shape": case.shape, "regularizer": "none" if what == "solve" else name, "call": what}
            rows.append(row)
            try:
                row["ours_ms"] = milliseconds(replay_times(on_inputs, run.options.seconds))
            except Exception as error:
                run.fail(f"{what}, {name}", error)
            run.save()


def eager(run: Run) -> None:
    """Baseline (a): eager torch, relax by autograd, the VJP by double backward."""
    deadline = time.perf_counter() + run.options.eager_limit
    for name, case in run.pairs():
        row = run.row(case, name)
        problem = cases.make(case, run.options.seed)
        constants = problem.weights[0].tolist(), problem.total, problem.exactly, name
        theta, z = (torch.from_numpy(x).to(run.device) for x in (problem.theta, problem.z))
        with_grad = theta.clone().requires_grad_()
        expected = Ours(problem, name, run.device)

        def forward(theta: Any = theta, constants: Any = constants) -> Any:
            return eager_torch.relax(theta, *constants)[1]

        def both(theta: Any = with_grad, z: Any = z, constants: Any = constants) -> Any:
            return torch.autograd.grad(eager_torch.relax(theta, *constants)[1], theta, z)[0]

        compare = partial(difference, expected, as_numpy=lambda y: y.cpu().numpy())
        baseline(run, row, "eager", {"forward": forward, "both": both}, compare, torch.cuda.synchronize, deadline)


def jax(run: Run) -> None:
    """Baseline (b): a jitted JAX scan on float32 rows; and our kernels, called from JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax as jax_module
    except ImportError:
        run.results["jax"] = "not installed"
        return
    platform = jax_module.devices()[0].platform
    if run.device == "cuda" and platform not in ("gpu", "cuda"):
        run.results["jax"] = f"installed without a GPU ({platform})"
        return
    from benchmarks import in_jax

    run.results["jax"] = jax_module.__version__
    for contestant in ("jax_ours", "jax"):
        for name, case in run.pairs():
            row = run.row(case, name)
            problem = cases.make(case, run.options.seed)
            theta, z = jax_module.device_put(problem.theta), jax_module.device_put(problem.z)
            repeats = JAX_REPEATS if contestant == "jax_ours" else 1
            if contestant == "jax_ours":
                forward, both = in_jax.ours(problem, name)
            else:
                forward, both = jax_scan.make(problem.weights[0], problem.total, problem.exactly, name)
            latest: list[Any] = [None]

            def keep(function: Any, *arguments: Any, latest: list[Any] = latest) -> Any:
                latest[0] = function(*arguments)
                return latest[0]

            calls = {
                "forward": partial(keep, in_turn(forward, repeats), theta),
                "both": partial(keep, in_turn(both, repeats), theta, z),
            }
            compare = partial(difference, Ours(problem, name, run.device), forward(theta)[1], np.asarray)
            wait = partial(jax_wait, jax_module, latest)
            baseline(run, row, contestant, calls, lambda _, c=compare: c(), wait, math.inf, 10 // repeats or 1, repeats)


def in_turn(function: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """So many calls inside one compiled function, without overhead of Python, each waiting for the one before."""
    import jax as jax_module

    def step(theta: Any, *rest: Any) -> Any:
        _, *results = function(theta, *rest)  # all of them are used: what is not would be left out
        return theta + 1e-6 * sum(results)

    def loop(theta: Any, *rest: Any) -> Any:
        return jax_module.lax.fori_loop(0, repeats, lambda _, t: step(t, *rest), theta)

    return jax_module.jit(loop) if repeats > 1 else function


def jax_wait(jax_module: Any, latest: list[Any]) -> None:
    jax_module.block_until_ready(latest[0])


def difference(expected: Ours, found: Any, as_numpy: Callable[[Any], np.ndarray]) -> float:
    return float(np.abs(expected.forward()[1].cpu().numpy() - as_numpy(found)).max())


def baseline(
    run: Run,
    row: Row,
    name: str,
    calls: dict[str, Callable[[], Any]],
    compare: Callable[[Any], float],
    wait: Callable[[], Any],
    deadline: float,
    chunk: int = 1,
    repeats: int = 1,
) -> None:
    """Times a baseline if its selection is about right and time is left; else records why it was not timed. ``call``
    makes so many calls in turn."""
    for task in TASKS:
        if run.out_of_time(deadline):
            row[task][f"{name}_missing"] = "out of time"
            continue
        try:
            result = calls[task]()  # compiles, and loads what torch loads late
            wait()
            if task == "forward":
                row[f"{name}_error"] = compare(result)
                if not row[f"{name}_error"] <= BASELINE_ALLOWED:
                    raise ArithmeticError(f"relax differs by {row[f'{name}_error']:.1e} from ours: not timed")
            del result
            once = wall_times(calls[task], wait, 1, 0.0, 1)[0]
            if once > 300:  # slow enough to be sure of
                times = np.append(wall_times(calls[task], wait, 1, 0.0, 2), once)
            else:
                times = wall_times(calls[task], wait, 1 if once > 20 else chunk, run.options.seconds, 5)
            row[task][f"{name}_ms"] = milliseconds(times / repeats)
        except Exception as error:
            row[task][f"{name}_missing"] = f"failed: {type(error).__name__}"
            run.fail(f"{name} {row['shape']} {row['regularizer']} {task}", error)
            break
    run.save()
    gc.collect()


SECTIONS: dict[str, Callable[[Run], None]] = {
    "correctness": correctness,
    "ours": ours,
    "floor": floors,
    "overhead": overhead,
    "memory": memory,
    "extras": extras,
    "eager": eager,
    "jax": jax,
}

if __name__ == "__main__":
    main()
