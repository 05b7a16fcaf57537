"""The file that TORCHELASTIC_ERROR_FILE names to the launcher holds the job's first failure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.node.torchrun import launcher_error_file
from tests.peers.conftest import Launch


def error_of(launch: Launch, directory: Path, script: str, *words: str) -> tuple[int, Any]:
    file = directory / "launcher.json"
    file.write_text("of an earlier run")
    done = launch(*words, script=script, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert sorted(os.listdir(directory))[:1] == ["launcher.json"] and not list(
        directory.glob("launcher.json.*")
    )
    return done.returncode, json.loads(file.read_text())["message"]


def test_an_exception_with_its_callstack(launch: Launch, tmp_path: Path) -> None:
    code, message = error_of(launch, tmp_path, "def f(): raise ValueError('bad')\nf()\n")
    assert code == 1
    assert (message["message"], message["errorCode"]) == ("ValueError: bad", 1)
    assert "in f" in message["extraInfo"]["py_callstack"] and message["extraInfo"]["timestamp"].isdigit()


def test_torchs_own_message_is_passed_on(launch: Launch, tmp_path: Path) -> None:
    script = """
import json, os
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "mine", "extraInfo": {"mine": 1}}}, file)
raise SystemExit(4)
"""
    code, message = error_of(launch, tmp_path, script)
    assert code == 4
    assert message == {"message": "mine", "extraInfo": {"mine": 1}, "errorCode": 4}


def test_a_signal_is_told_with_its_number(launch: Launch, tmp_path: Path) -> None:
    _, message = error_of(launch, tmp_path, "import os\nos.kill(os.getpid(), 11)\n")
    assert (message["message"], message["errorCode"]) == ("killed by SIGSEGV", -11)


def test_the_launchers_own_error(launch: Launch, tmp_path: Path) -> None:
    words = ("--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "x", "--rdzv-conf", "join_timeout=1")
    code, message = error_of(launch, tmp_path, "", "--nnodes", "2", *words)
    assert code == 1 and "127.0.0.1:1" in message["message"]


def test_success_writes_nothing(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "launcher.json"
    assert launch(script="", env={"TORCHELASTIC_ERROR_FILE": str(file)}).returncode == 0
    assert not file.exists()


@pytest.mark.parametrize("place", ["/no/such/directory/file"])
def test_a_file_that_cannot_be_written_changes_nothing_else(launch: Launch, place: str) -> None:
    done = launch(script="raise SystemExit(5)", env={"TORCHELASTIC_ERROR_FILE": place})
    assert done.returncode == 5 and "can't be written" in done.stderr


def test_a_link_at_its_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "launcher.json"
    victim.write_text("of another account")
    (tmp_path / f"launcher.json.{os.getpid()}").symlink_to(victim)
    launcher_error_file._write(str(file), {"message": "x"})
    assert victim.read_text() == "of another account" and not file.exists()
