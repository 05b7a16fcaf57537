"""The sizes from which a job is large, and how its work is then spread over its nodes. The only place of these numbers.

Below them every agent reads all keys, which is simplest and fastest: with 64 nodes a change is sent 64 times. The
environment can lower the first two, so that tests can run large jobs on a few hosts.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from bagua_agent.base.errors import UserError

PICTURE_VARIABLE = "BAGUA_WHOLE_PICTURE_NODES"
RECORD_VARIABLE = "BAGUA_WHOLE_RECORD_MEMBERS"


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes at which the work of a large job is spread.

    whole_picture_nodes: up to so many nodes each agent follows all keys of the job. whole_record_members: up to so many
    workers a record is stored in one key. nodes_of_a_keeper: so many agents ask one for a larger record.
    asking_at_once: so many agents ask after a leader that may be gone before the next are to. nodes_of_a_lease: above
    so many nodes leases last longer in proportion, so that keeping them costs etcd the same. gathered_for_deciding: so
    many times as long as a decision took, the next is left to gather; never longer than longest_gathering_s.
    """

    whole_picture_nodes: int = 64
    whole_record_members: int = 128
    nodes_of_a_keeper: int = 64
    asking_at_once: int = 64
    next_asking_after_s: float = 0.5
    nodes_of_a_lease: int = 512
    gathered_for_deciding: float = 4.0
    longest_gathering_s: float = 1.0

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> Limits:
        """Returns the limits with those that the environment sets. Raises UserError naming a variable that is no
        number."""
        usual = USUAL_LIMITS
        return Limits(
            whole_picture_nodes=_number(environ, PICTURE_VARIABLE, usual.whole_picture_nodes),
            whole_record_members=_number(environ, RECORD_VARIABLE, usual.whole_record_members),
        )

    def lease_ttl_s(self, ttl_s: float, nodes: int) -> float:
        """Returns the TTL of each agent's lease in a job of so many nodes, if `ttl_s` is right for a few. The end of a
        lease is the last of the ways in which a loss is noticed: failed collectives and probes come first."""
        return ttl_s * max(1.0, nodes / self.nodes_of_a_lease)

    def turn_s(self, agent_id: str, nodes: int) -> float:
        """Returns how long this agent leaves it to others to ask after the leader: thousands that ask at once would
        silence it."""
        if nodes <= self.asking_at_once:
            return 0.0
        place = zlib.crc32(agent_id.encode()) % nodes
        return place // self.asking_at_once * self.next_asking_after_s

    def gathering_s(self, took_s: float, nodes: int) -> float:
        """Returns how long to gather what happens before the next decision, after one that took so long. A small job
        waits for nothing."""
        if nodes <= self.whole_picture_nodes:
            return 0.0
        return min(self.gathered_for_deciding * took_s, self.longest_gathering_s)


USUAL_LIMITS = Limits()


def _number(environ: Mapping[str, str], name: str, usual: int) -> int:
    text = environ.get(name, "")
    if not text:
        return usual
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} is {text!r}; give a number of at least 0, or unset it")
    return int(text)
