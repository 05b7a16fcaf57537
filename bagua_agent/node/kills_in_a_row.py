"""Counts how many workers of a slot were killed in a row without progress. Pure."""

from __future__ import annotations

# Where steps are not observed (restart mode), a worker that ran for so long has made progress.
KILLS_FORGOTTEN_S = 600.0


def kills_after(before: int, *, killed: bool, has_committed: bool, ran_s: float) -> int:
    """The count once a worker has ended. before: the count when it started. killed: by a signal from outside."""
    made_progress = has_committed or ran_s >= KILLS_FORGOTTEN_S
    return (0 if made_progress else before) + killed
