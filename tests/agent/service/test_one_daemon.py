"""Two daemons never follow one node's orders, and a killed one leaves no lock."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.service.one_daemon import FILE_NAME, only_daemon

HOLD = """
import signal, subprocess, sys
from bagua_agent.service.one_daemon import only_daemon
with only_daemon(sys.argv[1]):
    unit = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("holds", unit.pid, flush=True)
    signal.pause()
"""


def test_a_second_one_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, state], stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        assert first.stdout is not None
        word, pid = first.stdout.readline().split()
        assert word == "holds"
        with (
            pytest.raises(UserError, match=f"another daemon runs with {state}; stop it first"),
            only_daemon(state),
        ):
            pass
        os.kill(first.pid, signal.SIGKILL)  # its unit goes on and holds nothing
        first.wait(10)

        def is_free() -> bool:
            with only_daemon(state):
                return True

        assert is_free() and is_free()
        os.kill(int(pid), signal.SIGKILL)
    finally:
        if first.poll() is None:
            first.kill()
        if first.stdout is not None:
            first.stdout.close()
        first.wait(10)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot make"), only_daemon(str(tmp_path)):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_in_place_of_the_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    said = f"cannot make {tmp_path / FILE_NAME}: Is a directory; check directories.state"
    with pytest.raises(UserError, match=re.escape(said)), only_daemon(str(tmp_path)):
        pass


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_lock_that_the_file_system_refuses_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = []

    def refuse(descriptor: int, operation: int) -> None:
        asked.append(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    said = re.escape(f"cannot lock {tmp_path / FILE_NAME}: {os.strerror(number)}; ")
    kind = InfrastructureLost if number == errno.EIO else UserError
    with pytest.raises(kind, match=said), only_daemon(str(tmp_path)):
        raise AssertionError("it was not refused")
    (descriptor,) = asked
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptor)  # the file is closed
