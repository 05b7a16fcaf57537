"""Ends a round on all members once one of them has used up its lease.

Owns the signal of the generation in force (meeting_signal.py). Without a signal each member uses up its own lease, and
the others wait for it: a lost connection costs time, and nothing else depends on it. Rules: docs/design/rounds.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bagua_contract.addresses import parted
from bagua_contract.records import Generation
from bagua_core.communication.transports.meeting_signal import MeetingSignal

PREFIX = "round-end"
_Found = TypeVar("_Found")


class EarlyEnd:
    def __init__(self, say: Callable[[str], None]) -> None:
        """Takes `say`, which prints a line for the user."""
        self._say = say
        self._number = 0  # of the generation that the signal belongs to
        self._signal: MeetingSignal | None = None

    def is_due(self, generation: Generation, step: int) -> bool:
        """Tells whether a member has ended the round of this step. Blocks for a bounded time, once a generation."""
        return self._with_signal(generation, lambda signal: signal.is_given(step)) or False

    def end(self, generation: Generation, step: int) -> None:
        """Ends the round of this step on all members."""
        self._with_signal(generation, lambda signal: signal.give(step))

    def close(self) -> None:
        if self._signal is not None:
            self._signal.close()
            self._signal = None

    def _with_signal(self, generation: Generation, use: Callable[[MeetingSignal], _Found]) -> _Found | None:
        address = generation.members[0].store_address
        try:
            if generation.number != self._number:
                self.close()
                self._number = generation.number
                prefix = f"{generation.nonce}/{generation.number}/{PREFIX}"
                self._signal = MeetingSignal(*parted(address), prefix)
            return None if self._signal is None else use(self._signal)
        except (OSError, ValueError) as error:
            self.close()
            self._say(
                f"the signal at {address}, by which one worker ends a round for all, is lost in generation "
                f"{generation.number}: {error}; until the next generation each round waits for its slowest worker"
            )
            return None
