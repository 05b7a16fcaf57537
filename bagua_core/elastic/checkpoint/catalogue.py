"""Lists the checkpoints in a storage, decides which are complete, and which may be deleted.

Owns the names in a storage: one directory per checkpoint, named by run and state name, and one small file per run (each
start of the job on this storage). A checkpoint is complete if and only if all its parts are there and fit: nothing is
committed and no member coordinates. The contents are checked on reading (restore.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bagua_contract.records import StateName
from bagua_core.elastic.checkpoint import part_file
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from bagua_core.elastic.checkpoint.placement_index import problem_of
from bagua_core.elastic.checkpoint.reading import read_each
from bagua_core.elastic.checkpoint.storage import Storage, StoreError, may_be_whole
from bagua_core.errors import PeerViolation, UserError

KEPT = 2
_CHECKPOINT = re.compile(r"run-(\d{4,})-step-(\d{9,})-generation-(\d{6,})-(\d+)")
_RUN = re.compile(r"run-(\d{4,})\.json")
_PART = re.compile(r"part-\d{5,}-of-\d{5,}(-[0-9a-f]{16})?" + re.escape(part_file.SUFFIX))
_OLD_PART = re.compile(r"part-\d{5,}-of-\d{5,}")
_MOST_RUN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, order=True)
class RunState:
    """A state of a run. The state of a later run is the newer one, for that run went on from what then counted."""

    run: int
    name: StateName

    @property
    def directory_name(self) -> str:
        name = self.name
        return f"run-{self.run:04d}-step-{name.step:09d}-generation-{name.generation:06d}-{name.operations}"

    @staticmethod
    def of(directory_name: str) -> RunState | None:
        """Returns the place that a checkpoint's directory is named for; None if it is no checkpoint's directory."""
        match = _CHECKPOINT.fullmatch(directory_name)
        if match is None:
            return None
        run, step, generation, operations = map(int, match.groups())
        return RunState(run, StateName(generation, step, operations))


PartSet = tuple[RunState, str]
"""The parts of a state that one replica has written, see Header; "": of replicas that agree."""


@dataclass(frozen=True, slots=True)
class Run:
    """A start of the job on this directory: it went on from `resumed_at_step`."""

    number: int
    resumed_at_step: int


class OldFormat(UserError, ValueError):
    """The directory has a part that an earlier version wrote. The message says so. To begin anew would in time remove
    it."""


class UnreadableRun(PeerViolation, ValueError):
    """A run's file is not as it was written. The message names it.

    The file may say that steps were undone, so it is not ignored.
    """


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's directory. headers: by part; empty, with the reason, if it does not count.

    unseen: why it could not be looked into; it may be complete.
    """

    place: RunState
    headers: tuple[Header, ...]
    reason: str = ""
    unseen: StoreError | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.headers)


def is_void(place: RunState, runs: Sequence[Run]) -> bool:
    """Tells whether a later run went on from before `place`, so that its steps were undone."""
    return any(run.number > place.run and run.resumed_at_step < place.name.step for run in runs)


def find(storage: Storage, refused: Collection[PartSet] = ()) -> list[Found]:
    """Returns all checkpoints, newest first. Headers and lengths are looked at, bytes are not. refused: sets that don't
    count.

    Raises OSError if the root can't be listed or a run's file can't be read, UnreadableRun, OldFormat.
    """
    past = runs(storage)
    found = []
    for name in storage.entries():
        place = RunState.of(name)
        if place is None:
            continue
        if is_void(place, past):
            found.append(Found(place, (), "a later run went on from before it"))
        else:
            try:
                found.append(look_into(storage, place, refused))
            except StoreError as error:
                found.append(Found(place, (), f"can't be read: {error}", error))
    return sorted(found, key=lambda f: f.place, reverse=True)


def newest_complete(found: Iterable[Found]) -> Found | None:
    """Returns the first complete one of `found`, which begins with the newest; None if none is complete.

    Raises StoreError if an unseen one comes before it: that one may be complete, and the newest.
    """
    for one in found:
        if one.unseen is not None:
            raise one.unseen
        if one.is_complete:
            return one
    return None


def look_into(storage: Storage, place: RunState, refused: Collection[PartSet] = ()) -> Found:
    """Looks for the parts of the checkpoint at `place`, without regard to runs. refused: sets that don't count.

    Raises OldFormat, and StoreError: what cannot be seen may be complete.
    """
    whole, reason = whole_sets(storage, place)
    usable = (found for found in whole if (place, found.headers[0].replica) not in refused)
    return next(usable, Found(place, (), "no member could read it" if whole else reason))


def whole_sets(storage: Storage, place: RunState, replica: str | None = None) -> tuple[list[Found], str]:
    """Returns each set of parts at `place` that is a whole checkpoint, and a reason if there is none.

    The same state may have been written by more workers later, after too few were left for a while, and by replicas
    that differ. A bad part spoils its own set alone. replica: see Header; only its parts count. None: those of any
    replica. Raises as look_into.
    """
    directory = place.directory_name
    try:
        there = storage.entries(directory)
        if old := next(filter(_OLD_PART.fullmatch, there), None):
            raise OldFormat(
                f"{storage}/{directory}/{old} was written by an earlier version of bagua, in a format that "
                "this version does not read. Start with another --checkpoint-dir, or go on with that version"
            )
        names = sorted(filter(_PART.fullmatch, there))
        read = dict(
            zip(names, read_each(lambda name: _read_header(storage, place, name), names), strict=True)
        )
    except StoreError:
        raise
    except OSError as error:
        if may_be_whole(error):
            raise StoreError(f"{storage}/{directory}: {error}") from error
        return [], str(error)
    headers = {name: header for name, header in read.items() if isinstance(header, Header)}
    whole, reasons = [], []
    for count, writer in sorted({(header.parts, header.replica) for header in headers.values()}):
        if replica not in (None, writer):
            continue
        wanted = [part_file.file_name(part, count, writer) for part in range(count)]
        missing = next((part for part, name in enumerate(wanted) if name not in headers), None)
        if missing is not None:
            bad = read.get(wanted[missing])
            reasons.append(f"part {missing} of {count} is missing" if bad is None else str(bad))
            continue
        one = tuple(headers[name] for name in wanted)
        try:
            _require_one_checkpoint(one, place)
        except CorruptPart as error:
            reasons.append(str(error))
        else:
            whole.append(Found(place, one))
    reasons += [str(bad) for bad in read.values() if not isinstance(bad, Header)]
    nothing = "no part was finished" if not names else "no part of the chosen replica was finished"
    return whole, next(iter(reasons), nothing)


def _require_one_checkpoint(headers: Sequence[Header], place: RunState) -> None:
    """Checks that these headers are of the checkpoint at `place`, and that it is whole. Raises CorruptPart otherwise.

    headers: of all parts, by the parts' names.
    """
    for part, header in enumerate(headers):
        is_own = (header.run, header.name) == (place.run, place.name)
        if not is_own or (header.part, header.whole) != (part, headers[0].whole):
            raise CorruptPart(
                f"{part_file.file_name(part, len(headers), header.replica)}: it belongs to another checkpoint"
            )
    if problem := problem_of(headers):
        raise CorruptPart(problem)


def _read_header(storage: Storage, place: RunState, name: str) -> Header | Exception:
    """Reads the header of the part `name`. Returns an error with the file's name if it is corrupt or no part at all.
    Raises OSError if it may be whole."""
    try:
        return part_file.read_header(storage, f"{place.directory_name}/{name}")
    except CorruptPart as error:
        return CorruptPart(f"{name}: {error}")
    except OSError as error:
        if may_be_whole(error):
            raise
        return error


def removable(found: Sequence[Found], kept: int = KEPT) -> list[RunState]:
    """Returns the checkpoints that may be removed, once there are `kept` complete ones. found: newest first.

    They are all that is older than the `kept` newest complete ones, and what an earlier run left unfinished or a later
    one undid. An unseen one is never among them.

    Raises StoreError if an unseen one is newer than the oldest of those kept: then nothing may be removed.
    """
    complete = [f.place for f in found if f.is_complete]
    if len(complete) < kept:
        return []
    oldest_kept = complete[kept - 1]
    newest_run = max(f.place.run for f in found)
    seen = []
    for one in found:
        if one.unseen is None:
            seen.append(one)
        elif one.place > oldest_kept:
            raise one.unseen
    return [
        f.place for f in seen if f.place < oldest_kept or (not f.is_complete and f.place.run < newest_run)
    ]


def failed_attempts(found: Sequence[Found], before: RunState, step: int) -> list[RunState]:
    """Returns what the run of `before` left incomplete at `step`, before that state. An unseen one is never among them.

    step: of a checkpoint of which a part failed, so that it can't become whole. One that only looks incomplete, as on a
    mount whose listings lag, is not touched. Call it only when none of the run's members is writing a part.
    """
    return [
        f.place
        for f in found
        if f.place.run == before.run
        and f.place.name.step == step
        and f.place < before
        and not f.is_complete
        and f.unseen is None
    ]


def remove(storage: Storage, place: RunState) -> None:
    """Removes the checkpoint at `place`. Raises OSError.

    Part 0 goes first: what an interrupted removal leaves is incomplete, and goes the next time.
    """
    storage.remove_directory(place.directory_name)


# -- runs


def runs(storage: Storage) -> list[Run]:
    """Returns the runs that have a file, by number. Raises OSError, UnreadableRun.

    A file that was never finished says nothing: it is renamed only when whole.
    """
    found = []
    for name in storage.entries():
        match = _RUN.fullmatch(name)
        if match is not None:
            found.append(Run(int(match[1]), _resumed_at_step(storage, name)))
    return sorted(found, key=lambda run: run.number)


def _resumed_at_step(storage: Storage, name: str) -> int:
    """Reads the step from which the run of this file went on. Raises OSError, UnreadableRun."""
    try:
        with storage.open(name) as file:
            text = file.read(_MOST_RUN_BYTES + 1)
        if len(text) > _MOST_RUN_BYTES:
            raise UnreadableRun(f"{name}: it has more than {_MOST_RUN_BYTES} bytes")
        return int(json.loads(text)["resumed_at_step"])
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise UnreadableRun(f"{name}: {error or repr(error)}") from error
    except UnreadableRun:
        raise
    except ValueError as error:  # no JSON, no text
        raise UnreadableRun(f"{name}: {error}") from error


def next_run(storage: Storage) -> int:
    """Returns one more than the number of any run that left a trace. Raises OSError."""
    names = storage.entries()
    numbers = [place.run for place in map(RunState.of, names) if place is not None]
    numbers += [int(match[1]) for match in map(_RUN.fullmatch, names) if match is not None]
    return 1 + max(numbers, default=0)


def write_run(storage: Storage, run: Run, job: str) -> None:
    """Writes the file of a run. Raises OSError."""
    text = json.dumps({"resumed_at_step": run.resumed_at_step, "job": job})
    storage.write(_run_name(run.number), (text.encode(),))


def has_run(storage: Storage, number: int) -> bool:
    """Tells whether the file of a run is there. Raises OSError, also if the root is not there."""
    try:
        storage.open(_run_name(number)).close()
    except FileNotFoundError:
        storage.entries()
        return False
    return True


def _run_name(number: int) -> str:
    return f"run-{number:04d}.json"
