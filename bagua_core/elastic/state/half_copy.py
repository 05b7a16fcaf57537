"""Names what a copy of the state that failed midway has left on this worker."""

from __future__ import annotations

from enum import IntEnum


class HalfCopy(IntEnum):
    """What a copy in place that failed has left here: nothing, or half a state, committed or initial."""

    NONE = 0
    INITIAL = 1
    COMMITTED = 2
