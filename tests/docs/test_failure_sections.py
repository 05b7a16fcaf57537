"""Each task page says what happens when nodes fail or come, under one heading, so that a reader knows where to look."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.page_blocks import ROOT

HEADING = "## When nodes fail or come\n"
# By page below docs/: why it has no such section.
EXCEPTIONS = {
    "index.md": "a list of pages",
    "guide/start.md": "a list of pages",
    "guide/examples.md": "a list of scripts",
    "guide/faq.md": "questions, each with a link",
    "guide/first-job.md": "all of it is about losing a worker and adding a node",
    "guide/what-happens.md": "all of it is about failures",
    "guide/troubleshooting.md": "all of it is about failures, by symptom",
    "scaling.md": "a study by simulation, with a section about simulated failures",
    "security.md": "certificates and ports, which changes of membership leave as they are",
}


def task_pages() -> list[Path]:
    folders = ("", "guide", "trackers")
    pages = [page for folder in folders for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [page for page in pages if name_of(page) not in EXCEPTIONS]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


@pytest.mark.parametrize("page", task_pages(), ids=name_of)
def test_a_task_page_says_what_happens_when_nodes_fail_or_come(page: Path) -> None:
    text = page.read_text()
    assert text.count(HEADING) == 1, f"{name_of(page)} needs one section {HEADING.strip()!r}"
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    assert len(section.split()) > 15, f"{name_of(page)}: the section is empty"


def test_each_exception_is_a_page_without_the_section() -> None:
    for name in EXCEPTIONS:
        assert HEADING not in (ROOT / "docs" / name).read_text(), name
