"""The warm parent runs under the workers' account: what it answers is checked before the agent signals anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.process.request_socket import LENGTH
from bagua_agent.workers.start import warm_parent
from bagua_agent.workers.start.warm_fit import StartPlace
from bagua_agent.workers.start.warm_parent import WarmParent

COMMAND = WorkerCommand(CommandKind.SCRIPT, "script.py")
# Says that it is ready, then gives one answer to the first request.
HOSTILE = """
import socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
control.sendall(bytes.fromhex(sys.argv[2]))
control.recv(1 << 20)
control.sendall(open(sys.argv[3], "rb").read())
control.recv(1)
"""

Ask = Callable[[bytes], int | None]


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """What a fork gives when the warm parent answers so."""
    (tmp_path / "script.py").write_text("")
    made: list[WarmParent] = []
    real = warm_parent._start

    def ask(answer: bytes) -> int | None:
        said = tmp_path / "answer"
        said.write_bytes(framed(answer))

        def start(line: list[str], place: StartPlace, control: object) -> subprocess.Popen[bytes]:
            number = line[line.index("--warm-fd") + 1]
            words = [sys.executable, "-c", HOSTILE, number, framed(b'{"ready": true}').hex(), str(said)]
            return real(words, place, control)  # type: ignore[arg-type]

        monkeypatch.setattr(warm_parent, "_start", start)
        warm = WarmParent(COMMAND, dict(os.environ), directory=tmp_path, preimport=())
        made.append(warm)
        warm.start()
        assert warm.wait_ready()
        place = StartPlace(dict(os.environ), tmp_path, sys.executable, ())
        return warm.fork(COMMAND, place, (0, 1, 2), None)

    yield ask
    for warm in made:
        warm.stop()


@pytest.mark.parametrize(
    "answer",
    [
        *(json.dumps({"pid": pid}).encode() for pid in (1, 0, -1, True, "1", 1.5, [], 1 << 70)),
        b'{"pid": 1' + b"0" * 5000 + b"}",
        b"[" * 200_000,
        b"[]",
        b"\xff",
    ],
    ids=lambda answer: answer[:12].decode(errors="replace"),
)
def test_what_names_no_worker_is_not_taken_for_one(ask: Ask, answer: bytes) -> None:
    assert ask(answer) is None


def test_a_process_of_another_account_is_no_worker(ask: Ask) -> None:
    assert ask(json.dumps({"pid": os.getppid()}).encode()) is None


def test_a_child_of_the_agent_that_leads_no_session_is_no_worker(ask: Ask) -> None:
    with subprocess.Popen(["sleep", "60"]) as helper:
        try:
            assert ask(json.dumps({"pid": helper.pid}).encode()) is None
            assert helper.poll() is None
        finally:
            helper.kill()
