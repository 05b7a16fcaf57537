"""Implements decentralized averaging in a ring with one byte a weight.

The messages say how far a model has moved from what its neighbours know of it.

Each party keeps W, its public copy, and L and R, those of its neighbours; all copies of one W have the same bits. Once
a step: t = x + L/3 + R/3 - 5W/3 and C = Q(t); both neighbours get C; L, R and W each grow by what C says of
their owner; x becomes W. Q's error is a small part of t, of how far the model moves, and not of the weights.

When. The original does this after the optimizer's step of steps 0, interval, 2 * interval, ... Here it is done before
the next step's forward: the same sequence, but a part of a step, which can fail as a whole. What a script reads between
two steps is therefore the model before the exchange that follows the step.

An exchange that falls due in a step that can't have it (under `no_sync`, or in one of a new ring, below) comes with the
next step that can. The step after which the last one was travels with the job's state.

When it counts:

- Neighbours must agree whether an exchange happened, or L is no longer the neighbour's W. They can't find out among
  themselves when one of them is lost, so it is provisional until the step's vote. The vote is an allreduce that each
  rank joins after its exchange: if it succeeds anywhere, every exchange has succeeded.
- If the step fails, x is put back to what it was before the exchange. L, R and W need no image of their own: every
  failure ends the generation, and a new generation has another ring, in which they begin anew.
- If the vote fails here and succeeded elsewhere, this rank is behind, and heals from one that is not.

A new ring. In the first step of a generation in which no worker heals, each party publishes W := x to its neighbours,
in full precision; x stays. In the job's first step that is the model that all workers begin with, as in the original. A
step in which a worker heals (the plan says so to all) exchanges nothing: its ring would be another one a step later. So
x is never written while copies of it are sent, and joiners are in the ring from their second step on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.decentralized import check_interval
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.devices.device_wait import last_awaited
from bagua_core.communication.reduction.operation_queue import Job, operation_queue_of
from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.topology.peer_selection import Parties, find_parties, ring_neighbours
from bagua_core.communication.weights.exchange_clock import STATE, ExchangeClock
from bagua_core.communication.weights.weight_buckets import FlatWeights, check_compressible
from bagua_core.communication.weights.weight_exchange import SWAP_TAG, WeightExchange
from bagua_core.kernels import minmax_bytes, minmax_compress, minmax_decompress


class LowPrecisionDecentralized(Algorithm):
    """Averages weights with both neighbours in a ring, compressed to a quarter of float32.

    hierarchical: nodes form the ring, each with the mean of its workers' weights.
    communication_interval: an exchange every so many steps, the first one after the job's first step.
    Raises ValueError; `attach` does for parameters that are neither float32 nor half precision.

    Commits: a step is final when every worker's exchange and vote have succeeded; else the weights are put back. Heals:
    a joiner copies one holder's model and optimizer beside its first step, which exchanges nothing, and is in the ring
    from its second on. Exactly once: every sample is computed and counted once; what a worker learned that had not come
    round the ring when it was lost goes with it.
    """

    name = "low_precision_decentralized"
    equal_states = False

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        check_interval(communication_interval)
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    @property
    def lanes(self) -> frozenset[Lane]:
        return frozenset({Lane.NODE, Lane.LEADERS}) if self.hierarchical else frozenset()

    @property
    def described(self) -> str:
        return f"{self.name}({self.hierarchical}, every {self.communication_interval})"

    def attach(self, attachment: Attachment) -> RingExchange:
        check_compressible(attachment.parameters, self.name)
        return RingExchange(attachment, self.hierarchical, self.communication_interval)


@dataclass(slots=True)
class _Ring:
    """A party's copies, and messages on their way. None of it counts any more when an exchange was given up."""

    own: list[torch.Tensor]
    left: list[torch.Tensor]
    right: list[torch.Tensor]
    sent: list[torch.Tensor]
    from_left: list[torch.Tensor]
    from_right: list[torch.Tensor]


class RingExchange(WeightExchange):
    def __init__(self, attachment: Attachment, hierarchical: bool, interval: int) -> None:
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            attachment.find_unused_parameters,
        )
        self._hierarchical = hierarchical
        self._clock = ExchangeClock(interval)
        self._is_due = False
        self._operations = operation_queue_of(attachment.engine)
        # t until it has been sent, then what x was before the step
        self._scratch = FlatWeights(attachment.parameters, widen=True)
        self._ring = self._new_ring()
        self._is_published = False  # W, in this generation's ring
        self._publishes = False
        self._is_under_way = False
        self._is_changed = False  # x, by this step's exchange

    def begin(self, communicator: Communicator | None, plan: StepPlan) -> None:
        if plan.healing:
            return
        self._publishes = communicator is not None and not self._is_published
        # After that step's optimizer
        self._is_due = not self._publishes and self._clock.is_due(plan.step - 1)
        if communicator is None or not (self._publishes or self._is_due):
            return
        parties = find_parties(communicator.nodes, plan, self._hierarchical)
        self._scratch.fill()
        self._is_under_way = True
        job = _exchange(communicator, parties, self._scratch.flats, self._ring, self._publishes)
        if parties.by_node:
            ring = self._ring
            tensors = [*self._scratch.flats, *ring.own, *ring.left, *ring.right]
            tensors += [*ring.sent, *ring.from_left, *ring.from_right]
            self._engine.wait(self._operations.launch(communicator, job, tensors))
        else:
            for pending in job:
                self._engine.wait(pending)
        self._is_under_way = False
        if self._publishes:
            return
        self._scratch.fill()
        self._engine.parameters_change()
        self._is_changed = True
        self._scratch.write_from(self._ring.own)

    def take_over(self) -> bool:
        exchanged = self._is_due
        if exchanged:
            self._engine.parameters_change()
            self._clock.exchanged(self._engine.plan.step - 1)
        self._is_published = self._is_published or self._publishes
        self._publishes = self._is_due = self._is_changed = False
        return exchanged

    def undo(self) -> None:
        if self._is_under_way:
            self._scratch.renew()
            self._ring = self._new_ring()
        elif self._is_changed:
            self._scratch.write_back()
        self._is_published = self._publishes = self._is_due = self._is_under_way = self._is_changed = False

    def communicator_changed(self) -> None:
        super().communicator_changed()
        self._is_published = False

    def travelling(self) -> Mapping[str, torch.Tensor]:
        return {STATE: self._clock.tensor}

    def _new_ring(self) -> _Ring:
        def messages() -> list[torch.Tensor]:
            return [
                torch.zeros(minmax_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
                for flat in self._scratch.flats
            ]

        copies: Callable[[], list[torch.Tensor]] = self._scratch.like
        return _Ring(copies(), copies(), copies(), messages(), messages(), messages())


def _exchange(
    communicator: Communicator, parties: Parties, x: list[torch.Tensor], ring: _Ring, publishes: bool
) -> Job:
    """Exchanges weights in the ring and leaves the new ones in ring.own, or only `publishes` this party's weights. x:
    this rank's weights, which are written over."""
    node = communicator.lanes[Lane.NODE] if parties.by_node else None
    if node is not None and node.world_size > 1:
        yield from [node.allreduce(flat) for flat in x]
        torch._foreach_div_(x, node.world_size)
    if parties.speaks:
        yield from _round_the_ring(
            communicator.lanes[Lane.LEADERS] if parties.by_node else communicator, parties, x, ring, publishes
        )
    if node is not None and node.world_size > 1 and not publishes:
        yield from [node.broadcast(flat, 0) for flat in ring.own]


def _round_the_ring(
    communicator: Communicator, parties: Parties, x: list[torch.Tensor], ring: _Ring, publishes: bool
) -> Job:
    assert parties.index is not None
    if parties.count == 1:
        torch._foreach_copy_(ring.own, x)
        return
    left, right = (parties.ranks[i] for i in ring_neighbours(parties.index, parties.count))

    def swap(bucket: int, sent: torch.Tensor, lefts: torch.Tensor, rights: torch.Tensor) -> list[Pending]:
        incoming = {left: [lefts]} if left == right else {left: [lefts], right: [rights]}
        return communicator.swap([sent], incoming, SWAP_TAG + bucket)

    if publishes:
        torch._foreach_copy_(ring.own, x)
        for i, own in enumerate(ring.own):
            yield from last_awaited(swap(i, own, ring.left[i], ring.right[i]), [own])
        if left == right:
            torch._foreach_copy_(ring.right, ring.left)
        return
    under_way = []
    # a bucket travels while the next one is compressed, and the one before it decompressed
    for i, t in enumerate(x):
        t.add_(ring.left[i], alpha=1 / 3).add_(ring.right[i], alpha=1 / 3).add_(ring.own[i], alpha=-5 / 3)
        minmax_compress(t, ring.sent[i])
        under_way.append(swap(i, ring.sent[i], ring.from_left[i], ring.from_right[i]))
    for i, pendings in enumerate(under_way):
        minmax_decompress(ring.sent[i], ring.own[i], add=True)
        yield from last_awaited(pendings, ring.sent[i : i + 1])
        minmax_decompress(ring.from_left[i], ring.left[i], add=True)
        from_right = ring.from_left if left == right else ring.from_right
        minmax_decompress(from_right[i], ring.right[i], add=True)
