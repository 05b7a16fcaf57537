"""Names what a copy of the state that failed midway has left on this worker."""

from __future__ import annotations

from enum import IntEnum


class HalfCopy(IntEnum):
    """The remains of a failed copy in place on this worker: nothing, or half a state, committed or initial."""

    NONE = 0
    INITIAL = 1
    COMMITTED = 2
