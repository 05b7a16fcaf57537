"""The samples of benchmarks.load_balancing: lengths with heavy tails, real and synthetic.

Docstrings of this environment's packages, read from their sources without importing them and in a fixed order, so the
same environment gives the same texts; and numbers drawn from distributions, whose seeds are fixed.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "networkx", "sympy", "setuptools", "pip", "grpc", "cryptography", "torch")
NAMES = ("docstrings", "pareto", "log-normal")
VOCABULARY = 256
_LONGEST = 4000  # words of a text, as a model's context would cut it


def docstrings(most: int) -> list[str]:
    """Of modules, classes and functions of installed packages that are usual beside torch, sorted by file."""
    found: list[str] = []
    for path in _sources():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or another Python's
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    found.append(text)
        if len(found) >= 2 * most:
            break
    # of all that was read, not of the first packages' only
    random.Random(0).shuffle(found)
    return found[:most]


def _sources() -> Iterator[Path]:
    site = Path(sysconfig.get_paths()["purelib"])
    for package in PACKAGES:
        yield from sorted((site / package).rglob("*.py"))


def texts(name: str, count: int) -> list[list[int]]:
    """`count` texts as numbers of words below VOCABULARY: "docstrings", or words by chance, as many as "pareto" (shape
    1.2) or "log-normal" (sigma 1.5) draw. Raises ValueError for another name."""
    if name == "docstrings":
        words = [text.split()[:_LONGEST] for text in docstrings(count)]
        return [[zlib.crc32(word.encode()) % VOCABULARY for word in text] for text in words]
    numbers = random.Random(name)
    if name == "pareto":
        drawn = [10 * numbers.paretovariate(1.2) for _ in range(count)]
    elif name == "log-normal":
        drawn = [numbers.lognormvariate(3.5, 1.5) for _ in range(count)]
    else:
        raise ValueError(f"{name!r} is none of {NAMES}")
    return [
        [numbers.randrange(VOCABULARY) for _ in range(max(1, min(_LONGEST, int(value))))] for value in drawn
    ]
