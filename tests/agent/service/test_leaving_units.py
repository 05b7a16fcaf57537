"""A unit that was asked to leave is asked once, whichever daemon comes after, and also where that can't be noted."""

from __future__ import annotations

import errno
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown
from bagua_agent.cluster.cluster_records import write_orders
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.units.units import FoundUnit, UnitFolders, UnitNote, UnitRequest, units_folder
from tests.agent.service.daemon_here import NODE, config_of, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0


class Units:
    """Runs nothing: `job` lives as long as its process, and takes its time to leave."""

    def __init__(self, pid: int) -> None:
        self.asked: list[str] = []
        self.failures: list[Exception] = []  # of the next requests to leave
        self._pid = pid

    def found(self) -> list[FoundUnit]:
        return [FoundUnit("job", self._pid, None)]

    def start(self, job_id: str, folder: Path) -> None:
        raise AssertionError("no order asks for a start")

    def ask_to_leave(self, job_id: str) -> None:
        self.asked.append(job_id)
        if self.failures:
            raise self.failures.pop(0)

    def kill(self, job_id: str) -> None:
        raise AssertionError("it has minutes to leave")

    def forget(self, job_id: str) -> None:
        raise AssertionError("it lives")


class Scene:
    def __init__(self, directory: Path, etcd: EmbeddedEtcd, store: Store, pid: int) -> None:
        self.directory, self.etcd, self.store = directory, etcd, store
        self.units = Units(pid)
        command = WorkerCommand(CommandKind.SCRIPT, "train.py")
        request = UnitRequest(JobConfig(command=command, job_id="job"), {}, str(directory))
        folders = UnitFolders(units_folder(config_of(etcd, directory).directories_state))
        folders.make(request, UnitNote(order=1, slots=(0,), shutdown_timeout_s=600.0))
        store.put(cluster_keys.orders(NODE), write_orders(()))  # present, and does not name it

    def daemon_lives_until(self, claim: str) -> list[str]:
        """A daemon from its start until it has said, or told the cluster, `claim`; what it said."""
        with running_daemon(self.etcd, self.store, self.directory, units=self.units) as said:
            eventually(lambda: claim in self._told(said), DEADLINE_S, lambda: f"{claim}; said {said}", 0.02)
        return said

    def _told(self, said: list[str]) -> str:
        stands = self.store.get(cluster_keys.node(NODE))
        return "\n".join(said) + ("\nthe node's record is in etcd" if stands is not None else "")


@pytest.fixture
def scene(plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path) -> Iterator[Scene]:
    process = subprocess.Popen(["sleep", "600"])
    yield Scene(tmp_path, plain_etcd, plain_store, process.pid)
    process.kill()
    process.wait()


def test_a_daemon_that_starts_again_does_not_ask_again(scene: Scene) -> None:
    """A second SIGTERM would end the job's agent at once instead of at a step boundary."""
    scene.daemon_lives_until("job job is asked to leave")
    assert scene.units.asked == ["job"]
    said = scene.daemon_lives_until("the node's record is in etcd")
    assert any("runs here already" in line for line in said), "it found the unit"
    assert not any("asked to leave" in line for line in said)
    assert scene.units.asked == ["job"]


def test_a_full_disk_keeps_no_unit_from_being_asked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: UnitFolders, job_id: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UnitFolders, "mark_asked", full)
    scene.daemon_lives_until("job job is asked to leave")
    assert scene.units.asked == ["job"]


def test_a_look_at_the_node_that_hangs_keeps_no_unit_from_being_asked(scene: Scene) -> None:
    """As nvidia-smi does in a driver that has failed, or a file system whose server is away: no signal ends it."""
    let_go = threading.Event()

    def hangs() -> tuple[str, ...]:
        assert let_go.wait(100 * DEADLINE_S)
        return ()

    def asked() -> bool:
        return bool(scene.units.asked)

    running = running_daemon(scene.etcd, scene.store, scene.directory, hangs, scene.units)
    try:
        with running as said:
            eventually(asked, DEADLINE_S, lambda: f"the unit is asked to leave; said {said}", 0.02)
            let_go.set()
    finally:
        let_go.set()


@pytest.mark.parametrize(
    ("failure", "asked"),
    [(InfrastructureLost("systemd is away"), 2), (OutcomeUnknown("systemd did not answer"), 1)],
    ids=["refused", "not answered"],
)
def test_a_daemon_that_starts_again_repeats_a_request_that_failed(
    scene: Scene, failure: InfrastructureLost, asked: int
) -> None:
    scene.units.failures.append(failure)
    said = scene.daemon_lives_until(f"asking it to leave failed: {failure}")
    assert any("is asked to leave" in line for line in said) and scene.units.asked == ["job"]
    scene.daemon_lives_until("job job is asked to leave" if asked > 1 else "the node's record is in etcd")
    assert scene.units.asked == ["job"] * asked
