"""Provides groups of workers under the original's names, and decides which communicator a call means.

Owns BaguaProcessGroup and its communicators: of all members, of those on this node, of one member of each node. A
worker outside a group gets CommMember.NON_COMM_MEMBER instead of a communicator, and collectives on that return at
once, as in the original. The collectives themselves are group_communicator.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bagua_core import collectives
from bagua_core.torch_api import script_world
from bagua_core.torch_api.group_communicator import GroupCommunicator
from bagua_core.torch_api.script_world import this_script

_numbers = itertools.count()


class comm:
    """Holds WORLD, the value of `comm` that means all workers."""

    WORLD = object()


class CommMember:
    """Holds WORLD, and NON_COMM_MEMBER, which a worker outside a group gets for a communicator."""

    WORLD = comm.WORLD
    NON_COMM_MEMBER = object()


class BaguaProcessGroup:
    """A group of workers and its communicators. group: None for all workers, and it follows the job's membership."""

    def __init__(self, group: collectives.Group | None = None) -> None:
        self.group = group
        self.group_name = str(next(_numbers))
        self._communicators: dict[str, Any] = {}
        _groups[self.group_name] = self

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members, as they were when the group was made; of all workers: those of now."""
        if self.group is not None:
            return list(self.group.ranks)
        this_script().world.join()
        return list(range(this_script().engine.place_of_script()[1]))

    @property
    def intra_ranks(self) -> list[int]:
        """The global ranks of the members on this worker's node."""
        nodes = _nodes()
        own = nodes[this_script().engine.place_of_script()[0]]
        return [rank for rank in self.ranks if nodes[rank] == own]

    @property
    def inter_ranks(self) -> list[int]:
        """The first of `ranks` on each node."""
        nodes, first = _nodes(), dict[str, int]()
        for rank in self.ranks:
            first.setdefault(nodes[rank], rank)
        return sorted(first.values())

    def rank(self) -> int:
        """Returns this worker's place in the group; -1 outside."""
        found = self.get_global_communicator()
        return found.rank() if isinstance(found, GroupCommunicator) else -1

    def size(self) -> int:
        """Returns the number of members."""
        return len(self.ranks)

    def get_global_communicator(self) -> Any:
        """Returns the communicator of all members, a `comm` argument of collectives; CommMember.NON_COMM_MEMBER outside
        the group."""
        return self._communicator("global")

    def get_intra_node_communicator(self) -> Any:
        """Returns the communicator of the members on this worker's node."""
        return self._communicator("intra")

    def get_inter_node_communicator(self) -> Any:
        """Returns the communicator of one member of each node, the one of lowest rank; CommMember.NON_COMM_MEMBER for
        the others."""
        return self._communicator("inter")

    def _communicator(self, kind: str) -> Any:
        found = self._communicators.get(kind)
        if found is None:
            found = self._communicators[kind] = communicator_of(self._part(kind))
        return found

    def _part(self, kind: str) -> collectives.Group | None:
        if kind == "global":
            return self.group
        return collectives.new_group(self.intra_ranks if kind == "intra" else self.inter_ranks)


_groups: weakref.WeakValueDictionary[str, BaguaProcessGroup] = weakref.WeakValueDictionary()
Comm = BaguaProcessGroup | GroupCommunicator | collectives.Group | object | None


def _nodes() -> list[str]:
    """Returns the node of each rank, as the generation in force lists them."""
    script = this_script()
    script.world.join()
    member = script.engine.member
    record = member.generation if member is not None else None
    if record is None:
        return [""]
    return [member.agent_id for member in record.members]


def communicator_of(group: collectives.Group | None) -> Any:
    """Returns a new communicator; CommMember.NON_COMM_MEMBER for a worker outside `group`."""
    if group is not None and group.rank is None:
        return CommMember.NON_COMM_MEMBER
    return GroupCommunicator(group)


def member_of(given: Comm) -> GroupCommunicator | None:
    """Returns the communicator that `comm=` names; None if this worker is not in it. Raises TypeError."""
    if given is None or given is CommMember.WORLD:
        given = DEFAULT_GROUP
    if isinstance(given, BaguaProcessGroup):
        given = given.get_global_communicator()
    elif isinstance(given, collectives.Group):
        given = communicator_of(given)
    if given is CommMember.NON_COMM_MEMBER:
        return None
    if isinstance(given, GroupCommunicator):
        return given
    raise TypeError(
        f"comm={given!r}: pass what new_group() or get_global_communicator() returned, or leave it out for all workers"
    )


DEFAULT_GROUP = BaguaProcessGroup()


def is_initialized() -> bool:
    """Tells whether init_process_group() was called."""
    return script_world.is_initialized()


def _get_default_group() -> BaguaProcessGroup:
    """Returns the group of all workers. Raises RuntimeError before init_process_group()."""
    if not is_initialized():
        raise RuntimeError("the default process group is not there yet; call init_process_group() first")
    return DEFAULT_GROUP


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """Returns a new group for `comm`, of `ranks`; None: all workers. stream: ignored; collectives return when they are
    done.

    Any worker may make it, a member or not. A group is its workers: once one of them is lost its collectives raise
    PeerLostError. Raises ValueError.
    """
    this_script().world.join()
    return BaguaProcessGroup(None if ranks is None else collectives.new_group([int(rank) for rank in ranks]))


def from_torch_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """Returns the group for one that torch.distributed.new_group() returned.

    stream: ignored, as by new_group.

    Raises ValueError for a group that torch made by itself and does not know any more.
    """
    if isinstance(group, BaguaProcessGroup):
        return group
    if group is None:
        return DEFAULT_GROUP
    return new_group(dist.get_process_group_ranks(group), stream)


def get_communicator(group_name: str, comm_name: str) -> Any:
    """Returns a communicator of a group.

    group_name: the group's attribute of this name.
    comm_name: "global", "inter" or "intra", as in BaguaProcessGroup.get_global_communicator and its siblings.

    Raises ValueError for an unknown name.
    """
    if comm_name not in ("global", "inter", "intra"):
        raise ValueError(f'comm_name={comm_name!r} is unknown; use "global", "inter" or "intra"')
    found = _groups.get(group_name)
    if found is None:
        raise ValueError(f"there is no group {group_name!r}; pass the group_name of one that still exists")
    return found._communicator(comm_name)
