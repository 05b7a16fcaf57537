"""docs/docstrings.py turns plain docstrings into reStructuredText that says the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "docs" / "docstrings.py"
_spec = importlib.util.spec_from_file_location("docstrings", PATH)
assert _spec and _spec.loader
docstrings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docstrings)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`op` over all", "``op`` over all"),
        ("``op`` already", "``op`` already"),
        ("function(*args, **kwargs)", r"function(\*args, \*\*kwargs)"),
        ("the name_ ends", r"the name\_ ends"),
        ("`f(*a)` and *b", r"``f(*a)`` and \*b"),
        ("plain_name stays", "plain_name stays"),
    ],
)
def test_marks(text: str, shown: str) -> None:
    assert docstrings.marked(text) == shown


def test_arguments_become_fields_with_their_continuation() -> None:
    lines = ["Split.", "", "budget: the most", "  in a batch.", "seed: a number.", "Raises ValueError."]
    assert docstrings.restructured(lines, {"budget", "seed"}) == [
        "Split.",
        "",
        "",
        ":param budget: the most",
        "    in a batch.",
        ":param seed: a number.",
        "",
        "Raises ValueError.",
    ]


def test_a_line_that_names_no_argument_stays_a_sentence() -> None:
    assert docstrings.restructured(["Note: this stays."], {"seed"}) == ["Note: this stays."]


def test_two_arguments_of_one_line_are_both_listed() -> None:
    assert docstrings.restructured(["low, high: bounds"], {"low", "high"})[1:] == [
        ":param high: see low",
        ":param low: bounds",
    ]


def test_indented_text_is_a_literal_block() -> None:
    lines = ["Use it so:", "", "    call(x)", "    call(y)", "", "Afterwards."]
    assert docstrings.restructured(lines, set()) == [
        "Use it so:",
        "",
        "::",
        "",
        "    call(x)",
        "    call(y)",
        "",
        "",
        "Afterwards.",
    ]
