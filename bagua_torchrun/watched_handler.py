"""Extends torch's handler of a rendezvous: the loss of a node begins another round.

torch removes a node without a heartbeat from the state, but its agents begin a round only for a node that waits for a
place. Workers that got no error from the loss would wait in a collective until it times out.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _NodeDesc


class WatchedHandler(DynamicRendezvousHandler):
    """A handler whose agent restarts its workers when a node of the round is lost."""

    _world: frozenset[_NodeDesc] = frozenset()  # the nodes of this agent's round

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for a place or have been lost from the round, this one among them if the others
        take it for dead. If it is not 0, torchrun begins another round."""
        waiting: int = super().num_nodes_waiting()  # reads the state
        state = self._state_holder.state
        return waiting if state.closed else waiting + len(self._world - state.participants.keys())

    def _get_world(self) -> tuple[int, int]:
        """Returns rank and size as torch's does, when a round is complete."""
        self._world = frozenset(self._state_holder.state.participants)
        rank, size = super()._get_world()
        return rank, size
