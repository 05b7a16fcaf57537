"""Chooses the next message for the agent's loop, and the messages that are decided on together with it.

All messages of one kind that have arrived are one batch: thousands of agents join or are probed at the same time. In a
large job the next decision waits longer for further messages, as large_jobs/limits.py defines.
"""

from __future__ import annotations

import contextlib
import queue
import time

from bagua_agent.base.timers import Timers
from bagua_agent.job.messages import Gathered
from bagua_agent.large_jobs.limits import Limits

IDLE_LOOK_S = 1.0
MOST_GATHERED = 10_000


class InboxReader:
    def __init__(self, inbox: queue.SimpleQueue[object], timers: Timers) -> None:
        self._inbox = inbox
        self._timers = timers
        self._gather_until_s = float("-inf")
        self._held: object = None  # the message that was taken out of the inbox too early

    def next(self) -> object:
        """Returns the next message or batch; None if a timer is due, or for a look around."""
        if self._held is not None:
            message, self._held = self._held, None
            return message
        try:
            message = self._inbox.get(timeout=min(IDLE_LOOK_S, self._timers.next_in_s(time.monotonic())))
        except queue.Empty:
            return None
        gathered = Gathered()
        return self._with_those_behind(gathered) if gathered.takes(message) else message

    def decided(self, began_s: float, limits: Limits, nodes: int) -> None:
        """Notes that a decision on what was gathered, begun at began_s, has just ended. nodes: how many the job has."""
        now_s = time.monotonic()
        self._gather_until_s = now_s + limits.gathering_s(now_s - began_s, nodes)

    def _with_those_behind(self, gathered: Gathered) -> Gathered:
        with contextlib.suppress(queue.Empty):
            while len(gathered) < MOST_GATHERED:
                wait_s = self._gather_until_s - time.monotonic()
                behind = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
                if not gathered.takes(behind):
                    self._held = behind
                    break
        return gathered
