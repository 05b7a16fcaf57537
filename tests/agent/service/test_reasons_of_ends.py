"""A job that can't run here is refused once, or ends, with the reason in the record that people see."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, write_orders, write_outcome
from bagua_agent.cluster.cluster_view import (
    ClusterView,
    JobEnd,
    NodeView,
    OrderView,
    OutcomeView,
    SubmissionView,
    UnitState,
    UnitView,
)
from bagua_agent.cluster.job_ends import stopped
from bagua_agent.cluster_client.job_story import follow
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.config.job_config_file import SUBMITTED, encode
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history.job_history import JobEvent, agent_failed, events_of, node_joined
from bagua_agent.job import run
from bagua_agent.observation.cluster_status import cluster_status
from bagua_agent.service.failure_events import write_failure
from bagua_agent.service.units import run_unit
from bagua_agent.service.units.child_units import ChildUnits
from bagua_agent.service.units.units import (
    FoundUnit,
    UnitFolders,
    UnitNote,
    UnitRequest,
    read_note,
    units_folder,
)
from bagua_contract import cluster_pb2 as pb
from tests.agent.service.daemon_here import NODE, config_of, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 40.0


class NeverStarted:
    def found(self) -> list[FoundUnit]:
        return []

    def start(self, job_id: str, folder: Path) -> None:
        raise AssertionError("the kernel would refuse it at every try")


def order_job(store: Store, directory: Path, *arguments: str, user: str = "root") -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "missing.py", arguments)
    submission = pb.Submission(
        protocol=PROTOCOL,
        job_id="job",
        wanted=pb.Submission.RUN,
        min_nodes=1,
        max_nodes=1,
        user=user,
        directory=str(directory),
        launch=encode(JobConfig(command=command, job_id="job"), SUBMITTED),
    )
    store.put(cluster_keys.submission("job"), submission.SerializeToString())
    store.put(cluster_keys.orders(NODE), write_orders([OrderView("job", 1, 1)]))


def told_unit(store: Store) -> pb.Unit:
    found = store.get(cluster_keys.node(NODE))
    units = pb.Node.FromString(found.value).units if found is not None else ()
    return units[0] if units else pb.Unit()


def test_an_argument_that_no_program_can_be_given(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path, "x" * 1_000_000)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=NeverStarted()) as said:
        eventually(
            lambda: told_unit(plain_store).state == UnitState.REFUSED.value,
            DEADLINE_S,
            lambda: f"a refusal; said {said}",
            0.02,
        )
        reason = told_unit(plain_store).reason
    assert "argument 1 has 1000000 bytes, more than the 131071" in reason
    assert len([line for line in said if "is refused here" in line]) == 1


def test_an_agent_that_ends_with_an_error_says_which(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path)
    units = ChildUnits(units_folder(config_of(plain_etcd, tmp_path).directories_state))
    (tmp_path / "log").mkdir()
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        eventually(
            lambda: told_unit(plain_store).failures > 0, DEADLINE_S, lambda: f"its end; said {said}", 0.05
        )
        reason = told_unit(plain_store).reason
    assert f"its agent ended with 2: script 'missing.py' does not exist in {tmp_path}" in reason
    for unit in units.found():
        units.kill(unit.job_id)


def told_events(store: Store) -> list[tuple[str, str]]:
    keys = JobKeys("job")
    return [(event.node_name, event.text) for event in events_of(store.get_prefix(keys.events)[0], keys)]


def run_until_failed(etcd: EmbeddedEtcd, store: Store, folder: Path, units: object) -> tuple[str, str, str]:
    """The unit's reason in the node's record, the job's first event, and what `status` says of the job."""
    with running_daemon(etcd, store, folder, units=units) as said:
        eventually(
            lambda: told_events(store) and told_unit(store).reason,
            DEADLINE_S,
            lambda: f"an event and a reason; said {said}",
            0.05,
        )
        [(node_name, text)] = told_events(store)[:1]
        assert node_name == NODE
        [job] = cluster_status(store, complain=print).jobs
        return told_unit(store).reason, text, job.reason


def test_a_refusal_stands_among_the_jobs_events(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path, "x" * 1_000_000)
    reason, text, status = run_until_failed(plain_etcd, plain_store, tmp_path, NeverStarted())
    assert text.startswith("the job's agent can't be started: ") and reason in text and reason in status


def test_a_missing_account_stands_in_status_and_events(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path, user="no-such-account")
    units = ChildUnits(units_folder(config_of(plain_etcd, tmp_path).directories_state))
    (tmp_path / "log").mkdir()
    reason, text, status = run_until_failed(plain_etcd, plain_store, tmp_path, units)
    said = "its agent ended with 2: user 'no-such-account' does not exist on this node"
    assert said in reason and said in text and said in status
    for unit in units.found():
        units.kill(unit.job_id)


class CantStart:
    """What runs the units does not do as asked, in words that a terminal must not be given."""

    def found(self) -> list[FoundUnit]:
        return []

    def start(self, job_id: str, folder: Path) -> None:
        raise InfrastructureLost("systemd did not start it: no\x1b[2J space" + "e" * 10_000)

    def forget(self, job_id: str) -> None:
        pass


def test_a_unit_that_is_not_started_says_why_in_plain_words(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path)
    reason, text, status = run_until_failed(plain_etcd, plain_store, tmp_path, CantStart())
    assert "job job was not started: systemd did not start it: no\\x1b[2J space" in reason
    assert "\x1b" not in reason + text and max(len(reason), len(text)) < 1000
    assert "job job was not started" in text and "job job was not started" in status


class StartsUnheard:
    """Starts its unit, and is not heard saying so: systemd takes too long under load."""

    def __init__(self) -> None:
        self.alive = False
        self.note = UnitNote()

    def found(self) -> list[FoundUnit]:
        return [FoundUnit("job", os.getpid(), None)] if self.alive else []

    def start(self, job_id: str, folder: Path) -> None:
        self.alive, self.note = True, read_note(folder)
        raise InfrastructureLost("systemd did not start it: timed out")


def test_a_unit_that_was_started_after_all_has_no_such_reason(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path)
    units, before_s = StartsUnheard(), time.time()
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        eventually(lambda: any("timed out" in line for line in said), DEADLINE_S, lambda: f"{said}")
        eventually(
            lambda: (unit := told_unit(plain_store)).state == pb.Unit.RUNNING and not unit.reason,
            DEADLINE_S,
            lambda: f"it runs: {told_unit(plain_store)}",
        )
    assert told_events(plain_store) == []
    assert before_s <= units.note.started_unix_s <= time.time(), "for the next daemon"


def test_an_agent_that_meets_a_bug_leaves_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(*_: object) -> int:
        raise ZeroDivisionError("as the test wants")

    monkeypatch.setattr(run, "run_job", run_job)
    command = WorkerCommand(CommandKind.SCRIPT, "train.py", ())
    folders = UnitFolders(tmp_path / "units")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = folders.make(UnitRequest(JobConfig("job", command), {}, str(tmp_path)), UnitNote())
    assert run_unit.main(folder) == 1
    assert folders.reasons()["job"].startswith("ZeroDivisionError: as the test wants")


def test_a_full_disk_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "units"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    try:
        command = WorkerCommand(CommandKind.SCRIPT, "train.py", ())
        folder = UnitFolders(disk).make(UnitRequest(JobConfig("job", command), {}, str(tmp_path)), UnitNote())
        with pytest.raises(OSError, match="No space left"):
            (disk / "all-of-it").write_bytes(bytes(1 << 20))

        def run_job(config: object, on_error: Callable[[str], None], *_: object) -> int:
            on_error("a reason that needs a page" * 100)
            return 2

        monkeypatch.setattr(run, "run_job", run_job)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        assert run_unit.main(folder) == 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    said = capfd.readouterr().err
    assert f"{folder / 'reason'} can't be written (No space left on device)" in said
    assert f"{folder / 'exit-code'} can't be written (No space left on device)" in said


def test_an_ended_jobs_agents_write_no_such_event(plain_store: Store) -> None:
    """They end with the job's exit code, which the job's own events tell."""
    submission = pb.Submission(protocol=PROTOCOL, job_id="job", nonce="n1")
    event = agent_failed(NODE, 1, "its agent ended with 1")
    for over in (JobKeys("job").result, cluster_keys.outcome("job"), cluster_keys.removal("n1")):
        plain_store.put(over, b"")
        assert not write_failure(plain_store, submission, event, NODE)
        plain_store.delete(over)
    assert write_failure(plain_store, submission, event, NODE)
    assert told_events(plain_store) == [(NODE, "its agent ended with 1")]


def test_a_follower_is_shown_a_failure_that_replaces_an_earlier_one(plain_store: Store) -> None:
    """A node's failures in a row are counted anew once its agent has run for long, so that two have the same key."""
    submission = pb.Submission(
        protocol=PROTOCOL, job_id="job", nonce="n1", wanted=pb.Submission.RUN, min_nodes=1, max_nodes=1
    )
    keys, shown = JobKeys("job"), []
    plain_store.put(cluster_keys.submission("job"), submission.SerializeToString())

    def show(event: JobEvent) -> None:
        shown.append(event.text)
        if event.text == "the first":
            assert write_failure(plain_store, submission, agent_failed(NODE, 1, "the second"), NODE)
            joined = node_joined("a", 1)
            plain_store.put(keys.event(joined.name), joined.encode(NODE, 1e9))
        elif event.text == node_joined("a", 1).text:
            end = write_outcome(OutcomeView(JobEnd.STOPPED, 0, "stopped"), 1e9, "n1")
            plain_store.put(cluster_keys.outcome("job"), end)

    assert write_failure(plain_store, submission, agent_failed(NODE, 1, "the first"), NODE)
    assert follow(plain_store, "job", show, print).outcome == "stopped"
    assert shown == ["the first", "the second", node_joined("a", 1).text]


def test_a_node_with_the_longest_name_can_tell_of_a_failure() -> None:
    assert JobKeys("job").event(agent_failed("n" * 100, 5, "why").name)


def test_a_job_that_is_stopped_before_it_began_ends_with_what_kept_it() -> None:
    failed = UnitView("job", UnitState.ENDED, failures=2, reason="its agent ended with 2: no such user")
    view = ClusterView({"n0": NodeView("n0", 1, units=(failed,))})
    end = stopped(view, SubmissionView("job", 1, 1, stop=True), 0.0, ClusterPolicy())
    assert (
        end is not None
        and end.reason == "stopped before it began; on n0: its agent ended with 2: no such user"
    )
