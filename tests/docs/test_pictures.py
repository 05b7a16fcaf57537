"""The pictures of docs/pictures show what the dashboard's page has today, by the words that they carry."""

from __future__ import annotations

import json
import re

import pytest

from tests.browser.page_pictures import DIRECTORY, KEYWORD, PICTURES
from tests.browser.png_text import texts, with_text
from tests.browser.test_faults_in_browser import SHOWN
from tests.docs.dashboard_table import pattern, rows
from tests.docs.page_blocks import PAGES, ROOT

PAGE = (ROOT / "bagua_agent/dashboard/static/index.html").read_text()
ONLY_AFTER_FAILURES = "What failed first"
AGAIN = "take it anew: python -m tests.browser.page_pictures"


def test_each_picture_is_made_by_the_command_and_is_on_a_page() -> None:
    names = {f"{name}.png" for name in PICTURES}
    assert {path.name for path in DIRECTORY.iterdir()} == names
    assert {
        name for page in PAGES for name in re.findall(r"\]\([./]*pictures/([\w-]+\.png)\)", page.read_text())
    } == names


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_a_verdict_of_the_manual_and_the_parts_of_the_page(name: str) -> None:
    shown = json.loads(texts((DIRECTORY / f"{name}.png").read_bytes())[KEYWORD])
    printed = rows()
    verdicts = [verdict for row in SHOWN[PICTURES[name].fault] for verdict in printed[row]]
    said = " ".join(shown["verdict"])
    assert any(all(pattern(s).search(said) for s in verdict) for verdict in verdicts), f"{said}: {AGAIN}"
    there = re.findall(r'<h2 id="([\w-]+)">(.+?)</h2>', PAGE)
    last = [f"#{identity}" for identity, _ in there].index(PICTURES[name].last)
    titles = [title for _, title in there[: last + 1]]
    assert shown["titles"] == [t for t in titles if t != ONLY_AFTER_FAILURES or t in shown["titles"]], AGAIN


def test_a_file_carries_its_text() -> None:
    png = (DIRECTORY / "cut-link.png").read_bytes()
    assert texts(with_text(png, "More", "text")) == {**texts(png), "More": "text"}
