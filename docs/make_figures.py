"""The picture of the README, drawn by ``python docs/make_figures.py``, and the plots that are drawn with the site.

That of the README is after the paper's first figure: how much of the first two items is selected, as their
scores vary and two others stay.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from PIL import Image

import knapgrad as kg

FIGURES = Path(__file__).resolve().parent / "figures"
RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "record.jsonl"
GAMMA = 0.25
GRID = np.linspace(-0.5, 2.0, 126)


def surfaces(path: Path) -> None:
    """``y_1 + y_2`` over ``theta = (t_1, t_2, 1/2, 1)`` for a top-2 and for a knapsack with an item of weight 0."""
    first, second = np.meshgrid(GRID, GRID)
    theta = np.stack([first, second, np.full_like(first, 0.5), np.full_like(first, 1.0)], axis=-1)
    constraints = {"top-2": kg.TopK(2), "knapsack\nw = (2, 0, 1, 1), C = 2": kg.Knapsack([2, 0, 1, 1], 2)}
    columns = {
        "hard": lambda constraint: kg.solve(theta, constraint),
        "Gini": lambda constraint: kg.relax(theta, constraint, kg.Gini(GAMMA)),
        "Tsallis": lambda constraint: kg.relax(theta, constraint, kg.Tsallis(GAMMA)),
        "Shannon": lambda constraint: kg.relax(theta, constraint, kg.Shannon(GAMMA)),
    }
    figure, axes = plt.subplots(2, 4, figsize=(11, 5.6), dpi=120, subplot_kw={"projection": "3d"})
    for row, (label, constraint) in zip(axes, constraints.items(), strict=True):
        for axis, (name, select) in zip(row, columns.items(), strict=True):
            height = select(constraint)[..., :2].sum(axis=-1)
            axis.plot_surface(
                first, second, height, cmap="viridis", vmin=0, vmax=2, rcount=126, ccount=126, lw=0, aa=False
            )
            axis.set(zlim=(0, 2), xticks=[0, 1, 2], yticks=[0, 1, 2], zticks=[0, 1, 2])
            axis.set_xlabel(r"$\theta_1$", labelpad=-8)
            axis.set_ylabel(r"$\theta_2$", labelpad=-8)
            axis.tick_params(pad=-3, labelsize=8)
            axis.view_init(elev=28, azim=-125)
            axis.set_box_aspect((1, 1, 0.75), zoom=1.1)
            if constraint is constraints["top-2"]:
                axis.set_title(name, y=1.04, fontsize=14)
        row[0].text2D(
            -0.16, 0.45, label, transform=row[0].transAxes, rotation=90, va="center", ha="center", fontsize=11
        )
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.01, top=0.93, wspace=0.02, hspace=0.0)
    save_small(figure, path)


def save_small(figure: Figure, path: Path) -> None:
    """As a PNG with a palette: a third of the size, and no visible difference."""
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    image.quantize(224, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


REGULARIZERS = {"Shannon": kg.Shannon, "Gini": kg.Gini, "Tsallis": kg.Tsallis}


def one_decision() -> Figure:
    """Two items, one of them to be picked: how the share of the first follows the difference of the scores."""
    delta = np.linspace(-3, 3, 301)
    theta = np.stack([delta, np.zeros_like(delta)], axis=-1)
    figure, (share, added) = plt.subplots(1, 2, figsize=(7.4, 3.1))
    for name, regularizer in REGULARIZERS.items():
        share.plot(delta, kg.relax(theta, kg.TopK(1), regularizer())[:, 0], label=name)
        added.plot(delta, kg.value(theta, kg.TopK(1), regularizer()), label=name)
    added.plot(delta, np.maximum(delta, 0), color="#7a8290", lw=1, ls="--", label="max")
    share.set(xlabel="score of one item minus score of the other, in gamma", title="how much of it is taken")
    added.set(xlabel="score of one item, the other has 0", title="the smoothed maximum")
    share.legend(loc="upper left")
    added.legend(loc="upper left")
    return figure


def hardening() -> Figure:
    """The relaxed selection of five items as gamma falls."""
    theta, weights = np.array([5.0, 3.4, 3.0, 4.2, 1.2]), [6, 3, 2, 5, 1]
    gammas = np.geomspace(0.1, 30, 200)
    budget = kg.Knapsack(weights, 9)
    figure, axes = plt.subplots(1, 3, figsize=(8.2, 3.2), sharey=True)
    for axis, (name, regularizer) in zip(axes, REGULARIZERS.items(), strict=True):
        shares = kg.relax(np.tile(theta, (len(gammas), 1)), budget, regularizer(gammas))
        for i, share in enumerate(shares.T):
            axis.plot(gammas, share, label=f"{theta[i]:g} for {weights[i]}")
        axis.set(xscale="log", xlabel="gamma", title=name, ylim=(-0.03, 1.03))
    axes[0].set_ylabel("share that is taken")
    axes[2].legend(title="score, weight", fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def possible_subsets() -> Figure:
    """How many of the feasible subsets can be drawn, and the entropy of the distribution."""
    rng = np.random.default_rng(0)
    theta, budget = rng.normal(1, 1, 12), kg.Knapsack(rng.integers(1, 9, 12), 24)
    subsets = (np.arange(2**12)[:, None] >> np.arange(12)) % 2
    subsets = subsets[budget.contains(subsets)].astype(float)
    gammas = np.geomspace(0.03, 30, 60)
    many = np.broadcast_to(theta, (len(subsets), 12))
    figure, (count, spread) = plt.subplots(1, 2, figsize=(7.4, 3.1))
    for name, regularizer in REGULARIZERS.items():
        logs = [kg.log_prob(many, subsets, budget, regularizer(gamma)) for gamma in gammas]
        count.plot(gammas, [np.isfinite(row).sum() for row in logs], label=name)
        spread.plot(gammas, kg.entropy(np.tile(theta, (len(gammas), 1)), budget, regularizer(gammas)), label=name)
    spread.axhline(np.log(len(subsets)), color="#7a8290", lw=1, ls="--")
    spread.text(gammas[0], np.log(len(subsets)) - 0.15, "all equally likely", va="top", fontsize=9)
    count.set(xscale="log", yscale="log", xlabel="gamma", title=f"subsets that can be drawn, of {len(subsets):,}")
    spread.set(xscale="log", xlabel="gamma", title="entropy, nats")
    count.legend()
    return figure


def order_of_items() -> Figure:
    """Eight items with the same score, one of them to be picked."""
    figure, axis = plt.subplots(figsize=(5.4, 2.8))
    for at, (name, regularizer) in enumerate(REGULARIZERS.items()):
        shares = kg.relax(np.zeros(8), kg.TopK(1), regularizer())
        axis.bar(np.arange(1, 9) + 0.27 * (at - 1), shares, 0.25, label=name)
    axis.set(xlabel="place of the item", ylabel="share of each", ylim=(0, 0.23), xticks=range(1, 9))
    axis.legend(ncols=3, loc="upper left")
    axis.grid(axis="x", visible=False)
    return figure


def means_of_samples() -> Figure:
    """How far the mean of so many drawn subsets is from the relaxed selection."""
    rng = np.random.default_rng(0)
    theta, budget = rng.normal(1, 1, 20), kg.Knapsack(rng.integers(1, 9, 20), 40)
    numbers = np.unique(np.geomspace(10, 100_000, 30).astype(int))
    figure, axis = plt.subplots(figsize=(5.4, 2.9))
    for name, regularizer in REGULARIZERS.items():
        drawn = kg.sample(theta, budget, regularizer(), num_samples=numbers[-1], rng=1)
        means = np.cumsum(drawn, axis=0)[numbers - 1] / numbers[:, None]
        axis.plot(numbers, np.abs(means - kg.relax(theta, budget, regularizer())).mean(-1), label=name)
    axis.plot(numbers, 0.3 / np.sqrt(numbers), color="#7a8290", lw=1, ls="--", label="0.3 / sqrt(subsets)")
    axis.set(xscale="log", yscale="log", xlabel="subsets drawn", ylabel="mean distance from relax")
    axis.legend()
    return figure


def frontiers() -> Figure:
    """The best score for every capacity, exactly and smoothed."""
    rng = np.random.default_rng(3)
    theta, weights = rng.uniform(1, 6, 10).round(1), rng.integers(2, 9, 10)
    budget = kg.Knapsack(weights, int(weights.sum()))
    figure, axis = plt.subplots(figsize=(5.4, 2.9))
    axis.step(np.arange(weights.sum() + 1), kg.frontier(theta, budget), where="post", color="#7a8290", label="exact")
    axis.plot(kg.frontier(theta, budget, kg.Shannon(0.5)), label="Shannon, gamma = 0.5")
    axis.plot(kg.frontier(theta, budget, kg.Gini(2.0)), label="Gini, gamma = 2")
    axis.set(xlabel="capacity", ylabel="best score")
    axis.legend()
    return figure


def record() -> Figure:
    """Times over time, as benchmarks/results/record.jsonl has them."""
    rows = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    shown = {
        "CPU, 32 x 100, Gini, relax": ("AMD EPYC, 2 cores", "knapsack n=100, gini, relax"),
        "CPU, small call with backward": ("AMD EPYC, 2 cores", "small call 8 x 10, relax, both"),
        "H200, 1024 x 100, Gini, relax": ("NVIDIA H200", "1024x100, gini, relax"),
        "H200, small call with backward": ("NVIDIA H200", "small call 4 x 10, relax, both"),
    }
    figure, axis = plt.subplots(figsize=(5.4, 3.4))
    for name, (machine, call) in shown.items():
        mine = [row for row in rows if row["machine"] == machine and call in row["microseconds"]]
        dates = [datetime.fromisoformat(row["date"]) for row in mine]
        axis.plot(dates, [row["microseconds"][call] for row in mine], "o-", label=name)
    axis.set(ylabel="microseconds", ylim=(0, None))
    axis.xaxis.set_major_locator(AutoDateLocator(maxticks=6))
    axis.xaxis.set_major_formatter(ConciseDateFormatter(axis.xaxis.get_major_locator()))
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


FOR_PAGES = {
    draw.__name__: draw
    for draw in (one_decision, hardening, possible_subsets, order_of_items, means_of_samples, frontiers, record)
}


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    surfaces(FIGURES / "surfaces.png")
