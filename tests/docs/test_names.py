"""The documents name files, functions and sections that exist.

Covers every *.md except those that describe an earlier tree: CHANGELOG.md and the dated results of benchmarks.
A path in backticks is a tracked file or folder, or the end of one; the end of a file's path leads to one file.
`file.py` (`name`) means that the file contains the name. A relative link leads to a file, and its fragment to a
heading there.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.lab.wait import HANG_S

ROOT = Path(__file__).resolve().parents[2]
DATED = ("CHANGELOG.md", "benchmarks/results/")
# Names that look like paths and are none of this tree.
OUTSIDE = frozenset({"train.py", "control/", "replicas/"})  # the last two: ranges of keys in etcd
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TOKEN = re.compile(r"`([\w./-]+)`")
SUFFIXES = (".py", ".proto", ".h", ".c", ".cu", ".cpp", ".md")
NAME_IN_FILE = re.compile(r"`([\w./-]+\.(?:py|proto))`\s+\(((?:`[\w.]+`(?:,\s+)?)+)\)")
PROGRAM = re.compile(r"`python -m ((?:bagua_\w+|benchmarks|tests)[\w.]*)")
LINK = re.compile(r"\]\(([^)\s:]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def tracked() -> tuple[str, ...]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(
        listing, cwd=ROOT, check=True, capture_output=True, text=True, timeout=HANG_S
    ).stdout
    return tuple(path for path in output.splitlines() if (ROOT / path).exists())


@cache
def endings() -> frozenset[str]:
    """Every path of the tree, and every end of one that starts at a folder's name; folders end with a slash."""
    found = set()
    for path in tracked():
        parts = path.split("/")
        for first in range(len(parts)):
            for last in range(first + 1, len(parts)):
                found.add("/".join(parts[first:last]) + "/")
            found.add("/".join(parts[first:]))
    return frozenset(found)


def documents() -> list[str]:
    return [path for path in tracked() if path.endswith(".md") and not path.startswith(DATED)]


def is_path(token: str) -> bool:
    return not token.startswith(("/", ".")) and token not in OUTSIDE and token.endswith((*SUFFIXES, "/"))


def prose(document: str) -> str:
    return CODE_BLOCK.sub("", (ROOT / document).read_text())


def missing_paths(text: str) -> list[str]:
    return sorted({t for t in TOKEN.findall(text) if is_path(t) and t not in endings()})


def ambiguous_paths(text: str) -> list[str]:
    files = {
        t: [p for p in tracked() if p == t or p.endswith("/" + t)] for t in TOKEN.findall(text) if is_path(t)
    }
    return sorted(token for token, found in files.items() if len(found) > 1 and token not in found)


def missing_names(text: str) -> list[str]:
    missing = []
    for path, names in NAME_IN_FILE.findall(text):
        files = [ROOT / p for p in tracked() if p == path or p.endswith("/" + path)]
        sources = [file.read_text() for file in files]
        for name in re.findall(r"`([\w.]+)`", names):
            word = re.compile(rf"\b{re.escape(name.rsplit('.', 1)[-1])}\b")
            if not any(word.search(source) for source in sources):
                missing.append(f"{path}: {name}")
    return missing


def missing_programs(text: str) -> list[str]:
    modules = {module: module.replace(".", "/") for module in PROGRAM.findall(text)}
    return [m for m, path in modules.items() if not {f"{path}.py", f"{path}/__main__.py"} & set(tracked())]


def anchors(text: str) -> set[str]:
    """Fragments of a document's headings, formed as GitHub forms them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}


def broken_links(document: str) -> list[str]:
    broken = []
    for link in LINK.findall(prose(document)):
        path, _, fragment = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (fragment and fragment not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", documents())
def test_names_of_a_document_exist(document: str) -> None:
    text = prose(document)
    assert missing_paths(text) == []
    assert ambiguous_paths(text) == []
    assert missing_names(text) == []
    assert missing_programs(text) == []
    assert broken_links(document) == []


def test_missing_and_ambiguous_names_are_found() -> None:
    assert missing_paths("`membership/ranks.py`, `membership/absent.py`, `bagua_agent/`") == [
        "membership/absent.py"
    ]
    assert missing_names("`membership/ranks.py` (`absent_name`)") == ["membership/ranks.py: absent_name"]
    assert missing_programs("`python -m benchmarks.chaos --seed 7`, `python -m tests.absent`") == [
        "tests.absent"
    ]
    assert ambiguous_paths("`README.md`, `ranks.py`, `decentralized.py`") == ["decentralized.py"]


def test_each_folder_at_the_top_is_in_the_readme() -> None:
    """A run that writes into the tree, and a commit that takes this along, show here."""
    layout = (ROOT / "README.md").read_text().partition("## Repository layout")[2].partition("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", layout, re.MULTILINE)
        for name in re.findall(r"`(\w+)/`", row)
    }
    folders = {path.partition("/")[0] for path in tracked() if "/" in path}
    assert {name for name in folders if not name.startswith(".")} == named
