"""Decides what a signal to this node's agent causes, given the earlier ones. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import Enum


class Reaction(Enum):
    LEAVE = "leave"  # at the next step boundary
    INTERRUPT = "interrupt"  # SIGINT to the workers at once
    KILL = "kill"  # end the workers at once
    GO_ON = "go on"  # with the leave that is under way


def reaction(earlier: Sequence[int], number: int, *, is_unit: bool = False) -> Reaction:
    """Returns what a signal causes. Ctrl-C: leave, interrupt, kill. Any other second signal kills: its sender does not
    wait for long. SIGHUP is no such signal: when a terminal closes, its shell sends one and the kernel another.

    is_unit: the agent is a unit of service mode. There a second SIGTERM is of the host's shutdown, after the daemon
    asked the unit to leave; both kill the unit themselves once the time to leave has passed.
    """
    if not earlier:
        return Reaction.LEAVE
    if number == signal.SIGHUP or (is_unit and number == signal.SIGTERM):
        return Reaction.GO_ON
    if [*earlier, number] == [signal.SIGINT, signal.SIGINT]:
        return Reaction.INTERRUPT
    return Reaction.KILL
