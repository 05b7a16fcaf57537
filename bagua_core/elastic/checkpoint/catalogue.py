"""Lists the checkpoints in a directory, decides which are complete, and which may be deleted.

Owns the directory: one directory per checkpoint, named by run and state name, and one small file per run (each start
of the job on this directory). A checkpoint is complete if and only if all its parts are there and fit: nothing is
committed and no member coordinates. The contents are checked on reading (restore.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_contract.records import StateName
from bagua_core.elastic.checkpoint import part_file
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from bagua_core.errors import PeerViolation, UserError

KEPT = 2
_CHECKPOINT = re.compile(r"run-(\d{4,})-step-(\d{9,})-generation-(\d{6,})-(\d+)")
_RUN = re.compile(r"run-(\d{4,})\.json")
_PART = re.compile(r"part-\d{5,}-of-\d{5,}" + re.escape(part_file.SUFFIX))
_OLD_PART = re.compile(r"part-\d{5,}-of-\d{5,}")
_MOST_RUN_BYTES = 64 << 10
_REMOVED = ".removed-"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which state of which run; a later run's is the newer one, for it went on from what then counted."""

    run: int
    name: StateName

    @property
    def directory_name(self) -> str:
        name = self.name
        return f"run-{self.run:04d}-step-{name.step:09d}-generation-{name.generation:06d}-{name.operations}"

    @staticmethod
    def of(directory_name: str) -> Place | None:
        """None for what is no checkpoint's directory."""
        match = _CHECKPOINT.fullmatch(directory_name)
        if match is None:
            return None
        run, step, generation, operations = map(int, match.groups())
        return Place(run, StateName(generation, step, operations))


@dataclass(frozen=True, slots=True)
class Run:
    """A start of the job on this directory: it went on from `resumed_at_step`."""

    number: int
    resumed_at_step: int


class OldFormat(UserError, ValueError):
    """The directory has a part that an earlier version wrote. Says so. To begin anew would in time remove it."""


class UnreadableRun(PeerViolation, ValueError):
    """A run's file is not as it was written. Names it. It may say that steps were undone, so it is not ignored."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's directory. headers: by part; empty, with the reason, if it does not count."""

    place: Place
    headers: tuple[Header, ...]
    reason: str = ""

    @property
    def is_complete(self) -> bool:
        return bool(self.headers)


def is_void(place: Place, runs: Sequence[Run]) -> bool:
    """A later run went on from before it, so its steps were undone."""
    return any(run.number > place.run and run.resumed_at_step < place.name.step for run in runs)


def find(root: Path) -> list[Found]:
    """All checkpoints, newest first. Headers and lengths are looked at, bytes are not.

    Raises OSError, UnreadableRun, OldFormat.
    """
    past = runs(root)
    found = []
    for name in os.listdir(root):
        place = Place.of(name)
        if place is None:
            continue
        if is_void(place, past):
            found.append(Found(place, (), "a later run went on from before it"))
        else:
            found.append(_look_into(root / name, place))
    return sorted(found, key=lambda f: f.place, reverse=True)


def _look_into(directory: Path, place: Place) -> Found:
    """Raises OldFormat."""
    try:
        there = os.listdir(directory)
        if old := next(filter(_OLD_PART.fullmatch, there), None):
            raise OldFormat(
                f"{directory / old} was written by an earlier version of bagua, in a format that this version does "
                "not read. Start with another --checkpoint-dir, or go on with that version"
            )
        names = sorted(filter(_PART.fullmatch, there))
        if not names:
            return Found(place, (), "no part was finished")
        reason = ""
        # The same state may have been written by more workers later, after too few were left for a while.
        for count in sorted({_read_header(directory / name).parts for name in names}):
            missing = next((p for p in range(count) if part_file.file_name(p, count) not in names), None)
            if missing is None:
                return Found(place, _headers(directory, place, count))
            reason = reason or f"part {missing} of {count} is missing"
        return Found(place, (), reason)
    except (CorruptPart, OSError) as error:
        return Found(place, (), str(error))


def _headers(directory: Path, place: Place, count: int) -> tuple[Header, ...]:
    """Of all `count` parts. Raises CorruptPart."""
    paths = [directory / part_file.file_name(part, count) for part in range(count)]
    first = _read_header(paths[0])
    return tuple(_checked(path, part, first, place) for part, path in enumerate(paths))


def _checked(path: Path, part: int, first: Header, place: Place) -> Header:
    header = _read_header(path)
    if (header.part, header.whole) != (part, first.whole) or (header.run, header.name) != (
        place.run,
        place.name,
    ):
        raise CorruptPart(f"{path.name}: it belongs to another checkpoint")
    return header


def _read_header(path: Path) -> Header:
    """Raises CorruptPart with the file's name, OSError."""
    try:
        return part_file.read_header(path)
    except CorruptPart as error:
        raise CorruptPart(f"{path.name}: {error}") from error


def removable(found: Sequence[Found], kept: int = KEPT) -> list[Place]:
    """found: newest first. All that is older than the `kept` newest complete ones, and whatever an earlier run left
    unfinished or a later one undid, once this many are there."""
    complete = [f.place for f in found if f.is_complete]
    if len(complete) < kept:
        return []
    oldest_kept = complete[kept - 1]
    newest_run = max(f.place.run for f in found)
    return [
        f.place for f in found if f.place < oldest_kept or (not f.is_complete and f.place.run < newest_run)
    ]


def remove(root: Path, place: Place) -> None:
    """Raises OSError. Renamed first: one that is half removed must not look like one that is being written."""
    doomed = root / (_REMOVED + place.directory_name)
    os.rename(root / place.directory_name, doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Finish removals that a death interrupted. Raises OSError."""
    for name in os.listdir(root):
        if name.startswith(_REMOVED):
            shutil.rmtree(root / name)


# -- runs


def runs(root: Path) -> list[Run]:
    """Raises OSError, UnreadableRun. A file that was never finished says nothing: it is renamed only when whole."""
    found = []
    for name in os.listdir(root):
        match = _RUN.fullmatch(name)
        if match is not None:
            found.append(Run(int(match[1]), _resumed_at_step(root / name)))
    return sorted(found, key=lambda run: run.number)


def _resumed_at_step(path: Path) -> int:
    """Raises OSError, UnreadableRun."""
    try:
        with part_file.open_ordinary(path) as file:
            text = file.read(_MOST_RUN_BYTES + 1)
        if len(text) > _MOST_RUN_BYTES:
            raise UnreadableRun(f"{path.name}: it has more than {_MOST_RUN_BYTES} bytes")
        return int(json.loads(text)["resumed_at_step"])
    except (CorruptPart, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise UnreadableRun(f"{path.name}: {error or repr(error)}") from error
    except UnreadableRun:
        raise
    except ValueError as error:  # no JSON, no text
        raise UnreadableRun(f"{path.name}: {error}") from error


def next_run(root: Path) -> int:
    """One more than any that left a trace. Raises OSError, UnreadableRun."""
    places = [place for place in map(Place.of, os.listdir(root)) if place is not None]
    return 1 + max((*(run.number for run in runs(root)), *(place.run for place in places)), default=0)


def write_run(root: Path, run: Run, job: str) -> None:
    """Raises OSError."""
    path = root / f"run-{run.number:04d}.json"
    partial = root / f".{path.name}.writing"
    with partial.open("w") as file:
        json.dump({"resumed_at_step": run.resumed_at_step, "job": job}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    part_file.sync_directory(root)
