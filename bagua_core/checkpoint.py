"""`python -m bagua_core.checkpoint`: lists the checkpoints of a `--checkpoint-dir` and exports one to a plain file.

The file is made by `torch.save` of tensors and plain values only; `torch.load(..., weights_only=True)` reads it.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from bagua_core.elastic.checkpoint import catalogue, restore
from bagua_core.elastic.checkpoint.catalogue import Found, OldFormat, UnreadableRun
from bagua_core.elastic.checkpoint.layout import OTHER_NAMES
from bagua_core.elastic.checkpoint.part_file import CorruptPart
from bagua_core.elastic.checkpoint.storage import (
    CheckpointDirError,
    Storage,
    StoreError,
    may_be_whole,
    storage_of,
)
from bagua_core.elastic.state.model_tensors import ALGORITHM, BUFFER, PARAMETER
from bagua_core.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

EXPORT = (
    "Write a checkpoint of DIR to OUT.pt, which torch.load reads with weights_only=True: "
    '"step", "position" (of the loader), "models" and "optimizers" (a state dict each), "registered"; '
    '"algorithms" where an algorithm has tensors of its own, "gradients" where .grad holds some.'
)
_OF_ONE_FILE = (errno.EIO, errno.EACCES)  # a bad sector, another owner: other checkpoints may be readable


class ExportError(UserError):
    """Nothing is exported. The message says why, and what there is."""


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bagua_core.checkpoint",
        description="Read the checkpoints that a job wrote into its --checkpoint-dir.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = "List the checkpoints in DIR, the newest first."
    listing = commands.add_parser("list", help=text, description=text)
    exporting = commands.add_parser("export", help=EXPORT, description=EXPORT)
    for command in (listing, exporting):
        command.add_argument("directory", metavar="DIR", help="A --checkpoint-dir: a directory or a URL.")
    exporting.add_argument("output", metavar="OUT.pt", type=Path, help="The file to write.")
    exporting.add_argument("--step", type=int, help="Export this step. Default: the newest complete one.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns the exit code."""
    parser = command_parser()
    given = parser.parse_args(arguments)
    try:
        storage = storage_of(given.directory)
        found = found_in(storage)
        if given.command == "list":
            print(shown(found))
        else:
            export(storage, found, given.output, given.step)
    except (ExportError, CheckpointDirError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def export(storage: Storage, found: list[Found], output: Path, step: int | None) -> None:
    """Writes one of the checkpoints that were found in `storage` to `output`. Raises ExportError."""
    if os.path.exists(output) and not os.path.isfile(output):
        raise ExportError(f"{output} can't be written: it is no ordinary file")
    chosen = choose(storage, found, step)
    if len(found) > 1:
        print(shown(found), file=sys.stderr)
    try:
        restored = restore.load_first(storage, catalogue.whole_sets(storage, chosen.place)[0] or [chosen])
    except (CorruptPart, OSError) as error:
        if isinstance(error, OSError) and may_be_whole(error) and error.errno not in _OF_ONE_FILE:
            raise ExportError(f"{storage}/{chosen.place.directory_name} can't be read: {error}") from error
        raise ExportError(
            f"{storage}/{chosen.place.directory_name} can't be used: {error}. Choose another one by --step:\n"
            + shown(found)
        ) from error
    partial = output.with_name(f".{output.name}.{os.getpid()}.writing")
    try:
        torch.save(exported(restored), partial)
        os.replace(partial, output)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        partial.unlink(missing_ok=True)
        raise ExportError(f"{output} can't be written: {error}") from error
    print(f"step {restored.step} of {storage} is in {output}")


def dcp_reader(directory: str, step: int | None = None) -> StorageReader:
    """Returns a storage reader for `torch.distributed.checkpoint.load(state_dict, storage_reader=...)`.

    directory: a --checkpoint-dir: a directory or a URL. step: which checkpoint; None: the newest complete one.
    state_dict has `model` and `optimizer` as torch's get_model_state_dict and get_optimizer_state_dict give them; any
    number of ranks may load, with any sharding. Raises CheckpointDirError.
    """
    from bagua_core.elastic.checkpoint.dcp_reader import DcpReader

    return DcpReader(storage_of(directory), step)


def found_in(storage: Storage) -> list[Found]:
    """Returns the checkpoints in `storage`, newest first. Raises ExportError, also if there are none."""
    try:
        found = catalogue.find(storage)
    except (OSError, UnreadableRun, OldFormat) as error:
        raise ExportError(f"{storage} can't be read: {error}") from error
    if not found:
        raise ExportError(f"{storage} holds no checkpoint; name the job's --checkpoint-dir")
    return found


def choose(storage: Storage, found: list[Found], step: int | None) -> Found:
    """Returns the newest complete checkpoint, of `step` if that is given. Raises ExportError that lists what is
    there."""
    try:
        chosen = catalogue.newest_complete(f for f in found if step in (None, f.place.name.step))
    except StoreError as error:
        raise ExportError(
            f"a checkpoint that may be complete can't be read: {error}. An older one is exported only if --step names "
            f"it:\n{shown(found)}"
        ) from error
    if chosen is None:
        wanted = "" if step is None else f" of step {step}"
        raise ExportError(f"{storage} holds no complete checkpoint{wanted}:\n{shown(found)}")
    return chosen


def shown(found: list[Found]) -> str:
    """Returns a line for each checkpoint."""
    return "\n".join(
        f"step {f.place.name.step}  run {f.place.run}  "
        + (
            f"{sum(h.data_bytes for h in f.headers)} bytes in {len(f.headers)} parts"
            if f.headers
            else f.reason
        )
        for f in found
    )


def exported(restored: restore.Restored) -> dict[str, Any]:
    """Returns the state in tensors and plain values, under the names that PyTorch's load_state_dict takes."""
    state = restored.state
    models = [{**_named(m, PARAMETER), **_named(m, BUFFER)} for m in state["modules"]]
    for model, others in zip(models, state.get(OTHER_NAMES, ()), strict=False):
        model |= {name: model[first] for name, first in others.items() if first in model}
    exact = {
        "step": restored.step,
        "position": restored.position,
        "models": models,
        "optimizers": state["optimizers"],
        "registered": state["registered"],
    }
    optional = {
        # what each shard has its own of came without elements
        "algorithms": [
            {n: t for n, t in _named(m, ALGORITHM).items() if t.numel()} for m in state["modules"]
        ],
        "gradients": [_named(m, PARAMETER) for m in state.get("gradients", ())],
    }
    exact |= {key: tensors for key, tensors in optional.items() if any(tensors)}
    return {key: _plain(value) for key, value in exact.items()}


def _named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _plain(value: Any) -> Any:
    """Returns `value` as `torch.load(weights_only=True)` reads it: NumPy's arrays become tensors or lists, its scalars
    numbers. Named tuples came as plain ones."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, numpy.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
        except TypeError:  # torch has no such type
            return _plain(value.tolist())
    if isinstance(value, numpy.generic):
        return _plain(value.item())
    known = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
    return value if isinstance(value, known) else str(value)


if __name__ == "__main__":
    sys.exit(main())
