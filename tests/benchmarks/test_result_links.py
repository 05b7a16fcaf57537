"""Every relative link in the documents leads to a file that exists, results of benchmarks included."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
_NUMBER = re.compile(r"\[([^\]]*\d[^\]]*)\]\(([^)#\s]*results/[^)#\s]+\.md)\)")
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def documents() -> list[Path]:
    folders = ("docs", "benchmarks", "deploy", "examples")
    return [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]


def test_every_link_leads_to_a_file() -> None:
    links = [(document, link) for document in documents() for link in _LINK.findall(document.read_text())]
    inside = [
        (document, link) for document, link in links if "://" not in link and not link.startswith("mailto:")
    ]
    assert sum("results/" in link for _, link in inside) > 10, "the documents cite results"
    broken = [f"{d.relative_to(ROOT)}: {link}" for d, link in inside if not (d.parent / link).exists()]
    assert not broken


def test_a_number_that_is_a_link_is_in_its_result() -> None:
    found = [
        (document, number, (document.parent / result).read_text())
        for document in documents()
        for number, result in _NUMBER.findall(document.read_text())
    ]
    assert len(found) > 15, "documents link numbers to results"
    assert [f"{d.relative_to(ROOT)}: {number}" for d, number, text in found if number not in text] == []


def test_one_result_of_each_name_is_kept_and_a_page_links_it() -> None:
    """The name says which part of a benchmark was measured, so an older result of the same name is of no use."""
    kept = sorted(path.stem for path in RESULTS.glob("*.json"))
    names = Counter(re.sub(r"-\d{4}-\d\d-\d\d(-\d+)?$", "", stem) for stem in kept)
    assert len(kept) > 20
    assert [name for name, count in names.items() if count > 1] == [], "kept twice: remove the older one"
    pages = [document for document in documents() if document.parent != RESULTS]
    links = {(page.parent / link).resolve() for page in pages for link in _LINK.findall(page.read_text())}
    assert [stem for stem in kept if RESULTS / f"{stem}.md" not in links] == [], "no page links it"
    written = {path.name for path in RESULTS.iterdir() if not path.name.startswith(tuple(kept))}
    assert written == set(), "without its values"


def test_each_failure_of_the_table_has_its_time() -> None:
    lines = (ROOT / "docs/guide/what-happens.md").read_text().splitlines()
    table = lines[lines.index("| failure | next step after | what is lost |") + 2 :]
    rows = [line.split(" | ") for line in table[: table.index("")]]
    assert len(rows) > 15
    assert [failure for failure, time, *_ in rows if not _NUMBER.search(time)] == []
