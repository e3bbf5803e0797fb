"""The tables of docs/gpu.md, from a result file of ``python -m benchmarks.gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
BEGIN = "<!-- tables: begin. Rewritten by `python -m benchmarks.gpu --report`; write above or below. -->"
END = "<!-- tables: end -->"


def write(results: dict[str, Any], page: Path) -> None:
    """Puts the tables between the marks; what stands around them stays."""
    old = page.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"{page} lacks the lines\n{BEGIN}\n{END}\nbetween which the tables belong")
    before, after = old.split(BEGIN)[0], old.split(END)[-1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}")


def tables(results: dict[str, Any]) -> str:
    """All of them as Markdown; a part that was not run is left out."""
    parts = [machine(results["environment"])]
    parts += [speed(results, task) for task in ("forward", "both") if results.get("speed")]
    parts += [part(results) for key, part in PARTS.items() if results.get(key)]
    if results.get("failures"):
        parts.append("## Failures\n\n" + "\n".join(f"- {f['section']}: {f['error']}" for f in results["failures"]))
    return "\n\n".join(parts)


def machine(environment: Row) -> str:
    versions = environment["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "jax") if name in versions)
    return (
        f"*{environment['gpu']}, driver {environment['driver']}, CUDA {environment['cuda']}, {software}, "
        f"Python {environment['python']}; commit {environment['commit']}, {environment['date'][:10]}; "
        f"`{environment['command']}`*"
    )


def speed(results: dict[str, Any], task: str) -> str:
    title = {"forward": "Value and relax", "both": "Value, relax and the VJP"}[task]
    rows = []
    for row in by_shape(results["speed"]):
        measured, below = row[task], row[task].get("floor", {})
        median = measured.get("ours_ms", {}).get("median")
        rows.append(
            [
                f"{row['shape']}, C={row['capacity']}",
                row["regularizer"],
                with_quartiles(measured.get("ours_ms")),
                bound(median, measured.get("bound_ms")),
                baseline(measured, "eager", None),
                baseline(measured, "jax", results.get("jax")),
                baseline(measured, "jax_ours", results.get("jax")),
                number(below.get("ms")),
                number(measured.get("over_floor"), 2),
                below.get("larger", ""),
            ]
        )
    header = ["batch x items", "", "ours (quartiles)", "bound", "eager torch", "JAX scan", "ours in JAX"]
    header += ["floor", "ours / floor"]
    return f"## {title}, milliseconds\n\n" + markdown([*header, "the floor is"], rows)


def by_shape(rows: list[Row]) -> list[Row]:
    """Regularizers under each other; shapes in the order in which they came."""
    order = list(dict.fromkeys(row["shape"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["shape"]))


def bound(median: float | None, at_most: float | None) -> str:
    if at_most is None:
        return ""
    return f"{at_most:g}" + ("" if median is None else " ok" if median <= at_most else " missed")


def baseline(measured: Row, name: str, status: Any) -> str:
    if f"{name}_ms" in measured:
        return number(measured[f"{name}_ms"]["median"])
    if f"{name}_missing" in measured:
        return measured[f"{name}_missing"]
    return str(status) if status and not str(status)[0].isdigit() else ""


def floor(results: dict[str, Any]) -> str:
    measured = results["floor"]
    rows = []
    for shape, step in measured["step_us"].items():
        row = next(r for r in results["speed"] if r["shape"] == shape)
        cells = [number(1e3 * step["float64"]), number(1e3 * step["float32"])]
        for task in ("forward", "both"):
            below = row[task]["floor"]
            cells += [f"{below['bytes'] / 1e6:,.1f}", number(below["bandwidth_ms"]), number(below["latency_ms"])]
        rows.append([shape, f"{step['layout']}, {step['block']} cells, {step['warps']} warps", *cells])
    header = ["", "layout", "step in float64, ns", "in float32, ns", "forward: MB", "their ms", "steps' ms"]
    header += ["with VJP: MB", "their ms", "steps' ms"]
    text = f"A copy moves {measured['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written."
    return f"## The floor\n\n{text}\n\n" + markdown(header, rows)


def correctness(results: dict[str, Any]) -> str:
    found: dict[tuple[str, str], Row] = {}
    for row in by_shape(results["correctness"]):
        found.setdefault((row["shape"], row["regularizer"]), {})[row["kind"]] = row
    rows = []
    for (shape, regularizer), kinds in found.items():
        cells = [
            f"{kinds[kind][what]:.1e}" if what in kinds.get(kind, {}) else "failed"
            for kind in ("ordinary", "near-ties")
            for what in ("value", "relax", "vjp")
        ]
        good = all(row["ok"] for row in kinds.values())
        rows.append([shape, regularizer, *cells, "ok" if good else "WRONG"])
    header = ["", "", "value", "relax", "VJP", "near-ties: value", "relax", "VJP", "1e-5 and 1e-4"]
    return "## Errors in float32\n\n" + markdown(header, rows)


def overhead(results: dict[str, Any]) -> str:
    rows = [
        [row["call"], row["regularizer"], *(micro(row.get(key)) for key in ("call_ms", "replay_ms", "device_ms"))]
        for row in results["overhead"]
    ]
    header = ["4x10", "", "a call from Python", "a replay of its graph", "of which kernels"]
    return "## Overhead, microseconds\n\n" + markdown(header, rows)


def memory(results: dict[str, Any]) -> str:
    found = results["memory"]
    megabytes = {key: f"{found[f'{key}_bytes'] / 1e6:,.1f} MB" for key in ("peak", "kept", "theta", "table")}
    return (
        f"## Memory\n\nForward and backward pass at {found['shape']}, C={found['capacity']}: {megabytes['peak']} at "
        f"the peak, {megabytes['kept']} from one to the other. theta itself has {megabytes['theta']}; a table of all "
        f"instances would have {megabytes['table']}."
    )


def extras(results: dict[str, Any]) -> str:
    rows = [[row["call"], row["regularizer"], with_quartiles(row.get("ours_ms"))] for row in results["extras"]]
    shape = results["extras"][0]["shape"]
    return f"## Other operations at {shape}, milliseconds\n\n" + markdown(["", "", "ours (quartiles)"], rows)


PARTS = {
    "floor": floor,
    "correctness": correctness,
    "overhead": overhead,
    "memory": memory,
    "extras": extras,
}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def with_quartiles(spread: Row | None) -> str:
    if spread is None:
        return "not measured"
    return f"{number(spread['median'])} ({number(spread['q1'])}–{number(spread['q3'])})"


def micro(spread: Row | None) -> str:
    return "not measured" if spread is None else number(1e3 * spread["median"])
