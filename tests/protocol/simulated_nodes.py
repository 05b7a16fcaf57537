"""The nodes and workers of a simulated job: how they come, what their agents record, and the faults that take them."""

from __future__ import annotations

from typing import Any

from simulated_store import Node, Simulation
from simulated_worker import Chain, Worker

from bagua_agent.membership import events as ev
from bagua_agent.membership.view import (
    DepartureView,
    FailureView,
    MemberView,
    SuspicionView,
)
from bagua_contract.records import Generation, StateName, SuspicionKind
from bagua_core.elastic.state.commit_history import Entry


class SimulatedNodes(Simulation):
    def __init__(self, seed: int, steps: int, nodes: int, slots: int, min_nodes: int) -> None:
        super().__init__(seed)
        self.steps = steps
        self.workers: dict[str, Worker] = {}
        self.rounds: dict[tuple[int, int], dict[int, Any]] = {}
        self.gone_from: dict[int, set[int]] = {}  # generation -> ranks whose side of it is closed
        self.ledger: dict[tuple[int, int, int], Entry] = {}
        self.states: dict[StateName, Chain] = {}
        self.faults: dict[str, int] = {}
        self.min_nodes = min_nodes
        self.put("desired", ev.DesiredChanged, min_nodes=min_nodes, max_nodes=8)
        for _ in range(nodes):
            self.add_node(slots)
        self.after(self.latency_s(0.0, 0.1), "", self.elect)

    # -- nodes and workers come and go

    def add_node(self, slots: int) -> Node:
        node = Node(f"n{len(self.nodes)}", slots, seen=len(self.log), newest=self.generation)
        self.nodes[node.agent_id] = node
        node.closing = "closing" in self.keys
        self.put_agent(node)
        for slot in range(slots):
            self.after(self.latency_s(0.2, 1.0), node.agent_id, lambda slot=slot: self.spawn(node, slot))  # type: ignore[misc]
        return node

    def spawn(self, node: Node, slot: int) -> None:
        if node.leaving or node.closing:
            return
        worker_id = f"w{len(self.workers)}"
        worker = Worker(worker_id, node, slot, ((worker_id,),))
        self.workers[worker_id] = worker
        self.boundary(worker)

    def of(self, node: Node) -> list[Worker]:
        return [w for w in self.workers.values() if w.node is node and w.alive]

    def workers_of(self, node: Node) -> tuple[str, ...]:
        return tuple(w.worker_id for w in self.of(node))

    def put_member(self, w: Worker) -> None:
        if w.node.cut or w.node.revision == 0 or not w.alive:
            return
        w.revision = w.revision or len(self.log) + 1
        self.put(
            f"members/{w.worker_id}",
            ev.MemberReady,
            member=MemberView(
                worker_id=w.worker_id,
                agent_id=w.node.agent_id,
                slot=w.slot,
                store_address=f"{w.node.agent_id}:2",
                fingerprint={"model": "m"},
                committed_generation=w.reported,
                join_revision=w.revision,
            ),
        )

    def remove_member(self, w: Worker) -> None:
        w.revision = 0
        self.delete(f"members/{w.worker_id}", ev.MemberGone, worker_id=w.worker_id)
        self.delete(f"suspicions/{w.worker_id}", ev.SuspicionCleared, worker_id=w.worker_id)

    def keys_removed(self, node: Node) -> None:
        for w in self.workers.values():
            if w.node is node:
                self.remove_member(w)

    def keys_back(self, node: Node) -> None:
        """The agent puts what it still stands for, and tells how workers ended meanwhile."""
        if node.revision == 0:
            self.put_agent(node)
        for w in self.workers.values():
            if w.node is node and not w.alive:
                self._tell_end(w)
            elif w.node is node and (w.reported or w.waiting_for_news or w.current is not None):
                self.put_member(w)
                if w.suspicion is not None:
                    self.suspect(w, w.suspicion[0], broken=w.suspicion[1])

    def suspect(self, w: Worker, generation: int, *, broken: bool) -> None:
        w.suspicion = (generation, broken)
        if w.node.cut or w.revision == 0:
            return  # its agent tells as soon as it can
        w.suspected += 1
        self.put(
            f"suspicions/{w.worker_id}",
            ev.SuspicionRaised,
            suspicion=SuspicionView(
                worker_id=w.worker_id,
                generation=generation,
                kind=SuspicionKind.BROKEN if broken else SuspicionKind.STALLED,
                hosts=(),
                sequence=w.suspected,
            ),
        )
        self.suspect_leader(w.node)

    def end(self, w: Worker, *, well: bool, trained: bool = False) -> None:
        """The process is gone; its sockets close. trained: it told its agent that training is done."""
        w.alive = False
        if w.node.leaving and not trained:
            w.ended = "departed"
        else:
            w.ended = "finished" if well else "failures"
        w.token += 1
        self.process_gone(w)
        self.after(self.latency_s(), w.node.agent_id, lambda: self._tell_end(w))
        if not well:
            self.after(self.latency_s(0.3, 1.0), w.node.agent_id, lambda: self.spawn(w.node, w.slot))

    def _tell_end(self, w: Worker) -> None:
        if w.node.cut or f"{w.ended}/{w.worker_id}" in self.keys:
            return
        if w.ended == "finished":
            self.put(
                f"finished/{w.worker_id}", ev.WorkerFinished, worker_id=w.worker_id, agent_id=w.node.agent_id
            )
        elif w.ended == "departed":
            listed = [g for g in self.records.values() if g.placement_of(w.worker_id) is not None]
            newest = max(listed, key=lambda g: g.number, default=None)
            departure = DepartureView(
                w.worker_id,
                w.node.agent_id,
                newest.number if newest is not None else 0,
                newest.world_size if newest is not None else 0,
                w.name,
            )
            self.put(f"departed/{w.worker_id}", ev.WorkerDeparted, departure=departure)
        else:
            self.put(
                f"failures/{w.worker_id}",
                ev.FailureRecorded,
                failure=FailureView(
                    worker_id=w.worker_id,
                    node_name=w.node.agent_id,
                    step=w.name.step,
                    in_step=False,
                    script_failure=False,
                    summary="killed by SIGKILL",
                    order=len(self.log) + 1,
                ),
            )
        self.remove_member(w)

    # -- faults

    def kill_worker(self, w: Worker) -> None:
        if w.alive and w.node.alive:
            self.say(f"{w.worker_id} is killed")
            self.count("kill")
            self.end(w, well=False)

    def kill_node(self, node: Node) -> None:
        self.say(f"{node.agent_id} is killed")
        self.count("node killed")
        node.alive = False
        node.state = None
        for w in self.of(node):
            w.alive = False
            w.token += 1
            self.process_gone(w)
        self.lapse(node)

    def cut_node(self, node: Node, for_s: float) -> None:
        self.say(f"{node.agent_id} is cut off for {for_s:.2f} s")
        self.count("cut")
        node.cut = True
        self.lapse(node)

        def heal() -> None:
            self.say(f"{node.agent_id} is back")
            node.cut = False
            node.lease += 1
            self.resync(node)
            for w in self.of(node):
                if w.in_collective and w.current is not None and not self.is_within(w.current, node):
                    self.fail(w, w.token)  # what was under way with others did not survive
                for number, gone in self.gone_from.items():
                    placement = self.records[number].placement_of(w.worker_id)
                    if placement is not None and placement.global_rank in gone:
                        self.tell_peers(w, self.records[number])

        self.after(for_s, node.agent_id, heal)

    def freeze_node(self, node: Node, for_s: float) -> None:
        self.say(f"{node.agent_id} freezes for {for_s:.2f} s")
        self.count("freeze")
        node.thaw_at_s = self.now_s + for_s
        self.lapse(node)

        def thaw() -> None:
            node.lease += 1
            if node.revision == 0:
                self.put_again(node)

        self.after(for_s, node.agent_id, thaw)

    def leave(self, node: Node) -> None:
        if not node.cut and node.revision and not node.leaving:
            self.say(f"{node.agent_id} is asked to leave")
            self.count("leave")
            node.leaving = True
            self.put_agent(node)
            self.news(node)

    @staticmethod
    def is_within(generation: Generation, node: Node) -> bool:
        """Its collectives need no network."""
        return all(m.agent_id == node.agent_id for m in generation.members)

    def count(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    # -- what the rest of the job adds

    def boundary(self, w: Worker) -> None:
        """Decide the worker's next move, and begin it."""
        raise NotImplementedError

    def fail(self, w: Worker, token: int) -> None:
        """Give up the worker's generation, if `token` is still what it does."""
        raise NotImplementedError

    def process_gone(self, w: Worker) -> None:
        """Close the sockets of a worker whose process ended."""
        raise NotImplementedError

    def tell_peers(self, w: Worker, generation: Generation) -> None:
        """Let the members of `generation` notice that `w` takes no part in it any more."""
        raise NotImplementedError
