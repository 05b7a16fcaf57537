"""Implements decentralized averaging of weights: each worker applies its own gradient to the mean of several models.

Owns one exchange a step: a copy of the weights is sent when the step's first forward begins, travels while forward and
backward run, and replaces the weights between the step's vote and the optimizer: x = mean(x) - update(gradient at the
old x). Nothing of the model changes before the vote, so a step that fails has nothing to undo; what is left of its
exchange may still write into the buffers that it was given, and they are left to it.

An exchange that is due in a step without a shared forward (`no_sync`) comes with the next one. When the last exchange
was, and how many there were, travels with the job's state. A joiner gets to know it beside its first step only; so an
exchange that depends on it, with an interval or between pairs, comes one step later.

Flat exchanges start on the main communicator, in the script's thread and ahead of the forward's buffers: one order on
all ranks. Hierarchical ones are jobs of the operation queue on the lanes inside the node and between leaders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.communication.communicator import Communicator, Lane, Pending
from bagua_core.communication.devices.device_wait import last_awaited
from bagua_core.communication.reduction.operation_queue import Job, operation_queue_of
from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.topology.peer_selection import (
    Parties,
    PeerSelection,
    find_parties,
    peer_of,
    shift_one,
)
from bagua_core.communication.weights.exchange_clock import STATE, ExchangeClock
from bagua_core.communication.weights.weight_buckets import FlatWeights
from bagua_core.communication.weights.weight_exchange import SWAP_TAG, WeightExchange

ALL = "all"
SELECTIONS: dict[str, PeerSelection | None] = {ALL: None, "shift_one": shift_one}


class Decentralized(Algorithm):
    """Averages weights instead of gradients: over all workers, or in pairs.

    peer_selection: "all" (the mean over all workers), "shift_one" (the mean of a pair that changes with each exchange),
    or a function that names pairs (see peer_selection.PeerSelection).
    hierarchical: the mean inside each node first, then among nodes; pairs are then pairs of nodes.
    communication_interval: an exchange every so many steps, in the first step of each interval that is not under
    `no_sync`.
    Raises ValueError.

    Commits: a step is final when every worker's exchange and vote have succeeded; the mean comes in with that, or
    never. Heals: a joiner copies one holder's model and optimizer beside its first step, where its own weights count
    nothing; with "all" in each step it takes the mean as well. A worker that missed a commit copies one that did not.
    Exactly once: every sample is computed and counted once; what a worker learned since its last exchange goes with it
    when it is lost.
    """

    name = "decentralized"
    equal_states = False

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection: str | PeerSelection = ALL,
        communication_interval: int = 1,
    ) -> None:
        if isinstance(peer_selection, str) and peer_selection not in SELECTIONS:
            raise ValueError(
                f"peer_selection={peer_selection!r} is unknown; use one of {', '.join(SELECTIONS)}, or a function"
            )
        check_interval(communication_interval)
        self.hierarchical = hierarchical
        self.peer_selection = peer_selection
        self.communication_interval = communication_interval

    @property
    def lanes(self) -> frozenset[Lane]:
        return frozenset({Lane.NODE, Lane.LEADERS}) if self.hierarchical else frozenset()

    @property
    def described(self) -> str:
        chosen = self.peer_selection
        if not isinstance(chosen, str):
            chosen = getattr(chosen, "__qualname__", type(chosen).__qualname__)
        return f"{self.name}({self.hierarchical}, {chosen}, every {self.communication_interval})"

    def attach(self, attachment: Attachment) -> DecentralizedExchange:
        chosen = self.peer_selection
        select = SELECTIONS[chosen] if isinstance(chosen, str) else chosen
        return DecentralizedExchange(attachment, self.hierarchical, select, self.communication_interval)


def check_interval(communication_interval: int) -> None:
    """Checks that `communication_interval` is 1 step or more. Raises ValueError."""
    if communication_interval < 1:
        raise ValueError(f"communication_interval={communication_interval}; use 1 or more steps")


class DecentralizedExchange(WeightExchange):
    """Exchanges the weights of one model. select: chooses the peer of a pair; None: the mean over all workers."""

    def __init__(
        self, attachment: Attachment, hierarchical: bool, select: PeerSelection | None, interval: int
    ) -> None:
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            attachment.find_unused_parameters,
        )
        self._hierarchical = hierarchical
        self._select = select
        self._clock = ExchangeClock(interval)
        # whether all ranks exchange in each step, so that a joiner needs no clock to do the same
        self._is_constant = interval == 1 and select is None
        self._weights = FlatWeights(attachment.parameters, widen=True)
        self._incoming = [] if select is None else self._weights.like()
        self._operations = operation_queue_of(attachment.engine)
        self._is_due = False  # in this step, on all ranks, though some may have no peer in it
        self._job: Job | None = None  # the step's exchange, which leaves the mean in the buffers
        self._awaited: Pending | None = None
        self._has_arrived = False

    def begin(self, communicator: Communicator | None, plan: StepPlan) -> None:
        self._is_due = self._is_constant if plan.healing else self._clock.is_due(plan.step)
        if not self._is_due:
            return
        if communicator is None:
            self._has_arrived = True
            return
        parties = find_parties(communicator.nodes, plan, self._hierarchical)
        peer = None if self._select is None else self._peer(self._select, parties)
        if self._select is not None and (parties.index is None or (peer is None and not parties.by_node)):
            return
        if plan.active_index is None:  # its own weights are none of the job's
            torch._foreach_zero_(self._weights.flats)
        else:
            self._weights.fill()
        # Jobs get the buffers that there are now: one that is given up keeps them.
        flats, incoming = self._weights.flats, self._incoming
        if parties.by_node:
            leaders = communicator.lanes.get(Lane.LEADERS, communicator)
            if self._select is None:
                among = _over_all(leaders, flats, plan.active_count)
            else:
                among = _among_pairs(leaders, parties, flats, incoming, peer)
            job = self._on_operation_queue(
                communicator, _by_node(communicator, parties, flats, among), [*flats, *incoming]
            )
        elif peer is None:
            job = _over_all(communicator, flats, plan.active_count)
        else:
            job = _in_pair(communicator, flats, incoming, peer)
        self._job, self._awaited = job, next(job)

    def before_vote(self) -> None:
        while self._awaited is not None:
            assert self._job is not None
            self._engine.wait(self._awaited)
            self._awaited = next(self._job, None)
        self._has_arrived = self._is_due

    def take_over(self) -> bool:
        if not self._has_arrived:
            self.undo()
            return False
        self._engine.parameters_change()
        self._clock.exchanged(self._engine.plan.step)
        if self._job is not None:
            self._weights.write_back()
        self._job, self._has_arrived = None, False
        return True

    def undo(self) -> None:
        if self._job is not None and not self._has_arrived:
            self._weights.renew()
            self._incoming = [] if self._select is None else self._weights.like()
        self._job = self._awaited = None
        self._has_arrived = False

    def travelling(self) -> Mapping[str, torch.Tensor]:
        return {STATE: self._clock.tensor}

    def _peer(self, select: PeerSelection, parties: Parties) -> int | None:
        """Returns the rank of the other party's speaker; None if this rank is in no party or its party has no peer."""
        if parties.index is None:
            return None
        index = peer_of(select, self._clock.count, parties.index, parties.count)
        return None if index is None else parties.ranks[index]

    def _on_operation_queue(
        self, communicator: Communicator, job: Job, tensors: Sequence[torch.Tensor]
    ) -> Job:
        """Runs `job` on the operation queue, where it goes on by itself while the script's thread computes."""
        ticket = self._operations.launch(communicator, job, tensors)
        self._operations.flush()
        yield ticket


# -- what leaves the mean in `flats`


def _over_all(communicator: Communicator, flats: list[torch.Tensor], count: int) -> Job:
    """Sums `flats` over all ranks and divides by `count`, the number of ranks that did not bring zeros."""
    yield from last_awaited([communicator.allreduce(flat) for flat in flats], flats)
    torch._foreach_div_(flats, count)


def _in_pair(
    communicator: Communicator, flats: list[torch.Tensor], incoming: list[torch.Tensor], peer: int
) -> Job:
    yield from last_awaited(communicator.swap(flats, {peer: incoming}, SWAP_TAG), flats)
    torch._foreach_add_(flats, incoming)
    torch._foreach_div_(flats, 2)


def _by_node(communicator: Communicator, parties: Parties, flats: list[torch.Tensor], among: Job) -> Job:
    """Sums inside the node, lets its speaker make a mean with the other nodes' sums, and broadcasts it inside the
    node."""
    node = communicator.lanes[Lane.NODE]
    if node.world_size > 1:
        yield from [node.allreduce(flat) for flat in flats]
    if parties.speaks:
        yield from among
    if node.world_size > 1:
        yield from [node.broadcast(flat, 0) for flat in flats]


def _among_pairs(
    leaders: Communicator,
    parties: Parties,
    flats: list[torch.Tensor],
    incoming: list[torch.Tensor],
    peer: int | None,
) -> Job:
    torch._foreach_div_(flats, parties.active)
    if peer is not None:
        yield from _in_pair(leaders, flats, incoming, peer)
