"""Trainings with checkpointers for tests: what an engine does at commits and at the beginning, without engines."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_contract.checkpoint_every import CheckpointEvery
from bagua_contract.records import StateName
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.checkpointer import Checkpointer, Moment, Settings
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.storage import Storage
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.state.trainings import Training

DEADLINE_S = 10.0
made: list[Rank] = []
"""Since the test began; the fixture ends their threads."""


def wait(pending: Pending) -> None:
    pending.wait()


class FailingStorage(LocalStorage):
    """A directory whose mount fails for a while: in each call named by `where` for what lies under `unreadable`."""

    def __init__(self, root: Path, where: str, number: int) -> None:
        super().__init__(root)
        self.where, self.number = where, number
        self.unreadable = ""

    def _fail(self, where: str, name: str) -> None:
        if self.unreadable and where == self.where and name.startswith(self.unreadable):
            raise OSError(self.number, os.strerror(self.number))

    def entries(self, directory: str = "") -> list[str]:
        self._fail("list", directory)
        return super().entries(directory)

    def open(self, name: str) -> io.BufferedReader:
        self._fail("open", name)
        return super().open(name)


class Rank:
    """One worker: its training, the state's name, its checkpointer. communicator None: a world of one."""

    def __init__(
        self,
        root: Path | Storage,
        communicator: Communicator | None,
        every: str = "2",
        seed: int = 1,
        job: str = "job",
        clock: Any = None,
        **fingerprint: str,
    ) -> None:
        made.append(self)
        self.communicator = communicator
        self.training = Training("adam", seed)
        self.name = StateName()
        self.job = job
        self.said: list[str] = []
        self.generation = communicator.generation if communicator else 1
        settings = Settings(
            LocalStorage(root) if isinstance(root, Path) else root, CheckpointEvery.decode(every)
        )
        script = {**self.training.registry.fingerprint(), **fingerprint}
        clocks = {"clock": clock} if clock else {}
        self.checkpointer = Checkpointer(settings, self.said.append, lambda: script, **clocks)

    @property
    def world_size(self) -> int:
        return self.communicator.world_size if self.communicator else 1

    @property
    def part(self) -> int:
        return self.communicator.global_rank if self.communicator else 0

    @property
    def moment(self) -> Moment:
        position = {"epoch": self.name.step // 10, "batch": self.name.step % 10}
        return Moment(self.job, self.name, self.part, self.world_size, position)

    def begin(self) -> None:
        """An engine's path when no worker has any state; all can read here."""
        while (choice := self.checkpointer.choose(self.communicator, self.job, wait)) is not None:
            if choice.place is None:
                return
            restored = self.checkpointer.read(choice)
            if restored is None:
                self.checkpointer.could_not_read(choice)
                continue
            self.training.registry.restore(restored.state)
            self.name = StateName(self.generation, restored.step)
            assert restored.position == self.moment.position
            return

    def step(self, *, settle: bool = True) -> None:
        self.training.train(1, seed=self.name.step)
        self.name = StateName(self.generation, self.name.step + 1)
        if self.checkpointer.is_due(self.moment, self.communicator, wait):
            self.checkpointer.write(self.moment, self.training.registry.capture)
        if settle:
            assert self.checkpointer.writer.wait(DEADLINE_S)

    def end(self) -> None:
        self.checkpointer.finish(self.moment, self.training.registry.capture, DEADLINE_S)


def world(root: Path | Storage, size: int, **keywords: Any) -> list[Rank]:
    if size == 1:
        return [Rank(root, None, **keywords)]
    return [Rank(root, communicator, **keywords) for communicator in build_in_process(size)]


def together(ranks: Sequence[Rank], steps: int = 0, *, begin: bool = False, end: bool = False) -> None:
    def act(rank: Rank) -> None:
        if begin:
            rank.begin()
        for _ in range(steps):
            rank.step()
        if end:
            rank.end()

    run_ranks(ranks, act)


def steps_on_disk(root: Path) -> list[int]:
    return [f.place.name.step for f in catalogue.find(LocalStorage(root)) if f.is_complete]
