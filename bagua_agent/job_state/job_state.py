"""This node's state of the job: the newest records, and whether this node itself is leaving.

Each change is a method of LocalJobState, called in the loop's thread. No other module assigns its fields. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from bagua_agent.etcd.client import Compare, mod_revision_is
from bagua_agent.job_state.decode import LeaderKey
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation

V = TypeVar("V")


@dataclass(slots=True)
class LocalJobState:
    """Holds what this node knows of its job. Collections are replaced, never changed in place."""

    spec: pb.JobSpec
    view: JobView  # the picture
    generation: Generation | None = None  # the newest record
    generation_revision: int = 0  # mod revision of the current generation key; 0 if absent
    leader: LeaderKey | None = None
    closing: bool = False  # no worker joins any more
    result: pb.Result | None = None
    # of the first signal; minus infinity once workers must end at once, or if there is nothing to wait for
    leaving_since_s: float | None = None
    leaving_signal: int = 0  # the first one
    leave_within_s: float = 0.0  # the grace period that began with it
    # by key, the values that must be put again if the store loses them, besides the record
    remembered: Mapping[str, bytes] = field(default_factory=dict)
    # by key, mod revision of a value that can't be read
    unreadable: Mapping[str, int] = field(default_factory=dict)
    # workers here that can't go on, with the generation
    waits: Mapping[str, int] = field(default_factory=dict)
    committed_here: bool = False  # a worker of this node has committed a step of the job
    whole: bool = True  # the picture has all agents and workers; that of a large job has only this node's
    keepers: tuple[str, ...] = ()  # of a large record, by address
    generations: Mapping[str, int] = field(default_factory=dict)  # how many were seen, by kind

    # -- changes that the store's keys bring

    def take_view(self, view: JobView) -> None:
        """Takes the picture that the membership machine made of the newest events."""
        self.view = view

    def take_generation(self, generation: Generation) -> None:
        """Takes a record that is newer than the one before, and counts it."""
        self.generation = generation
        kind = generation.kind.name.lower()
        self.generations = {**self.generations, kind: self.generations.get(kind, 0) + 1}

    def take_generation_revision(self, mod_revision: int) -> None:
        """Takes the mod revision of the generation key, readable or not; 0 if the key was removed."""
        self.generation_revision = mod_revision

    def take_leader(self, leader: LeaderKey | None) -> None:
        """Takes the content of the leader's key; None if it was removed."""
        self.leader = leader

    def take_result(self, result: pb.Result | None) -> None:
        """Takes the job's result; None if it can't be read."""
        self.result = result

    def close_joins(self) -> None:
        """Notes that no worker joins any more."""
        self.closing = True

    def become_live(self) -> None:
        """Notes that the job, which began in restart mode, is one of live mode from now on."""
        self.spec.mode = pb.JobSpec.LIVE

    def take_readable(self, key: str) -> None:
        """Notes that `key` is absent or holds a value that can be read."""
        self.unreadable = _without(self.unreadable, key)

    def take_unreadable(self, key: str, mod_revision: int) -> None:
        """Notes that `key` holds a value that can't be read."""
        self.unreadable = {**self.unreadable, key: mod_revision}

    def remember(self, key: str, value: bytes) -> None:
        """Remembers a value that must be put again if the store loses it."""
        self.remembered = {**self.remembered, key: value}

    def forget(self, key: str) -> None:
        """Forgets a value that is not put again from now on."""
        self.remembered = _without(self.remembered, key)

    def take_scope(self, *, whole: bool) -> None:
        """Takes what the subscription covers: all agents and workers, or only this node's."""
        self.whole = whole

    def take_keepers(self, keepers: tuple[str, ...]) -> None:
        """Takes the addresses of the agents that keep the newest large record."""
        self.keepers = keepers

    # -- changes that this node's workers and signals bring

    def worker_waits(self, worker_id: str, generation: int) -> None:
        """Notes that a worker here can't go on with `generation`."""
        self.waits = {**self.waits, worker_id: generation}

    def worker_waits_no_more(self, worker_id: str) -> None:
        """Notes that a worker here goes on, or has ended."""
        self.waits = _without(self.waits, worker_id)

    def commit_here(self) -> None:
        """Notes that a worker of this node has committed a step of the job."""
        self.committed_here = True

    def begin_leave(self, now_s: float, signal_number: int, within_s: float) -> None:
        """Begins this node's leave, which the signal asked for; it has `within_s` seconds."""
        self.leaving_since_s = now_s
        self.leaving_signal = signal_number
        self.leave_within_s = within_s

    def leave_at_once(self) -> None:
        """Ends the grace period of this node's leave, which may not have begun."""
        self.leaving_since_s = float("-inf")

    # -- what the parts of the agent ask

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


def _without(values: Mapping[str, V], key: str) -> Mapping[str, V]:
    return {k: v for k, v in values.items() if k != key}
