"""Writes a rank's part of a checkpoint while training goes on: one thread, one part at a time. A failure never raises.

Owns the staging buffer, which is used again and again, and what is said of failures: the first of a series. Does not
know when a part is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bagua_core.elastic.checkpoint import catalogue, part_file
from bagua_core.elastic.checkpoint.catalogue import Found, RunState
from bagua_core.elastic.checkpoint.layout import Stripe
from bagua_core.elastic.checkpoint.part_file import Header
from bagua_core.elastic.checkpoint.storage import Storage
from bagua_core.elastic.state.heal_memory import is_out_of_memory

LISTING_LAG_S = 90.0
"""Parts that other hosts wrote are listed at the latest after this time. NFS keeps a listing for up to 60 s."""


@dataclass(frozen=True, slots=True)
class _Job:
    header: Header  # without the digest, which is taken in the thread
    data: torch.Tensor | None  # None: there was no memory for it, and room is made all the same
    failed_step: int  # see Writer.write
    before: RunState | None  # see Writer.write


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that is whole on disk: part `part` of `parts` of the checkpoint at `place`."""

    place: RunState
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a rank's parts on disk, for a person.

    step: of the newest one on disk; 0: none. trouble: why the one that was due after it is not there; empty: none was
    due, or it is being written in time. The writer of part 0 looks for the parts of all ranks: if some stay missing,
    step is of the newest whole checkpoint.
    """

    step: int = 0
    trouble: str = ""


NOTHING_SAVED = Saved()


def no_memory(for_what: str, error: BaseException) -> str:
    """Describes a part that found no memory: the allocator's first line says which memory, and how much."""
    line = str(error).partition("\n")[0]
    return f"no memory {for_what}" + (f": {line}" if line else "")


class Writer:
    """Writes this rank's parts in a thread. The writer of part 0 also removes checkpoints that have served.

    at_edge: called with each edge of a write, see Storage.write. clock: monotonic seconds.
    """

    def __init__(
        self,
        storage: Storage,
        say: Callable[[str], None],
        at_edge: Callable[[str], None] = lambda edge: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._storage = storage
        self._say = say
        self._at_edge = at_edge
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._closed = False
        self._failing = False
        self._busy_said = False
        self._thread: threading.Thread | None = None
        self.written: WrittenPart | None = None  # this rank's newest part
        self.write_s = 0.0  # how long the thread took for it
        self.problem = ""  # of the last write; empty: it succeeded
        self.failed_step = 0  # of that write, if it failed; 0: it succeeded
        self._left_out = ""  # why the newest part was not even begun; empty: it was
        # The oldest checkpoint of which all ranks wrote their parts and that was not seen whole yet, and since when
        self._awaited: tuple[RunState, float] | None = None
        self.not_whole = ""  # why a checkpoint is not whole after LISTING_LAG_S; empty: none is late
        self._whole_step = 0  # of the newest whole checkpoint, if not_whole

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return self._job is not None

    @property
    def saved(self) -> Saved:
        written, not_whole = self.written, self.not_whole
        step = 0 if written is None else written.place.name.step
        return Saved(self._whole_step if not_whole else step, self._left_out or self.problem or not_whole)

    def write(
        self, header: Header, stripe: Stripe, *, failed_step: int = 0, before: RunState | None = None
    ) -> bool:
        """Copies the stripe and has it written.

        Returns False if the last part is still being written, or if there is no memory for the copy; this is said once.

        failed_step: of the checkpoint before, if a part of it could not be written, else 0. The writer of part 0 first
        removes what that attempt left, see catalogue.failed_attempts. before: the checkpoint before, if all ranks have
        written their parts of it.
        """
        if self.is_busy:
            self.say_left_out(header.name.step)
            return False
        self._left_out = ""
        try:
            data = self._staged(stripe)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.not_written(header.name.step, no_memory("for the copy of this worker's part", error))
            data = None
        with self._changed:
            self._job = _Job(header, data, failed_step, before)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="bagua-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return data is not None

    def say_left_out(self, step: int) -> None:
        """Says that the part of this step is not written, because the one before is still being written; said once."""
        self._left_out = f"the checkpoint of step {step} is left out: the one before is still being written"
        if not self._busy_said:
            self._busy_said = True
            self._say(f"{self._left_out} (said once; take a longer --checkpoint-every or a faster disk)")

    def not_written(self, step: int, problem: str) -> None:
        """Notes why the part of this step is not on disk; the first failure of a series is said."""
        self._left_out, self.problem, self.failed_step = "", problem, step
        if not self._failing:
            self._failing = True
            self._say(
                f"the checkpoint of step {step} could not be written: {problem}; training goes on, and the next one "
                "is tried when it is due"
            )

    def _staged(self, stripe: Stripe) -> torch.Tensor:
        if self._staging.numel() < stripe.size_bytes:
            # its memory is free before more is asked for
            self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
            on_gpu = any(tensor.is_cuda for _, tensor in stripe.pieces)
            self._staging = torch.empty(stripe.size_bytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu")
        data = self._staging[: stripe.size_bytes]
        stripe.read_into(data)
        return data

    def wait(self, limit_s: float) -> bool:
        """Waits until nothing is being written; returns False if that takes longer than limit_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, limit_s)

    def close(self, limit_s: float) -> bool:
        """Ends the thread, waiting up to limit_s for it. Returns whether it is gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    # -- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                job = self._job
            if job is None:
                return
            try:
                self._write(job)
            except BaseException as error:  # a defect, which Python shows; the next write begins a new thread
                self.problem, self._thread = repr(error), None
                raise
            finally:
                job = None  # it holds the staging buffer
                with self._changed:
                    self._job = None
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        place = RunState(job.header.run, job.header.name)
        if job.failed_step and job.header.part == 0:
            self._make_room(place, job.failed_step)
        if job.data is None:
            return
        step, began_s = job.header.name.step, time.monotonic()
        try:
            header = replace(job.header, digest=part_file.digest(job.data))
            part_file.write(self._storage, place.directory_name, header, job.data, self._at_edge)
        except OSError as error:
            # the error of a write does not name its file
            self.not_written(step, str(error) if error.filename else f"{self._storage}: {error}")
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.not_written(step, no_memory(f"to write it to {self._storage}", error))
            return
        if self._failing:
            self._failing = False
            self._say(f"checkpoints are written again, from step {step} on")
        self.written = WrittenPart(place, job.header.part, job.header.parts)
        self.write_s, self.problem, self.failed_step = time.monotonic() - began_s, "", 0
        if job.header.part == 0:
            self._prune(job.before)
        else:
            self._awaited, self.not_whole = None, ""  # it may have been the writer of part 0 before

    def _prune(self, before: RunState | None) -> None:
        """Removes checkpoints that have served, and looks whether checkpoints become whole.

        The parts of others may come later than this one: then they count the next time.
        """

        def choose(found: list[Found]) -> list[RunState]:
            self._look_for_whole(found, before)
            return catalogue.removable(found)

        self._remove(choose)

    def _look_for_whole(self, found: Sequence[Found], before: RunState | None) -> None:
        """Notes, and says once, that parts stay missing which other ranks have written, as into a directory of their
        own host."""
        whole = max((f.place for f in found if f.is_complete), default=None)
        awaited = None if self._awaited is None else self._awaited[0]
        if any(f.unseen is not None and (whole is None or f.place > whole) for f in found):
            return  # that one may be whole
        if awaited is not None and whole is not None and whole >= awaited:
            self._awaited = awaited = None
            if self.not_whole:
                self._say(f"checkpoints are whole again: that of step {whole.name.step} is")
            self.not_whole = ""
        if awaited is None:
            if before is not None and (whole is None or whole < before):
                self._awaited = (before, self._clock())
            return
        assert self._awaited is not None
        if self._clock() - self._awaited[1] < LISTING_LAG_S:
            return
        reason = next((f.reason for f in found if f.place == awaited), "it was removed")
        self._whole_step = 0 if whole is None else whole.name.step
        if not self.not_whole:
            self.not_whole = (
                f"the checkpoint of step {awaited.name.step} is not whole, though all have written: {reason}"
            )
            self._say(f"{self.not_whole}. All nodes must see one directory as {self._storage}")

    def _make_room(self, place: RunState, failed_step: int) -> None:
        """Removes checkpoints that have served, and failed attempts.

        A full disk would else stay full: without a new part 0 nothing is pruned, and failed attempts are not old.
        """
        self._remove(
            lambda found: [
                *catalogue.removable(found),
                *catalogue.failed_attempts(found, place, failed_step),
            ]
        )

    def _remove(self, choose: Callable[[list[Found]], list[RunState]]) -> None:
        try:
            for place in dict.fromkeys(choose(catalogue.find(self._storage))):
                catalogue.remove(self._storage, place)
        except (OSError, MemoryError, catalogue.UnreadableRun, catalogue.OldFormat) as error:
            if not self._failing:
                self._say(f"older checkpoints could not be removed: {str(error) or 'no memory'}")
