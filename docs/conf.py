"""Sphinx's configuration of the documentation site. scripts/docs builds it.

The source directory is the repository's root, so that links between docs/ and the documents beside it work on GitHub
and on the site alike.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "protos"), str(ROOT / "docs")]

from docstrings import restructured  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.parsers.rst import Directive  # noqa: E402
from program_help import help_texts  # noqa: E402

project = "Bagua"
copyright = "The Bagua authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
include_patterns = ["docs/**", "deploy/README.md", "benchmarks/README.md", "benchmarks/results/*.md", "*.md"]
exclude_patterns = [".*"]
html_theme = "furo"
html_title = "Bagua"
html_copy_source = False
smartquotes = False  # "--nnodes" in a help text must stay as it is typed

myst_heading_anchors = 4  # fragments as GitHub forms them
myst_fence_as_directive = ["mermaid"]
linkcheck_timeout = 20
linkcheck_retries = 2

autodoc_inherit_docstrings = False  # torch's docstrings describe torch
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autoclass_content = "both"  # many describe their arguments at __init__
maximum_signature_line_length = 100


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    try:
        parameters = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):  # a module, a constant
        parameters = set()
    lines[:] = restructured(lines, parameters | set(getattr(thing, "__annotations__", {})))


def _folder_links(app: Any, docname: str, source: list[str]) -> None:
    """A link to a folder of the repository, which has no page here, becomes its plain text."""
    folder = Path(app.env.doc2path(docname)).parent

    def replaced(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^\]\n]+)\]\(([\w./-]+)\)", replaced, source[0])


class ProgramHelp(Directive):
    """`.. program-help:: module:function`: the help of a program that is not click's."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [nodes.literal_block(text, text, language="none") for text in help_texts(self.arguments[0])]


def setup(app: Any) -> None:
    app.add_directive("program-help", ProgramHelp)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("source-read", _folder_links)
