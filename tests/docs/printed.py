"""Gives tests the commands and the code that a page of the manual prints, so that they run what the page says.

The mark of such a block is `run by: TEST`; test_page_blocks.py checks that TEST takes each of its commands, by
calls whose page and part are literals (printed_calls.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from tests.docs.page_blocks import ROOT, Block, blocks, commands


def printed(page: str, part: str, given: Mapping[str, str] | None = None) -> list[str]:
    """The words of the one command of `page` whose line contains `part`, behind the program's name.

    page: relative to the repository. given: replacements for addresses, paths and names that the page makes up, by
    what the page prints. Raises AssertionError if no command or several contain `part`, or if it lacks a given text.
    """
    found = [words for block in blocks(ROOT / page) for words in commands(block) if part in " ".join(words)]
    assert len(found) == 1, f"{page}: {len(found)} commands with {part!r}"
    (words,) = found
    return replaced(words, given or {}, f"{page}: {' '.join(words)}")[1:]


def printed_commands(page: str, part: str, given: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of each command of the one block of `page` that contains `part`, in their order, programs included.

    given: as in printed(), for all commands together. Raises AssertionError as printed_block() does, and if the block
    lacks a given text.
    """
    found = commands(printed_block(page, part))
    words = iter(replaced([word for line in found for word in line], given or {}, f"{page}: {part!r}"))
    return [list(islice(words, len(line))) for line in found]


def printed_text(page: str, part: str, given: Mapping[str, str] | None = None) -> str:
    """The text of the one block of `page` that contains `part`; given, and AssertionError: as in printed_commands()."""
    return replaced([printed_block(page, part).text], given or {}, f"{page}: {part!r}")[0]


def printed_block(page: str, part: str) -> Block:
    """The one block of `page` that contains `part`. Raises AssertionError if none or several do."""
    found = [block for block in blocks(ROOT / page) if part in block.text]
    assert len(found) == 1, f"{page}: {len(found)} blocks with {part!r}"
    return found[0]


def replaced(words: list[str], given: Mapping[str, str], place: str) -> list[str]:
    for old, new in given.items():
        assert any(old in word for word in words), f"{place}: no {old!r}"
        words = [word.replace(old, new) for word in words]
    return words


def printed_lines(page: str, fault: str) -> str:
    """The text of the one block of `page` whose mark ends with `lines of: FAULT`. Raises AssertionError as above."""
    found = [block for block in blocks(ROOT / page) if block.lines_of == fault]
    assert len(found) == 1, f"{page}: {len(found)} blocks with lines of: {fault}"
    return found[0].text
