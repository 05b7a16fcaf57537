"""Reduces a model's gradients over the job: bucket by bucket, as they become ready in the backward.

Owns the hooks on the parameters, the buckets and the order in which they leave. Knows the engine only as
StepReductions. Invariants: a bucket holds weight times this rank's gradient, and the weights of all ranks sum to
1 over a step; every rank launches the same buckets in the same order; a failed reduction leaves only zeros
behind, in memory that no abandoned operation can reach.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending, ReduceOp
from bagua_core.communication.devices.device_wait import wait_once
from bagua_core.communication.flight_record import bucket_launched
from bagua_core.communication.pending import trace_operation
from bagua_core.communication.reduction.arrivals import Arrivals
from bagua_core.communication.reduction.backward_task import BackwardTask, NestedBackwardError, current_task
from bagua_core.communication.reduction.bucket_layout import BucketLayout
from bagua_core.communication.reduction.bucket_operation import BucketOperation, Sum
from bagua_core.communication.reduction.bucket_times import BucketTimes
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB, FIRST_BUCKET_BYTES
from bagua_core.communication.reduction.contributions import Contributions
from bagua_core.communication.reduction.gradient_hooks import GradientHooks
from bagua_core.communication.reduction.model_turns import TurnOfBackward, model_turns_of
from bagua_core.communication.reduction.step_tail import StepTail
from bagua_core.communication.reduction.trained_parameters import (
    Candidates,
    FrozenWithinStep,
    TrainedParameters,
    check_known,
    listed,
)
from bagua_core.communication.step_interface import StepReductions
from bagua_core.model.gradient_placements import place_gradient
from bagua_core.model.optimizer_steps import optimizer_steps_of


class Reducer(Contributions):
    """Averages gradients over the job within backward, weighted by samples.

    After the backward of a step's last micro-batch every .grad is the job's mean, or whatever `operation` makes of
    the ranks' contributions. Before that the contributions gather in the buckets, and .grad is zero, so that the
    script's own zero_grad and clipping do no harm. A parameter that took no part counts as zero; with
    find_unused_parameters one that took part on no rank keeps a .grad of None, so that no optimizer touches it, which
    costs one small message a step. average False: the mean times the number of workers that take part, which for
    equal shares is the sum of their gradients. A frozen parameter keeps a .grad of None. Close it to remove its hooks.

    parameters: of the model; those that need no gradient are left out. engine: the attachment's.
    bucket_cap_bytes, first_bucket_bytes: the most of a bucket, and of the one that fills first.
    operation: on each full bucket; None: the sum.
    Raises ValueError if no parameter needs a gradient.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        engine: StepReductions,
        bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * 1024 * 1024,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        operation: BucketOperation | None = None,
        find_unused_parameters: bool = False,
        average: bool = True,
    ) -> None:
        attached = list({id(p): p for p in parameters if p.requires_grad}.values())
        if not attached:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        self._engine = engine
        self._attached = attached
        self.arrivals, self._times = Arrivals(attached), BucketTimes()
        self._first_bucket_bytes = first_bucket_bytes
        chosen = operation or Sum()
        layout = BucketLayout(
            attached, bucket_cap_bytes, first_bucket_bytes, chosen.carries_pair, engine.replica_size
        )
        super().__init__(layout, chosen, optimizer_steps_of(engine))
        self._finds_unused = find_unused_parameters
        self._trained = TrainedParameters(self._layout.is_attached, chosen.takes_new_buckets)
        self._tail = StepTail(engine, self._trained)
        self._turn = TurnOfBackward(model_turns_of(engine), engine.wait)
        self._relays = False  # whether the next forward lays out the buckets anew

        self._lock = threading.RLock()  # parameters on several devices: backward runs in several threads
        self._reductions = 0
        self._has_local = False
        self._has_said_lost = False
        self._backward = BackwardTask()
        self._skips = False
        self._next_bucket = 0
        self._separates_mean = False
        self._average = average
        self._hooks = GradientHooks(self._accumulated_in, self._before_accumulation)
        self._hooks.add(self._parameters, before=chosen.may_keep_own)
        if not average:  # what .grad still holds is scaled already
            self._separate_mean()

    @property
    def is_unfinished(self) -> bool:
        """Whether a backward began and did not reach its end: it raised, or it runs now."""
        return self._backward.is_open

    @property
    def reductions(self) -> int:
        """The number of reductions that succeeded; see Exchange."""
        return self._reductions

    @property
    def has_local_gradients(self) -> bool:
        """Whether .grad holds contributions of this rank alone; see Exchange."""
        return self._has_local

    @property
    def readiness(self) -> tuple[int, ...]:
        """The measured order of the gradients; see Exchange."""
        return self.arrivals.order

    @property
    def bucket_times(self) -> tuple[tuple[int, float], ...]:
        """The bytes and seconds of each bucket's sum; see Exchange."""
        return self._times.found

    def holds_reduced(self, parameter: torch.Tensor) -> bool:
        """Tells whether the parameter's .grad is its part of a bucket; see Exchange. It is False while a backward runs,
        because contributions lie there too."""
        index = self._index_of.get(id(parameter))
        whole = not self._backward.is_open and not self._has_local
        return whole and index is not None and parameter.grad is self._gradients[index]

    def be_model(self, number: int) -> None:
        """Sets the number of the model; see Exchange."""
        self._turn.number = number

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._hooks.are_removed

    def close(self) -> None:
        """Removes the hooks from the parameters; see Exchange."""
        self._hooks.remove()

    # -- which parameters are trained

    def trains(self, candidates: Candidates, choice: bytes) -> None:
        """Sets which parameters are trained; see Exchange. Parameters that are unfrozen get buckets of their own behind
        the others, which are reduced once all ranks are known to have the same ones. The layout changes at a forward
        after that, on all ranks alike."""
        trained = self._trained
        if (choice == trained.choice and not self._relays) or self.is_unfinished:
            return
        with self._lock:
            trained.candidates = candidates
            changed = trained.changed(choice)
            if changed and self._has_parts:
                raise FrozenWithinStep(
                    f"{listed(changed)}: frozen or unfrozen between two micro-batches; do it at a step boundary"
                )
            if self._relays:
                self._relays = False
                assert trained.agreed is not None
                self._layout.lay_out(trained.chosen(trained.agreed))
            chosen = trained.chosen(choice)
            new = [p for p in chosen if id(p) not in self._layout.index_of]
            if not (trained.takes_new and self._operation.takes_new_buckets):
                check_known(candidates, choice, {id(p) for p in self._attached})
            if new:
                self._layout.append(new)
            self._take_over_layout()
            self._hooks.add(self._parameters, self._separates_mean or self._operation.may_keep_own)
            trained.choose(choice)
            known = {id(p) for p in chosen}
            self._frozen = [p for p in self._parameters if id(p) not in known]

    def _reduce_late(self, communicator: Communicator) -> None:
        """Reduces the buckets of parameters that were unfrozen. All ranks have the same ones."""
        first, begin = self._layout.settled, self._layout.settled_parameters
        self._layout.settle()
        for number, bucket in enumerate(self._buckets[first:], first):
            bucket.pending = self._operation.launch(communicator, bucket, number, self._weight)
        for bucket in self._buckets[first:]:
            assert bucket.pending is not None
            self._engine.wait(bucket.pending)
        if self._finds_unused and begin < len(self._parameters):
            self._engine.wait(communicator.allreduce(self._used[begin:], ReduceOp.MAX))

    def step_committed(self) -> None:
        """Forgets gradients of a step whose last micro-batch had no backward: they are no part of the next one. See
        Exchange."""
        self._operation.step_committed()
        if self._has_parts:
            with self._lock:
                self._forget_parts()

    def step_rolled_back(self) -> None:
        """Forgets the accumulations of a step that did not happen; the caller must clear .grad."""
        with self._lock:
            self._forget()

    def communicator_changed(self) -> None:
        """Drops everything of the old communicator."""
        with self._lock:
            self._forget()
            self.arrivals.begin_generation()
            self._times.begin_generation()
            self._communicator = None
            # a worker that joins has the layout of its wrapping, so all ranks begin with that one again
            self._trained.forget()
            self._relays = False
            self._frozen = []
            if self._layout.reset():
                self._take_over_layout()
            self._operation.communicator_changed()

    def retune(self, operation: BucketOperation, bucket_cap_bytes: int, order: Sequence[int]) -> None:
        """Changes the operation and the buckets; see Exchange."""
        with self._lock:
            self._forget()
            self._operation.communicator_changed()
            self._operation = operation
            parameters = self._attached
            if len(order) == len(parameters):
                parameters = [parameters[place] for place in reversed(order)]
            first_bytes = min(self._first_bucket_bytes, bucket_cap_bytes)
            self._layout.retune(parameters, bucket_cap_bytes, first_bytes, operation.carries_pair)
            self._take_over_layout()

    # -- during backward, called by autograd

    def _accumulated_in(self, parameter: torch.Tensor) -> None:
        index = self._index_of.get(id(parameter))
        if index is None:
            return
        if self._layout.has_shards:
            # before anything that may differ between the workers of a replica, which all take part
            place_gradient(parameter)
        if not self.synced:
            self._has_local = True
            return
        with self._lock:
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self._take(index, parameter)
            else:
                self._take(index, parameter)

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        if current_task() != self._backward.task:
            self._enter_backward()
        if self._skips:
            return
        if self._ready[index]:
            raise NestedBackwardError(
                "a parameter received a gradient twice in one backward; if activation checkpointing is used, "
                "pass use_reentrant=False"
            )
        if self._earlier.stepped:
            self._earlier.check_unused(self._parameters[index], self._trained)
        self._contribute(index, parameter)
        if self.arrivals.taken is not None:
            self.arrivals.came(parameter)
        self._ready[index] = 1
        number = self._bucket_of[index]
        bucket = self._buckets[number]
        bucket.missing -= 1
        if bucket.missing == 0 and number == self._next_bucket and self._micro_batch.last:
            self._launch_filled()

    def _enter_backward(self) -> None:
        """Sets, at the first gradient of a backward, what holds for all of it."""
        if not self._backward.is_new():
            return
        if self._backward.is_open:
            self._give_up_unfinished()
        self._weigh(self._engine.micro_batch)
        self._skips = self._engine.step_failed
        self._communicator = self._engine.communicator()
        self._multiply_by(1 if self._average else self._engine.plan.active_count)
        self._next_bucket = 0
        self._ready = bytearray(len(self._parameters))
        for bucket in self._buckets:
            bucket.rearm()
        self._backward.begin(self._end_backward, defers=self._layout.has_shards)
        self.arrivals.backward_begins()
        self._times.backward_begins()
        reduces_by = self._communicator if self._micro_batch.last and not self._skips else None
        self._turn.backward_begins(reduces_by, can_lead=not self._layout.has_shards)
        self._backward_begins()

    def _backward_begins(self) -> None:
        """Acts once the step's values are set, before a gradient of this backward is taken."""
        if not self._skips:
            self._earlier.backward_begins(self._trained)

    def _turn_is_taken(self) -> None:
        """Lets a subclass act when the first bucket of several models' is about to leave."""

    def _launch_filled(self, *, ended: bool = False) -> None:
        """Launches the full buckets that are next in order. ended: the backward has ended."""
        communicator = self._communicator
        if communicator is None and not self._operation.acts_alone:
            return
        if self._turn.is_due:
            if not self._turn.is_taken(ended=ended):
                return
            self._turn_is_taken()
        buckets = self._buckets
        while self._next_bucket < self._layout.settled and buckets[self._next_bucket].missing == 0:
            number, bucket = self._next_bucket, buckets[self._next_bucket]
            self._next_bucket += 1
            if bucket.tail is not None and communicator is not None:
                self._tail.write(bucket.tail)
            launched = self._operation.launch(communicator, bucket, number, self._weight)
            bucket.pending = launched
            bucket_launched(number, bucket.flat.nbytes, launched)
            self._times.launched(launched, bucket.flat.nbytes, is_plain=type(self._operation) is Sum)
            if tracing.active is not None:
                trace_operation(launched, "bucket", number)

    def _launch_small(self, communicator: Communicator) -> list[Pending]:
        """Launches what goes beside the buckets. The tail is last: its pair says that all of the step succeeded
        here."""
        pendings: list[Pending] = []
        if self._finds_unused:
            settled = self._used[: self._layout.settled_parameters]
            pendings.append(communicator.allreduce(settled, ReduceOp.MAX))
        lone = self._layout.lone_tail
        if lone is not None:
            self._tail.write(lone)
            pendings.append(communicator.allreduce(lone))
        return pendings

    # -- the end of backward, called by autograd after the last gradient

    def _end_backward(self) -> None:
        if (recorder := tracing.active) is not None:
            recorder.backward_ends()
        with self._lock, torch.no_grad():
            if self._skips:
                self._zero_gradients()
                if self._micro_batch.last:
                    self._engine.reduction_given_up()
            else:
                self.arrivals.backward_ends()
                self._complete()
            self._backward.close()

    def _complete(self) -> None:
        last = self._micro_batch.last
        if last and self._finds_unused:
            self._note_used()
        # As in torch, freezing a parameter changes nothing of its .grad: a gradient that an earlier backward of the
        # step made stays, and None does not become zero, by which weight decay and momentum would move it.
        discarded = [self._index_of[id(p)] for p in self._frozen if p.grad is None]
        for index, parameter in enumerate(self._parameters) if 0 in self._ready else ():
            if not self._ready[index]:
                if self._must_separate:
                    self._set_mean_aside(index, parameter)
                if last or parameter.grad is not None:
                    self._contribute(index, parameter)
        if self._earlier.are_recorded:
            taken = [p for p, ready in zip(self._parameters, self._ready, strict=True) if ready]
            self._earlier.backward_ends(taken, changes=last or self._layout.has_shards)
        if not last:
            self._has_parts = True
            self._separate_mean()
            return
        # not a joiner: it has gathered in this step only, in which none of its gradients counts
        is_lost = self._weight == 0.0 and not self._own_means
        if self._has_local and is_lost and self._engine.plan.active_index is not None:
            self._say_lost()
        for bucket in self._buckets:
            bucket.missing = 0
        try:
            pair = self._reduce_rest()
        except CollectiveFailed as error:
            self._retire_buckets()
            self._zero_gradients()
            self._engine.reduction_failed(error)
            self._engine.reduction_given_up()
            return
        self._accumulated = bytearray(len(self._parameters))
        self._has_parts = False
        self._reductions += 1
        self._has_local = False
        self._engine.reduction_done(pair)
        if self._engine.step_failed:
            self._operation.failed()
            self._zero_gradients()
            return
        self._add_own()
        if self._finds_unused:
            discarded += (self._used == 0).nonzero().flatten().tolist()
        self._discard(discarded)
        self._operation.reduced()

    def _reduce_rest(self) -> tuple[float, float] | None:
        """Launches what is left and waits for everything. Returns the sums of the switch pair."""
        communicator = self._communicator
        if self._turn.is_due or self._next_bucket < self._layout.settled:
            self._launch_filled(ended=True)
        self._turn.check()
        if communicator is None:
            for bucket in self._buckets:
                bucket.pending = None
            self._layout.settle()
            return None
        small = self._launch_small(communicator) if self._operation.starts_at_once else None
        settled = self._buckets[: self._layout.settled]
        pendings = [bucket.pending for bucket in settled if bucket.pending is not None]
        assert len(pendings) == len(settled)
        # one wait of the host a device: for its last bucket, with the tail if that carries it
        tail = wait_once(pendings, self._engine.wait, settled[-1].tail, [b.plan.device for b in settled])
        self._operation.before_vote(communicator)
        for pending in self._launch_small(communicator) if small is None else small:
            self._engine.wait(pending)
        carrier = self._operation if self._layout.lone_tail is None else None
        sums = self._tail.read(self._layout.tail if tail is None else tail, communicator, carrier)
        if sums.choices_differ:
            self._trained.agree(communicator, self._engine.wait)
            self._reduce_late(communicator)
        elif self._operation.takes_new_buckets:
            # by what all ranks know alike: none has changed its choice since they agreed
            is_small = self._layout.is_compact and not self._frozen
            self._relays = self._trained.agreed is not None and not is_small
        for bucket in self._buckets:
            bucket.pending = None
        return sums.pair

    # -- several backwards in a step of several micro-batches

    def _separate_mean(self) -> None:
        """Keeps, from now on, a mean that .grad still holds apart from what the next backward adds.

        With one micro-batch a step no such care is needed: a mean G that all ranks hold comes out of the reduction as
        G, for the weights sum to 1. The weights of a last micro-batch alone do not.
        """
        if self._separates_mean:
            return
        self._separates_mean = True
        self._hooks.add(self._parameters, before=True)

    @property
    def _must_separate(self) -> bool:
        """Whether a mean in .grad is to be set aside in this backward. One that is this rank's own comes out of the
        reduction as it is too, unless this rank has no samples in the step."""
        return self._separates_mean or (self._operation.keeps_own and not self._engine.micro_batch.weight)

    def _before_accumulation(self, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        def gradient_computed(_: torch.Tensor) -> None:
            if not self.synced:
                return
            separates = parameter.grad is not None and self._must_separate
            if not (separates or self._earlier.are_any):
                return
            index = self._index_of.get(id(parameter))
            if index is None:
                return
            with self._lock:
                self._enter_backward()
                if separates and not self._skips:
                    self._set_mean_aside(index, parameter)

        return gradient_computed

    def _say_lost(self) -> None:
        """Warns once that the gradients of a member are replaced by zero, because a loader's batch has no share for
        it."""
        if not self._has_said_lost:
            self._has_said_lost = True
            print(
                "bagua: warning: what this worker gathered under no_sync() is left out: it has no share of the batch "
                "whose backward is synchronized; drop_last=True avoids it, and max_local_batch_size in place of "
                "no_sync()",
                file=sys.stderr,
                flush=True,
            )

    # -- what did not happen

    def _give_up_unfinished(self) -> None:
        """Gives up a backward that raised half-way when the script went on; peers wait for the rest of it."""
        sent = sum(1 for b in self._buckets if b.pending is not None)
        self._forget()
        if sent or self._turn.has_begun:
            self._engine.reduction_failed(
                CollectiveFailed(f"a backward ended with an exception after it had sent {sent} buckets")
            )

    def _forget(self) -> None:
        self._backward.close()
        self._has_local = False
        self._forget_parts()
        if any(b.pending is not None for b in self._buckets):
            self._retire_buckets()
            self._zero_gradients()
