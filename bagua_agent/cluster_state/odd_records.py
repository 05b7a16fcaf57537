"""Skips records that can't be read: one line names each, and the rest of the cluster goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_records import UnreadableRecord

log = logging.getLogger(__name__)

MOST_TOLD = 1000  # a program that writes odd records writes many; reported ones are remembered


class OddRecords:
    """Reports records that can't be read. say: called once for each record and reason."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._told: set[tuple[str, str]] = set()

    @contextmanager
    def passing_over(self, key: str, what_follows: str = "it is passed over") -> Iterator[None]:
        """Passes over the record at `key` if reading it raises, whatever it raises: the error concerns that record
        alone."""
        try:
            yield
        except UnreadableRecord as error:
            self.tell(key, f"{shortened(str(error))}; {what_follows}")
        except Exception as error:  # our bug must not end what serves all other records, nor go unseen
            if self.tell(key, f"a bug: reading it raised {type(error).__name__}; {what_follows}"):
                log.exception("bug: reading %s raised", shortened(key))

    def tell(self, key: str, why: str) -> bool:
        """Reports a record. Returns False if it was reported before, or if too many were reported already."""
        told = (shortened(key), why)
        if told in self._told or len(self._told) > MOST_TOLD:
            return False
        self._told.add(told)
        if len(self._told) > MOST_TOLD:
            self._say(f"more than {MOST_TOLD} records can't be read; further ones are passed over in silence")
            return False
        self._say(f"{told[0]}: {why}")
        return True
