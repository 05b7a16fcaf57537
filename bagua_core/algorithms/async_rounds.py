"""Implements asynchronous model averaging by rounds, as the unit of commit: no worker waits for a slower one's steps.

Owns when an average begins and comes in. Both happen at the commit of a round and nowhere else, so an average holds
committed rounds alone, and a model takes in nothing of a round that it has not committed itself: the samples of a lost
lease, which are served again, are in no other worker's model. States, invariants and failure cases:
docs/design/rounds.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bagua_core.algorithms.algorithm import Attachment
from bagua_core.communication.communicator import CollectiveAborted, Communicator, Lane
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.trained_parameters import Candidates, check_known
from bagua_core.communication.weights.background_mean import BackgroundMean
from bagua_core.communication.weights.weight_buckets import FlatWeights, make_equal


class AsyncRounds(Exchange):
    """Runs asynchronous model averaging for one model where the round is the unit of commit.

    When a round closes, it needs this worker's part of the samples alone: the model's weight in the next average.
    clock: monotonic seconds.
    """

    def __init__(
        self, attachment: Attachment, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = attachment.engine
        self._parameters = attachment.parameters
        self._known = frozenset(map(id, attachment.parameters))
        self._mean = BackgroundMean(
            attachment.parameters, attachment.engine, interval_s, clock, weighted=True
        )
        self._round = 0.0  # this worker's part of the samples of the round under way
        self._began = FlatWeights(attachment.parameters)  # the model before the first local step of a round
        self._began_in = -1  # that round; -1: none, of the model that is here

    @property
    def rounds(self) -> int:
        """The number of averages that came in on this worker."""
        return self._mean.count

    def pause(self) -> None:
        """Begins no further average; one under way still comes in."""
        self._mean.pause()

    def resume(self) -> None:
        self._mean.resume()

    def wait_for_round(self, limit_s: float) -> bool:
        """Waits until no average is under way, for limit_s at most, and tells whether this is so. The average's result
        comes in at the next commit."""
        return self._mean.wait(limit_s)

    # -- Exchange

    def trains(self, candidates: Candidates, choice: bytes) -> None:
        check_known(candidates, choice, self._known)

    def forward_begins(self) -> None:
        # by the round's number: one that is closed again in another generation began where it did
        step = self._engine.plan.step
        if self._began_in != step:
            self._began.fill()
            self._began_in = step

    @contextmanager
    def at_round_begin(self) -> Iterator[None]:
        if self._began_in != self._engine.plan.step:  # no local step was taken
            yield
            return
        local = FlatWeights(self._parameters)
        local.fill()
        self._began.write_back()
        try:
            yield
        finally:
            local.write_back()

    def close_round(self, communicator: Communicator | None, weight: float) -> None:
        if communicator is not None:
            lane = communicator.lanes[Lane.BACKGROUND]
            if lane.abort_flag.is_set() and not communicator.abort_flag.is_set():
                # in the middle of an average; only a new generation brings another lane
                raise CollectiveAborted("the lane of averages was given up by an earlier wrapping")
        self._round = weight  # a round that is closed again has other members, and this worker another part

    def step_committed(self) -> None:
        self._mean.take_in()
        self._mean.trained(self._round)
        self._round = 0.0
        communicator = self._engine.communicator()
        if communicator is not None and communicator.world_size > 1:
            self._mean.begin_if_due(communicator.lanes[Lane.BACKGROUND])

    def communicator_changed(self) -> None:
        self._mean.give_up("another generation is in force")

    def state_replaced(self) -> None:
        self._mean.restart()
        self._began_in = -1

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._mean.give_up("training is over")
        make_equal(self._parameters, average, self._mean.weight)

    def close(self) -> None:
        self._mean.close()


def check_round(sync_every: int, warmup_steps: int) -> None:
    """Checks `sync_every` and `warmup_steps` for unit="round". Raises ValueError."""
    if sync_every < 1:
        raise ValueError(f"sync_every={sync_every}; use 1 or more steps")
    if warmup_steps:
        raise ValueError(
            f'warmup_steps={warmup_steps} averages gradients in each step, and in a round (unit="round") each worker '
            "is at another step; leave one of them out"
        )
