"""Restores a job without any state: chooses the checkpoint, and reads it on every member.

Global rank 0 chooses the newest complete one that fits and tells the others; each reads it whole. A member that
can't read it heals from one that could, like any member that is behind; if no member could, rank 0 chooses the
next older one. Knows nothing of generations and of how a state is taken over.
"""

from __future__ import annotations

import errno
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.elastic.checkpoint import catalogue, part_file
from bagua_core.elastic.checkpoint.assembly import Assembly, OtherShards, Reader
from bagua_core.elastic.checkpoint.catalogue import Found, OldFormat, PartSet, Run, RunState, UnreadableRun
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from bagua_core.elastic.checkpoint.reading import read_each
from bagua_core.elastic.checkpoint.storage import Storage
from bagua_core.elastic.state.heal_memory import is_out_of_memory
from bagua_core.elastic.state.state_codec import NoMemory, StateCodecError
from bagua_core.elastic.state.state_registry import ORDER, SHARDING
from bagua_core.errors import InfrastructureLost, UserError

_ROW_BYTES = 1024
_DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Between looks for a run's file, which a network's file system may show late. In all less than a hang takes."""

# May differ between what wrote a checkpoint and what goes on from it: none changes state nor position. require_order
# compares the names that ORDER is a digest of, which earlier versions wrote too.
_FREE = frozenset({"torch", "max_local_batch_size", SHARDING, ORDER})


class CheckpointMismatch(UserError, RuntimeError):
    """The script does not fit the checkpoint."""


class CheckpointsUnreadable(InfrastructureLost, RuntimeError):
    """No checkpoint can be chosen: the directory cannot be listed or is of an older version, or none of the members
    could read the chosen one, which may be whole."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Rank 0's choice; place None: there is no checkpoint to go on from. run: the number of the run that begins.
    replica: whose parts are read, see Header; all shards must read those of one replica. is_noted: the file of the run
    was written."""

    run: int
    place: RunState | None
    replica: str = ""
    is_noted: bool = True

    @property
    def step(self) -> int:
        return self.place.name.step if self.place else 0


@dataclass(frozen=True, slots=True)
class Restored:
    """A state as it was captured, with the loader's position and the step committed last."""

    step: int
    position: Mapping[str, int]
    state: dict[str, Any]


def choose(storage: Storage, job: str, refused: frozenset[PartSet], say: Callable[[str], None]) -> Choice:
    """Makes rank 0's choice, and writes down the run that begins.

    Raises CheckpointsUnreadable: to begin anew or from an older checkpoint, where newer ones only can't be seen, would
    undo those.
    """
    try:
        storage.prepare()
        found = catalogue.find(storage, refused)
        newest = catalogue.newest_complete(found)
        run = catalogue.next_run(storage)
    except OldFormat as error:
        raise CheckpointsUnreadable(str(error)) from error
    except (OSError, UnreadableRun) as error:
        raise CheckpointsUnreadable(
            f"{storage} can't be read: {error}. Mend it, or start with another --checkpoint-dir"
        ) from error
    for one in itertools.takewhile(lambda f: f is not newest, found):
        say(f"checkpoint {one.place.directory_name} is not used: {one.reason}")
    choice = Choice(run, None)
    if newest is not None:
        choice = Choice(run, newest.place, newest.headers[0].replica)
    try:
        catalogue.write_run(storage, Run(run, choice.step), job)
    except OSError as error:
        say(f"run {run} can't be noted in {storage}: {error}")
        return replace(choice, is_noted=False)
    return choice


def share(communicator: Communicator, choice: Choice | None, wait: Callable[[Pending], None]) -> Choice:
    """Returns rank 0's choice on every rank. choice: of rank 0, else None. Raises CollectiveFailed."""
    row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device="cpu")
    if choice is not None:
        name = choice.place.directory_name if choice.place else ""
        text = json.dumps([choice.run, name, choice.replica, choice.is_noted]).encode()
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    wait(communicator.broadcast(row, 0))
    run, name, replica, is_noted = json.loads(row.numpy().tobytes().rstrip(b"\0"))
    return Choice(run, RunState.of(name), replica, is_noted)


def require_one_directory(
    storage: Storage, choice: Choice, pause: Callable[[float], None] = time.sleep
) -> None:
    """Checks that the run's file, which rank 0 has written, is in this member's storage too. Blocks on the disk.

    Where it is not, the job's checkpoints would have their parts in several directories, and none would be whole. An
    unreadable or missing storage passes; its writes fail and are reported.
    Raises CheckpointsUnreadable.
    """
    if not choice.is_noted:
        return
    for delay_s in (*_DELAYS_S, None):
        try:
            if catalogue.has_run(storage, choice.run):
                return
        except OSError:
            return
        if delay_s is not None:
            pause(delay_s)
    raise CheckpointsUnreadable(
        f"{storage} is another directory here than on the node of rank 0: it lacks the file of run {choice.run}, which "
        f"rank 0 wrote. All nodes must see one --checkpoint-dir: mount it here, or give a shared one"
    )


def read(
    storage: Storage,
    place: RunState,
    fingerprint: Mapping[str, str],
    reader: Reader | None = None,
    replica: str | None = None,
) -> Restored:
    """Reads the state and checks every digest of what is read. reader: None: whole tensors. replica: whose parts are
    read, see catalogue.whole_sets.

    Raises CheckpointMismatch if it is another script's, CorruptPart or OSError if it can't be used.
    """
    whole, reason = catalogue.whole_sets(storage, place, replica)
    if not whole:
        raise CorruptPart(reason)
    _require_fit(storage, place, whole[0].headers[0], fingerprint, 0 if reader is None else reader.shards)
    try:
        return load_first(storage, whole, reader)
    except OtherShards as error:
        raise CheckpointMismatch(f"checkpoint {storage}/{place.directory_name}: {error}") from error


def load_first(storage: Storage, whole: Sequence[Found], reader: Reader | None = None) -> Restored:
    """Reads the state from the first of these whole sets of its parts that is not corrupt. Raises as `load`."""
    for found in whole[:-1]:
        try:
            return load(storage, found, reader)
        except CorruptPart:  # bytes; what its headers say was seen before
            continue
    return load(storage, whole[-1], reader)


def load(storage: Storage, found: Found, reader: Reader | None = None) -> Restored:
    """Reads the state of a complete checkpoint, as `read` gives it.

    Raises CorruptPart, OtherShards, OSError, of which ENOMEM if there is no memory for it.
    """
    first = found.headers[0]
    directory = found.place.directory_name
    names = [f"{directory}/{h.file_name}" for h in found.headers]
    try:
        assembly = Assembly(part_file.read_manifest(storage, names[0]), found.headers, reader)
        if assembly.layout_digest != first.layout_digest:
            raise CorruptPart("its manifest is of another state")

        def read_part(name: str) -> None:
            try:
                part_file.read_data(storage, name, assembly.targets)
            except CorruptPart as error:
                raise CorruptPart(f"{name}: {error}") from error

        read_each(
            read_part, [name for name, h in zip(names, found.headers, strict=True) if assembly.needs(h)]
        )
        return Restored(first.name.step, first.position, assembly.state())
    except OtherShards:
        raise
    except (NoMemory, MemoryError, RuntimeError) as error:
        if not isinstance(error, NoMemory) and not is_out_of_memory(error):
            raise
        raise OSError(errno.ENOMEM, f"no memory for its state: {error}") from error
    except (StateCodecError, ValueError) as error:
        raise CorruptPart(f"its state can't be decoded: {error}") from error


def _require_fit(
    storage: Storage, place: RunState, header: Header, own: Mapping[str, str], shards: int
) -> None:
    """Checks that the script fits the checkpoint. Raises CheckpointMismatch otherwise.

    shards: workers of a replica of this job; 0: no job reads.
    """
    written, own = _comparable(header.fingerprint), _comparable(own)
    differing = {
        key: f"{key}: the checkpoint has {written.get(key, 'none')}, the script {own.get(key, 'none')}"
        for key in sorted(written.keys() | own.keys())
        if key not in _FREE and written.get(key) != own.get(key)
    }
    if differing.keys() == {"model"} and shards not in (0, header.shards):
        raise CheckpointMismatch(
            f"checkpoint {storage}/{place.directory_name} was written with --replica-size {header.shards} and this job "
            f"has --replica-size {shards} ({differing['model']}). If the model is the same, its algorithm keeps "
            "tensors for each shard, which can't be divided among another number of shards: start with --replica-size "
            f"{header.shards}. If the model is another one, start with another --checkpoint-dir"
        )
    if differing.keys() == {"model"} and _parameter_count(written) == _parameter_count(own):
        raise CheckpointMismatch(
            f"checkpoint {storage}/{place.directory_name} does not fit the script ({differing['model']}). If the model "
            "is the same, an earlier version of bagua wrote it, with its algorithm's tensors in another layout: go on "
            "with that version, or start with another --checkpoint-dir and a model from `python -m "
            "bagua_core.checkpoint export`. If the model is another one, start with another --checkpoint-dir"
        )
    if differing:
        raise CheckpointMismatch(
            f"checkpoint {storage}/{place.directory_name} is of another script ({'; '.join(differing.values())}). "
            "Start with another --checkpoint-dir, or remove this one"
        )


def require_order(
    checkpoint: str, written: Sequence[Sequence[str | None]], own: Sequence[Sequence[str | None]]
) -> None:
    """Checks that the numbers in the optimizers' states mean the same parameters. Raises CheckpointMismatch.

    written, own: StateRegistry.parameter_names of the checkpoint and of the script; a parameter without a name is in no
    wrapped model. Whether the numbers of parameters agree is checked when an optimizer loads its state.
    """
    for optimizer, (theirs, ours) in enumerate(zip(written, own, strict=False)):
        for number, (name, own_name) in enumerate(zip(theirs, ours, strict=False)):
            if name != own_name:
                raise CheckpointMismatch(
                    f"checkpoint {checkpoint}: parameter {number} of optimizer {optimizer} is "
                    f"{name or 'in no wrapped model'}, and in the script {own_name or 'in no wrapped model'}. The "
                    "optimizer's state would go to other parameters. Give the optimizer its parameters in the order "
                    "that the checkpoint has, or start with another --checkpoint-dir. A set has another order in "
                    "each process: sort what comes from one"
                )


def _comparable(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Returns the fingerprint without the names that Bagua registers itself. They follow from its other values, and
    versions differ in them."""
    names = fingerprint.get("registered", "").split(", ")
    own = [name for name in names if not name.startswith("bagua.")]
    return {**fingerprint, "registered": ", ".join(own) or "none"}


def _parameter_count(fingerprint: Mapping[str, str]) -> str:
    """Returns how many parameters the script's models have, as StateRegistry.fingerprint says it."""
    return fingerprint.get("model", "").partition(",")[0]
