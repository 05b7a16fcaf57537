"""Defines the interfaces between loader, reducer, optimizers and engine within a step.

The engine (engine.py) owns boundaries, commits and generations. Loader and reducer know only these
types, so each is tested with a small fake of the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from bagua_contract.step_settings import StepSettings
from bagua_core.communication.communicator import Communicator, Lane, Pending, ReduceOp


class Stateful(Protocol):
    """An object whose state the job keeps, copies and rolls back with the model's."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class StepPlan(NamedTuple):
    """The plan of the step that begins: which workers take part, and which only copy the state meanwhile (share 0)."""

    generation: int
    step: int  # steps committed before this one
    global_rank: int
    world_size: int
    healing: frozenset[int] = frozenset()
    # Worker ids by global rank; empty where they do not matter. With replicas those of shard 0, by replica rank: alike
    # on all shards, since what is kept under them (LeaseBook.speeds) is a part of the state that shards share.
    workers: tuple[str, ...] = ()

    @property
    def active_count(self) -> int:
        return self.world_size - len(self.healing)

    @property
    def active_index(self) -> int | None:
        """The place among the ranks that take a share of the batch; None for a rank that is healing."""
        if not self.healing:
            return self.global_rank
        if self.global_rank in self.healing:
            return None
        return self.global_rank - sum(1 for r in self.healing if r < self.global_rank)


class MicroBatch(NamedTuple):
    """The part of a step that runs between two yields of the loader on this rank.

    weight: the weight of this rank's mean gradient over the micro-batch in the global mean (its samples over the global
    batch's); 0 means that its gradient is replaced by zero.
    last: whether the gradients are reduced after it.
    part: the factor of this worker's gradients before those of its replica's workers are averaged; 1 where all of them
    have equally many samples.
    own: the fraction of the replica's samples that this worker has in the micro-batch; 1 where all of its workers have
    the same ones.
    shards: in a deterministic job the virtual shards of the step's batch, else 0.
    shard: the number of the virtual shard that the micro-batch is; None for a worker without any.
    """

    weight: float
    last: bool
    shard: int | None = None
    shards: int = 0
    part: float = 1.0
    own: float = 1.0


MOST_LEASE_RANGES = 8  # rows of fixed size say what a worker used


@dataclass(frozen=True, slots=True)
class Used:
    """The report of what one worker did in a round. ranges: half-open intervals of places in the epoch's order, on
    which it trained; speed: samples per second of its local steps, 0 if it took none; confirms: its script asks that
    all members confirm the round."""

    ranges: tuple[tuple[int, int], ...] = ()
    speed: float = 0.0
    confirms: bool = False

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Rounds(Protocol):
    """The leases of samples as the engine sees them; see docs/design/rounds.md."""

    @property
    def has_work(self) -> bool:
        """Whether this worker took local steps that no committed round contains."""

    @property
    def may_end_early(self) -> bool:
        """Whether the epoch has places left for another round, so that nothing is lost if this round's leases are not
        used up."""

    @property
    def is_used_up(self) -> bool:
        """Whether this worker has used its whole lease, which is large enough for the others to end the round by it."""

    def used(self) -> Used:
        """Returns what this worker did in the round under way."""

    def closed(self, plan: StepPlan, used: Sequence[Used]) -> None:
        """Notes that the round is committed. used: by global rank of `plan`."""

    def drop(self) -> None:
        """Forgets the local steps of the round under way: this worker copies a state that does not have them."""

    def keep_only(self, positions: Iterable[Mapping[str, int]]) -> None:
        """Forgets the samples of all closed rounds except those at `positions`, which the ledger may still ask for."""


class DataSource(Protocol):
    """A loader as the engine sees it. Positions are plain JSON-like values."""

    @property
    def global_batch_size(self) -> int:
        """The samples of a batch, at most."""

    @property
    def job_steps(self) -> int:
        """The steps of all epochs that the script asked for; 0 where this is unknown."""

    def fingerprint(self) -> dict[str, str]:
        """Returns the properties that must agree on all workers: dataset length, seed, global batch size, ..."""

    def position(self) -> dict[str, int]:
        """Returns {"epoch": e, "batch": b}: the global batch that the next step uses."""

    def seek(self, position: dict[str, int]) -> None: ...

    def after(self, position: dict[str, int]) -> dict[str, int]:
        """Returns the position that follows once the batch at `position` is committed. Pure."""

    def sample_count(self, position: dict[str, int]) -> int:
        """Returns the samples of all workers in the committed batch, or round, at `position`. Pure."""

    def samples_of(self, position: dict[str, int], plan: StepPlan, global_rank: int) -> list[int]:
        """Returns the indices of the dataset that `global_rank` uses at `position` under `plan`. Pure."""

    @property
    def place_in_replica(self) -> tuple[int, int]:
        """The place of this worker among those of its replica that get samples of their own, and their number."""

    @property
    def rounds(self) -> Rounds | None:
        """The leases of a job whose unit of commit is the round; None where it is the step."""

    def training_over(self) -> None:
        """Ends the source's part in a training that is over: stops what runs for it, and serves no more batches."""


class Model(Protocol):
    """A DistributedDataParallel as the engine sees it."""

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name, with the arguments that must agree on all workers."""

    @property
    def equal_states(self) -> bool:
        """Whether all ranks hold the same parameters after each step."""

    @property
    def round_steps(self) -> int | None:
        """The local steps of a round, if the round is the algorithm's unit of commit; see Algorithm.round_steps."""

    def copy_begins(self) -> None:
        """Prepares the model for a copy of its state; see Exchange.copy_begins."""

    def close_round(self, communicator: Communicator | None, weight: float, source: int) -> None:
        """Closes the round under way; see Exchange.close_round. source: the first rank that has samples of it."""

    def at_round_begin(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the parameters of the round's beginning; see
        Exchange.at_round_begin."""

    @property
    def has_local_gradients(self) -> bool:
        """Whether .grad holds contributions of this rank alone; see Exchange.has_local_gradients."""

    @property
    def lanes(self) -> frozenset[Lane]:
        """The lanes that each generation's communicator must have for this model."""

    def use_settings(self, settings: StepSettings) -> str:
        """Applies the settings of the generation that this worker enters; `communicator_changed` follows. Returns why
        they have no effect on this model; empty if they have one."""

    @property
    def readiness(self) -> tuple[int, ...]:
        """The measured order of the gradients; see Exchange.readiness."""

    @property
    def bucket_times(self) -> tuple[tuple[int, float], ...]:
        """The bytes and seconds of each bucket's sum; see Exchange.bucket_times."""

    @property
    def warms_up(self) -> bool:
        """Whether a QAdamOptimizer of the model still is in its warm-up, in which QAdam compresses nothing."""

    def travelling(self) -> Mapping[str, torch.Tensor]:
        """Returns further tensors that belong to the job's state; see Exchange.travelling."""

    def put_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Makes `value` the .grad of `parameter`, in the memory where the next backward expects it."""

    def check_shards(self) -> None:
        """Checks the shards of a step of a deterministic job, as the step ends; see Exchange.check_shards."""

    def step_committed(self) -> None:
        """Tells the model that the step is final and the optimizer has stepped."""

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes the replicas equal at the end of training; see Exchange.finish."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a backward pass began and was not finished."""

    def step_rolled_back(self) -> None:
        """Tells the model that the step did not happen: it forgets the step's gradients and accumulations."""

    def communicator_changed(self) -> None:
        """Tells the model that another communicator, or none, is in force: it keeps nothing of the old one."""

    def state_replaced(self) -> None:
        """Tells the model that its values were copied, or are about to be; see Exchange.state_replaced."""

    def detach(self) -> None:
        """Removes all hooks once the training is over."""


class StepReductions(Protocol):
    """The step under way as the reducer sees it."""

    @property
    def micro_batch(self) -> MicroBatch: ...

    @property
    def in_step(self) -> bool: ...

    @property
    def plan(self) -> StepPlan:
        """The plan of the step under way."""

    def communicator(self) -> Communicator | None:
        """Returns the generation's communicator; None in a world of one (nothing to reduce)."""

    @property
    def replica_size(self) -> int:
        """The number of workers that hold one copy of the model together."""

    @property
    def step_failed(self) -> bool:
        """Whether a collective of this step failed: no more are started, and gradients are zeroed."""

    @property
    def is_final(self) -> bool:
        """Whether the latest reduction of this step is complete: the step is committed unless something of it fails
        later."""

    def switch_value(self) -> float:
        """Returns v of the switch pair: pending minus current generation if built here, else 0."""

    def loss_numbers(self) -> tuple[float, float]:
        """Returns the numbers that this rank adds to the sums of reported_loss.py."""

    def losses_reduced(self, sums: tuple[float, float]) -> None:
        """Takes the sums of all ranks' loss_numbers, from a reduction of this step."""

    def reduction_done(self, pair: tuple[float, float] | None) -> None:
        """Tells the engine that all buckets of the step's reduction are done. pair: sums of v and v*v over the ranks.
        Blocks until a copy that this rank receives in the shadow step has been swapped in."""

    def reduction_failed(self, error: Exception) -> None: ...

    def reduction_given_up(self) -> None:
        """Tells the engine that a reduction that was due here was not done because the step has failed. Each reduction
        ends with `reduction_done` or this, so that the other shards of the replica hear of it."""

    def parameters_change(self) -> None:
        """Blocks until copies of the state that are being sent to others no longer read the parameters. Call it before
        parameters change other than by the optimizer."""

    def exchange_is_final(self) -> None:
        """Tells the engine that an exchange behind the step's vote has changed the job's state. The change stays if the
        step fails later, because it is unknown whether other ranks saw the vote."""

    def wait(self, pending: Pending) -> None:
        """Waits for `pending` with the engine's own stall reports. Raises CollectiveFailed."""


class StepEngine(StepReductions, Protocol):
    """The engine as the loader, models and optimizers see it."""

    def attach_model(self, model: Model) -> None: ...

    def share_in_replica(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives all workers of this worker's replica shard 0's values of `tensors`, which are whole on each of them."""

    def detach_model(self, model: Model) -> None:
        """Removes `model` from all further steps. Called between two steps, on all workers alike."""

    @property
    def answered_collectives(self) -> int:
        """The number of the script's own collectives within steps that other workers have answered, since the training
        began."""

    @property
    def virtual_shards(self) -> int:
        """The most virtual shards of a batch in a deterministic job; 0 in any other."""

    # -- for the loader
    @property
    def round_steps(self) -> int | None:
        """The local steps of a round, where the round is the models' unit of commit. Raises ValueError if only some of
        them have rounds, or rounds of another length."""

    def closes_round_early(self) -> bool:
        """Tells whether the loader must take no further local step: another member has ended the round, or a change of
        membership waits for its end."""

    def attach_source(self, source: DataSource) -> None: ...

    def shard_place(self) -> tuple[int, int]:
        """Returns this worker's place in its replica, and the number of workers of the replica."""

    def register_state(self, name: str, stateful: Stateful) -> None:
        """Registers an object whose state the job keeps; see bagua_core.register_state."""

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduces `tensor` over all workers; see bagua_core.allreduce. Within a step it is part of the step, and fails
        with it."""

    def epoch_begins(self, epoch: int) -> None:
        """Tells the engine that the loader yields `epoch` to the script, before the boundary of its first step."""

    def epoch_ends(self) -> None:
        """Tells the engine that the script has left the loop over the epoch, before the next boundary."""

    def boundary(self, goes_on: bool = False, confirmed: bool = False) -> StepPlan:
        """Ends the step before (commit, or roll back), follows a new generation if there is one, and begins the next
        step.

        May block while this worker waits for the job; may raise SystemExit(0) when the node leaves. The source's
        position is right when it returns.
        goes_on: whether the script's work from here to the next boundary belongs to the step; a last checkpoint waits
        for it.
        confirmed: whether a step that is committed here is committed by all members before this returns.
        Both hold at an epoch's end.
        """

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None: ...

    def finish(self) -> bool:
        """Ends the training and returns whether every rank of the job has committed its last step. False: the job took
        this worker elsewhere meanwhile, and the source's position says where to go on."""

    # -- for models and optimizers
    def forward_begins(self) -> None:
        """Tells the engine that a forward that computes gradients begins."""

    def backward_begins(self) -> None:
        """Tells the engine that a backward is about to add to .grad. Called at least once in a step that has a
        backward."""

    def takes_optimizer_step(self, final: bool = True) -> bool:
        """Returns whether the optimizer's step, the next one in this step, is to be done here and now.

        Blocks until copies of the state that are being sent to others no longer read the parameters.
        final: whether it can no longer fail; if False, `optimizer_step_is_final` follows unless it fails.
        """

    def optimizer_step_is_final(self) -> None:
        """Tells the engine that the optimizer's step that was taken with final=False is done."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells the engine that an optimizer's step that was taken has returned: its parameters have new values."""
