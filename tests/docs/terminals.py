"""Compares blocks of pages with the terminals of a real job in which a fault is made.

Which process notices a loss first depends on moments, and with it which lines there are. So a fault is repeated, at
most STRIKES times, until one terminal shows all lines of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.docs.printed_lines import missing, parts
from tests.faults.job import DEADLINE_S, Node
from tests.lab.wait import eventually

STRIKES = 8
Terminals = Sequence[Sequence[str]]  # for each part of a block, the terminals one of which shows it


def shows(block: str, strike: Callable[[], Terminals]) -> None:
    """Strike until the terminals show each line of `block`. Raises AssertionError with the lines that they lack."""
    lacks: list[str] = []
    for _ in range(STRIKES):
        found = strike()
        lacks = []
        for part, terminals in zip(parts(block), found, strict=True):
            lacks += min((missing(part, text) for text in terminals), key=len)
        if not lacks:
            return
    shown = "\n----\n".join(text for terminals in found for text in terminals)
    raise AssertionError(
        "the page prints what the job does not:\n" + "\n".join(lacks) + f"\n---- of\n{shown}"
    )


class Since:
    """What some nodes print from now on."""

    def __init__(self, *nodes: Node) -> None:
        self._begins = {node: len(node.log) for node in nodes}

    def __call__(self) -> list[str]:
        return [node.log[begin:] for node, begin in self._begins.items()]

    def __contains__(self, node: Node) -> bool:
        return node in self._begins

    def await_all(self, words: str) -> None:
        eventually(
            lambda: all(words in text for text in self()), DEADLINE_S, lambda: f"{words}: {self()}", 0.02
        )
