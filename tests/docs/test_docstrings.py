"""docs/docstrings.py turns plain docstrings into reStructuredText that says the same; those of public names say what
each argument is."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_core as bagua

PATH = Path(__file__).resolve().parents[2] / "docs" / "docstrings.py"
_spec = importlib.util.spec_from_file_location("docstrings", PATH)
assert _spec and _spec.loader
docstrings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docstrings)

MADE_BY_BAGUA = (Exception, enum.Enum, bagua.algorithms.Attachment)  # a script makes none of these


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


def public() -> list[tuple[str, object]]:
    """Functions and classes of bagua_core and bagua_core.algorithms that a script calls."""
    named = [(name, getattr(place, name)) for place in (bagua, bagua.algorithms) for name in place.__all__]
    called = [(name, thing) for name, thing in named if inspect.isfunction(thing) or inspect.isclass(thing)]
    return [
        (name, thing)
        for name, thing in called
        if not inspect.isclass(thing) or not issubclass(thing, MADE_BY_BAGUA)
    ]


@pytest.mark.parametrize(
    ("name", "thing"), public(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_docstrings_say_what_each_argument_is(name: str, thing: Any) -> None:
    text = thing.__doc__ or ""
    if inspect.isclass(thing):
        text += thing.__init__.__doc__ or ""
    assert text, "no docstring"
    refers = re.match(r"See (\w+)", text)
    if refers:
        text += getattr(bagua, refers[1]).__doc__
    parameters = set(inspect.signature(thing).parameters) - {"self", "engine"}
    if inspect.isclass(thing) and issubclass(thing, torch.nn.modules.batchnorm._BatchNorm):
        parameters -= set(inspect.signature(torch.nn.BatchNorm1d).parameters)  # "as torch.nn.BatchNorm1d"
    assert [p for p in sorted(parameters) if not re.search(rf"\b{p}\b", text)] == []
