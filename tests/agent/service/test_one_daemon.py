"""Two daemons never follow one node's orders, and a killed one leaves no lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
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
