"""Docstrings as Markdown, for the pages of the API: doctests, shapes and <theta, y> become code, and roles become links
or code."""

from __future__ import annotations

import re
from typing import Any

import griffe

import knapgrad

PUBLIC = knapgrad.__all__
IN_JAX = {"Relax": "layers", "Sample": "layers", "SubsetDistribution": "distribution"}
DOCTEST = r"^[ ]*>>> .*(?:\n[ ]*\S.*)*"
# A shape, such as (*batch, n), and an inner product, such as <theta, y>, alone or in brackets. Markdown would take the
# asterisks for emphasis, and the angles for a tag of HTML.
SHAPE = r"\((?=[^()`]*\*\w)[^()`]*\)"
INNER = r"\w*\([^()`]*<\w+, \w+>[^()`]*\)|<\w+, \w+>"
PLAIN = re.compile(rf"(?P<code>``[^`]+``|`[^`]+`|{DOCTEST})|{SHAPE}|{INNER}", re.MULTILINE)


def as_markdown(text: str) -> str:
    text = re.sub(r":(?:class|func|mod|meth|attr):`~?([\w.]+)`", _linked, text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = text.replace("docs/math.md", '<a href="../../math/#sweeps">The equations</a>')  # seen from pages in docs/api
    text = PLAIN.sub(lambda found: found[0] if found["code"] else f"`{found[0]}`", text)
    return re.sub(r"^([ ]*)(>>> .*(?:\n[ ]*\S.*)*)", r"\1```pycon\n\1\2\n\1```", text, flags=re.MULTILINE)


def _linked(found: re.Match[str]) -> str:
    name = found[1].removeprefix("knapgrad.")
    shown = found[1].rpartition(".")[2] if name in PUBLIC else found[1]
    return f"[`{shown}`][knapgrad.{name}]" if name in PUBLIC else f"`{shown}`"


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """knapgrad.jax imports its classes when they are used, which cannot be read from its source."""
        if pkg.path == "knapgrad":
            for name, module in IN_JAX.items():
                pkg["jax"].set_member(name, griffe.Alias(name, f"knapgrad.jax.{module}.{name}", parent=pkg["jax"]))

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
