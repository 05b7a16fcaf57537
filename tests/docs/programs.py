"""Asks a program of the repository whether it takes a command line, without running it.

A program is `python -m MODULE`, whose parser is argparse's, or a script of scripts/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.docs.page_blocks import ROOT


class Parsed(Exception):
    """The program's parser has returned these values."""

    def __init__(self, values: argparse.Namespace) -> None:
        super().__init__(values)
        self.values = values


def parsed(words: Sequence[str]) -> argparse.Namespace | None:
    """What the program's parser makes of `words`; None for a script of the shell.

    Raises AssertionError if the program does not exist or refuses an option, a choice or a value.
    """
    if words[0].startswith("scripts/"):
        _check_script(words)
        return None
    assert words[:2] == ["python", "-m"], f"{words}: neither python -m nor a script"
    module = importlib.import_module(words[2])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[2]}.__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_and_stop)
        patch.setattr(sys, "argv", [words[2], *words[3:]])
        try:
            module.main()
        except Parsed as made:
            return made.values
        except SystemExit as error:
            raise AssertionError(f"{' '.join(words)}: refused") from error
    raise AssertionError(f"{' '.join(words)}: ended without parsing its words")


def _parse_and_stop(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> None:
    values, extra = parser.parse_known_args(arguments, namespace)
    if extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    raise Parsed(values)


def _check_script(words: Sequence[str]) -> None:
    script = ROOT / words[0]
    assert os.access(script, os.X_OK), f"{words[0]} is no program"
    text = script.read_text()
    missing = [word for word in words[1:] if word.startswith("-") and word not in text]
    assert not missing, f"{words[0]} has no {missing}"
