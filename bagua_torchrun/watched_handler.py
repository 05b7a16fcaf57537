"""Extends torch's handler of a rendezvous: the loss of a node begins another round.

torch removes a node without a heartbeat from the state, but its agents begin a round only for a node that waits for a
place. Workers that got no error from the loss would wait in a collective until it times out. A node that is lost before
its round is complete is a member of the round, and the others would wait for its values in the agents' store. Once a
node's workers have finished, the lost one is missed no more: the others' workers are at their end too.
"""

from __future__ import annotations

from contextlib import suppress

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _NodeDesc
from torch.distributed.elastic.utils.store import _NUM_MEMBERS

from bagua_torchrun.agents_store import AgentsStore

ARRIVED = "bagua/arrived/"
FINISHED = _TERMINAL_STATE_SYNC_ID + _NUM_MEMBERS  # the number of nodes whose workers have finished


class _RoundBroken(Exception):
    """A node of the round was lost, or the run was closed, before all nodes had arrived in one world."""


class WatchedHandler(DynamicRendezvousHandler):
    """A handler whose agent restarts its workers when a node of the round is lost. Its store is an AgentsStore."""

    _world: frozenset[_NodeDesc] = frozenset()  # the nodes of this agent's round
    _round_store: Store | None = None  # of this agent's round; None before its first one

    def next_rendezvous(self) -> RendezvousInfo:
        """Joins rounds until all nodes of one have arrived. Raises as torch's does."""
        assert isinstance(self._store, AgentsStore)
        while True:
            # Only here: at the end of a run its agents wait in the store too, and end one by one.
            with suppress(_RoundBroken), self._store.checked(self._check_the_round):
                joined = super().next_rendezvous()  # waits for the master's address
                arrived = [f"{ARRIVED}{rank}" for rank in range(joined.world_size)]
                size = str(joined.world_size)
                joined.store.set(arrived[joined.rank], size)
                joined.store.wait(arrived)
                if any(joined.store.get(key) != size.encode() for key in arrived):
                    raise _RoundBroken  # a last rank was removed between two agents' readings of the state
                self._round_store = joined.store
                return joined

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for a place or have been lost from the round, this one among them if the others
        take it for dead. If it is not 0, torchrun begins another round.

        A loss counts until the run is closed or the workers of a node have finished: that node joins no other round,
        and torchrun would kill workers that write their last checkpoint.
        """
        waiting: int = super().num_nodes_waiting()  # reads the state
        lost = len(self._lost())
        if not lost or self._state_holder.state.closed or self._a_node_has_finished():
            return waiting
        return waiting + lost

    def _a_node_has_finished(self) -> bool:
        return self._round_store is not None and self._round_store.check([FINISHED])

    def _lost(self) -> frozenset[_NodeDesc]:
        """Returns the nodes of the round that the state as it was last read no longer lists."""
        return self._world - self._state_holder.state.participants.keys()

    def _check_the_round(self) -> None:
        if self.is_closed() or self._lost():
            raise _RoundBroken

    def _get_world(self) -> tuple[int, int]:
        """Returns rank and size as torch's does, when a round is complete. Raises _RoundBroken if a node was removed
        since: its rank is missing, unless it was the last."""
        participants = self._state_holder.state.participants
        if sorted(participants.values()) != list(range(len(participants))):
            raise _RoundBroken
        self._world = frozenset(participants)
        rank, size = super()._get_world()
        return rank, size
