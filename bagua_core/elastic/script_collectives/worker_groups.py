"""A script's own groups of workers, and how each connects in a generation.

A group is its workers, whatever ranks they have by now. It connects at its first use in a generation, among themselves
only, and those connections end with the generation's communicator.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.membership.member import Member

MEETING_TAG = 1 << 22
"""And the 2^20 above it; below are the tags of scripts and of the runtime."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """A script's own group of workers. rank: this worker's place in the group, None if it is not in it. workers: ids by
    rank; None for a group without peers, made in a world of one or before this worker's first step. ranks: as the
    script named them."""

    ranks: tuple[int, ...]
    workers: tuple[str, ...] | None
    rank: int | None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @staticmethod
    def of(present: Sequence[str] | None, own_id: str, ranks: Sequence[int] | None) -> WorkerGroup:
        """Returns the group of `ranks`. present: worker ids by rank, None in a world of one. ranks: default all.
        Raises ValueError."""
        world_size = 1 if present is None else len(present)
        chosen = tuple(range(world_size)) if ranks is None else tuple(sorted(ranks))
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"a group needs different ranks, at least one; these are {list(chosen)}")
        if chosen[0] < 0 or chosen[-1] >= world_size:
            raise ValueError(
                f"a group of the ranks {list(chosen)} in a world of {world_size}: ranks go from 0 to "
                f"{world_size - 1}"
            )
        if present is None:
            return WorkerGroup(chosen, None, 0)
        workers = tuple(present[r] for r in chosen)
        return WorkerGroup(chosen, workers, workers.index(own_id) if own_id in workers else None)

    def communicator(self, member: Member, wait: Callable[[Pending], None]) -> Communicator:
        """Returns the group's communicator in the generation in force. All its workers must be members of that
        generation, and call this. Raises CollectiveFailed."""
        main, generation = member.communicator, member.generation
        assert main is not None and generation is not None and self.workers is not None
        ids = [m.worker_id for m in generation.members]
        members = tuple(ids.index(worker_id) for worker_id in self.workers)
        name = "group-" + hashlib.sha1("/".join(self.workers).encode(), usedforsecurity=False).hexdigest()
        connected = main.adopted.get(name)
        if connected is not None:
            return connected
        member.drain()  # each before it says that it is here: a communicator is not joined beside kernels of another
        # Building has a time limit, for a peer that does not connect; one that still computes may take as it likes.
        _meet(main, members, zlib.crc32(name.encode()) % MEETING_TAG, wait)
        building = member.rendezvous.start(generation, members, f"outside/{name}")
        main.abort_flag.add_waiter(lambda: building.abandon("the generation ended"))
        member.wait_for_transfer(lambda: building.done)
        if building.communicator is None:
            raise CollectiveFailed(f"building a group of {len(members)} workers failed: {building.error}")
        main.adopt(name, building.communicator)
        return building.communicator


def _meet(main: Communicator, members: tuple[int, ...], number: int, wait: Callable[[Pending], None]) -> None:
    """Returns when all of `members` have called it. Raises CollectiveFailed."""
    tag = MEETING_TAG + number
    first, *others = members
    with_whom = others if main.global_rank == first else [first]
    received = [torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in with_whom]
    arrivals = [main.receive(r, peer, tag) for r, peer in zip(received, with_whom, strict=True)]
    told = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if main.global_rank != first:
        wait(main.send(told, first, tag))
    for pending in arrivals:
        wait(pending)
    if main.global_rank == first:
        for pending in [main.send(told, peer, tag) for peer in others]:
            wait(pending)
