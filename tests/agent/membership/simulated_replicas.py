"""A simulated job of replicas: its workers are assembled, and an agent ends them with their replica.

Asserts at every write A1 and A2 of docs/design/replicas.md: generations list whole replicas, and a worker is in one
replica in its life.
"""

from __future__ import annotations

from dataclasses import replace

from simulated_job import SimulatedJob
from simulated_workers import Node, Worker

from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import WriteReplicas
from bagua_agent.membership.replica_groups import groups, groups_in, lists_whole_replicas
from bagua_contract.records import Generation, Stage
from bagua_contract.replica import Replica


class SimulatedReplicaJob(SimulatedJob):
    """group_of: worker to the replica that it was told. told: that replica's record."""

    group_of: dict[str, tuple[str, ...]]
    told: dict[str, Replica]

    def __init__(self, min_nodes: int, max_nodes: int, **keywords: object) -> None:
        self.group_of, self.told = {}, {}
        super().__init__(min_nodes, max_nodes, **keywords)  # type: ignore[arg-type]

    @property
    def first_stage(self) -> Stage:
        return Stage.ASSEMBLING

    def write_replicas(self, action: WriteReplicas) -> None:
        for replica in action.replicas:
            assert replica.size == self.replica_size
            key = f"replicas/{replica.replica_id}"
            known = self.keys[key][1] if key in self.keys else None
            # by workers: a leader without the record marks the replica over as the generation lists it, which has no
            # addresses of agents
            assert known is None or known["replica"].worker_ids == replica.worker_ids, "A2: written over"
            order = self.revision + 1 if known is None else known["order"]
            self.put(key, ev.ReplicaSeen, replica=replica, order=order)
        for replica_id in action.forgotten:
            self.delete(f"replicas/{replica_id}", ev.ReplicaGone, replica_id=replica_id)

    def accept(self, generation: Generation) -> None:
        assert lists_whole_replicas(generation, self.replica_size), f"A1: {generation}"
        for members in groups_in(generation, self.replica_size):
            ids = tuple(m.worker_id for m in members)
            for worker_id in ids:
                assert self.group_of.get(worker_id) == ids, f"A2: {ids}, told {self.group_of.get(worker_id)}"
        super().accept(generation)

    def staying(self, generation: Generation) -> set[str]:
        """The whole replica leaves with a node: another one may already be there to get its state."""
        stay = super().staying(generation)
        replicas = [{m.agent_id for m in members} for members in groups_in(generation, self.replica_size)]
        return {agent_id for nodes in replicas if nodes <= stay for agent_id in nodes}

    def _check_ranks(self, generation: Generation) -> None:
        if generation.base:
            assert generation.members[0].holder, "rank 0 is a holder"
        for members in groups_in(generation, self.replica_size):
            assert len({(m.holder, m.since_generation) for m in members}) == 1, "one condition for a replica"

    def holders(self) -> list[str]:
        """Those whose replicas hold the state as a whole and are not over."""
        found = set(super().holders())
        over = {w for kind, values in self.keys.values() if kind is ev.ReplicaSeen and values["replica"].over
                for w in values["replica"].worker_ids}  # fmt: skip
        return sorted(
            w for w in found if w not in over and all(x in found for x in self.group_of.get(w, (w,)))
        )

    # -- what an agent does with what it has read

    def deliver(self, node: Node, most: int = 10**9) -> None:
        super().deliver(node, most)
        if node.reaches_store:
            self.carry_out(node)

    def carry_out(self, node: Node) -> None:
        view = node.state.view
        for replica in groups(view).records.values():
            here = [w for w in self.of(node) if w.alive and w.worker_id in replica.worker_ids]
            away = {m.agent_id for m in replica.members} - {node.agent_id}
            for worker in here:
                if worker.worker_id not in self.group_of:
                    self.group_of[worker.worker_id] = replica.worker_ids
                    self.told[worker.worker_id] = replica
                assert self.group_of[worker.worker_id] == replica.worker_ids, "A2"
                worker.leaves |= any(a in view.agents and view.agents[a].leaving for a in away)
                if replica.over:
                    self.end(worker, well=False)
                elif worker.stage is Stage.ASSEMBLING:
                    self._goes_on(worker, Stage.WAITING if self.asks else Stage.LOOP)

        for worker in self.of(node):
            told = self.told.get(worker.worker_id)
            # lost_keys.py: a record whose workers live is put again if another one removed it
            if worker.alive and told is not None and f"replicas/{told.replica_id}" not in self.keys:
                again = replace(told, over="")
                self.put(
                    f"replicas/{told.replica_id}", ev.ReplicaSeen, replica=again, order=self.revision + 1
                )

    def look(self, worker: Worker) -> None:
        if worker.stage is not Stage.ASSEMBLING:
            super().look(worker)
        elif worker.alive and self.nodes[worker.agent_id].leaving:
            self.end(worker, well=True)
