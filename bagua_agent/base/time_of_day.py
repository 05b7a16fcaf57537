"""Shows a time of a record to people."""

from __future__ import annotations

import time


def time_of_day(time_unix_s: float) -> str:
    """Returns the local time, as HH:MM:SS. The time may be of a record that others wrote, and be one that no calendar
    has."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(time_unix_s))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
