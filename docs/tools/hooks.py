"""What MkDocs does beyond its plugins: run code, draw figures, publish files of the repository, LaTeX as MathML."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link

TOOLS = Path(__file__).resolve().parent
DOCS, ROOT = TOOLS.parent, TOOLS.parents[1]
CACHE = ROOT / "build" / "docs"
sys.path[:0] = [str(TOOLS), str(DOCS)]
import cells  # noqa: E402
import make_figures  # noqa: E402

# Pages that are kept elsewhere, since they are read in the repository too.
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "experiments.md": "experiments/README.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    cells.style()
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    notebooks = sorted((DOCS / "recipes").glob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        for path, markdown in zip(notebooks, pool.map(executed, notebooks)):
            name = f"recipes/{path.stem}.md"
            files.append(File.generated(config, name, content=f"{markdown}\n[This page as a notebook]({path.name})\n"))
    return files


def executed(path: Path) -> str:
    """A notebook as Markdown; it is run again only if it, an example or the library has changed."""
    digest = hashlib.sha256()
    for source in [
        path,
        TOOLS / "cells.py",
        *sorted((ROOT / "examples").glob("*.py")),
        *sorted((ROOT / "src").rglob("*.py")),
    ]:
        digest.update(source.read_bytes())
    target = CACHE / f"{path.stem}-{digest.hexdigest()[:16]}.md"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{path.stem}-*.md"):
            old.unlink()
        unfinished = target.with_suffix(".part")
        command = [
            sys.executable,
            "-W",
            "error::DeprecationWarning:__main__",
            str(TOOLS / "cells.py"),
            str(path),
            str(unfinished),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=CACHE, env={**os.environ, "TQDM_DISABLE": "1"}
        )
        if done.returncode:
            raise PluginError(f"{path.name} failed:\n{done.stderr}")
        unfinished.replace(target)
    return target.read_text(encoding="utf-8")


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """The explorer is no page of MkDocs, but a reader wants it among them."""
    nav.items.insert(2, Link("Explorer", "explorer/"))
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = cells.page(markdown, source.name)
    markdown = re.sub(r"^<!-- figure (\w+): (.*?) -->$", drawn, markdown, flags=re.MULTILINE)
    parts = FENCE.split(markdown)
    for at, part in enumerate(parts):
        if part.startswith("```math\n"):
            parts[at] = f'<div class="math">{convert(part[8:-3].strip(), display="block")}</div>'
        elif not part.startswith("```"):
            part = re.sub(r"\$`([^`]+)`\$", lambda found: convert(found[1]), part)
            parts[at] = LINK.sub(lambda found: linked(found, source, page.file, files, config), part)
    return "".join(parts)


def drawn(found: re.Match[str]) -> str:
    figure = make_figures.FOR_PAGES[found[1]]()
    make_figures.plt.close(figure)
    return cells.inline(figure, found[2])


def linked(found: re.Match[str], source: Path, here: File, files: Files, config: Any) -> str:
    """A link of a file of the repository, as a link of the site. What is not a page is published beside the pages."""
    mark, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    there = (source.parent / target).resolve()
    if not there.is_relative_to(ROOT) or not there.exists():
        return found[0]  # left to MkDocs, which says what is wrong
    name = there.relative_to(ROOT).as_posix()
    if there.is_dir() and there != DOCS / "explorer":
        return text
    pages = {place: page for page, place in PAGES.items()} | {"README.md": "index.md"}
    if name in pages:
        uri = pages[name]
    elif there.is_relative_to(DOCS):
        return found[0]
    else:
        uri = f"source/{name}"
        if uri not in files.src_uris:
            files.append(File.generated(config, uri, abs_src_path=str(there)))
    return f"{mark}[{text}]({os.path.relpath(uri, Path(here.src_uri).parent)}{anchor})"
