"""The figures and the tables, from the result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import page, plots
from experiments.assortment.agents import AGENTS, EXPLORERS
from experiments.assortment.measure import BASELINE
from experiments.assortment.policies import POLICIES
from experiments.sweep import Row

NAMES = (*AGENTS, *POLICIES)
COLORS = dict(zip(NAMES, plots.plt.cm.tab10.colors))


def write(rows: list[Row], times: Row | None, folder: Path, to_page: bool) -> None:
    """Prints the tables, draws the figures, and puts the tables into the page."""
    tables = "\n\n".join(
        [revenue_table(rows), *([covariance_table(rows)] if rows else []), *([time_table(times)] if times else [])]
    )
    print(tables)
    print(f"\nFigures: {', '.join(map(str, draw(rows, times, folder)))}")
    if to_page:
        page.rewrite("assortment", tables)


def replicas(rows: list[Row], agent: str) -> list[float]:
    """Test revenues of all replicas of an agent."""
    return [revenue for row in rows if row["agent"] == agent for revenue in row["revenue"]]


def paired(rows: list[Row], agent: str) -> list[float]:
    """Test revenues minus those of the perturbed agent's replicas that began with the same networks."""
    base = {row["seed"]: row["revenue"] for row in rows if row["agent"] == BASELINE}
    mine = {row["seed"]: row["revenue"] for row in rows if row["agent"] == agent and agent in AGENTS}
    return [x - y for seed in mine if seed in base for x, y in zip(mine[seed], base[seed])]


def bounds(rows: list[Row], agent: str) -> tuple[float, float]:
    """Mean and half a 95% interval: over the replicas of an agent, over the episodes of a policy without learning."""
    found = replicas(rows, agent)
    if agent in POLICIES and found:
        return found[0], 1.96 * next(row["standard_error"][0] for row in rows if row["agent"] == agent)
    return page.interval(found)


def revenue_table(rows: list[Row]) -> str:
    ends = {name: bounds(rows, name)[0] for name in POLICIES}
    lines = []
    for name in NAMES:
        found = replicas(rows, name)
        if not found:
            continue
        mean, half = bounds(rows, name)
        way = 100 * (mean - ends["greedy"]) / (ends["expert"] - ends["greedy"])
        ahead, width = page.interval(paired(rows, name))
        seconds = [row["training_seconds"] for row in rows if row["agent"] == name and "training_seconds" in row]
        lines.append(
            [
                name,
                f"{mean:.2f} ± {half:.2f}",
                f"{ahead:+.2f} ± {width:.2f}" if np.isfinite(width) and name != BASELINE else "",
                ", ".join(f"{x:.1f}" for x in found) if name in AGENTS else "",
                f"{way:.0f}%",
                f"{np.mean(seconds) / 60:.0f}" if seconds else "",
            ]
        )
    episodes = max((row["episodes"] for row in rows), default=0)
    return (
        f"Revenue of an episode, on the same test episodes for all, after {episodes:,} episodes of training: mean and "
        "95% interval, over replicas, for policies without learning over episodes; the difference from SRL "
        "perturbed, replica by replica, which begin with the same networks; each replica; how far that is on the way "
        "from greedy to expert; minutes of training, three replicas at once.\n\n"
        + page.table(["agent", "revenue", "minus perturbed", "replicas", "way to the expert", "minutes"], lines)
    )


def covariance_table(rows: list[Row]) -> str:
    lines = []
    for name in EXPLORERS:
        curves = [np.array(row["curve"]["covariance"]) for row in rows if row["agent"] == name]
        if not curves:
            continue
        curve = np.concatenate(curves, axis=1)  # (points, replicas)
        thirds = np.array_split(curve, 3) if len(curve) > 2 else [curve] * 3
        cells = [page.interval(third.mean(0)) for third in thirds]
        lines.append([name, *(f"{mean:.3g} ± {half:.2g}" for mean, half in cells)])
    return (
        "Trace of the covariance of the actor's gradient, estimated 16 times on one batch of 32 from the replay "
        "buffer: mean over the validations in each third of the training, and 95% interval over replicas.\n\n"
        + page.table(["agent", "first third", "second", "last"], lines)
    )


def time_table(found: Row) -> str:
    times, speeds = found["rows"], found["transitions_a_second"]
    ways = list(dict.fromkeys(row["sold_out"] for row in times))
    by_name = {(row["agent"], row["sold_out"]): row for row in times}

    def cell(row: Row) -> str:
        time, ratio = row["microseconds"], row["times_faster_than_perturbed"]
        return f"{page.quartiles(time)}, {ratio['median']:.1f}×"

    lines = [[name, *(cell(by_name[name, way]) for way in ways)] for name in EXPLORERS]
    return (
        "Microseconds of a gradient estimate, batch 32, 32 candidates (perturbed: and 32 more samples), one thread: "
        "median and quartiles, and how many times faster than the perturbed one. Items that are sold out are kept out "
        "by weight C + 1, as in the paper, or by score -inf, as in our trainings.\n\n"
        + page.table(["agent", *ways], lines)
        + "\n\nCustomers a second on one thread, all episodes of the test at once: "
        + ", ".join(f"{name} {page.quartiles(speed)}" for name, speed in speeds.items())
        + f".\n\n{page.origin(found['environment'])}"
    )


def draw(rows: list[Row], times: Row | None, folder: Path) -> list[Path]:
    learning = plots.plot("Revenue in validation, mean and range", xlabel="episodes of training")
    revenue = plots.plot("Revenue on the test episodes, 95% intervals")
    covariance = plots.plot("Trace of the gradient's covariance", xlabel="episodes of training", yscale="log")
    speed = plots.plot("Time of a gradient estimate, microseconds")
    for name in AGENTS:
        mine = [row["curve"] for row in rows if row["agent"] == name]
        if mine:
            band(learning, mine[0]["episode"], np.concatenate([c["revenue"] for c in mine], axis=1), name)
            if name in EXPLORERS:
                band(covariance, mine[0]["episode"], np.concatenate([c["covariance"] for c in mine], axis=1), name)
    shown = [name for name in NAMES if replicas(rows, name)]
    for place, name in enumerate(shown):
        mean, half = bounds(rows, name)
        revenue.errorbar(place, mean, half, fmt="o", capsize=4, color=COLORS[name])
        if name in AGENTS:
            revenue.scatter([place + 0.15] * len(replicas(rows, name)), replicas(rows, name), s=9, color=COLORS[name])
        else:
            learning.axhline(mean, color=COLORS[name], linestyle="--", label=name)
    ways = list(dict.fromkeys(row["sold_out"] for row in times["rows"])) if times else []
    for row in times["rows"] if times else []:
        place, agent = ways.index(row["sold_out"]), list(EXPLORERS).index(row["agent"])
        time = row["microseconds"]
        spread = [[time["median"] - time["q1"]], [time["q3"] - time["median"]]]
        look = {"color": COLORS[row["agent"]], "label": "" if place else row["agent"]}
        speed.bar(place + 0.2 * agent - 0.3, time["median"], 0.2, yerr=spread, capsize=3, **look)
    floor, ceiling = bounds(rows, "greedy")[0], bounds(rows, "expert")[0]
    if np.isfinite(floor + ceiling):
        learning.set_ylim(floor - 25, ceiling + 5)
    revenue.set_xticks(range(len(shown)), shown, rotation=40, ha="right")
    speed.set_xticks(range(len(ways)), [f"sold out by\n{way.replace(', ', ',' + chr(10))}" for way in ways])
    parts = {"learning": learning, "revenue": revenue, "covariance": covariance, "time": speed}
    return [plots.save(axes, folder / f"assortment_{part}.png") for part, axes in parts.items()]


def band(axes: Any, episodes: list[int], curves: np.ndarray, name: str) -> None:
    """Mean over replicas (points, replicas), and the range between the lowest and the highest."""
    axes.plot(episodes, curves.mean(1), color=COLORS[name], label=name)
    axes.fill_between(episodes, curves.min(1), curves.max(1), color=COLORS[name], alpha=0.15)
