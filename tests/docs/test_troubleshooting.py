"""Each message by which the page of troubleshooting is searched is one that a job prints, or an error's name."""

from __future__ import annotations

import re

import pytest

from tests.docs.page_blocks import GUIDES, ROOT, blocks

PAGE = ROOT / "docs/guide/troubleshooting.md"
COMMANDS = {"ps -o min_flt= PID"}


def messages() -> list[str]:
    """What the first column of each table quotes."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    quoted = [message for row in rows for message in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return [message for message in quoted if message not in COMMANDS]


def pattern_of(message: str) -> re.Pattern[str]:
    words = re.escape(message).replace(re.escape("..."), ".+")
    return re.compile(re.sub(r"\bN\b", r"\\d+", words))


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_that_jobs_print_and_tests_expect(message: str) -> None:
    if re.fullmatch("[A-Z][A-Za-z]+", message):
        sources = [path.read_text() for path in (ROOT / "bagua_core").rglob("*.py")]
        assert any(f"class {message}(" in source for source in sources)
        return
    # their lines are compared with real jobs
    printed = [block.text for page in GUIDES for block in blocks(page) if block.lines_of]
    expected = [test.read_text() for test in (ROOT / "tests").rglob("test_*.py")]
    assert any(pattern_of(message).search(text) for text in [*printed, *expected])


def test_the_page_quotes_messages() -> None:
    assert len(messages()) > 5
