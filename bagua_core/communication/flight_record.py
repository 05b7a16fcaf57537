"""Keeps the newest operations of each communicator of this worker, for a person who asks what is under way.

A collective has a number, which is the same on all members of its communicator, so that answers of several workers show
which of them have not begun it. Messages between two workers have none. A record holds no operation and no tensor: an
operation that its caller has let go is not under way any more. Recording an operation takes a counter and one entry of
a ring; all else is done when a person asks, in a thread of its own (worker/collectives_answer.py). Nothing there moves
an operation on.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from bagua_core.communication.communicator import AbortFlag, Pending

KEPT = 256  # operations of a communicator
KEPT_BUCKETS = 512
MOST_RECORDS = 64  # in an answer, the newest ones
MOST_SHOWN = 64  # operations of each

_Entry = tuple[int, str, int, int, int | None, "weakref.ref[Pending]"]  # number, what, bytes, begin, peer


class FlightRecord:
    """The newest operations of one communicator. name and ranks: set once it is known which workers it joins; ranks are
    global ranks, by place in the communicator."""

    def __init__(self, transport: str, generation: int, place: int, abort_flag: AbortFlag) -> None:
        self.transport = transport
        self.generation = generation
        self.place = place
        self.name = ""
        self.ranks: tuple[int, ...] = ()
        self._abort_flag = abort_flag
        self._begun = 0
        self._entries: deque[_Entry] = deque(maxlen=KEPT)
        with _lock:
            _records.append(weakref.ref(self))
            _records[:] = [kept for kept in _records if kept() is not None]

    def is_of(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)

    def collective(self, what: str, size_bytes: int, pending: Pending) -> Pending:
        """Records that a collective of all members has begun, and returns `pending`. Call it from the thread that
        starts collectives."""
        self._begun += 1
        self._entries.append((self._begun, what, size_bytes, time.monotonic_ns(), None, weakref.ref(pending)))
        return pending

    def message(self, what: str, size_bytes: int, peer: int | None, pending: Pending) -> Pending:
        """Records a message between this worker and `peer`, and returns `pending`. Any thread may call it.

        peer: a place in the communicator; None: several.
        """
        self._entries.append((0, what, size_bytes, time.monotonic_ns(), peer, weakref.ref(pending)))
        return pending

    def answer(self, now_ns: int) -> dict[str, Any]:
        """Returns the record as a JSON-like value. under_way: oldest first."""
        under_way = [entry for entry in list(self._entries) if _is_under_way(entry[-1])]
        return {
            "name": self.name,
            "transport": self.transport,
            "generation": self.generation,
            "ranks": list(self.ranks),
            "place": self.place,
            "begun": self._begun,
            "under_way": [
                {
                    "number": number,
                    "what": what if peer is None else f"{what} with rank {self._rank_of(peer)}",
                    "bytes": size_bytes,
                    "since_s": (now_ns - begin_ns) * 1e-9,
                }
                for number, what, size_bytes, begin_ns, peer, _ in under_way[:MOST_SHOWN]
            ],
        }

    def _rank_of(self, place: int) -> int:
        return self.ranks[place] if place < len(self.ranks) else place

    @property
    def is_over(self) -> bool:
        """Whether the generation was given up, so that nothing in it is awaited any more."""
        return self._abort_flag.is_set()


_lock = threading.Lock()
_records: list[weakref.ref[FlightRecord]] = []
_buckets: deque[tuple[int, int, int, weakref.ref[Pending]]] = deque(maxlen=KEPT_BUCKETS)


def bucket_launched(number: int, size_bytes: int, pending: Pending) -> None:
    """Records that a full bucket of gradients was sent to the other ranks; it may take several collectives."""
    _buckets.append((number, size_bytes, time.monotonic_ns(), weakref.ref(pending)))


def answer() -> dict[str, Any]:
    """Returns the operations of this worker that are under way, as a JSON-like value of bounded size."""
    now_ns = time.monotonic_ns()
    with _lock:
        found = [record for kept in _records if (record := kept()) is not None and not record.is_over]
    return {
        "groups": [record.answer(now_ns) for record in found[-MOST_RECORDS:]],
        "buckets": [
            {"bucket": number, "bytes": size_bytes, "since_s": (now_ns - begin_ns) * 1e-9}
            for number, size_bytes, begin_ns, pending in list(_buckets)
            if _is_under_way(pending)
        ],
    }


def _is_under_way(kept: weakref.ref[Pending]) -> bool:
    pending = kept()
    return pending is not None and not pending.is_known_done()
