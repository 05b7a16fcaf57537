"""Reads the faults, and what the dashboard says of each, from the table of docs/guide/what-happens.md."""

from __future__ import annotations

import re

from tests.docs.page_blocks import ROOT

HEADING = "## What the dashboard shows\n"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
LATER = re.compile(r"^first: |\. Then: |\. After \d+ s: ")
SENTENCE = re.compile(r"\. (?=[A-Z])")


def rows() -> dict[str, list[list[str]]]:
    """By fault: its verdicts in their order, each as the sentences that the page prints of it, in small letters."""
    page = (ROOT / "docs/guide/what-happens.md").read_text()
    _head, _line, *found = ROW.findall(page.split(HEADING)[1].split("\n## ")[0])
    return {
        fault: [
            [sentence.removesuffix(".").lower() for sentence in SENTENCE.split(text)]
            for text in LATER.split(said)
            if text
        ]
        for fault, said in found
    }


def pattern(sentence: str) -> re.Pattern[str]:
    """Matches the sentence with other numbers and directories, and with the speed that a running job has in it."""
    text = re.sub(r"(?<![\dh])\d+", r"\\d+", re.escape(sentence)).replace("/shared/demo", r"\S+")
    return re.compile(re.sub(r"(nodes?),", r"\1(?: at [\\d.e+-]+ steps/s)?,", text), re.IGNORECASE)
