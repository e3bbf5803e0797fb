"""Writes tables of docs/performance.md and docs/gpu.md, from the files in benchmarks/results:
``python docs/tools/tables.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGES = ROOT / "benchmarks" / "results", [ROOT / "docs" / name for name in ("performance.md", "gpu.md")]
CPU = max(RESULTS.glob("20[0-9][0-9]-[0-9][0-9]-[0-9][0-9].json"))  # the latest
NAMES = {"shannon": "Shannon", "gini": "Gini", "tsallis": "Tsallis"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def short(x: float) -> str:
    """Two digits, and all that are left of the point."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}" if x < 1 else f"{x:.1f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def source(path: Path, environment: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if name != "knapgrad")
    machine = environment.get("gpu") or f"{environment['cpu']}, {environment['cores']} shared cores"
    where = f"{environment['date'][:10]}; [{path.name}](../benchmarks/results/{path.name})"
    return f"*{machine}, Python {environment['python']}, {versions}; `{environment['command']}`, {where}*"


def cpu() -> str:
    """value and relax, and with the VJP: microseconds, and in brackets how often the paper's layout takes as long."""
    found = read(CPU)
    sizes = [f"knapsack n={n}" for n in (10, 25, 50, 100)]
    rows = []
    for regularizer, name in NAMES.items():
        cells = []
        for size in sizes:
            (row,) = (
                row
                for row in found["speed"]
                if (row["case"], row["regularizer"], row["threads"], row["batch"]) == (size, regularizer, 1, 32)
            )
            times = " / ".join(short(row[part]["ours_us"]["median"]) for part in ("forward", "both"))
            factors = " / ".join(short(row[part]["over_paper"]["median"]) for part in ("forward", "both"))
            cells.append(f"{times} ({factors})")
        rows.append([name, *cells])
    return f"{table(['', *sizes], rows)}\n\n{source(CPU, found['environment'])}"


def gpu() -> str:
    """The slowest regularizer of each: value and relax, and with the VJP, in milliseconds."""
    path = RESULTS / "h200.json"
    found = read(path)
    columns = {
        "knapgrad": "ours_ms",
        "the same from JAX": "jax_ours_ms",
        "jitted JAX scan": "jax_ms",
        "eager PyTorch": "eager_ms",
    }
    rows = []
    for shape in dict.fromkeys(row["shape"] for row in found["speed"]):
        same = [row for row in found["speed"] if row["shape"] == shape]
        cells = []
        for column in columns.values():
            parts = [
                [row[part][column]["median"] for row in same if row[part].get(column)] for part in ("forward", "both")
            ]
            cells.append(" / ".join(short(max(part)) if part else "" for part in parts))
        rows.append([f"{same[0]['batch']} × {same[0]['items']}, {same[0]['capacity']}", *cells])
    return f"{table(['batch × items, capacity', *columns], rows)}\n\n{source(path, found['environment'])}"


def gpu_calls() -> str:
    """A tiny call: from Python, and as a graph."""
    found = read(RESULTS / "h200.json")["overhead"]
    rows = []
    for call in dict.fromkeys(row["call"] for row in found):
        same = [row for row in found if row["call"] == call]
        spans = [sorted(1000 * row[part]["median"] for row in same) for part in ("call_ms", "replay_ms")]
        rows.append([call, *(f"{short(span[0])} to {short(span[-1])}" for span in spans)])
    return table(["4 × 10, microseconds", "a call from Python", "a replay of its CUDA graph"], rows)


def memory() -> str:
    """What is kept from the forward to the backward pass, and the peak."""
    rows = []
    for row in read(CPU)["memory"]:
        kept, peak = row["kept_bytes"], row["peak_bytes"]
        sizes = [f"{short(kept[who] / 1e6)} / {short(peak[who] / 1e6)}" for who in ("ours", "paper", "eager")]
        rows.append([f"{row['case']}, batch {row['batch']}, capacity {row['capacity']}", *sizes])
    return table(["kept / peak, MB", "knapgrad", "the paper's layout", "eager PyTorch"], rows)


def top_k() -> str:
    """The soft selection, and with its gradient: microseconds, with a table too, and how many times torch.topk's."""
    path, rows = RESULTS / "top-k-cpu.json", []
    found = read(path)
    for row in found["rows"]:
        times = row["microseconds"]

        def both(way: str, times: dict[str, Any] = times) -> str:
            found = [times.get(f"{way}, {part}") for part in ("forward", "both")]
            return " / ".join(short(x["median"]) for x in found if x)

        factors = " / ".join(
            f"{short(x['median'])} ({short(x['q1'])}–{short(x['q3'])})" for x in row["times torch.topk"].values()
        )
        shape = f"{row['batch']:,} × {row['n']:,}, {row['k']:,}"
        off = " / ".join(f"{x:.1e}" for x in row["off by"].values())
        rows.append([shape, both("knapgrad"), both("with a table"), short(times["torch.topk"]["median"]), factors, off])
    head = ["batch × items, k", "knapgrad", "with a table", "torch.topk", "times torch.topk", "off by"]
    return f"{table(head, rows)}\n\n{source(path, found['environment'])}"


def peers(name: str = "peers-cpu.json") -> str:
    """The soft selection, and with its gradient, in milliseconds; the peak memory of the latter; by how much entries
    differ from the marginals."""
    path = RESULTS / name
    found = read(path)
    shapes = list(dict.fromkeys((row["batch"], row["n"], row["k"]) for row in found["rows"]))
    rows = []
    for method in dict.fromkeys(row["method"] for row in found["rows"]):
        cells = []
        for shape in shapes:
            (row,) = [
                row for row in found["rows"] if (row["batch"], row["n"], row["k"], row["method"]) == (*shape, method)
            ] or [{}]
            times = [short(row[part]["median"]) for part in ("forward, ms", "both, ms") if part in row]
            peak = f" ({short(row['both, peak MB'])})" if "both, peak MB" in row else ""
            cells.append(" / ".join(times) + peak)
        errors = [row["difference from the marginals"] for row in found["rows"] if row["method"] == method]
        rows.append([method, *cells, "yes" if max(errors) < 1e-3 else "no", f"{max(errors):.2g}"])
    head = ["batch × items, k", *(f"{batch} × {n}, {k}" for batch, n, k in shapes), "exact marginals", "off by"]
    return f"{table(head, rows)}\n\n{source(path, found['environment'])}"


def peers_gpu() -> str:
    return peers("peers-h200.json")


PIPELINE = RESULTS / "pipeline-h200.json"


def of_pipeline(section: str, ways: dict[str, str]) -> list[list[str]]:
    """Medians and quartiles of value and relax, and with the VJP; the launches of the former, and the peak memory."""
    rows = []
    for row in read(PIPELINE)[section]:
        cells = [f"{row['batch']} x {row['n']}, {row['size']:,}", row["regularizer"]]
        for way in ways:
            is_used = way != "segments" or row["n"] >= 2048
            times = [row[f"{way}, {task}"] for task in ("forward", "both") if is_used and f"{way}, {task}" in row]
            cells.append(" / ".join(f"{x[0]:.3g} ({x[1]:.3g}–{x[2]:.3g})" for x in times))
        launches = row.get("launches, pipeline, forward", {})
        cells.append(" + ".join(short(ms) for ms in launches.values()) if len(launches) == 3 else "")
        peaks = [row[f"{way}, peak MB"] for way in ways if f"{way}, peak MB" in row]
        rows.append([*cells, f"{peaks[0]:,}"])
    return rows


def floors() -> dict[str, tuple[float, float]]:
    """Of long selections: milliseconds of the way there and back, the larger of the chain of steps, each a shift of 64
    cells by one warp as measured, and the bytes of the live states."""
    floor = read(RESULTS / "h200.json")["floor"]
    steps, bandwidth = floor["step_us"]["4096x20"], floor["copy_bytes_per_s"]
    result = {}
    for row in read(PIPELINE)["top-k"]:
        batch, n, k = row["batch"], row["n"], row["size"]
        moved = 1e3 * 4 * batch * (n - k) * (k + 1) / bandwidth
        result[f"{batch} x {n}, {k:,}"] = tuple(max(1e-3 * n * steps[dtype], moved) for dtype in ("float64", "float32"))
    return result


def long_selections() -> str:
    ways = {"pipeline": "a pipeline", "segments": "segments", "one program": "one program per instance"}
    lowest = floors()
    rows = [[*row[:6], " + ".join(map(short, lowest[row[0]])), row[6]] for row in of_pipeline("top-k", ways)]
    head = ["batch x items, k", "", *ways.values(), "fill + collect + sum", "floor of the first two", "peak MB"]
    return f"{table(head, rows)}\n\n{source(PIPELINE, read(PIPELINE)['environment'])}"


def wide_knapsacks() -> str:
    ways = {"pipeline": "a pipeline", "one program": "without"}
    return table(
        ["batch x items, capacity", "", *ways.values(), "fill + collect + sum", "peak MB"], of_pipeline("wide", ways)
    )


def budgets_gpu() -> str:
    """Milliseconds, and in brackets next to one budget of as many states."""
    path = RESULTS / "several-budgets-h200.json"
    found, rows = read(path), []
    for row in found["on a GPU"]:
        names = [name.removesuffix(", several") for name in row if name.endswith(", several")]
        pairs = [[row[f"{name}, {kind}"]["median"] for kind in ("several", "one")] for name in names]
        size = f"{row['batch']} x {row['n']}, {', '.join(f'{c:,}' for c in row['capacities'])}"
        rows.append([size, row["regularizer"], *(f"{several:.3g} ({several / one:.2f})" for several, one in pairs)])
    return f"{table(['batch x items, budgets', '', *names], rows)}\n\n{source(path, found['environment'])}"


MAKERS = cpu, gpu, gpu_calls, memory, top_k, peers, peers_gpu, long_selections, wide_knapsacks, budgets_gpu
TABLES = {make.__name__: make for make in MAKERS}


def rewritten(page: str) -> str:
    """The page with its tables as the files have them now."""
    place = r"(<!-- table (\w+): begin.*?-->\n).*?(<!-- table: end -->)"
    return re.sub(place, lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
