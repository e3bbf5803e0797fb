"""The figures and the tables, from the result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import page, plots
from experiments.pyepo.methods import METHODS
from experiments.sweep import Row

MEASURES = {"test_regret": "with true values to validate", "test_regret_without_values": "decisions alone"}


def write(rows: list[Row], times: Row | None, folder: Path, to_page: bool) -> None:
    """Prints the tables, draws the figures, and puts the tables into the page."""
    tables = "\n\n".join([regret_table(rows), paired_table(rows), *([time_table(times)] if times else [])])
    print(tables)
    figures = draw(rows, times["rows"] if times else [], folder)
    print(f"\nFigures: {', '.join(map(str, figures))}")
    if to_page:
        page.rewrite("pyepo", tables)


def interval(rows: list[Row], method: str, n: int, measure: str) -> tuple[float, float, int]:
    """Mean in percent, half the width of its 95% confidence interval, and the number of seeds."""
    found = [100 * row[measure] for row in rows if row["method"] == method and row["n"] == n]
    return *page.interval(found), len(found)


def regret_table(rows: list[Row]) -> str:
    sizes = sorted({row["n"] for row in rows})
    seeds = ", ".join(f"{len({row['seed'] for row in rows if row['n'] == n})} for n = {n}" for n in sizes)
    parts = [
        f"Relative regret on the test set in percent: mean and 95% interval over seeds ({seeds}). Epochs are chosen by "
        "the regret on the validation set; in the second table, where nobody has true values, by its share of wrong "
        "decisions.",
    ]
    for measure in MEASURES:
        lines = []
        for name, method in sorted(METHODS.items(), key=lambda pair: pair[1].sees):
            if measure == "test_regret_without_values" and method.sees == "values":
                continue
            cells = []
            for n in sizes:
                mean, half, count = interval(rows, name, n, measure)
                cells.append("" if not count else f"{mean:.2f} ± {half:.2f}" if count > 1 else f"{mean:.2f}")
            lines.append([method.sees, name, *cells])
        parts.append(page.table(["sees", "method", *(f"n = {n}" for n in sizes)], lines))
    return "\n\n".join(parts)


def paired_table(rows: list[Row], against: str = "PFY, 10 samples") -> str:
    """Differences seed by seed: most of the spread above is between data sets, which the methods share."""
    sizes = sorted({row["n"] for row in rows})
    regrets = {(row["method"], row["n"], row["seed"]): 100 * row["test_regret"] for row in rows}
    lines = []
    for name, method in sorted(METHODS.items(), key=lambda pair: pair[1].sees):
        cells = []
        for n in sizes:
            differences = [
                regret - regrets[against, n, seed]
                for (other, size, seed), regret in regrets.items()
                if (other, size) == (name, n) and (against, n, seed) in regrets
            ]
            mean, half = page.interval(differences)
            cells.append(f"{mean:+.2f} ± {half:.2f}" if len(differences) > 1 else "")
        if name != against:
            lines.append([method.sees, name, *cells])
    return f"The same minus that of {against}, seed by seed: mean and 95% interval.\n\n" + page.table(
        ["sees", "method", *(f"n = {n}" for n in sizes)], lines
    )


def time_table(measured: Row) -> str:
    times = measured["rows"]
    sizes = sorted({row["n"] for row in times})
    found = {(row["method"], row["n"]): page.quartiles(row["microseconds"]) for row in times}
    names = dict.fromkeys(row["method"] for row in times)
    return (
        "Microseconds of a gradient step, forward and backward to the predicted values, batch 32, one thread: median "
        "and quartiles.\n\n"
        + page.table(
            ["method", *(f"n = {n}" for n in sizes)],
            [[name, *(found.get((name, n), "") for n in sizes)] for name in names],
        )
        + f"\n\n{page.origin(measured['environment'])}"
    )


def draw(rows: list[Row], times: list[Row], folder: Path) -> list[Path]:
    speed = plots.plot("Gradient step, one thread", xlabel="items", ylabel="microseconds", xscale="log", yscale="log")
    regret = {
        measure: plots.plot(
            f"Regret, {title}", xlabel="items", ylabel="test relative regret, %", xscale="log", yscale="log"
        )
        for measure, title in MEASURES.items()
    }
    names = list(dict.fromkeys([*METHODS, *(row["method"] for row in times)]))
    colors = dict(zip(names, [*plots.plt.cm.tab10.colors, *plots.plt.cm.Dark2.colors]))

    def style(name: str) -> dict[str, Any]:
        ours = name.startswith("DP")
        seen = METHODS[name].sees if name in METHODS else "decisions"
        return {
            "color": colors[name], "label": name, "marker": "o" if ours else "s", "markersize": 4,
            "linewidth": 2.2 if ours else 1.2, "linestyle": "--" if seen == "values" else "-", "capsize": 2,
        }  # fmt: skip

    for place, name in enumerate(names):
        aside = 1.015 ** (place - len(names) / 2)  # so that bars do not hide each other
        mine = sorted((row["n"], row["microseconds"]) for row in times if row["method"] == name)
        if mine:
            middle = np.array([spread["median"] for _, spread in mine])
            bars = np.abs(np.array([[spread["q1"], spread["q3"]] for _, spread in mine]).T - middle)
            speed.errorbar([n * aside for n, _ in mine], middle, bars, **style(name))
        for decisions_alone, (measure, axes) in enumerate(regret.items()):
            if name not in METHODS or (decisions_alone and METHODS[name].sees == "values"):
                continue
            sizes = sorted({row["n"] for row in rows if row["method"] == name})
            if sizes:
                means, halves, _ = zip(*(interval(rows, name, n, measure) for n in sizes))
                axes.errorbar([n * aside for n in sizes], means, halves, **style(name))
    for axes in regret.values():
        axes.set_yticks([1, 1.5, 2, 3, 5, 10, 20, 30], ["1", "1.5", "2", "3", "5", "10", "20", "30"])
    for axes in (speed, *regret.values()):
        axes.set_xticks([10, 25, 50, 100], ["10", "25", "50", "100"], minor=False)
        axes.minorticks_off()
    parts = zip(("time", "regret", "regret_decisions"), (speed, *regret.values()))
    return [plots.save(axes, folder / f"pyepo_knapsack_{part}.png") for part, axes in parts]
