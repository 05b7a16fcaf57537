"""Implements asynchronous model averaging: every worker trains on its own, and models are averaged in the background.

Owns when an average (a "round") begins and when its result comes in; background_mean.py does both. Everything that
touches parameters runs in the script's thread at the start of a forward. With unit="round" async_rounds.py does it.

Commits: a step is final when all members have computed it (a vote of two numbers at the end of backward); the models'
exchange takes no part in that, so its traffic never stops a step. Heals: a joiner copies one holder's model and
optimizer. A change of membership ends the round under way without a trace. Exactly once: every sample is computed and
counted once; what a worker learned since its last round goes with it when it is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.async_rounds import AsyncRounds, check_round
from bagua_core.algorithms.local_sgd import DEFAULT_SYNC_EVERY, ROUND, STEP
from bagua_core.communication.communicator import CollectiveAborted, Communicator, Lane, Pending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import LocalMean
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import StepReductions
from bagua_core.communication.weights.background_mean import BackgroundMean
from bagua_core.communication.weights.weight_buckets import make_equal

DEFAULT_INTERVAL_MS = 500


class AsyncModelAverage(Algorithm):
    """Lets every worker train on its own and averages the models in the background.

    peer_selection_mode: "all" is the only one.
    sync_interval_ms: least time between the beginnings of two rounds.
    warmup_steps: the number of first steps in which gradients are averaged.
    unit: what all workers commit together. "step": every step, so that the slowest worker sets the pace. "round":
    `sync_every` local steps for a worker of average speed, of which each worker takes as many as its speed allows
    (docs/design/rounds.md); an average begins and comes in when a round is committed. Needs ElasticDataLoader.
    Raises ValueError.
    """

    name = "async"
    equal_states = False

    def __init__(
        self,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = DEFAULT_INTERVAL_MS,
        warmup_steps: int = 0,
        unit: str = STEP,
        sync_every: int = DEFAULT_SYNC_EVERY,
    ) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f'peer_selection_mode={peer_selection_mode!r} is unknown; use "all"')
        if sync_interval_ms < 0:
            raise ValueError(f"sync_interval_ms={sync_interval_ms} must not be negative")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
        if unit not in (STEP, ROUND):
            raise ValueError(f'unit={unit!r} is unknown; use "{STEP}" or "{ROUND}"')
        if unit == ROUND:
            check_round(sync_every, warmup_steps)
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps
        self.unit = unit
        self.sync_every = sync_every

    @property
    def lanes(self) -> frozenset[Lane]:
        return frozenset({Lane.BACKGROUND})

    @property
    def described(self) -> str:
        if self.unit == ROUND:
            return f"{self.name}(every {self.sync_every}, unit {self.unit})"
        return f"{self.name}(warmup_steps={self.warmup_steps})"

    @property
    def round_steps(self) -> int | None:
        return self.sync_every if self.unit == ROUND else None

    def attach(self, attachment: Attachment) -> Exchange:
        if self.unit == ROUND:
            return AsyncRounds(attachment, self.sync_interval_ms / 1000)
        return AsyncExchange(attachment, self.sync_interval_ms / 1000, self.warmup_steps)


class _WarmUp(LocalMean):
    """Averages gradients over all workers in the first steps, and over this worker's samples afterwards."""

    def __init__(self, engine: StepReductions, warmup_steps: int) -> None:
        self._engine = engine
        self._warmup_steps = warmup_steps

    @property
    def is_over(self) -> bool:
        return self._engine.plan.step >= self._warmup_steps

    @property
    def keeps_own(self) -> bool:
        return self.is_over

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if communicator is None or self.is_over:
            return super().launch(communicator, bucket, number, weight)
        return communicator.allreduce(bucket.reducible)


class AsyncExchange(Reducer):
    """Runs asynchronous model averaging for one model where every step is committed. clock: monotonic seconds."""

    def __init__(
        self,
        attachment: Attachment,
        interval_s: float,
        warmup_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warm_up = _WarmUp(attachment.engine, warmup_steps)
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=self._warm_up,
            find_unused_parameters=attachment.find_unused_parameters,
        )
        self._mean = BackgroundMean(attachment.parameters, attachment.engine, interval_s, clock)
        self._has_begun = False  # this step's first forward

    @property
    def rounds(self) -> int:
        """The number of rounds whose result came in on this worker."""
        return self._mean.count

    # -- what the script may do

    def pause(self) -> None:
        """Begins no further round; one under way still comes in. Peers go on training without new rounds."""
        self._mean.pause()

    def resume(self) -> None:
        self._mean.resume()

    def wait_for_round(self, limit_s: float) -> bool:
        """Waits until no round is under way, for limit_s at most, and tells whether this is so. The round's result
        comes in at the next forward."""
        return self._mean.wait(limit_s)

    # -- Exchange

    def forward_begins(self) -> None:
        # Once a step: a graph whose backward is yet to come must not see other weights than its forward did.
        if self._has_begun:
            return
        self._has_begun = True
        plan = self._engine.plan
        communicator = self._engine.communicator()
        # One that heals has no model of the job yet; the others' round waits for it, in the background.
        if communicator is None or plan.active_index is None or not self._warm_up.is_over:
            return
        self._mean.take_in()
        lane = communicator.lanes[Lane.BACKGROUND]
        if lane.abort_flag.is_set() and not communicator.abort_flag.is_set():
            # by an earlier wrapping that ended in the middle of an average: only a new generation brings another lane
            self._engine.reduction_failed(
                CollectiveAborted("the lane of averages was given up by an earlier wrapping")
            )
            return
        self._mean.begin_if_due(lane)

    def step_committed(self) -> None:
        super().step_committed()
        self._has_begun = False

    def step_rolled_back(self) -> None:
        super().step_rolled_back()
        self._has_begun = False

    def communicator_changed(self) -> None:
        self._has_begun = False
        self._mean.give_up("another generation is in force")
        super().communicator_changed()

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._mean.give_up("training is over")
        make_equal(self._parameters, average)

    def close(self) -> None:
        self._mean.close()
        super().close()
