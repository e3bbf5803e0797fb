"""The figures and the tables, from the result files."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments import page, plots
from experiments.dvae.bottlenecks import BOTTLENECKS
from experiments.dvae.training import Settings
from experiments.sweep import Row

TITLES = {
    "error": "squared error",
    "positive": "y above 0",
    "nonzeros": "y above 1e-6",
    "style_divergence": "KL of the styles",
    "sets_recovered": "sets recovered, percent",
    "digits_recovered": "digits recovered, percent",
}
EXPLANATION = (
    "On the test set, after the last epoch: mean and 95% interval over seeds; those that ended in NaN are counted "
    "apart. The error is the sum over an image's pixels. y above 0, and above 1e-6, are how many of the ten "
    "slots are. Digits, and sets of three, are those with the highest scores, under the best matching of slots to "
    "digits. FSD is the sparse soft top-k, ST straight-through."
)
PAIRS = {"Gumbel top-k, ST": "hard top-k, ST"}  # of one colour in the curves, what is random dashed
PAIRS |= {name: name.split(",")[0] for name in BOTTLENECKS if ", sampled" in name}


def write(rows: list[Row], times: Row | None, folder: Path, to_page: bool) -> None:
    """Prints the tables, draws the figures, and puts the tables into the page: for each variant of the loss."""
    tables, figures = [], []
    for settings in dict.fromkeys(map(settings_of, rows)):
        mine = [row for row in rows if settings_of(row) == settings]
        if any(row["epoch"] == settings.epochs for row in mine):
            tables.append(final_table(mine, settings))
        figures += draw_curves(mine, folder / f"dvae_{settings.variant}")
        examples = folder / f"dvae_examples_{settings.variant}.npz"
        if examples.exists():
            figures.append(examples.with_suffix(".png"))
            draw_examples(dict(np.load(examples)), figures[-1])
    text = "\n\n".join([EXPLANATION, *tables, *([time_table(times)] if times else [])])
    print(text)
    print(f"\nFigures: {', '.join(map(str, figures))}")
    if to_page:
        page.rewrite("dvae", text)


def settings_of(row: Row) -> Settings:
    return Settings(reconstruction=row["reconstruction"], prior=row["prior"], epochs=row["epochs"])


def curves(rows: list[Row], bottleneck: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs (points,), and the measure (points, seeds) at the epochs that all seeds have."""
    mine: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["bottleneck"] == bottleneck:
            mine.setdefault(row["seed"], {})[row["epoch"]] = np.nan if row[measure] is None else row[measure]
    epochs = sorted(set.intersection(*(set(found) for found in mine.values()))) if mine else []
    return np.array(epochs), np.array([[found[epoch] for found in mine.values()] for epoch in epochs])


def measured(rows: list[Row]) -> list[str]:
    """Of TITLES: the first rows had fewer."""
    return [measure for measure in TITLES if all(measure in row for row in rows)]


def final_table(rows: list[Row], settings: Settings) -> str:
    """Of trainings that have come to their end."""
    ended = [row for row in rows if row["epoch"] == settings.epochs]
    seeds = len({row["seed"] for row in ended})
    lines = []
    for name in BOTTLENECKS:
        mine = [row for row in ended if row["bottleneck"] == name]
        cells = [cell([row[measure] for row in mine], measure) for measure in measured(rows)]
        fewer = f", {len(mine)} seeds" if len(mine) < seeds else ""
        lines += [[name + fewer, *cells]] if mine else []
    return (
        f"**The loss has the {settings.reconstruction} of squared errors"
        + (f", and both divergences, weighted {settings.prior:g} at first" if settings.prior else "")
        + f"**, {settings.epochs} epochs, {seeds} seeds:\n\n"
        + page.table(["bottleneck", *(TITLES[measure] for measure in measured(rows))], lines)
    )


def cell(found: list[float | None], measure: str) -> str:
    finite = [value for value in found if value is not None]
    percent = 100 if "recovered" in measure else 1
    mean, half = (percent * x for x in page.interval(finite))
    digits = 1 if percent == 100 else 0 if mean > 100 else 2
    lost = f" ({len(found) - len(finite)} NaN)" if len(finite) < len(found) else ""
    spread = f" ± {half:,.{digits}f}" if len(finite) > 1 else ""
    return (f"{mean:,.{digits}f}{spread}" if finite else "–") + lost


def time_table(times: Row) -> str:
    lines = [
        [
            row["bottleneck"],
            page.quartiles(row["step_microseconds"]),
            page.quartiles(row["layer_microseconds"]),
            f"{100 * row['share']:.0f}%",
        ]
        for row in times["rows"]
    ]
    return (
        "Microseconds of a training step of one model alone, batch 64, and of the layer in it (forwards, penalty, "
        "backwards): medians and quartiles.\n\n"
        + page.table(["bottleneck", "step", "layer", "share"], lines)
        + f"\n\n{page.origin(times['environment'])}"
    )


def draw_curves(rows: list[Row], stem: Path) -> list[Path]:
    selected = "positive" if "positive" in measured(rows) else "nonzeros"
    colors = dict(zip([name for name in BOTTLENECKS if name not in PAIRS], plt.cm.tab10.colors))
    paths = []
    for measure in ("error", selected, "style_divergence", "digits_recovered"):
        axes = plots.plot(TITLES[measure], xlabel="epochs")
        percent = 100 if "recovered" in measure else 1
        for name in BOTTLENECKS:
            epochs, found = curves(rows, name, measure)
            if len(epochs):
                look = {"color": colors[PAIRS.get(name, name)], "linestyle": "--" if name in PAIRS else "-"}
                axes.plot(epochs, percent * np.nanmean(found, 1), marker=".", label=name, **look)
                low, high = percent * np.nanmin(found, 1), percent * np.nanmax(found, 1)
                axes.fill_between(epochs, low, high, color=look["color"], alpha=0.15)
        if measure in ("error", "style_divergence"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 10.5 if measure == selected else None)
        paths.append(plots.save(axes, stem.with_name(f"{stem.name}_{measure}.png")))
    return paths


def draw_examples(found: dict[str, np.ndarray], path: Path) -> None:
    """A row for each bottleneck; for each stack the reconstruction, and three slots with the digits they mean."""
    names = [name for name in BOTTLENECKS if f"{name}/images" in found]
    count = len(found[f"{names[0]}/images"])
    figure, panels = plt.subplots(
        len(names) + 1, 4 * count, figsize=(1.05 * 4 * count, 1.2 * (len(names) + 1)), squeeze=False
    )
    for axes in panels.flat:
        axes.axis("off")
    for example in range(count):
        truth = np.flatnonzero(found[f"{names[0]}/truth"][example])
        panels[0, 4 * example].imshow(found[f"{names[0]}/images"][example], cmap="gray")
        panels[0, 4 * example].set_title(f"stack of {', '.join(map(str, truth))}", fontsize=8, loc="left")
        for place, name in enumerate(names, start=1):
            images = [found[f"{name}/reconstructions"][example], *found[f"{name}/parts"][example]]
            titles = ["", *map(str, found[f"{name}/digits"][example])]
            for axes, image, title in zip(panels[place, 4 * example :], images, titles):
                axes.imshow(image, cmap="gray")
                axes.set_title(title, fontsize=8, color="black" if title == "" or int(title) in truth else "red", pad=1)
    for place, name in enumerate(names, start=1):
        panels[place, 0].text(
            -0.1, 0.5, name, transform=panels[place, 0].transAxes, ha="right", va="center", fontsize=8
        )
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
