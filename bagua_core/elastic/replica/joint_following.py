"""Decides whether all shards of this worker's replica go on in the same generation. Shard 0 decides for all.

A shard that goes on alone waits for its mates in torch's collectives, which nothing gives up, while a mate that
follows a newer generation waits for it there. So no shard may leave this exchange by itself once another may have seen
it succeed. The others say where they are and wait for shard 0's word; shard 0 alone may follow something newer
meanwhile, and says so before it does anything for which it needs the others. Knows the words and what they mean;
shard_watch.py carries them, in order and beside all collectives, so an exchange that is open when a shard enters a
generation changes the order of none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum


class Word(IntEnum):
    """A message between two shards. AT n: the sender has entered generation n, and waits. GO n: all have, and go on.
    MOVES n: the sender leaves every generation before n."""

    AT = 1
    GO = 2
    MOVES = 3


class JointFollowing:
    """Exchanges words with the other shards, and keeps what they said. send(shard rank, word, number): to a mate; may
    do nothing for one that is gone. changed: notified by `heard` and `left`, which any thread may call; the rest is for
    the script's thread."""

    def __init__(
        self, shard_rank: int, size: int, send: Callable[[int, Word, int], None], changed: threading.Condition
    ) -> None:
        self._others = range(1, size)
        self._decides = shard_rank == 0
        self._send = send
        self._changed = changed
        self._at: dict[int, int] = {}  # shard 0: of each other, the AT that it has not answered
        self._waits_at: int | None = None  # the others: their own AT, while shard 0 has not answered it
        self._goes_at: int | None = None  # the others: shard 0's GO that this shard has not acted on
        self._moved_to = 0  # the others: the newest generation that shard 0 went to
        self._is_alone = False  # the others: shard 0 left in order
        self.said = 0
        """How many words have come."""

    @property
    def decides(self) -> bool:
        return self._decides

    def heard(self, shard_rank: int, word: Word, number: int) -> None:
        with self._changed:
            if word is Word.AT:
                self._at[shard_rank] = number
            elif word is Word.GO:
                self._goes_at = number
            else:
                self._moved_to = max(self._moved_to, number)
            self.said += 1
            self._changed.notify_all()

    def left(self) -> None:
        """Notes that a mate left in order: shard 0 says no more, and news says what becomes of this worker."""
        with self._changed:
            self._is_alone = True
            self.said += 1
            self._changed.notify_all()

    def moves(self, number: int) -> None:
        """Tells the mates that this shard is about to enter generation `number`: those that wait in one before it wait
        in vain."""
        if self._decides:
            for shard in self._others:
                self._send(shard, Word.MOVES, number)

    def arrive(self, number: int) -> None:
        """Says that this shard has entered generation `number`, and asks whether it may go on there. Another call
        changes nothing."""
        if self._decides or self._waits_at == number or self._moved_to > number:
            return
        self._waits_at = number
        self._send(0, Word.AT, number)

    def outcome(self, number: int) -> bool | None:
        """Returns whether all shards go on in generation `number`; None if that is not known yet. True is returned once
        for each arrival."""
        with self._changed:
            if not self._decides:
                if self._goes_at == number:
                    self._goes_at = self._waits_at = None
                    return True
                if self._is_alone or self._moved_to > number:
                    self._waits_at = None
                    return False
                return None
            if any(self._at.get(shard) != number for shard in self._others):
                return None
            self._at.clear()
        for shard in self._others:
            self._send(shard, Word.GO, number)
        return True
