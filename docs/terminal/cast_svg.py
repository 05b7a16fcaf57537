"""Renders a recording of a terminal (asciicast version 2) as an SVG that shows its lines as they came.

    python docs/terminal/cast_svg.py docs/terminal/node-loss.cast docs/terminal/node-loss.svg

For recordings that only append lines, with the colours of COLOURS. Pauses are cut to the recording's idle_time_limit.
Where nothing is animated (a printed page, reduced motion) all lines are there at once.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path

COLOURS = {"32": "#7ee787", "90": "#8b949e", "0": ""}
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
CHARACTER_PX, LINE_PX, MARGIN_PX, FONT_PX = 7.83, 19, 18, 13


def lines_of(cast: str) -> tuple[int, list[tuple[float, str]]]:
    """Columns, and each line with its time in seconds, pauses cut. Raises ValueError for another format."""
    head, *events = (json.loads(line) for line in cast.splitlines() if line.strip())
    if not isinstance(head, dict) or head.get("version") != 2:
        raise ValueError("it is no asciicast of version 2")
    limit_s = head.get("idle_time_limit") or float("inf")
    found: list[tuple[float, str]] = []
    shown_s = before_s = 0.0
    for at_s, kind, text in events:
        if kind != "o":
            continue
        shown_s += min(limit_s, at_s - before_s)
        before_s = at_s
        found += [(shown_s, line) for line in text.replace("\r", "").removesuffix("\n").split("\n")]
    return head["width"], found


def wrapped(line: str, columns: int) -> list[list[tuple[str, str]]]:
    """Rows of (colour, text): the line without its escapes, cut where the terminal would break it."""
    rows: list[list[tuple[str, str]]] = [[]]
    colour, room = "", columns
    for index, part in enumerate(_ESCAPE.split(line)):
        if index % 2:
            colour = COLOURS.get(part, "")
            continue
        while part:
            if not room:
                rows.append([])
                room = columns
            rows[-1].append((colour, part[:room]))
            room, part = max(0, room - len(part)), part[room:]
    return rows


def render(cast: str) -> str:
    columns, lines = lines_of(cast)
    body: list[str] = []
    row = 0
    for at_s, line in lines:
        cells = []
        for parts in wrapped(line, columns):
            y = MARGIN_PX + FONT_PX + row * LINE_PX
            spans = "".join(
                f'<tspan fill="{colour}">{escape(text)}</tspan>' if colour else escape(text)
                for colour, text in parts
            )
            cells.append(f'<text x="{MARGIN_PX}" y="{y}" xml:space="preserve">{spans}</text>')
            row += 1
        body.append(f'<g style="animation-delay:{at_s:.2f}s">{"".join(cells)}</g>')
    width = round(2 * MARGIN_PX + columns * CHARACTER_PX)
    height = 2 * MARGIN_PX + row * LINE_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-label="A terminal: a node of a running job is lost and comes back">',
            "<style>",
            f"text{{font:{FONT_PX}px {FONTS};fill:#e6edf3}}",
            "g{animation:come 1ms step-end backwards}@keyframes come{from{opacity:0}to{opacity:1}}",
            "@media (prefers-reduced-motion){g{animation:none}}",
            "</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/terminal/cast_svg.py FILE.cast FILE.svg")
    Path(sys.argv[2]).write_text(render(Path(sys.argv[1]).read_text()))
