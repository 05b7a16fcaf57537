"""Connects checkpoints with the rest of a worker: the engine's calls in terms of its state, member and ledger.

Owns how a generation in which no member has any state gets one: the chosen checkpoint is read beside
the script's thread, then names are exchanged again, and heal_plan.py decides as always. Without a directory every call
returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from bagua_contract import membership_pb2
from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.checkpoint.assembly import Reader
from bagua_core.elastic.checkpoint.checkpointer import LAST_WAIT_S, Checkpointer, Moment, Settings
from bagua_core.elastic.checkpoint.layout import NAMES, OTHER_NAMES
from bagua_core.elastic.checkpoint.restore import Restored, require_order
from bagua_core.elastic.checkpoint.state_agreement import NO_CHECKPOINTS, NOT_KNOWN
from bagua_core.elastic.checkpoint.storage import storage_of
from bagua_core.elastic.checkpoint.writer import NOTHING_SAVED, Saved
from bagua_core.elastic.heal import heal
from bagua_core.elastic.heal.heal_plan import HealPlan, StateGone
from bagua_core.elastic.ledger.ledger import Resumption
from bagua_core.elastic.membership import entry
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.state.commit_history import History
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.state.wanted_layouts import wanted_layouts

CLOSE_WAIT_S = 5.0
T = TypeVar("T")


def settings_of(environment: WorkerEnvironment) -> Settings | None:
    """Returns the settings that the environment gives, or None without a checkpoint directory.

    Raises ValueError for a variable that no agent wrote, and what storage_of raises.
    """
    if not environment.checkpoint_dir:
        return None
    return Settings(
        storage_of(environment.checkpoint_dir), CheckpointEvery.decode(environment.checkpoint_every)
    )


def _none_to_begin_with(infos: Sequence[entry.Info]) -> StateGone:
    return StateGone(
        tuple(range(len(infos))),
        "the job begins anew, since its state is lost with the workers that had it, and all workers that are left have "
        "trained in it before; it needs new ones, with the parameters that the script builds",
    )


class JobCheckpoints:
    """The checkpoints of one worker.

    swap_in: makes a copied or read state this worker's. resumed: a ledger line to be written now. `part` and `parts`
    below count replicas.
    """

    def __init__(
        self,
        settings: Settings | None,
        state: CommittedState,
        member: Member,
        swap_in: Callable[[Any], None],
        info: Callable[[], entry.Info],
        resumed: Callable[[Resumption], None],
        fingerprint: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._member = member
        self._swap_in = swap_in
        self._info = info
        self._resumed = resumed
        self._say = say
        self._checkpointer: Checkpointer | None = None
        if settings is not None:
            self._checkpointer = Checkpointer(settings, say, fingerprint, reader=self._reader)
        self._directory = "" if settings is None else str(settings.storage)
        self._last: Moment | None = None  # this worker stepped aside with this state

    @property
    def is_on(self) -> bool:
        return self._checkpointer is not None

    # -- entering a generation

    def resume(
        self, generation: Generation, plan: HealPlan, infos: list[entry.Info]
    ) -> tuple[HealPlan, list[entry.Info]]:
        """Returns the plan to go on with: unchanged, unless no member has any state and there is a checkpoint.

        Raises CollectiveFailed, CheckpointMismatch if the checkpoint is another script's, CheckpointsUnreadable if it
        or the directory can't be read or is another one than rank 0's, and StateGone if the job begins anew and every
        member has trained before.
        """
        self._last = None
        begins_again = (
            generation.kind is GenerationKind.FAILOVER and generation.base == 0 and generation.number > 1
        )
        checkpointer = self._checkpointer
        if plan.void and checkpointer is None:
            raise _none_to_begin_with(infos)
        if plan.initial and checkpointer is None and begins_again:
            # No worker has the state and nothing was saved: whatever the job did before is void.
            self._say(f"begins at step 0: {generation.reason}")
            self._resumed(Resumption(time.time(), generation.nonce, generation.number, 0, 0))
        if checkpointer is None:
            return plan, infos
        if not plan.initial:
            # A joiner gets it before its first commit: it may soon be the only one that has the state.
            known = max(infos[rank].run for rank in plan.holders)
            self._state.run = checkpointer.run = max(known, checkpointer.run)
            return plan, infos
        communicator = self._member.communicator
        assert communicator is not None
        while True:
            choice = checkpointer.choose(communicator, generation.nonce, self._member.wait_unlearned)
            self._state.run = choice.run
            if communicator.global_rank != 0:
                self._beside(partial(checkpointer.require_one_directory, choice))
            if choice.place is not None:
                restored = self._beside(partial(checkpointer.read, choice))
                if restored is not None:
                    checkpoint = f"{self._directory}/{choice.place.directory_name}"
                    names = restored.state.get(NAMES, ())  # of no state of an early version
                    require_order(checkpoint, names, self._state.registry.parameter_names())
                    self._take_over(generation, restored)
                plan, infos = entry.exchange(
                    communicator, generation, self._info(), self._member.wait_unlearned, self._shard()[1]
                )
                if plan.initial:
                    checkpointer.could_not_read(choice)
                    continue
                if restored is not None:
                    self._say(f"goes on from the checkpoint of step {choice.step}")
            elif plan.void:
                raise _none_to_begin_with(infos)
            elif choice.run > 1 and communicator.global_rank == 0:
                self._say(f"begins anew at step 0: {self._directory} holds no checkpoint that counts")
            self._resumed(
                Resumption(time.time(), generation.nonce, generation.number, choice.run, choice.step)
            )
            return plan, infos

    def _beside(self, read: Callable[[], T]) -> T:
        """Reads from the disk in a thread of its own, so that the end of the generation releases this one."""
        transfer = heal.Transfer(read, self._member.changed)
        self._member.wait_for_transfer(lambda: transfer.done)
        if transfer.error is not None:
            raise transfer.error
        result: T = transfer.result
        return result

    def _take_over(self, generation: Generation, restored: Restored) -> None:
        self._swap_in(
            {
                **restored.state,
                "name": [generation.number, restored.step, 0],
                "history": History.decode(restored.state.get("history", "[]")).resumed().encode(),
                "operations": [],
                "final_parts": restored.state.get("final_parts", 0),
                "owes": [False, False],
            }
        )
        self._state.position = dict(restored.position)

    # -- boundaries

    def is_due(self) -> bool:
        """Tells whether a checkpoint of the step just committed is due.

        It is written when the script's next step begins, with what the script did until then. An agreement that fails
        breaks the generation, as any collective does.
        """
        if self._checkpointer is None or self._member.broken:
            return False
        communicator = self._member.communicator
        assert communicator is not None
        _, shards = self._shard()
        moment = self._moment(communicator.global_rank // shards, communicator.world_size // shards)
        try:
            return self._checkpointer.is_due(moment, communicator, self._member.wait)
        except CollectiveFailed as error:
            self._member.break_generation(error)
            return False

    def write(self, part: int, parts: int) -> None:
        """Hands this worker's part to the writer. part, parts: its place among those that have the state."""
        if self._checkpointer is not None and self._member.generation is not None:
            self._checkpointer.write(self._moment(part, parts), self._captured)

    def _captured(self, at_resume_point: bool = False) -> dict[str, Any]:
        """Returns the state, with the steps whose ledger lines may still be missing. See capture_for_checkpoint."""
        state = self._state.registry.capture_for_checkpoint(at_resume_point=at_resume_point)
        other_names = self._state.registry.other_names()
        parts = self._state.final_parts  # between two steps, after one that failed behind them
        return {
            **state,
            "history": self._state.history.encode(),
            NAMES: self._state.registry.parameter_names(),
            **({OTHER_NAMES: other_names} if any(other_names) else {}),
            **({"final_parts": parts} if parts else {}),
        }

    @property
    def saved(self) -> Saved:
        return NOTHING_SAVED if self._checkpointer is None else self._checkpointer.writer.saved

    # -- leaving

    @property
    def expected_write_s(self) -> float:
        """The time to write this worker's part, as the last one took; 0 if none was written yet."""
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_write_s

    def step_aside(
        self, left: Generation, part: int, parts: int, leave_by_s: float, *, at_resume_point: bool = False
    ) -> None:
        """Begins to write this worker's part: it was in `left` and keeps the state, perhaps as one of the last.

        leave_by_s: monotonic time by which its node has to be gone; infinite if it does not leave. at_resume_point: a
        step is under way, which will not be committed.
        """
        if self._state.name.is_none:
            return
        self._last = self._moment_in(left, part, parts)
        if self._checkpointer is None:
            return
        left_s, expected_s = leave_by_s - time.monotonic(), self._checkpointer.expected_write_s
        if expected_s > left_s:
            self._say(
                f"the last checkpoint, of step {self._state.name.step}, may not be written: it takes about "
                f"{expected_s:.1f} s, and {max(0.0, left_s):.1f} s are left to leave; give a longer --shutdown-timeout"
            )
        self._checkpointer.write_last(
            self._last,
            lambda: self._captured(at_resume_point),
            max(0.0, min(left_s, LAST_WAIT_S)),
        )

    def before_leaving(self, leave_by_s: float, problem: str = "") -> membership_pb2.LastCheckpoint | None:
        """Waits for the part that `step_aside` began, and returns what became of it.

        None: this worker holds no state of the job. problem: why `step_aside` was not called, though this worker holds
        the state.
        """
        if problem and not self._state.name.is_none and self._member.generation is not None:
            self._last = self._moment(0, 1)
        moment = self._last
        if moment is None:
            return None
        name = moment.name
        told = membership_pb2.LastCheckpoint(
            state=membership_pb2.StateName(
                generation=name.generation, step=name.step, operations=name.operations
            )
        )
        if self._checkpointer is not None and not (moment.alone and moment.part):
            limit_s = min(leave_by_s - time.monotonic(), LAST_WAIT_S)
            told.part, told.parts, told.replica = moment.number, moment.numbers, moment.replica
            told.problem = (problem or self._checkpointer.is_last_written(moment, limit_s))[:500]
            told.written = not told.problem
            if told.problem:
                self._say(f"the last checkpoint, of step {name.step}, is not written: {told.problem}")
        return told

    def digests(self) -> torch.Tensor:
        """Returns the digests of this worker's state, by which the members agree that it is one: int64 [2], on the
        CPU."""
        own = NO_CHECKPOINTS if self._checkpointer is None else NOT_KNOWN
        if self._checkpointer is not None and self._member.generation is not None:
            own = self._checkpointer.digests(self._moment(0, 1), self._captured)
        return torch.tensor(own, dtype=torch.int64, device="cpu")

    def finish(self, part: int, parts: int, digests: torch.Tensor) -> None:
        """Writes the last checkpoint. All members that have the state call it, at the job's end.

        part, parts: this one's place among them. digests: those of all members, by rank.
        """
        if self._checkpointer is not None and self._member.generation is not None:
            rows = [(layout, values) for layout, values in digests.tolist()]
            self._checkpointer.finish(self._moment(part, parts), self._captured, digests=rows)

    def close(self) -> None:
        """Lets a part that is being written come to its end, within reason, before this worker goes."""
        if self._checkpointer is not None:
            self._checkpointer.close(CLOSE_WAIT_S)

    def _shard(self) -> tuple[int, int]:
        """Returns this worker's shard_rank, and the shards of a replica."""
        replica = self._member.replica
        return (0, 1) if replica is None else replica.place

    def _reader(self) -> Reader:
        return Reader(wanted_layouts(self._state.registry), *self._shard())

    def _moment(self, part: int, parts: int) -> Moment:
        generation = self._member.generation
        assert generation is not None
        return self._moment_in(generation, part, parts)

    def _moment_in(self, generation: Generation, part: int, parts: int) -> Moment:
        alone, replica = not self._state.registry.equal_states, self._member.replica
        return Moment(
            generation.nonce,
            self._state.name,
            part,
            parts,
            self._state.position,
            alone,
            *self._shard(),
            replica.record.replica_id if alone and replica is not None else "",
        )
