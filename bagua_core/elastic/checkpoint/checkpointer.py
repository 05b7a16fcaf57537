"""The engine's interface to checkpoints: one call when a generation begins without state, one per commit, one at the
end.

Owns the agreement on what is due (the only collectives), the run's number and the last look. due.py decides when,
layout.py which bytes, writer.py writes them, catalogue.py knows what is there. Runs in the script's thread; the writer
has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_contract.records import StateName
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.elastic.checkpoint import due, layout, restore
from bagua_core.elastic.checkpoint.assembly import Reader
from bagua_core.elastic.checkpoint.catalogue import PartSet, RunState
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from bagua_core.elastic.checkpoint.restore import CheckpointsUnreadable, Choice, Restored
from bagua_core.elastic.checkpoint.state_agreement import NOT_KNOWN, difference
from bagua_core.elastic.checkpoint.storage import Storage, may_be_whole
from bagua_core.elastic.checkpoint.writer import Writer, WrittenPart, no_memory
from bagua_core.elastic.state.heal_memory import is_out_of_memory

LAST_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    storage: Storage
    every: CheckpointEvery


@dataclass(frozen=True, slots=True)
class Moment:
    """This rank at a boundary, or at the end: the state it holds and the others that hold it.

    part, parts: this rank's place among those that have the state (and its shard), as a rule its replica_rank and the
    number of replicas. alone: their parameters differ by the algorithm's nature, so the first writes all of its own.
    shard, shards: which shard of a replica this worker holds. replica: see Header.
    """

    job: str
    name: StateName
    part: int
    parts: int
    position: Mapping[str, int]
    alone: bool = False
    shard: int = 0
    shards: int = 1
    replica: str = ""

    @property
    def is_first(self) -> bool:
        """Whether this worker decides for all."""
        return self.part == 0 and self.shard == 0

    @property
    def number(self) -> int:
        """The number of the checkpoint's part that this worker writes."""
        return self.part * self.shards + self.shard

    @property
    def numbers(self) -> int:
        """The number of parts of the checkpoint."""
        return (1 if self.alone else self.parts) * self.shards


class Checkpointer:
    """Chooses, reads and writes a rank's checkpoints.

    say: one line for the person. fingerprint: of the script. reader: which shard this worker is, asked for when a
    checkpoint is read. clock: monotonic seconds. at_edge: see Storage.write.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        fingerprint: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
        at_edge: Callable[[str], None] = lambda edge: None,
        reader: Callable[[], Reader] = Reader,
    ) -> None:
        self._settings = settings
        self._reader = reader
        self._say = say
        self._fingerprint = fingerprint
        self._clock = clock
        self.run = 0
        self.pause_s = 0.0  # of the last checkpoint: what the script's thread spent on it
        self._looked_in_generation = 0
        self._look_at_step = 0
        self._last_due_s = clock()
        # of the checkpoint before the one that is due, if a part of it could not be written
        self._failed_step = 0
        self._last_look: tuple[int, float] | None = None
        self._pace = due.Pace()
        self._refused: frozenset[PartSet] = frozenset()
        self._unseen: OSError | None = None  # why the chosen one was not read; it may be whole
        self._script: Mapping[str, str] | None = None
        self.writer = Writer(settings.storage, say, at_edge, clock)
        try:
            settings.storage.prepare()
        except OSError as error:
            say(
                f"{settings.storage} can't be made: {error}; this worker writes no checkpoints until it is there"
            )

    # -- a generation in which no member has any state

    def choose(self, communicator: Communicator | None, job: str, wait: Callable[[Pending], None]) -> Choice:
        """Chooses the checkpoint that all members go on from; the same on each. communicator None: a world of one.

        Called again in the same entry, after `could_not_read`, it answers with an older one. Raises CollectiveFailed.
        """
        choice = None
        if communicator is None or communicator.global_rank == 0:
            choice = restore.choose(self._settings.storage, job, self._refused, self._say)
        if communicator is not None:
            choice = restore.share(communicator, choice, wait)
        assert choice is not None
        self.run = choice.run
        return choice

    def require_one_directory(self, choice: Choice) -> None:
        """Checks that rank 0, which chose, has the same directory. Blocks on the disk. Raises CheckpointsUnreadable."""
        restore.require_one_directory(self._settings.storage, choice)

    def read(self, choice: Choice) -> Restored | None:
        """Reads the chosen state. Returns None if it can't be read here. Blocks on the disk.

        Raises CheckpointMismatch.
        """
        assert choice.place is not None
        self._unseen = None
        try:
            return restore.read(
                self._settings.storage, choice.place, self._fingerprint(), self._reader(), choice.replica
            )
        except (CorruptPart, OSError, ValueError) as error:
            self._unseen = error if isinstance(error, OSError) and may_be_whole(error) else None
            self._say(f"checkpoint {choice.place.directory_name} can't be used: {error}")
            return None

    def could_not_read(self, choice: Choice) -> None:
        """Excludes parts that no member could read from the next choice.

        Raises CheckpointsUnreadable if it may be whole: to go on from an older one would undo this one.
        """
        if choice.place is None:
            return
        if self._unseen is not None:
            raise CheckpointsUnreadable(
                f"no member could read the checkpoint {choice.place.directory_name}, which may be whole: {self._unseen}"
            ) from self._unseen
        self._refused |= {(choice.place, choice.replica)}

    # -- every commit

    def is_due(
        self, moment: Moment, communicator: Communicator | None, wait: Callable[[Pending], None]
    ) -> bool:
        """Tells whether a checkpoint of the step that was just committed is to be written, the same on every rank.

        Raises CollectiveFailed if that could not be agreed on.
        """
        is_due = due.is_due_by_steps(self._settings.every, moment.name.step)
        generation = moment.name.generation
        by_seconds = self._settings.every.seconds > 0
        if self._looked_in_generation != generation or (
            by_seconds and moment.name.step >= self._look_at_step
        ):
            self._looked_in_generation = generation
            is_due |= self._look(moment, communicator, wait)
        return is_due and self._all_can_write(moment, communicator, wait)

    def _all_can_write(
        self, moment: Moment, communicator: Communicator | None, wait: Callable[[Pending], None]
    ) -> bool:
        """Tells whether no rank is still writing its part of the checkpoint before. All learn too whether one failed.

        If each decided for itself, ranks with slow storage would leave out different checkpoints, and none might ever
        be complete.
        """
        is_busy = self.writer.is_busy
        row = torch.tensor([is_busy, self.writer.failed_step], dtype=torch.int64, device="cpu")
        if communicator is not None:
            row = _largest(row, communicator, wait)
        if is_busy:
            self.writer.say_left_out(moment.name.step)
        any_busy, self._failed_step = row.tolist()
        return not any_busy

    def _look(
        self, moment: Moment, communicator: Communicator | None, wait: Callable[[Pending], None]
    ) -> bool:
        """Returns whether rank 0 decided that a checkpoint is due. All ranks agree on that and on the run's number."""
        row = torch.zeros(3, dtype=torch.int64, device="cpu")
        row[0] = self.run
        if moment.is_first and self._settings.every.seconds:
            decided = self._decide(moment.name.step)
            row[1], row[2] = int(decided.is_due), decided.next_step
        if communicator is not None:
            row = _largest(row, communicator, wait)
        self.run, is_due, self._look_at_step = (int(v) for v in row)
        if is_due:
            self._last_due_s = self._clock()  # on every rank: any may be rank 0 of the next generation
        return bool(is_due)

    def _decide(self, step: int) -> due.Look:
        now_s = self._clock()
        if self._last_look is not None and step > self._last_look[0]:
            self._pace = self._pace.after(step - self._last_look[0], now_s - self._last_look[1])
        self._last_look = (step, now_s)
        return due.look(self._settings.every, step, now_s - self._last_due_s, self._pace)

    def write(self, moment: Moment, capture: Callable[[], dict[str, Any]]) -> None:
        """Hands this rank's part of the checkpoint that is due to the writer.

        capture: the state as it is now; the tensors are the live ones.
        """
        failed_step, self._failed_step = self._failed_step, 0
        before = None if failed_step or self.writer.written is None else self.writer.written.place
        # In one generation all agreed, when this one was due, that none was writing and none had failed.
        if before is not None and (before.run, before.name.generation) != (self.run, moment.name.generation):
            before = None
        self._write(moment, capture, failed_step, before)

    def _write(
        self,
        moment: Moment,
        capture: Callable[[], dict[str, Any]],
        failed_step: int = 0,
        before: RunState | None = None,
    ) -> None:
        if moment.alone and moment.part != 0:
            return
        began_s = self._clock()
        if self._script is None:
            self._script = dict(self._fingerprint())  # once: it walks the whole model
        replicas = moment.numbers // moment.shards
        try:
            stripe = layout.stripe(capture(), moment.part, replicas, moment.shard, moment.shards)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.writer.not_written(moment.name.step, no_memory("to list the state", error))
            return
        header = Header(
            run=self.run,
            job=moment.job,
            name=moment.name,
            part=moment.number,
            parts=moment.numbers,
            layout_digest=stripe.layout_digest,
            manifest_crc=stripe.manifest_crc,
            digest=0,
            entries=stripe.entries,
            position=dict(moment.position),
            fingerprint=self._script,
            shard=moment.shard,
            shards=moment.shards,
            replica=moment.replica,
            placed=stripe.placed,
        )
        self.writer.write(header, stripe, failed_step=failed_step, before=before)
        self.pause_s = self._clock() - began_s

    # -- all members step aside

    @property
    def expected_write_s(self) -> float:
        """The time that the last part took from the call to the disk; 0 before the first one."""
        return self.pause_s + self.writer.write_s

    def write_last(
        self, moment: Moment, capture: Callable[[], dict[str, Any]], limit_s: float = LAST_WAIT_S
    ) -> None:
        """Hands this rank's part of the last state to the writer, after the part that is being written now.

        A part of a periodic checkpoint of the same state stays: that checkpoint may be complete, and a writer may be
        killed while others replace their parts.
        """
        if self.writer.wait(limit_s) and self.writer.written != self._part_of(moment):
            self._write(moment, capture)

    def is_last_written(self, moment: Moment, limit_s: float) -> str:
        """Waits for the part of `write_last`. Returns why it is not written, empty if it is."""
        if not self.writer.wait(limit_s):
            return f"it was still being written after {max(0.0, limit_s):.1f} s"
        if self.writer.written == self._part_of(moment):
            # Where parts of earlier ones stay missing, those of this one do too.
            return self.writer.not_whole if moment.numbers > 1 else ""
        return self.writer.problem or "the part before it took too long"

    def _part_of(self, moment: Moment) -> WrittenPart:
        """Returns this rank's part. One of the same state that is cut otherwise is another."""
        return WrittenPart(RunState(self.run, moment.name), moment.number, moment.numbers)

    # -- the end

    def digests(self, moment: Moment, capture: Callable[[], dict[str, Any]]) -> tuple[int, int]:
        """Returns the digests by which state_agreement.py compares the states that are written as one."""
        if moment.alone:
            return NOT_KNOWN
        try:
            return layout.digests(capture(), moment.shard, moment.shards)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._say(f"the last checkpoint: {no_memory('to compare the state', error)}")
            return NOT_KNOWN

    def finish(
        self,
        moment: Moment,
        capture: Callable[[], dict[str, Any]],
        limit_s: float = LAST_WAIT_S,
        digests: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Writes the job's last state before it returns, or gives it up after limit_s.

        digests: of all ranks. If they differ, nothing is written.
        """
        deadline_s = self._clock() + limit_s
        if differ := difference(digests, moment.shards):
            if moment.is_first:
                self._say(f"the job's last checkpoint, of step {moment.name.step}, is not written: {differ}")
            self.close(limit_s)
            return
        if self.writer.wait(limit_s):
            self._write(moment, capture)
        if not self.writer.wait(max(0.0, deadline_s - self._clock())):
            self._say(f"the job's last checkpoint is not written after {limit_s:g} s: it is given up")
        self.close()

    def close(self, limit_s: float = 1.0) -> None:
        """Ends the writer's thread, after the part that it is writing."""
        self.writer.close(limit_s)


def _largest(row: torch.Tensor, communicator: Communicator, wait: Callable[[Pending], None]) -> torch.Tensor:
    """Returns the largest of each number over all ranks.

    This is no allreduce, which Gloo would match with the gradients of a rank whose script runs another backward where
    the others are at the step's end.
    """
    rows = row.new_empty(communicator.world_size, len(row))
    wait(communicator.allgather(rows, row))
    return rows.amax(0)
