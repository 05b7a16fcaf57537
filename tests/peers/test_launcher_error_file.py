"""The file that TORCHELASTIC_ERROR_FILE names to the launcher holds the job's first failure."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
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


def test_names_that_are_not_utf8_reach_the_script_and_its_error_is_reported(
    launch: Launch, tmp_path: Path
) -> None:
    odd, file = os.fsdecode(b"caf\xe9"), tmp_path / "launcher.json"
    (tmp_path / f"{odd}.py").write_text("""
import json, os, sys
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": repr(os.fsencode(sys.argv[1]))}}, file)
raise SystemExit(4)
""")
    options = ("--log-dir", odd, "--redirects", "3", "--max-restarts", "1")
    done = launch(*options, f"{odd}.py", odd, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert done.returncode == 4 and ".g2" in done.stderr, done.stderr
    # the record has another text than the path
    assert json.loads(file.read_text())["message"] == {"message": "b'caf\\xe9'", "errorCode": 4}
    assert r"caf\udce9/" in done.stderr


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


CONTENT = {"message": {"message": "x" * 100_000}}  # more than a pipe holds


def unfinished(file: Path) -> bool:
    return os.path.lexists(f"{file}.{os.getpid()}")


@pytest.mark.parametrize("by_link", [False, True])
def test_a_fifo_or_a_link_to_one_stays_and_its_reader_gets_the_error(tmp_path: Path, by_link: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = tmp_path / "link" if by_link else fifo
    if by_link:
        file.symlink_to(fifo)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; print('ready', flush=True); print(open(sys.argv[1]).read())",
            fifo,
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
            held = os.open(fifo, os.O_RDWR)  # whether or not the reader has come this far
            launcher_error_file._write(str(file), CONTENT)
            os.close(held)
            assert json.loads(reader.communicate(timeout=30)[0]) == CONTENT
        finally:
            reader.kill()
    assert stat.S_ISFIFO(os.lstat(fifo).st_mode) and file.is_symlink() == by_link and not unfinished(file)


def test_a_fifo_that_nothing_reads_delays_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "fifo")
    launcher_error_file._write(str(tmp_path / "fifo"), CONTENT)
    assert "can't be written: No such device or address" in caplog.text


def test_a_fifo_whose_reader_takes_nothing_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_error_file, "_READER_LIMIT_S", 0.01)
    os.mkfifo(tmp_path / "fifo")
    held = os.open(tmp_path / "fifo", os.O_RDWR)
    launcher_error_file._write(str(tmp_path / "fifo"), CONTENT)
    os.close(held)
    assert "can't be written: Connection timed out" in caplog.text


def test_the_launchers_own_output_is_added_to(tmp_path: Path) -> None:
    file, link = tmp_path / "errors.log", tmp_path / "stderr"
    link.symlink_to("/proc/self/fd/2")  # as /dev/stderr
    code = (
        "import sys; from bagua_agent.node.torchrun import launcher_error_file\n"
        "print('said before', file=sys.stderr, flush=True)\n"
        "launcher_error_file._write(sys.argv[1], {'message': 'x'})\n"
    )
    with file.open("w") as stderr:
        subprocess.run([sys.executable, "-c", code, link], stderr=stderr, check=True, timeout=60)
    assert file.read_text() == 'said before\n{"message": "x"}\n' and link.is_symlink()


def test_a_link_to_an_ordinary_file_is_replaced_as_torch_does(tmp_path: Path) -> None:
    """Where it leads may be another account's choice."""
    victim, file = tmp_path / "victim", tmp_path / "launcher.json"
    victim.write_text("of another account")
    file.symlink_to(victim)
    launcher_error_file._write(str(file), {"message": "x"})
    assert victim.read_text() == "of another account"
    assert json.loads(file.read_text()) == {"message": "x"} and not file.is_symlink()


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Such as a mounted one: Kubernetes' /dev/termination-log."""

    def replace(*_: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", replace)
    file = tmp_path / "termination-log"
    file.write_text("of an earlier run, which was longer")
    launcher_error_file._write(str(file), {"message": "x"})
    assert json.loads(file.read_text()) == {"message": "x"} and not unfinished(file)


def test_nothing_unfinished_stays_where_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "directory"
    file.mkdir()
    launcher_error_file._write(str(file), {"message": "x"})
    assert not unfinished(file) and "can't be written: Is a directory" in caplog.text
