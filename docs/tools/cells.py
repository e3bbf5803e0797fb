"""Runs the code of pages and notebooks, and puts what it prints and draws below it.

A page is Markdown; its blocks that begin with `` ```python run `` are run, in one namespace per page. A notebook is a
Python file whose cells begin with ``# %%`` (the percent format of Jupytext), which Jupyter and editors open as well.

    python docs/tools/cells.py docs/recipes/bits_per_layer.py page.md
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python run\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STYLE = {
    "figure.figsize": (5.4, 3.1),
    "figure.constrained_layout.use": True,
    "font.size": 10.5,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # the text of a figure is text of the page
    "svg.hashsalt": "knapgrad",  # the same figure is the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.formatter.min_exponent": 3,  # 0.1, not a power of ten
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#010203"),
}
CYCLE = ["#3b76e1", "#d9731a", "#2e9e6b", "#9b59c9", "#b8860b", "#7a8290"]


def style() -> None:
    """Figures without a background, whose black is the colour of the text around them, light or dark."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE, **{"axes.prop_cycle": matplotlib.cycler(color=CYCLE)})


def inline(figure: Any, label: str = "") -> str:
    """A figure as a part of the page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace("#010203", "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
    svg = re.sub(
        r'(<svg[^>]*?) width="[\d.]+pt"',
        rf'\1 style="max-width: {1.6 * width:.0f}px; min-width: {0.85 * width:.0f}px"',
        svg,
        count=1,
    )
    svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    titles = [figure.get_suptitle(), *(f"{a.get_title()} {a.get_ylabel()} by {a.get_xlabel()}" for a in figure.axes)]
    label = (label or "; ".join(filter(None, titles))).replace('"', "'").replace("\n", " ")
    body = "\n".join(line for line in svg.splitlines() if line.strip())
    return f'<div class="figure" role="img" aria-label="{label}" data-search-exclude>\n{body}\n</div>'


def run(code: str, names: dict[str, Any], place: str) -> str:
    """What a piece of code prints, the value of its last expression, and its figures, as Markdown."""
    tree = ast.parse(code, place)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, place, "exec"), names)
        value = eval(compile(last, place, "eval"), names) if last else None
        if value is not None and "matplotlib" not in type(value).__module__:
            print(repr(value))
    text = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
    parts = [f"``` {{ .text .output }}\n{text}\n```"] if text.strip() else []
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is not None:
        parts += [inline(plt.figure(number)) for number in plt.get_fignums()]
        plt.close("all")
    return "\n\n".join(parts)


def page(markdown: str, place: str) -> str:
    """The page with what its blocks give."""
    names: dict[str, Any] = {"__name__": "page"}

    def shown(found: re.Match[str]) -> str:
        line = markdown.count("\n", 0, found.start()) + 1
        return f"```python\n{found[1]}```\n\n{run(found[1], names, f'{place}, code at line {line}')}"

    return BLOCK.sub(shown, markdown)


def notebook(path: Path) -> str:
    """A notebook as a page."""
    names: dict[str, Any] = {"__name__": "notebook"}
    parts = []
    for number, cell in enumerate(re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]):
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip())
        elif body.strip():
            parts += [f"```python\n{body.strip()}\n```", run(body, names, f"{path.name}, cell {number}")]
    return "\n\n".join(filter(None, parts)) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    sys.path.insert(0, str(source.resolve().parents[2] / "examples"))  # notebooks import from the examples
    style()
    target.write_text(notebook(source), encoding="utf-8")
