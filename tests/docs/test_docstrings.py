"""docs/docstrings.py turns plain docstrings into reStructuredText that says the same; those of public names say what
each argument is."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_core as bagua
from tests.docs.public_names import shown

PATH = Path(__file__).resolve().parents[2] / "docs" / "docstrings.py"
_spec = importlib.util.spec_from_file_location("docstrings", PATH)
assert _spec and _spec.loader
docstrings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docstrings)

MADE_BY_BAGUA = (BaseException, enum.Enum, bagua.algorithms.Attachment)  # a script makes none of these


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
    """Functions and classes of the reference that a script calls, each once."""
    called = {
        thing: f"{module}.{name}"
        for (module, name), thing in shown().items()
        if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("bagua_"))
    }
    return [
        (name, thing)
        for thing, name in called.items()
        if not inspect.isclass(thing)
        or not (issubclass(thing, MADE_BY_BAGUA) or getattr(thing, "_is_protocol", False))
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
    # as in "a bagua_core.CacheLoader, whose other arguments it takes"
    for named in re.findall(r"bagua_core\.([\w.]*\w)", thing.__doc__ or ""):
        other = functools.reduce(lambda place, part: getattr(place, part, None), named.split("."), bagua)
        text += (other.__doc__ or "") + (other.__init__.__doc__ or "") if inspect.isclass(other) else ""
    parameters = set(inspect.signature(thing).parameters) - {"self", "engine"}
    if inspect.isclass(thing) and issubclass(thing, torch.nn.modules.batchnorm._BatchNorm):
        parameters -= set(inspect.signature(torch.nn.BatchNorm1d).parameters)  # "as torch.nn.BatchNorm1d"
    assert [p for p in sorted(parameters) if not re.search(rf"\b{p}\b", text)] == []
