"""Reads from a test's code which blocks of the manual it takes, without running it.

A call of printed.py's functions names its page and part by literals, so that its block is known. Commands that install
Bagua need no test by page: tests/packaging has them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.docs.page_blocks import ROOT, Block, commands

OF_ONE_COMMAND, OF_A_BLOCK = "printed", ("printed_commands", "printed_block", "printed_text")
OF_A_FAULT = "printed_lines"


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    page: str  # relative to the repository
    part: str

    def takes(self, block: Block, words: list[str]) -> bool:
        """Whether the call gives the command `words` of `block` to its test. Some blocks have no words."""
        if ROOT / self.page != block.page:
            return False
        if self.function == OF_A_FAULT:
            return self.part == block.lines_of
        return self.part in (" ".join(words) if self.function == OF_ONE_COMMAND else block.text)


def calls(test: Path) -> list[Call]:
    """Those in the code of `test`. Raises AssertionError if one names its page or part by anything but a literal."""
    found = [call_of(node, str(test)) for node in ast.walk(ast.parse(test.read_text()))]
    return [call for call in found if call is not None]


def call_of(node: ast.AST, test: str) -> Call | None:
    """What `node` of the file `test` takes, if it is a call of one of the functions; AssertionError: as calls()."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id not in (OF_ONE_COMMAND, *OF_A_BLOCK, OF_A_FAULT):
        return None
    names = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
    assert len(names) == 2, f"{test}:{node.lineno}: write the page and the part as literals"
    return Call(node.func.id, *map(str, names))


def installs(words: list[str]) -> bool:
    words = words[1:] if words[0] == "sudo" else words
    return words[1:3] == ["-m", "venv"] or (words[0].endswith("pip") and words[1] == "install")


def parts_of(block: Block) -> list[list[str]]:
    """The words of each of its commands that tests take by page; without commands one part that has no words."""
    lines = [] if block.language == "python" else [words for words in commands(block) if not installs(words)]
    return lines or [[]]


def not_taken(block: Block, taken: list[Call]) -> list[str]:
    """The commands of the block that no call takes; of a block without commands, its text."""
    return [
        " ".join(words) or block.text
        for words in parts_of(block)
        if not any(call.takes(block, words) for call in taken)
    ]
