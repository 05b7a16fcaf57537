"""Reads what the programs that are not click's say of themselves, for the command reference.

A place, `module:function`, names a function without arguments that returns argparse's parser, or the text itself.
`conf.py` shows the texts.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

WIDTH = 100


def parsers(whole: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield whole
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in dict.fromkeys(action.choices.values()):
                yield from parsers(parser)


def help_texts(place: str) -> list[str]:
    """The program's help; a command's follows as a text of its own."""
    module, _, name = place.partition(":")
    made = getattr(importlib.import_module(module), name)()
    if isinstance(made, str):
        return [made]
    texts = []
    for parser in parsers(made):
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
        parser.color = False  # from Python 3.14 on
        texts.append(parser.format_help())
    return texts
