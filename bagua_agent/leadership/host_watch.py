"""Decides which agents are touched in a round, and which of them are then suspected.

In restart mode, and in the collectives within a replica, a worker may wait without end for a lost peer and report
nothing, so agents watch each other. Restart mode: all touch the leader, and the leader touches the others. Jobs with
replicas: the agents of one replica touch each other. An agent that has never answered is not suspected: its port may
be closed to this host. A suspicion only leads to a probe. Pure: no IO, no clock. docs/design/restart-mode.md has the
rules.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from bagua_agent.rpc.reachability import Reachability

ROUND_S = 0.5
MOST_IN_A_ROUND = 16  # touches that the leader sends, and about as many that it receives
SILENT_ROUNDS = 3  # a network that fails for a second and a half is no accident


class HostWatch:
    """Chooses the agents to touch. Lives as long as its agent; each round is one `next_round` and one `touched`."""

    def __init__(self, agent_id: str) -> None:
        self._round = zlib.crc32(agent_id.encode())  # spreads the agents of a job over the rounds
        self._silent: dict[str, int] = {}  # agents in doubt, with the silent rounds in a row
        self._met: set[str] = set()  # agents that have answered
        self._after = ""  # the last agent whose turn it was
        self._cut_off: set[str] = set()

    @property
    def cut_off(self) -> frozenset[str]:
        """The agents that were suspected and have not answered since."""
        return frozenset(self._cut_off)

    @property
    def met(self) -> frozenset[str]:
        """The agents that have answered."""
        return frozenset(self._met)

    def next_round(self, agent_ids: Iterable[str], watchers: int) -> list[str]:
        """Returns the agents to touch now: those in doubt, and those whose turn it is. watchers: agents that watch the
        same ones, and so share the work."""
        targets = sorted(set(agent_ids))
        self._round += 1
        self._silent = {a: n for a, n in self._silent.items() if a in targets}
        self._met.intersection_update(targets)
        self._cut_off.intersection_update(targets)
        doubted = list(self._silent)[:MOST_IN_A_ROUND]
        if self._round % max(1, -(-watchers // MOST_IN_A_ROUND)):
            return doubted
        sure = [a for a in targets if a not in self._silent]
        turn = [a for a in sure if a > self._after] + [a for a in sure if a <= self._after]
        turn = turn[: MOST_IN_A_ROUND - len(doubted)]
        self._after = turn[-1] if turn else self._after
        return doubted + turn

    def touched(self, found: Mapping[str, Reachability]) -> list[str]:
        """Takes the outcome of a round and returns the agents that are suspected now."""
        suspected = []
        for agent_id, touch in found.items():
            if touch is Reachability.ANSWERED:
                self._silent.pop(agent_id, None)
                self._met.add(agent_id)
                self._cut_off.discard(agent_id)
                continue
            if agent_id not in self._met:
                continue
            self._silent[agent_id] = self._silent.get(agent_id, 0) + 1
            if touch is Reachability.REFUSED or self._silent[agent_id] >= SILENT_ROUNDS:
                suspected.append(agent_id)
                self._cut_off.add(agent_id)
        return suspected
