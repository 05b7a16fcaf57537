"""Extends torch's handler of a rendezvous: the loss of a node begins another round.

torch removes a node without a heartbeat from the state, but its agents begin a round only for a node that waits for a
place. Workers that got no error from the loss would wait in a collective until it times out. A node that is lost before
its round is complete is a member of the round, and the others would wait for its values in the agents' store. Once a
node's workers have finished, the lost one is missed no more: the others' workers are at their end too.

A node may also be lost after its round is complete and before its workers have ranks. torchrun has no way back from
there, so the survivors get ranks without the lost node, start their workers, and begin another round at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID, _RoleInstanceInfo
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _NodeDesc
from torch.distributed.elastic.utils.store import _NUM_MEMBERS

from bagua_torchrun.agents_store import AgentsStore

ARRIVED = "bagua/arrived/"
# torch's keys, in SimpleElasticAgent._assign_worker_ranks: each agent's number of workers, and the ranks by rank 0
ROLE_INFO, ASSIGNED_RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"
FINISHED = _TERMINAL_STATE_SYNC_ID + _NUM_MEMBERS  # the number of nodes whose workers have finished


class _RoundBroken(Exception):
    """A node of the round was lost, or the run was closed, before all nodes had arrived in one world."""


class WatchedHandler(DynamicRendezvousHandler):
    """A handler whose agent restarts its workers when a node of the round is lost. Its store is an AgentsStore."""

    _world: Mapping[_NodeDesc, int] = MappingProxyType(
        {}
    )  # the nodes of this agent's round, with their ranks
    _round_store: Store | None = None  # of this agent's round; None while it forms

    def next_rendezvous(self) -> RendezvousInfo:
        """Joins rounds until all nodes of one have arrived. Raises as torch's does."""
        assert isinstance(self._store, AgentsStore)
        self._round_store = None
        self._store.while_waiting = self._while_waiting
        while True:
            with suppress(_RoundBroken):
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
        return frozenset(self._world.keys() - self._state_holder.state.participants.keys())

    def _while_waiting(self, missing: Sequence[str]) -> None:
        """Ends the wait for a lost node's values. At the end of a run agents wait too, and end one by one."""
        if self._round_store is None:
            if self.is_closed() or self._lost():
                raise _RoundBroken
        elif any(ROLE_INFO in key or ASSIGNED_RANKS in key for key in missing):
            if self.is_closed():
                raise RendezvousClosedError("the run was closed before its workers had ranks")
            lost, own_rank = self._lost(), self._world[self._this_node]
            # without this agent's own value there is nothing to go by; the wait ends by its limit
            if lost and self._round_store.check([f"{ROLE_INFO}{own_rank}"]):
                self._assign_ranks_without(lost, self._round_store)

    def _assign_ranks_without(self, lost: frozenset[_NodeDesc], store: Store) -> None:
        """Writes what this agent misses of lost nodes, as if they had as many workers as this one. Their workers' ranks
        have no process, or the master is one of them: no world is complete until the next round."""
        own_rank = self._world[self._this_node]
        own = _RoleInstanceInfo.deserialize(store.get(f"{ROLE_INFO}{own_rank}"))
        if own_rank == 0:
            for rank in (self._world[node] for node in lost):
                if not store.check([f"{ROLE_INFO}{rank}"]):
                    substitute = _RoleInstanceInfo(own.role, rank, own.local_world_size)
                    store.set(f"{ROLE_INFO}{rank}", substitute.serialize().decode())
        elif 0 in (self._world[node] for node in lost):
            base, size = own_rank * own.local_world_size, len(self._world) * own.local_world_size
            store.set(f"{ASSIGNED_RANKS}{own_rank}", json.dumps([base, size, base, size]))

    def _get_world(self) -> tuple[int, int]:
        """Returns rank and size as torch's does, when a round is complete. Raises _RoundBroken if a node was removed
        since: its rank is missing, unless it was the last."""
        participants = self._state_holder.state.participants
        if sorted(participants.values()) != list(range(len(participants))):
            raise _RoundBroken
        self._world = dict(participants)
        rank, size = super()._get_world()
        return rank, size
