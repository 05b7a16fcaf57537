"""Checks ids of jobs, nodes, agents and workers: each becomes one part of a key and of a path. Pure."""

from __future__ import annotations

import re

LONGEST_ID = 100

_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


def is_id(text: str) -> bool:
    """Tells whether the text is an id: no slash, no control character, never "." or ".."."""
    return _ID.fullmatch(text) is not None and text not in (".", "..")
