"""The end of a child process is seen at once, within a bound."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading

import pytest

from bagua_agent.base.process_end import wait_for_end
from tests.lab.wait import HANG_S


def test_an_end_is_waited_for_without_looking_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(delay_s: float) -> None:
        raise AssertionError(f"slept for {delay_s} s")

    with subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        monkeypatch.setattr(subprocess.time, "sleep", fail)  # type: ignore[attr-defined]
        threading.Timer(0.05, process.stdin.close).start()
        assert wait_for_end(process, HANG_S) == 7
    assert wait_for_end(process, HANG_S) == 7


def test_one_that_goes_on_is_waited_for_within_the_bound() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            wait_for_end(process, 0.01)
        process.kill()
        assert wait_for_end(process, HANG_S) == -9


def none_left(pid: int) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_without_a_descriptor_for_it_the_bound_holds_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller sends SIGKILL then."""
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            wait_for_end(process, 0.01)
        process.kill()
        assert wait_for_end(process, HANG_S) == -9


class Adopted:
    """A child that no Popen knows, as one that was there before this program."""

    args = ("adopted",)

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_child_that_this_program_did_not_start_is_waited_for_alike(
    monkeypatch: pytest.MonkeyPatch, has_descriptors: bool
) -> None:
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", none_left)
    end, kept = os.pipe()
    pid = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, end, 0)])
    os.close(end)
    try:
        with pytest.raises(subprocess.TimeoutExpired, match="adopted"):
            wait_for_end(Adopted(pid), 0.01)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(kept)
    assert wait_for_end(Adopted(pid), HANG_S) == -9
