"""Decides what a signal to this node's agent causes, given the earlier ones. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import Enum


class Reaction(Enum):
    LEAVE = "leave"  # at the next step boundary
    INTERRUPT = "interrupt"  # SIGINT to the workers at once
    KILL = "kill"  # end the workers at once


def reaction(earlier: Sequence[int], number: int) -> Reaction:
    """Returns what a signal causes. Ctrl-C: leave, interrupt, kill. Any other second signal kills: its sender does not
    wait for long."""
    if not earlier:
        return Reaction.LEAVE
    if [*earlier, number] == [signal.SIGINT, signal.SIGINT]:
        return Reaction.INTERRUPT
    return Reaction.KILL
