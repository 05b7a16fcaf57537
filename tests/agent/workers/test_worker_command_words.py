"""A command as it is typed, and as one worker gets it."""

from __future__ import annotations

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand


def test_torchruns_macro_stands_for_the_local_rank() -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py", ("--out", "log-${local_rank}.txt", "$local_rank"))
    assert command.for_worker(3).args == ("--out", "log-3.txt", "$local_rank")
    plain = WorkerCommand(CommandKind.SCRIPT, "train.py", ("--out", "x"))
    assert plain.for_worker(3) is plain


@pytest.mark.parametrize(
    ("kind", "typed"),
    [
        (CommandKind.SCRIPT, "t 'a b'"),
        (CommandKind.MODULE, "-m t 'a b'"),
        (CommandKind.EXECUTABLE, "--no-python t 'a b'"),
        (CommandKind.RUN_PATH, "--run-path t 'a b'"),
    ],
)
def test_it_reads_as_it_is_typed(kind: CommandKind, typed: str) -> None:
    assert str(WorkerCommand(kind, "t", ("a b",))) == typed
