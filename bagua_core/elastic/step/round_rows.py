"""Encodes what a worker used in a round as a row of whole numbers of fixed size, which members exchange."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_core.communication.step_interface import MOST_LEASE_RANGES, Used
from bagua_core.errors import PeerViolation

ROW_COLUMNS = 3 + 2 * MOST_LEASE_RANGES
_MILLI = 1000.0


def to_row(used: Used) -> list[int]:
    """Returns `used` as whole numbers of a fixed count, which members exchange."""
    flat = [place for each in used.ranges for place in each]
    head = [len(used.ranges), round(used.speed * _MILLI), int(used.confirms)]
    return [*head, *flat, *([0] * (2 * MOST_LEASE_RANGES - len(flat)))]


def from_row(row: Sequence[int]) -> Used:
    """Returns what a row of `to_row` says. Raises PeerViolation for a row that `to_row` does not make."""
    if len(row) != ROW_COLUMNS:
        raise PeerViolation(f"a member's row of a round has {len(row)} columns: {list(row)}")
    count, speed, confirms, *places = row
    if not 0 <= count <= MOST_LEASE_RANGES or speed < 0 or confirms not in (0, 1):
        raise PeerViolation(f"a member's row of a round is none: {list(row)}")
    ranges = tuple((places[2 * i], places[2 * i + 1]) for i in range(count))
    if any(start >= stop for start, stop in ranges):
        raise PeerViolation(f"a member's row of a round has an empty range: {list(row)}")
    return Used(ranges, speed / _MILLI, bool(confirms))
