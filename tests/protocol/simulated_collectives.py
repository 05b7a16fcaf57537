"""The collectives of a simulated job: when they complete, how they fail, and when a wait becomes a stall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_nodes import SimulatedNodes
from simulated_worker import Worker

from bagua_contract.records import Generation
from bagua_core.elastic.membership.following import is_superseded

STALL_S = 0.25


class SimulatedCollectives(SimulatedNodes):
    @staticmethod
    def rank(w: Worker, generation: Generation) -> int:
        placement = generation.placement_of(w.worker_id)
        assert placement is not None
        return placement.global_rank

    @staticmethod
    def roster(generation: Generation) -> frozenset[str]:
        return frozenset(m.worker_id for m in generation.members)

    def contribute(self, w: Worker, value: object, then: Callable[[dict[int, Any]], None]) -> None:
        """Bring `value` to the generation's next collective; `then` gets all values, if it completes."""
        generation = w.current
        assert generation is not None
        key = (generation.number, w.round)
        values = self.rounds.setdefault(key, {})
        w.round += 1
        w.in_collective = True
        w.token += 1
        w.then = then
        rank, token = self.rank(w, generation), w.token

        def arrive() -> None:
            if not w.alive or (w.node.cut and not self.is_within(generation, w.node)):
                return
            values[rank] = value
            if len(values) == generation.world_size:
                for m in generation.members:
                    peer = self.workers[m.worker_id]
                    if peer.in_collective and peer.current is generation and peer.round == key[1] + 1:
                        self.complete_soon(generation, peer, dict(values))

        self.after(self.latency_s(), w.node.agent_id, arrive)
        peers = [self.workers[m.worker_id] for m in generation.members]
        if self.gone_from.get(generation.number) or any(not p.alive and p.node.alive for p in peers):
            self.after(self.latency_s(), w.node.agent_id, lambda: self.maybe_fail(w, token, values))
        self.watch_stall(w, token, generation)

    def complete_soon(self, generation: Generation, w: Worker, values: dict[int, Any]) -> None:
        token, then = w.token, w.then

        def complete() -> None:
            if (
                w.alive
                and w.token == token
                and w.current is generation
                and (not w.node.cut or self.is_within(generation, w.node))
            ):
                assert then is not None
                w.in_collective = False
                w.token += 1
                then(values)

        self.after(self.latency_s(0.001, 0.03), w.node.agent_id, complete)

    def maybe_fail(self, w: Worker, token: int, values: dict[int, Any]) -> None:
        """A peer's side is closed. If all had contributed, the result may still arrive, or not."""
        if w.token != token or w.current is None:
            return
        complete = len(values) == w.current.world_size
        if complete:
            self.count("a result under way when a peer went")
        if not complete or self.random.random() < 0.5:
            self.fail(w, token)

    def close_side(self, w: Worker, generation: Generation) -> None:
        """`w` takes no part in `generation` any more; its peers notice, if they can hear it."""
        gone = self.gone_from.setdefault(generation.number, set())
        rank = self.rank(w, generation)
        if rank in gone:
            return
        gone.add(rank)
        if w.agreed is not None and w.alive:
            return  # it switched, in order: the others have what they need to do the same
        if not w.node.cut:
            self.tell_peers(w, generation)

    def tell_peers(self, w: Worker, generation: Generation) -> None:
        """The end of a connection reaches a worker that waits for something on it."""
        for m in generation.members:
            peer = self.workers[m.worker_id]
            if peer.alive and peer.current is generation and peer.in_collective and not peer.node.cut:
                values = self.rounds[generation.number, peer.round - 1]
                self.after(
                    self.latency_s(0.001, 0.03),
                    peer.node.agent_id,
                    lambda peer=peer, token=peer.token, values=values: self.maybe_fail(peer, token, values),  # type: ignore[misc]
                )

    def process_gone(self, w: Worker) -> None:
        """Its sockets close, also those to generations that it had yet to enter."""
        for peer in self.workers.values():
            generation = peer.current
            if generation is not None and generation.placement_of(w.worker_id) is not None:
                self.close_side(w, generation)

    def fail(self, w: Worker, token: int) -> None:
        """The generation is of no use to `w` any more. Lines that it owes it writes all the same."""
        generation = w.current
        if not w.alive or w.token != token or generation is None or w.broken:
            return
        w.broken, w.agreed, w.held = True, None, None
        self.close_side(w, generation)
        newest = w.node.newest
        if newest is None or not is_superseded(generation, newest, newcomer=False):
            self.suspect(w, generation.number, broken=True)
        if not w.taking_part:
            w.floor = max(w.floor, generation.number)
            w.current, w.previous = w.previous, None
            w.broken = w.current is not None
            w.taking_part = w.current is not None
        if not w.is_writing:
            self.boundary(w)

    def watch_stall(self, w: Worker, token: int, generation: Generation) -> None:
        def look() -> None:
            if not w.alive or w.token != token or not w.in_collective:
                return
            newest = w.node.newest
            if newest is not None and newest.base < generation.number < newest.number:
                # Superseded while it was pending, for a newcomer died; and yet this worker switched to it.
                # Where no connection ends, only this shows the leader that no worker can continue.
                self.count("stalled in a superseded generation")
                self.fail(w, token)
            else:
                self.suspect(w, generation.number, broken=False)
                self.after(STALL_S, w.node.agent_id, look)

        self.after(STALL_S, w.node.agent_id, look)
