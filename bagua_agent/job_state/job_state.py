"""This node's state of the job: the newest records, and whether this node itself is leaving.

Changed only in the loop's thread: by apply_changes.py for the store's content, by membership_driver.py for the picture,
by loop.py for the rest. All other parts only read it. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bagua_agent.etcd.client import Compare, mod_revision_is
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation


@dataclass(slots=True)
class LocalJobState:
    """Holds what this node knows of its job.

    view: the picture. whole: the picture has all of it; else it has no other agents and their workers, as in large
    jobs. keepers: of a large record, by address. generation: the newest record. generation_revision: mod revision of
    the current generation key; 0 if absent. remembered: values by key that must be put again if the store loses them,
    besides the record. unreadable: by key, the mod revision of a value that can't be read. closing: no worker joins any
    more. waits: workers here that can't go on, with the generation. committed_here: a worker of this node has committed
    a step of the job.

    leaving_since_s: of the first signal; minus infinity once workers must end at once, or if there is nothing to wait
    for. leaving_signal: the first one. leave_within_s: the grace period that began with it. generations: how many were
    seen, by kind.
    """

    spec: pb.JobSpec
    view: JobView
    generation: Generation | None = None
    generation_revision: int = 0
    leader: LeaderKey | None = None
    closing: bool = False
    result: pb.Result | None = None
    leaving_since_s: float | None = None
    leaving_signal: int = 0
    leave_within_s: float = 0.0
    remembered: dict[str, bytes] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    committed_here: bool = False
    whole: bool = True
    keepers: tuple[str, ...] = ()
    generations: Counter[str] = field(default_factory=Counter)

    def unwritten(self, key: str) -> Compare:
        """Returns the condition that `key` is absent, or holds the value that can't be read."""
        return mod_revision_is(key, self.unreadable.get(key, 0))

    @property
    def restarts(self) -> bool:
        """Whether workers are started again for each generation."""
        return bool(self.spec.mode == pb.JobSpec.RESTART)

    @property
    def replica_size(self) -> int:
        """The number of workers that together hold one copy of the model; 1: each holds one."""
        return max(1, int(self.spec.replica_size))

    @property
    def stopping(self) -> bool:
        """Whether ends of workers are expected."""
        return self.result is not None or self.leaving_since_s is not None

    @property
    def failures_allowed(self) -> int:
        """The budget of failures. It is the job's, not this node's: all agents judge by the same number."""
        return int(self.spec.max_restarts)

    def relay_address(self, own_agent_id: str) -> str:
        """Returns the address of an agent that is neither this one nor the leader; empty if there is none."""
        if self.leader is None:
            return ""
        taken = (own_agent_id, self.leader.agent_id)
        known = (a.control_address for a in self.view.agents.values() if a.agent_id not in taken)
        # a keeper may be this agent itself, whose word then counts for nothing more than its own
        others = (k for k in self.keepers if k != self.leader.control_address)
        return next(known, None) or next(others, "")

    @property
    def commit_is_known(self) -> bool:
        """Whether a worker is known to have committed a step; in part of the picture, which lacks members, one here."""
        return self.view.committed_generation > 0 or self.committed_here

    @property
    def has_trained(self) -> bool:
        """Whether a step is known to have been committed, by workers or by the record."""
        return self.view.has_trained or self.committed_here

    @property
    def nodes(self) -> int:
        """The number of agents, as far as this one sees them."""
        record = 0 if self.generation is None else self.generation.node_count
        return max(len(self.view.agents), record)

    def leave_is_known(self, own_agent_id: str) -> bool:
        """Tells whether etcd has that this node leaves; in part of the picture, which lacks agents, it is taken to
        have."""
        own = self.view.agents.get(own_agent_id)
        return own is None or own.leaving or not self.whole

    def others_stay(self, own_agent_id: str) -> bool:
        """Tells whether another node is there that does not leave; in part of the picture, whether the record has
        one."""
        if any(a.agent_id != own_agent_id and not a.leaving for a in self.view.agents.values()):
            return True
        record = self.generation
        return (
            not self.whole and record is not None and any(m.agent_id != own_agent_id for m in record.members)
        )
