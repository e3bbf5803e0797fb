"""Long selections on a CUDA device: the pipeline over tiles of capacities against one program per instance.

What is timed is checked first: against knapgrad.reference in float64 at moderate sizes, against the kernels of the CPU
in float64 at 32768 items. Both ways take turns on the same inputs, between CUDA events; the launches of the pipeline
are timed apart as well. Rows are printed and saved as they come.

    PYTHONPATH=src python -m benchmarks.pipeline --output pipeline.json
    TRITON_INTERPRET=1 PYTHONPATH=src python -m benchmarks.pipeline large  # the errors alone, without a GPU, in hours
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import knapgrad as kg
from knapgrad import reference
from knapgrad.constraints import base
from knapgrad.kernels.triton import from_torch, pipeline, plan
from knapgrad.regularizers import REGULARIZERS
from measuring.origin import environment

GAMMA = 0.3
H200 = 132  # multiprocessors
ALWAYS, NEVER = (1 << 30, 0, 0), (0, 0, 0)
ALWAYS_FAR, NEVER_FAR = (*ALWAYS, 1 << 30), (*NEVER, 0)
RULES = plan.PIPELINED, plan.PIPELINED_FAR, plan.SEGMENTED
WAYS = {
    "pipeline": (ALWAYS, ALWAYS_FAR, (0, 1)),
    "segments": (ALWAYS, ALWAYS_FAR, plan.SEGMENTED),
    "one program": (NEVER, NEVER_FAR, (0, 1)),
    "rule": RULES,
}
#: batch, items, k
TOP_K = [(64, 1024, 128), (16, 4096, 512), (8, 8192, 1024), (4, 32768, 2048), (1, 131072, 2048)]
#: batch, items, capacity
WIDE = [(16, 500, 5000), (8, 1000, 50_000), (4, 1000, 1_000_000)]
WIDE_CROSSOVER = [(batch, 400, capacity) for capacity in (2000, 4200, 20_000, 120_000) for batch in (1, 16)]
WIDE_CROSSOVER += [(32, 400, 4200), (1, 100, 20_000), (8, 100, 5000), (4, 1000, 250_000)]
SECTIONS = [
    "small", "large", "top-k", "segments", "variants", "wide", "wide variants", "crossover", "wide crossover",
]  # fmt: skip
#: tiles per multiprocessor, up to which items are cut into segments, and their least length
SEGMENTS = [(4, 1024), (8, 1024), (16, 1024), (32, 1024)]
BATCHES = 16, 64, 128, 256, 512, 1024
CROSSOVER = [(batch, n, k) for n in (200, 1000) for k in (20, 50, 100, 200, 400) for batch in BATCHES if k < n]
#: tile, items read ahead
VARIANTS = [(32, 4), (32, 8), (32, 16), (64, 8)]
#: the same, for picks that move further than a tile
FAR_VARIANTS = [(32, 2), (32, 4), (64, 2), (64, 4), (128, 2), (128, 4)]


def use(way: str) -> None:
    """From now on; constraints remember their launches, as do all that are equal, so they are made anew."""
    plan.PIPELINED, plan.PIPELINED_FAR, plan.SEGMENTED = WAYS[way]
    plan.tiles.cache_clear()
    plan.segments.cache_clear()
    base._first_equal.cache_clear()


def knapsack(n: int, capacity: int) -> kg.Knapsack:
    """About half of the total weight."""
    return kg.Knapsack(np.random.default_rng(n).integers(1, 4 * capacity // n, n), capacity)


def scores(batch: int, n: int, dtype: Any = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, n, device="cuda", generator=generator, dtype=dtype)


def tasks(constraint: Any, smoothing: Any, theta: torch.Tensor, z: torch.Tensor) -> dict[str, Callable[[], Any]]:
    leaf = theta.clone().requires_grad_()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return kg.relax(theta, constraint, smoothing)

    def both() -> torch.Tensor:
        return torch.autograd.grad(kg.relax(leaf, constraint, smoothing), leaf, z)[0]

    return {"forward": forward, "both": both}


def events(calls: dict[str, Callable[[], Any]], seconds: float, most: int = 25) -> dict[str, list[float]]:
    """Milliseconds of each call on the device, in turn; the slow ones less often."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    spent = dict.fromkeys(calls, 0.0)
    for _ in range(most):
        for name, call in calls.items():
            if spent[name] > seconds and len(found[name]) >= 3:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end))
            spent[name] += 1e-3 * found[name][-1]
    return found


def quartiles(times: list[float]) -> list[float]:
    return [round(float(x), 4) for x in np.quantile(times, [0.5, 0.25, 0.75])]


def launches(call: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each launch of the pipeline in a call, medians."""
    plain = pipeline.Pipeline.launch
    times: list[list[tuple[str, Any, Any]]] = []

    def timed(self: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        plain(self, kernel, *arguments, **options)
        end.record()
        times[-1].append((kernel.__name__.removesuffix("_tiles_kernel"), begin, end))

    pipeline.Pipeline.launch = timed  # type: ignore[method-assign]
    try:
        for _ in range(repeats):
            times.append([])
            call()
            torch.cuda.synchronize()
    finally:
        pipeline.Pipeline.launch = plain  # type: ignore[method-assign]
    found: dict[str, list[float]] = {}
    for turn in times:
        for place, (name, begin, end) in enumerate(turn):
            found.setdefault(f"{place} {name}", []).append(begin.elapsed_time(end))
    return {name: round(statistics.median(x), 4) for name, x in found.items()}


def check_small() -> list[dict[str, Any]]:
    """Against the specification."""
    use("pipeline")
    rng = np.random.default_rng(0)
    cases = {
        "top 100 of 300": (kg.TopK(100), 300),
        "top 31, 32 or 33 of 64": (kg.TopK(33, at_least=31), 64),
        "top 40 of 40": (kg.TopK(40), 40),
        "knapsack": (kg.Knapsack(rng.integers(0, 9, 200), 400), 200),
        "a least weight": (kg.Knapsack(rng.integers(0, 32, 100), 700, at_least=690), 100),
        "heavy items": (kg.Knapsack(rng.integers(0, 900, 150), 2000), 150),
    }
    rows: list[dict[str, Any]] = []
    for place, (name, (constraint, n)) in enumerate(cases.items()):
        lattice = constraint.lattice(n)
        for regularizer, kind in REGULARIZERS.items():
            if place and list(REGULARIZERS)[place % 3] != regularizer:
                continue  # all of the first case, one of the others: most of the time is the compiler's
            for dtype in (torch.float32, torch.float64)[: 1 if place else 2]:
                theta, z = scores(3, n, dtype), scores(3, n, dtype, seed=1)
                calls = tasks(constraint, kind(GAMMA), theta, z)
                value, y, slope = kg.value(theta, constraint, kind(GAMMA)), calls["forward"](), calls["both"]()
                entropy = kg.entropy(theta, constraint, kind(GAMMA))
                error = np.zeros(4)
                for b in range(len(theta)):
                    scaled, direction = theta[b].double().cpu().numpy() / GAMMA, z[b].double().cpu().numpy()
                    v, mean = reference.operator(scaled, lattice, kind)
                    product = reference.vjp(scaled, direction, lattice, kind) / GAMMA
                    spread = reference.entropy(scaled, lattice, kind)[0]
                    error = np.maximum(error, [
                        abs(float(value[b]) / GAMMA - v) / abs(v),
                        np.abs(y[b].double().cpu().numpy() - mean).max(),
                        np.abs(slope[b].double().cpu().numpy() - product).max() / max(np.abs(product).max(), 1e-2),
                        abs(float(entropy[b]) - spread) / max(spread, 1.0),
                    ])  # fmt: skip
                exact = (1e-5, 1e-5, 1e-4, 1e-5) if dtype == torch.float32 else (1e-10, 1e-9, 1e-8, 1e-10)
                rows.append({"case": name, "regularizer": regularizer, "dtype": str(dtype), "errors": error.tolist()})
                good = bool((error <= exact).all())
                rows[-1]["good"] = good
                print(
                    "ok " if good else "BAD", name, regularizer, dtype, " ".join(f"{x:.1e}" for x in error), flush=True
                )
    return rows


def check_large(interpreted: bool, save: Callable[[Any], None]) -> None:
    """Against the CPU in float64: relax, and its derivative relative to the largest entry. Interpreted: on the CPU too,
    with as many segments as on an H200, and tiles of a whole row, which change no number of a lane."""
    rows: list[dict[str, Any]] = []
    n, k = 32768, 2048
    segments = plan.segments(1, n, k, 1, 2, 4, H200)
    assert segments is not None
    rng = np.random.default_rng(0)
    theta, z = (torch.tensor(rng.normal(size=(1, n)), dtype=torch.float32) for _ in range(2))
    for way, regularizers in (("segments", {"shannon": REGULARIZERS["shannon"]}), ("pipeline", REGULARIZERS)):
        for regularizer, kind in regularizers.items():
            exact = [call().double() for call in tasks(kg.TopK(k), kind(GAMMA), theta.double(), z.double()).values()]
            use(way)
            if interpreted:
                plan.TILE = plan.power_of_2(k + 1)
                plan.SEGMENTED = (segments[0], n // segments[0]) if way == "segments" else (0, 1)
                lattice = kg.TopK(k).lattice(n)
                tensors = {x: torch.tensor(getattr(lattice, x)) for x in ("weights", "capacity", "slack")}
                given = lattice.replace(**tensors, sizes=lattice.sizes), np.array(GAMMA), regularizer
                found = [from_torch.relax(theta, *given), from_torch.vjp(theta, z, *given) / GAMMA]
            else:
                found = [x().cpu() for x in tasks(kg.TopK(k), kind(GAMMA), theta.cuda(), z.cuda()).values()]
            errors = [float((x.double() - y).abs().max()) for x, y in zip(found, exact)]
            row = {"way": way, "regularizer": regularizer, "relax": errors[0]}
            rows.append(row | {"vjp": errors[1] / float(exact[1].abs().max())})
            print("1 x 32768, k = 2048", rows[-1], flush=True)
            save(rows)


def compare(
    batch: int, n: int, constraint_of: Callable[[], Any], regularizer: str, seconds: float, ways: list[str]
) -> dict[str, Any]:
    """Both ways in turn, for both tasks."""
    theta, z, kind = scores(batch, n), scores(batch, n, seed=1), REGULARIZERS[regularizer]
    row: dict[str, Any] = {"batch": batch, "n": n, "regularizer": regularizer}
    made = {}
    for way in ways:
        use(way)
        constraint = constraint_of()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        made[way] = tasks(constraint, kind(GAMMA), theta, z)
        for call in made[way].values():
            call()  # compiles, and settles the way: it is kept with the constraint
        torch.cuda.synchronize()
        row[f"{way}, peak MB"] = round(torch.cuda.max_memory_allocated() / 1e6)
    for way in ways[1:]:
        row[f"difference, {way}"] = float((made[ways[0]]["both"]() - made[way]["both"]()).abs().max())
    for task in ("forward", "both"):
        times = events({way: calls[task] for way, calls in made.items()}, seconds)
        row |= {f"{way}, {task}": quartiles(x) for way, x in times.items()}
        for way in made:
            if way != "one program":
                row[f"launches, {way}, {task}"] = launches(made[way][task])
    return row


def segments(seconds: float) -> list[dict[str, Any]]:
    """More and fewer segments, next to the pipeline without."""
    rows, usual = [], WAYS["segments"]
    for batch, n, k in TOP_K:
        for place, rule in enumerate(SEGMENTS):
            WAYS["segments"] = (*usual[:2], rule)
            use("segments")
            found = plan.segments(batch, n, k, 1, 1, 4, torch.cuda.get_device_properties(0).multi_processor_count)
            if found is None or any(row["segments"] == found[0] and row["size"] == (batch, n, k) for row in rows):
                continue
            ways = ["segments", "pipeline"][: 1 if place else 2]
            row = {"size": (batch, n, k), "segments": found[0], "rule": rule}
            rows.append(row | compare(batch, n, partial(kg.TopK, k), "shannon", seconds, ways))
            show(rows[-1])
    WAYS["segments"] = usual
    return rows


def variants(seconds: float, wide: bool) -> list[dict[str, Any]]:
    """The pipeline with other tiles and groups."""
    if wide:
        shapes = [("shannon", batch, n, partial(knapsack, n, capacity)) for batch, n, capacity in WIDE[:2]]
        cases = [("FAR_TILE", *variant, case) for variant in FAR_VARIANTS for case in shapes]
    else:
        shapes = [("shannon", *TOP_K[1][:2], partial(kg.TopK, TOP_K[1][2]))]
        shapes += [("tsallis", *TOP_K[3][:2], partial(kg.TopK, TOP_K[3][2]))]
        cases = [("TILE", *variant, case) for variant in VARIANTS for case in shapes]
    rows, usual = [], {name: getattr(plan, name) for name in ("TILE", "FAR_TILE", "GROUP", "FAR_GROUP")}
    for name, tile, group, (regularizer, batch, n, constraint_of) in cases:
        setattr(plan, name, tile)
        setattr(plan, name.replace("TILE", "GROUP"), group)
        row: dict[str, Any] = {name: tile, "group": group}
        try:
            row |= compare(batch, n, constraint_of, regularizer, seconds, ["pipeline"])
        except Exception as error:  # of a compiler: the others go on
            row["error"] = repr(error)[:300]
        rows.append(row)
        show(row)
        vars(plan).update(usual)
    return rows


def sensible(ways: list[str], regularizer: str, size: int) -> list[str]:
    """Segments are for Shannon; a row of a million capacities has too many tiles for a pipeline."""
    excluded = {"segments": regularizer != "shannon" or size > 4000, "pipeline": size >= 1_000_000}
    return [way for way in ways if not excluded.get(way)]


def show(row: dict[str, Any]) -> None:
    print(" | ".join(f"{name} {x}" for name, x in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=SECTIONS)
    parser.add_argument("--output", type=Path, default=Path("pipeline.json"))
    parser.add_argument("--regularizers", nargs="*", default=list(REGULARIZERS))
    parser.add_argument("--seconds", type=float, default=0.15, help="for each number")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=["pipeline", "one program"])
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which nothing more is begun")
    options = parser.parse_args()
    begin = time.perf_counter()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: Triton's interpreter"
    results: dict[str, Any] = {"environment": environment(sys.argv[1:], "benchmarks.pipeline") | {"gpu": gpu}}

    def save(section: str, rows: Any) -> None:
        results[section] = rows
        options.output.write_text(json.dumps(results, indent=1) + "\n")

    def table(section: str, shapes: Any, constraint_of: Any, names: list[str], ways: list[str]) -> None:
        rows: list[dict[str, Any]] = []
        for batch, n, size in shapes:
            for regularizer in names:
                if time.perf_counter() - begin > options.limit:
                    return
                own = sensible(ways, regularizer, size)
                row = compare(batch, n, partial(constraint_of, n, size), regularizer, options.seconds, own)
                rows.append({"size": size, **row})
                show(rows[-1])
                save(section, rows)

    ways = options.ways
    if "small" in options.sections:
        save("small", check_small())
    if "large" in options.sections:
        check_large(not torch.cuda.is_available(), partial(save, "large"))
    if "top-k" in options.sections:
        table("top-k", TOP_K, lambda n, k: kg.TopK(k), options.regularizers, ways)
    if "segments" in options.sections:
        save("segments", segments(options.seconds))
    for section in ("variants", "wide variants"):
        if section in options.sections:
            save(section, variants(options.seconds, section == "wide variants"))
    if "wide" in options.sections:
        table("wide", WIDE, knapsack, options.regularizers, ways)
    if "crossover" in options.sections:
        table("crossover", CROSSOVER, lambda n, k: kg.TopK(k), options.regularizers[:1], ways)
    if "wide crossover" in options.sections:
        table("wide crossover", WIDE_CROSSOVER, knapsack, options.regularizers[:1], ways)
    bad = [row for row in results.get("small", []) if not row["good"]]
    print(f"{time.perf_counter() - begin:.0f} s; {len(bad)} checks failed", flush=True)


if __name__ == "__main__":
    main()
