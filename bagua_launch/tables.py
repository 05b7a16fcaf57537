"""Prints rows in columns as wide as needed; the last one takes the rest of the width. Plain text."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_agent.base.plain_text import plain_line


def table(head: Sequence[str], rows: Sequence[Sequence[str]], if_empty: str) -> str:
    if not rows:
        return if_empty
    cells = [[plain_line(" ".join(cell.split())) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )
