"""Limits how many logs one caller reads at once, so that none keeps the others from reading."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

# `logs --follow` reads two streams of each worker on the node: 24 workers.
MOST_OF_A_CALLER = 48
MOST_READERS = 240  # of all callers; each takes a thread


class TooManyReaders(Exception):
    """Says which limit was reached."""


class CallerLimits:
    """Any thread may call. callers: how many logs each reads now."""

    def __init__(self, most_of_a_caller: int = MOST_OF_A_CALLER, most: int = MOST_READERS) -> None:
        self._most_of_a_caller = most_of_a_caller
        self._most = most
        self._lock = threading.Lock()
        self.callers: Counter[str] = Counter()

    @contextmanager
    def reading(self, caller: str) -> Iterator[None]:
        """Raises TooManyReaders."""
        with self._lock:
            if self.callers[caller] >= self._most_of_a_caller:
                raise TooManyReaders(
                    f"{caller!r} reads {self._most_of_a_caller} logs here, and one caller may read no more at once; "
                    "end another `logs --follow`, or follow one rank"
                )
            if self.callers.total() >= self._most:
                raise TooManyReaders(
                    f"{self._most} logs are read here, and no more may be at once; try again later"
                )
            self.callers[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self.callers[caller] -= 1
                self.callers += Counter()  # without those that read nothing


def caller_name(auth_context: Mapping[str, Sequence[bytes]], peer: str) -> str:
    """The name in the caller's certificate; without one its address. Pure. peer: as gRPC says it, with a port."""
    names = auth_context.get("x509_common_name")
    return names[0].decode("utf-8", "backslashreplace") if names else peer.rpartition(":")[0]
