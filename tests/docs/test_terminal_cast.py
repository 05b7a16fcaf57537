"""The recording of a terminal that the README opens with, and its picture."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "terminal"
CAST_SVG = runpy.run_path(str(FOLDER / "cast_svg.py"), run_name="cast_svg")


def cast(*events: tuple[float, str], columns: int = 20, limit_s: float | None = 1.0) -> str:
    head = {"version": 2, "width": columns, "height": 5, "idle_time_limit": limit_s}
    return "\n".join(json.dumps(value) for value in (head, *[[at_s, "o", text] for at_s, text in events]))


def test_the_picture_is_that_of_the_recording() -> None:
    assert (FOLDER / "node-loss.svg").read_text() == CAST_SVG["render"](
        (FOLDER / "node-loss.cast").read_text()
    )


def test_the_recording_shows_the_loss_and_the_return() -> None:
    lines = [line for _, line in CAST_SVG["lines_of"]((FOLDER / "node-loss.cast").read_text())[1]]
    [lost] = [i for i, line in enumerate(lines) if "loses its power" in line]
    [back] = [i for i, line in enumerate(lines) if "has its power again" in line]
    assert any("2 workers on 2 nodes" in line for line in lines[lost:back])
    assert any("3 workers on 3 nodes" in line for line in lines[back:])


def test_pauses_are_cut_and_colours_kept() -> None:
    text = cast((0.5, "a\r\n"), (10.0, "\x1b[32mgreen\x1b[0m <b>\r\n"), (10.2, "c\r\n"))
    assert CAST_SVG["lines_of"](text)[1] == [
        (0.5, "a"),
        (1.5, "\x1b[32mgreen\x1b[0m <b>"),
        (pytest.approx(1.7), "c"),
    ]
    picture = CAST_SVG["render"](text)
    assert '<tspan fill="#7ee787">green</tspan> &lt;b&gt;' in picture
    assert len(ElementTree.fromstring(picture).findall("{*}g")) == 3


def test_a_long_line_is_broken_where_the_terminal_breaks_it() -> None:
    assert CAST_SVG["wrapped"]("a" * 8 + "\x1b[90m" + "b" * 5, 10) == [
        [("", "a" * 8), ("#8b949e", "bb")],
        [("#8b949e", "bbb")],
    ]


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no asciicast"):
        CAST_SVG["lines_of"](json.dumps({"version": 1}))
