"""Figures of the claims: one plot each, readable at the width of a phone, with the legend below it, off the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(title: str, **axes: Any) -> Any:
    """The axes of a new figure."""
    _, made = plt.subplots(figsize=(5.2, 3.9), layout="constrained")
    made.set(title=title, **axes)
    made.grid(alpha=0.3)
    return made


def save(axes: Any, path: Path) -> Path:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 3 if len(labels) > 4 else 2
        axes.figure.set_figheight(3.9 + 0.2 * -(-len(labels) // columns))
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    axes.figure.savefig(path, dpi=140)
    plt.close(axes.figure)
    return path
