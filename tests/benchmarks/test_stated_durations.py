"""The time that a page states behind a benchmark's command is about the time that its newest kept result took."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.result_file import RESULTS
from tests.docs.page_blocks import PAGES, PARSED, blocks

UNIT_S = {"s": 1, "second": 1, "minute": 60, "hour": 3600}
WORDS = {"a": 1.0, "an": 1.0, "half a": 0.5, "half an": 0.5}
STATED = re.compile(
    r"\b(?:(?P<least>\d+) to )?(?P<most>\d+|half an?|an?) (?P<unit>s|second|minute|hour)s?\b(?! (?:a|for each)\b)"
)
WITHIN = 2.0  # of the stated bounds: a comment says "about"


def stated_s(comment: str) -> tuple[float, float] | None:
    """The least and most seconds that a comment states; None: it states no time of a whole run."""
    found = STATED.search(comment)
    if found is None:
        return None
    most = WORDS.get(found["most"]) or float(found["most"])
    unit_s = UNIT_S[found["unit"]]
    return float(found["least"] or most) * unit_s, most * unit_s


def took_s(command: str, results: Path = RESULTS) -> float | None:
    """The duration of the newest result that this command wrote; None: no result states one."""
    abouts = [json.loads(path.read_text())["about"] for path in results.glob("*.json")]
    known = [about for about in abouts if about["command"] == command and "took_s" in about]
    return float(max(known, key=lambda about: about["date"])["took_s"]) if known else None


def is_about(stated: tuple[float, float], took: float) -> bool:
    return stated[0] / WITHIN <= took <= stated[1] * WITHIN


@pytest.mark.parametrize(
    ("comment", "stated"),
    [
        ("about 4 minutes on an idle machine; needs root", (240.0, 240.0)),
        ("1 to 3 minutes", (60.0, 180.0)),
        ("half a minute", (30.0, 30.0)),
        ("about an hour", (3600.0, 3600.0)),
        ("15 s", (15.0, 15.0)),
        ("about 2 minutes a round, most of it torchrun's", None),
        ("minutes, on an idle machine", None),
        ("the CPU, one thread", None),
    ],
)
def test_the_time_in_a_comment(comment: str, stated: tuple[float, float] | None) -> None:
    assert stated_s(comment) == stated


def test_a_time_that_is_far_from_the_kept_one_is_found(tmp_path: Path) -> None:
    for day, took in (("01", 900.0), ("02", 130.0)):
        about = {"command": "python -m benchmarks.some --keep", "date": f"2026-01-{day}", "took_s": took}
        (tmp_path / f"some-2026-01-{day}.json").write_text(json.dumps({"about": about, "values": []}))
    found = took_s("python -m benchmarks.some --keep", tmp_path)
    assert found == 130.0 and took_s("python -m benchmarks.some --part a --keep", tmp_path) is None
    assert is_about((60.0, 120.0), found) and not is_about((60.0, 60.0), found)


def test_stated_times_are_about_those_of_kept_results() -> None:
    far = []
    for page in PAGES:
        for block in blocks(page):
            for line in block.text.splitlines() if PARSED.fullmatch(block.mark) else []:
                command, _, comment = line.partition("#")
                stated, took = stated_s(comment), took_s(command.strip())
                if stated is not None and took is not None and not is_about(stated, took):
                    far.append(f"{page}:{block.line}: {comment.strip()}; took {took:.0f} s")
    assert far == []
