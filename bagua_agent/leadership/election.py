"""Wins and gives up the leadership key, and removes the keys of a leader that died."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_agent.etcd.client import MOST_OPERATIONS_IN_A_TRANSACTION, create_revision_is
from bagua_agent.etcd.keys import JobKeys, Removal
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.leadership.leader_writes import LeaderWrites, keys_of_workers
from bagua_agent.leadership.reports import Act, Elected, NotElected, Report, WriteFailed, Written
from bagua_contract import membership_pb2 as pb

# An agent that can't reach etcd for longer than this may itself be cut off: its report is stale by then.
REMOVAL_TIMEOUT_S = 1.0


class Election:
    """This agent's candidacy."""

    def __init__(self, writes: LeaderWrites, keys: JobKeys, leased: LeasedKeys) -> None:
        self._writes = writes
        self._keys = keys
        self._leased = leased

    def stand(self, agent_id: str, control_address: str) -> None:
        """Tries to become the leader. Reports Elected, NotElected or WriteFailed."""
        value = pb.Leader(agent_id=agent_id, control_address=control_address).SerializeToString()

        def elect() -> Report:
            self._writes.failpoints.reach("election.before")
            revision = self._leased.put_if_absent(self._keys.leader, value)
            if revision is None:
                return NotElected()
            self._writes.failpoints.reach("election.after")
            self._writes.fence = revision
            return Elected(revision)

        self._writes.run(Act.ELECTION, "standing for election", elect)

    def lost(self) -> None:
        """Notes that the key is not ours any more. Writes under way fail by themselves: they are fenced."""
        self._writes.fence = 0

    def resign(self) -> None:
        """Removes our leadership key, so that another agent can lead. Returns at once."""
        self._writes.fence = 0
        self._leased.remove(self._keys.leader)

    def remove_dead_leader(
        self, agent_id: str, create_revision: int, agent_revision: int, worker_ids: Sequence[str]
    ) -> None:
        """Removes the keys of a leader whose death was confirmed: its leadership and its part in the job, in one
        transaction. create_revision: of its leadership; agent_revision: of its agent key. If either has changed,
        nothing is removed. agent_revision 0: its leadership alone is removed; its other keys are not seen here.

        Keys of workers that exceed etcd's limit are removed in transactions after it, while no agent of its id is
        there.
        """
        act, what = Act.LEADER_REMOVAL, "removing a dead leader's keys"
        compares = [create_revision_is(self._keys.leader, create_revision)]
        deletes = [*self._keys.removed(Removal.WITH_LEADER)]
        own = self._keys.agent(agent_id)
        if agent_revision:
            compares.append(create_revision_is(own, agent_revision))
            deletes += [own, *keys_of_workers(self._keys, worker_ids)]

        def remove() -> Report:
            size = MOST_OPERATIONS_IN_A_TRANSACTION
            for start in range(0, len(deletes), size):
                refused = self._writes.transact(
                    act,
                    compares if not start else [create_revision_is(own, 0)],
                    deletes=deletes[start : start + size],
                    timeout_s=REMOVAL_TIMEOUT_S,
                )
                if refused:
                    return WriteFailed(act, what, refused)
            return Written(act)

        self._writes.run(act, what, remove)
