"""Brings the mean of the workers' models into one worker's model, beside its training.

Owns one average at a time: what the model was when it began, and how its result comes in: x = x + (mean - what x was
then), so what was learned meanwhile stays. The caller says when an average may begin and when one that is done comes
in. Everything here runs in the script's thread; the average's own thread (background_average.py) sees copies only.
Invariant: an average that failed or was given up leaves no trace, and its buffers are not used again. What this worker
has trained since its last average that came in, but for what followed that average's begin, is its weight in the next.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.step_interface import StepReductions
from bagua_core.communication.weights.background_average import Round
from bagua_core.communication.weights.weight_buckets import FlatWeights

# So small that it changes no mean by more than the rounding of float16, and not zero: where no member has trained since
# its last average, they all count alike.
_LEAST_WEIGHT = 1e-4


_of_engine: weakref.WeakKeyDictionary[object, weakref.ref[BackgroundMean]] = weakref.WeakKeyDictionary()


class BackgroundMean:
    """Averages one worker's model with those of the others, beside its training.

    interval_s: least time between the beginnings of two averages. clock: monotonic seconds.
    weighted: members count by what they have trained (`trained`) instead of alike; a setting that all members share.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        engine: StepReductions,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        weighted: bool = False,
    ) -> None:
        """Begins without an average. Raises ValueError if another model of the engine has one that is neither closed
        nor paused."""
        self.is_closed = False
        self._engine = engine
        self._be_the_only_one()
        self._weighted = weighted
        self._trained = 0.0  # in no average yet
        self._sent = 0.0  # of it, in the average under way
        self._interval_s = interval_s
        self._clock = clock
        self._average: Round | None = None
        self._lane: Communicator | None = None
        self._began_s = -interval_s
        self._snapshot = FlatWeights(parameters, widen=True)
        self._mean = self._snapshot.like()
        self.is_paused = False
        self.count = 0
        """Averages that came in."""

    def pause(self) -> None:
        """Lets no further average begin; one under way still comes in."""
        self.is_paused = True

    def resume(self) -> None:
        """Lets averages begin again. Raises ValueError as the constructor does."""
        self._be_the_only_one()
        self.is_paused = False

    def _be_the_only_one(self) -> None:
        known = _of_engine.get(self._engine)
        other = None if known is None else known()
        if other is not None and other is not self and not (other.is_closed or other.is_paused):
            raise ValueError(
                "averages in the background begin by each worker's own clock, so those of two models would meet in "
                "different orders and be mixed; wrap one module that contains both, choose another algorithm for one, "
                "or pause the other model's averages (abort) while this one trains"
            )
        _of_engine[self._engine] = weakref.ref(self)

    def trained(self, amount: float) -> None:
        """Notes that this worker has trained on so much more, in a unit that all members share."""
        self._trained += amount

    @property
    def weight(self) -> float:
        """The weight of this worker's model, if an average began now."""
        return max(self._trained, _LEAST_WEIGHT)

    def begin_if_due(self, lane: Communicator) -> None:
        """Sends what the model is now, unless an average is under way, paused or too early."""
        if self._average is not None or self.is_paused or self._clock() - self._began_s < self._interval_s:
            return
        self._snapshot.fill()
        torch._foreach_copy_(self._mean, self._snapshot.flats)
        if self._weighted:
            torch._foreach_mul_(self._mean, self.weight)
        self._began_s = self._clock()
        self._lane = lane
        self._average = Round(lane, self._mean, self.weight if self._weighted else None)
        self._sent = self._trained

    def take_in(self) -> None:
        """Changes the model by an average that is done. Raises what ended it, unless that was a peer's doing."""
        ended = self._average
        if ended is None or not ended.done:
            return
        self._average = None
        if ended.error is not None:
            self._mean = self._snapshot.like()
            if not isinstance(ended.error, CollectiveFailed):
                raise ended.error  # memory that is missing, say; the peers' average is broken by this worker's end
            # The peers that are gone break the generation by themselves, at the next vote.
            return
        self._engine.parameters_change()
        torch._foreach_sub_(self._mean, self._snapshot.flats)
        self._snapshot.add_to_parameters(self._mean)
        self._trained -= self._sent
        self.count += 1

    def give_up(self, reason: str) -> None:
        given_up, self._average = self._average, None
        if given_up is None:
            return
        if not given_up.done:
            assert self._lane is not None
            self._lane.abort(reason)
            self._mean = self._snapshot.like()  # the thread may still write into the old one
        elif given_up.error is not None:
            # An abort by a peer's loss releases the thread at once; the transport may still write into the old one.
            self._mean = self._snapshot.like()
        self._lane = None

    def restart(self) -> None:
        """Drops the average under way and what was trained so far: the model is another worker's."""
        self.give_up("the model was copied")
        self._trained = 0.0

    def close(self) -> None:
        """Lets no average begin any more; one of another model may."""
        self.give_up("closed")
        self.is_closed = True

    def wait(self, limit_s: float) -> bool:
        """Waits for limit_s at most, and returns whether no average is under way any more."""
        return self._average is None or self._average.wait(limit_s)
