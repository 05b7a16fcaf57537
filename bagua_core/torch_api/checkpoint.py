"""Saves and loads the script's own checkpoints, in the files of the original's save_checkpoint and load_checkpoint.

Owns the layout: <path>/iter_<iteration>/mp_rank_00_model_states.pt, and beside it latest_checkpointed_iteration.txt.
Rank 0 writes. A reader sees a whole checkpoint or the one before: each file is renamed into place, the tracker last. A
rank 0 that the job went on without may still write beside the next one. Each has part files of its own, and leaves the
tracker alone if it has changed since the save began and names a later iteration.
Checkpoints of the job, for which a script calls nothing, are `bagua-launch --checkpoint-dir`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua_core.collectives import allreduce, is_alone
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api.communication import barrier, get_rank
from bagua_core.torch_api.script_world import say, this_script

__all__ = ["load_checkpoint", "save_checkpoint"]

TRACKER = "latest_checkpointed_iteration.txt"
STATES = "mp_rank_00_model_states.pt"


def save_checkpoint(
    iteration: int,
    checkpoints_path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Saves rank 0's states and returns on every worker when they are written. All workers must call it.

    If rank 0 is lost before it has written them, the next rank 0 writes them. A worker without peers waits for no
    other, and saves nothing if its rank is not 0: before its first step, or if the job went on without it. After the
    end of the training the workers that are left raise JobClosing instead, and the states may not be saved. Where the
    algorithm lets replicas differ, what is saved is rank 0's. Raises OSError, JobClosing.

    iteration: the number in the name of the checkpoint's folder.
    checkpoints_path: a directory that every later rank 0 can write; the folder is made in it.
    model, optimizer, lr_scheduler: their state_dict() is saved; None: no such part.
    """
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    is_saved = False
    while not is_saved:
        saves = get_rank() == 0
        if saves:
            _save(iteration, Path(checkpoints_path), parts)
        is_saved = bool(allreduce(torch.tensor(saves, dtype=torch.bool, device="cpu"), ReduceOp.MAX))
        if this_script().engine.in_step:
            return  # a loss fails the step, and the script comes here again
        if is_alone():
            return  # no repetition would bring it rank 0's answer


def _save(iteration: int, root: Path, parts: Mapping[str, Any]) -> None:
    """Writes the states of `parts` and then the tracker. Raises OSError."""
    states = {name: stateful.state_dict() for name, stateful in parts.items() if stateful is not None}
    directory, tracker = root / f"iter_{iteration:07d}", root / TRACKER
    directory.mkdir(parents=True, exist_ok=True)
    before = _text(tracker)
    _put(directory / STATES, lambda part: torch.save({"iteration": iteration, **states}, part))
    for left in directory.glob(f"{STATES}.*.part"):
        left.unlink(missing_ok=True)  # of a rank 0 that was lost while it saved this iteration
    now = _text(tracker)
    named = (now or "").strip()
    if now == before or not named.isdecimal() or int(named) <= iteration:
        _put(tracker, lambda part: part.write_text(str(iteration)))


def load_checkpoint(
    checkpoints_path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Loads the newest checkpoint and returns its iteration; 0 if there is none. All workers must call it, between two
    steps.

    checkpoints_path: as in save_checkpoint; every worker reads it.
    model, optimizer, lr_scheduler: they load their states; None: the checkpoint's is ignored.
    strict: as in Module.load_state_dict.

    Raises ValueError for a checkpoint without a state that is asked for, or with experts in files of their own;
    OSError, and what torch.load raises.
    """
    tracker = Path(checkpoints_path) / TRACKER
    if not tracker.is_file():
        say(f"no checkpoint is loaded: {tracker} does not exist; the script begins at iteration 0")
        return 0
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"{tracker} holds {text[:40]!r}; write the number of the iteration to load into it")
    directory = Path(checkpoints_path) / f"iter_{int(text):07d}"
    if any(directory.glob("expert_*")):
        raise ValueError(
            f"{directory} holds experts in files of their own, as the original's expert parallelism wrote them; merge "
            f"them into {STATES}: every worker holds all experts here"
        )
    states = torch.load(directory / STATES, map_location="cpu", weights_only=True)
    model.load_state_dict(states["model"], strict=strict)
    for name, stateful in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if stateful is None:
            continue
        if name not in states:
            raise ValueError(f"{directory / STATES} has no {name}; save it, or don't ask for it")
        stateful.load_state_dict(states[name])
    barrier()
    return int(text)


def _text(file: Path) -> str | None:
    """Returns what the file holds; None if it is absent."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


def _put(final: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make the file under another name, and renames it. Raises OSError, unless another writer has put the
    file meanwhile and removed this one."""
    part = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(final)
    except FileNotFoundError:
        if not final.exists():
            raise
    except BaseException:
        part.unlink(missing_ok=True)
        raise
