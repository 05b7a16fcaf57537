"""Keeps this node's own key in the store, agents/<agent>, up to date.

Changed only in the loop's thread; leased_keys.py writes it, and writes it again after a lease was lost.
"""

from __future__ import annotations

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.membership.view import Run
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION


class OwnKey:
    def __init__(
        self,
        leased: LeasedKeys,
        keys: JobKeys,
        *,
        agent_id: str,
        node_name: str,
        control_address: str,
        slots: int,
        node_rank: int | None = None,
    ) -> None:
        """Prepares the key; `put` writes it. node_rank: torchrun's --node-rank. Nodes that come together are ranked by
        it, and without it in the order they came."""
        self._leased = leased
        self._key = keys.agent(agent_id)
        self._agent = pb.Agent(
            protocol=PROTOCOL_VERSION,
            agent_id=agent_id,
            node_name=node_name,
            control_address=control_address,
            slots=slots,
            topology="" if node_rank is None else f"{node_rank:010d}",
        )

    def put(self) -> None:
        """Writes the key, by which the job sees this node from now on."""
        self._leased.put(self._key, self._agent.SerializeToString())

    def remove(self) -> None:
        """Removes the key: this node is no longer in the job."""
        self._leased.remove(self._key)

    def leaving(self) -> None:
        self._agent.leaving = True
        self.put()

    def one_slot_less(self) -> None:
        self._agent.slots -= 1
        self.put()

    def cut_off(self, agent_ids: frozenset[str]) -> None:
        """Records the agents whose hosts do not answer this one: no worker here can be in a replica with theirs."""
        if frozenset(self._agent.cut_off) != agent_ids:
            self._agent.cut_off[:] = sorted(agent_ids)
            self.put()

    def ready(self) -> None:
        """Records that workers can be started here at once."""
        if not self._agent.ready:
            self._agent.ready = True
            self.put()

    def runs(self, generation: int, run: Run) -> None:
        """Records how far this node's workers of a RESTART generation are."""
        if (self._agent.run_generation, self._agent.run) != (generation, run.value):
            self._agent.run_generation, self._agent.run = generation, run.value
            self.put()
