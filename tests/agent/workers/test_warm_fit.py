"""When a fork may replace a start, when a warm parent is started again, and which children are ours."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.exits.orphans import adopting, is_orphan, reap_orphans
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.start.warm_fit import StartPlace, can_be_warm, restart_delay_s, why_not_forked
from tests.agent.workers.worker_lab import wait_until

PARENT = StartPlace({"A": "1", "RANK": "0", "BAGUA_SLOT": "0"}, Path("/d"), "python", ("torch",))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (PARENT, None),
        (replace(PARENT, env={"A": "1", "RANK": "1", "BAGUA_WORKER_ID": "w", "MASTER_PORT": "2"}), None),
        (replace(PARENT, preimport=()), None),
        (replace(PARENT, preimport=("other",)), "imports"),
        (replace(PARENT, env={**PARENT.env, "A": "2"}), "its A differs"),
        (replace(PARENT, env={**PARENT.env, "OMP_NUM_THREADS": "1"}), "OMP_NUM_THREADS"),
        (replace(PARENT, env={"RANK": "0"}), "its A differs"),
        (replace(PARENT, python="other"), "interpreter"),
        (replace(PARENT, directory=Path("/e")), "directory"),
        (replace(PARENT, account=Account("other", 5, 5, (), "/", "/bin/sh")), "it runs as other"),
    ],
)
def test_only_what_is_read_late_may_differ(wanted: StartPlace, reason: str | None) -> None:
    found = why_not_forked(PARENT, wanted)
    assert found is None if reason is None else found is not None and reason in found


def test_bound_workers_need_a_given_number_of_threads() -> None:
    assert why_not_forked(PARENT, PARENT, bound_to_processors=True) is not None
    given = replace(PARENT, env={"OMP_NUM_THREADS": "1"})
    assert why_not_forked(given, given, bound_to_processors=True) is None


def test_which_commands_can_be_warm() -> None:
    script = WorkerCommand(CommandKind.SCRIPT, "s.py")
    assert [can_be_warm(script, method) for method in ("warm", "fork", "forkserver", "spawn")] == [
        *(True, True, True, False)
    ]
    assert not can_be_warm(WorkerCommand(CommandKind.EXECUTABLE, "s"), "warm")


def test_restarts_are_spaced_and_end() -> None:
    delays = [restart_delay_s(deaths) for deaths in range(1, 10)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


@pytest.mark.parametrize(
    ("pid", "session", "expected"),
    [(5, 5, False), (5, 1, False), (5, 4, True)],
    ids=["leader", "ours", "other"],
)
def test_is_orphan(pid: int, session: int, expected: bool) -> None:
    assert is_orphan(pid, session, own_session=1) is expected


FAMILY = """
import os, sys
if os.fork() == 0:
    os.read(0, 1)
    os._exit(5)
sys.stdout.close()
os._exit(0)
"""


def test_an_adopted_orphan_is_reaped_and_no_child_of_ours() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys\nsys.exit(3)"], start_new_session=True) as ours:
        hold_read, hold_write = os.pipe()
        line = [sys.executable, "-c", FAMILY]
        with adopting(), subprocess.Popen(line, stdin=hold_read, start_new_session=True) as parent:
            parent.wait(10)
        os.close(hold_read)
        own = psutil.Process()
        orphans = [p for p in own.children() if p.pid != ours.pid and p.status() != psutil.STATUS_ZOMBIE]
        orphans = [p for p in orphans if os.getsid(p.pid) == parent.pid]
        assert len(orphans) == 1
        wait_until(lambda: psutil.Process(ours.pid).status() == psutil.STATUS_ZOMBIE, "ours is a zombie")
        os.close(hold_write)
        wait_until(lambda: orphans[0].status() == psutil.STATUS_ZOMBIE, "the orphan is a zombie")
        assert reap_orphans() == [orphans[0].pid]
        assert reap_orphans() == []
        assert ours.wait(10) == 3
