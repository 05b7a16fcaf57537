"""Turns Bagua's plain-text docstrings into reStructuredText for the API reference.

Docstrings are read in editors first, so they use single backticks, `name: meaning` lines for arguments, and sentences
that begin with Raises and Returns. Sphinx wants other marks for each. Pure functions; `conf.py` connects them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

ARGUMENTS = re.compile(r"^((?:\w+)(?:, \w+)*): (.*)$")
SENTENCE = re.compile(r"^(?:Raises|Returns|Source:) ?")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SPECIAL = re.compile(r"\*+|(?<=\w)_(?=\W|$)|\|")


def restructured(lines: Sequence[str], parameters: Collection[str]) -> list[str]:
    """`lines` of a docstring with the marks of reStructuredText.

    parameters: names of the arguments; only a line that begins with such names is taken for a description of them.
    Text that is indented under an ordinary line is code; it becomes a literal block.
    """
    result: list[str] = []
    inside = False  # in the description of an argument
    code = False
    for line in lines:
        argument = ARGUMENTS.match(line)
        if not line.strip():
            inside = False
            result.append("")
        elif argument and all(name in parameters for name in argument[1].split(", ")):
            if not inside:
                result.append("")
            code = False
            first, *others = argument[1].split(", ")
            result += [f":param {name}: see {first}" for name in others]
            result.append(f":param {first}: {marked(argument[2])}")
            inside = True
        elif SENTENCE.match(line):
            inside = code = False
            result += ["", marked(line)]
        elif inside:
            result.append(f"    {marked(line.strip())}")
        elif line.startswith("    "):
            if not code:
                result += ["::", ""]
            code = True
            result.append(line)
        else:
            if code:
                result.append("")
            code = False
            result.append(marked(line))
    return result


def marked(text: str) -> str:
    """`text` with code in double backticks, and with a backslash before what Sphinx would take for a mark."""
    parts = CODE.split(text)
    for place, part in enumerate(parts):
        parts[place] = (
            f"``{part}``" if place % 2 else SPECIAL.sub(lambda mark: re.sub(r"(.)", r"\\\1", mark[0]), part)
        )
    return "".join(parts)
