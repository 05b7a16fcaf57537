"""A daemon forgets removed jobs, removes their logs, and puts nothing of them back, in any order of events."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.cluster.cluster_records import write_removal
from bagua_agent.cluster.cluster_view import RemovalView
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service import daemon as daemon_module
from bagua_agent.service.logs.kept_logs import KeptLogs, owners_folder
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import StartedUnits, orders, runs_good, submission, units_of
from tests.agent.etcd.conftest import Relay
from tests.agent.service.daemon_here import NODE, config_of, running_daemon
from tests.agent.service.test_job_retention import end, submit
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

DEADLINE_S = 20.0
SUBMISSION, OUTCOME = cluster_keys.submission("demo"), cluster_keys.outcome("demo")


class Units(StartedUnits):
    """Also asked to leave, which they do at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def ask_to_leave(self, job_id: str) -> None:
        self.asked.append(job_id)
        self.forget(job_id)


def write_logs(folder: Path, nonce: str) -> Path:
    """As a unit of this submission left them."""
    directory = folder / "log" / "demo" / NODE
    (directory / "slot0-w").mkdir(parents=True)
    KeptLogs(owners_folder(str(folder / "state")), folder / "log", NODE).begin("demo", nonce)
    return directory


def await_heard(store: Store, said: list[str]) -> None:
    """Earlier writes have arrived: the job that is ordered after them runs."""
    store.put(cluster_keys.submission("good"), submission("good"))
    store.put(cluster_keys.orders(NODE), orders("good"))
    eventually(lambda: runs_good(store), DEADLINE_S, lambda: f"the good job runs; said: {said}")


def await_line(said: list[str], *words: str) -> None:
    eventually(
        lambda: any(all(w in line for w in words) for line in said), DEADLINE_S, lambda: f"{words}: {said}"
    )


def lose(store: Store, *keys: str) -> None:
    store.transact(deletes=keys)


def test_a_removed_job_is_forgotten_and_its_logs_go(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    nonce = submit(plain_store, "demo")
    end(plain_store, "demo")
    directory = write_logs(tmp_path, nonce)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        await_heard(plain_store, said)
        cluster_requests.delete(plain_store, "demo", time.time())
        await_line(said, "job demo was removed, and its logs here with it")
        assert not directory.exists()
        lose(plain_store, cluster_keys.submission("good"))
        await_line(said, "etcd has lost", "submissions/good; it is put back")
    assert plain_store.get(SUBMISSION) is None and plain_store.get(OUTCOME) is None
    assert not any("/demo" in line for line in said), said


def test_a_removal_that_was_made_while_it_was_away_removes_the_logs(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    nonce = submit(plain_store, "demo")
    end(plain_store, "demo")
    cluster_requests.delete(plain_store, "demo", time.time())
    submit(plain_store, "demo")
    directory = write_logs(tmp_path, nonce)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        await_line(said, "job demo was removed, and its logs here with it")
    assert not directory.exists() and plain_store.get(SUBMISSION) is not None


def test_logs_of_a_job_whose_removal_came_and_went_while_it_was_away_go(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    """Those of a job that the cluster still has stay, however long ago it began."""
    submit(plain_store, "demo")
    directory = write_logs(tmp_path, "of-the-removed-one")
    owners = owners_folder(str(tmp_path / "state"))
    long_ago = (time.time() - 4 * DAY_S,) * 2
    os.utime(owners / "demo", long_ago)
    (owners / "fresh").write_text("of-another-removed-one")
    (owners / "kept").write_text(submit(plain_store, "kept"))
    os.utime(owners / "kept", long_ago)
    policy = ClusterPolicy(logs_tidied_every_s=0.1)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units(), policy=policy) as said:
        await_line(said, "job demo was removed while this node was away, and its logs here are removed now")
        eventually(
            lambda: (owners / "kept").stat().st_mtime > long_ago[0], DEADLINE_S, "it is known to be there"
        )
    assert not directory.exists()
    assert sorted(path.name for path in owners.iterdir()) == ["fresh", "kept"]


def test_logs_that_can_not_be_removed_are_told_of_in_one_line(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    nonce = submit(plain_store, "demo")
    end(plain_store, "demo")
    directory = write_logs(tmp_path, nonce)
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        cluster_requests.delete(plain_store, "demo", time.time())
        await_line(said, "removing its logs failed", "remove them by hand")
        await_heard(plain_store, said)
    assert sum("its logs" in line for line in said) == 1, said
    assert (tmp_path / "elsewhere" / "slot0-w").exists()


def test_after_a_loss_what_was_removed_stays_away_and_the_rest_comes_back(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    submit(plain_store, "demo")
    submit(plain_store, "kept")
    end(plain_store, "kept")
    end(plain_store, "demo")
    kept = [plain_store.get(key) for key in (cluster_keys.submission("kept"), cluster_keys.outcome("kept"))]
    nonce = cluster_requests.submission_nonce(plain_store, "demo")
    removal = cluster_keys.removal(nonce)
    write_logs(tmp_path, nonce)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        await_heard(plain_store, said)
        cluster_requests.delete(plain_store, "demo", time.time())
        await_line(said, "job demo was removed, and its logs here with it")  # it has heard of the removal
        lost = [kv.key for kv in plain_store.get_prefix(cluster_keys.PREFIX)[0] if "/nodes/" not in kv.key]
        lose(plain_store, *lost)
        eventually(
            lambda: all(plain_store.get(key) for key in lost),
            DEADLINE_S,
            lambda: f"{lost} are put back; said: {said}",
        )
    assert removal in lost and SUBMISSION not in lost
    assert plain_store.get(SUBMISSION) is None and plain_store.get(OUTCOME) is None
    for before in kept:
        assert before is not None
        after = plain_store.get(before.key)
        assert after is not None and after.value == before.value


def test_a_submission_that_another_put_back_is_not_taken_up(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    nonce = "n1"
    plain_store.put(cluster_keys.removal(nonce), write_removal(RemovalView("demo", time.time())))
    plain_store.put(SUBMISSION, submission("demo", nonce=nonce))
    units = Units()
    plain_store.put(cluster_keys.orders(NODE), orders("demo"))
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        eventually(lambda: "demo" in units_of(plain_store), DEADLINE_S, lambda: f"it heard of it: {said}")
        assert units_of(plain_store)["demo"].state == pb.Unit.WAITING
        lose(plain_store, SUBMISSION)
        await_heard(plain_store, said)
    assert units.found()[0].job_id == "good" and plain_store.get(SUBMISSION) is None


def test_a_removal_at_the_end_of_its_time_is_not_put_back(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    old, young = cluster_keys.removal("old"), cluster_keys.removal("young")
    plain_store.put(old, write_removal(RemovalView("demo", time.time() - 3.01 * DAY_S)))
    plain_store.put(young, write_removal(RemovalView("demo", time.time())))
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        await_heard(plain_store, said)
        lose(plain_store, old, young)
        eventually(lambda: plain_store.get(young), DEADLINE_S, lambda: f"the young one: {said}")
        await_line(said, "etcd has lost", "removals/young")
    assert plain_store.get(old) is None


def test_one_that_was_out_of_touch_for_days_puts_nothing_back(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, or asleep: the removal may have come and gone meanwhile."""
    jump = [0.0]
    monkeypatch.setattr(daemon_module, "_clock_s", lambda: time.monotonic() + jump[0])
    submit(plain_store, "demo")
    end(plain_store, "demo")
    with running_daemon(plain_etcd, plain_store, tmp_path, units=Units()) as said:
        await_heard(plain_store, said)
        jump[0] = 2.1 * DAY_S
        lose(plain_store, SUBMISSION, OUTCOME)
        await_line(said, SUBMISSION, "out of touch")
        await_line(said, OUTCOME, "out of touch")
        jump[0] += 120.0  # in touch since
        await_heard(plain_store, said)
        lose(plain_store, cluster_keys.submission("good"))
        await_line(said, "etcd has lost", "submissions/good; it is put back")
    assert plain_store.get(SUBMISSION) is None and plain_store.get(OUTCOME) is None


def test_a_unit_of_a_removed_job_makes_way_for_the_next_of_its_name(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    """As on a node that was lost while its job was stopped and removed."""
    first = submit(plain_store, "demo")
    plain_store.put(cluster_keys.orders(NODE), orders("demo", nonce=first))
    units = Units()
    owner = owners_folder(config_of(plain_etcd, tmp_path).directories_state) / "demo"
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        eventually(lambda: units.found(), DEADLINE_S, lambda: f"it runs: {said}")
        end(plain_store, "demo")
        cluster_requests.delete(plain_store, "demo", time.time())
        second = submit(plain_store, "demo")
        await_line(said, "job demo is asked to leave: its job was removed")
        waits = "its order is of another submission of this name"
        eventually(lambda: units_of(plain_store)["demo"].reason == waits, DEADLINE_S, lambda: f"{said}")
        plain_store.put(cluster_keys.orders(NODE), orders("demo", nonce=second))

        def owned() -> str:
            try:
                return owner.read_text()
            except FileNotFoundError:
                return ""  # of the first one until then, and of none in between

        eventually(
            lambda: units.found() and owned() == second,
            DEADLINE_S,
            lambda: f"the second one runs: {said}",
        )
    assert first != second and units.asked == ["demo"]
    assert not any("failures in a row" in unit.reason for unit in units_of(plain_store).values())


def test_one_that_was_cut_off_while_jobs_were_removed_and_etcd_compacted(
    tmp_path: Path,
) -> None:
    """It reads its keys again, and receives the removal of the submission first."""
    etcd = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}")
    direct = Store(StoreConfig((parse_endpoint(etcd.endpoint),)))
    port = free_port()
    relay = Relay(etcd.endpoint, port)
    through = Store(StoreConfig((parse_endpoint(relay.endpoint),)))
    nonce = submit(direct, "demo")
    end(direct, "demo")
    submit(direct, "kept")
    directory = write_logs(tmp_path, nonce)
    try:
        with running_daemon(etcd, through, tmp_path, units=Units()) as said:
            await_heard(direct, said)
            relay.end()
            cluster_requests.delete(direct, "demo", time.time())
            direct.put(cluster_keys.orders(NODE), orders("good", "kept"))
            revision = direct.put("/bagua/v1/x", b"1")
            direct.compact(revision)
            relay = Relay(etcd.endpoint, port)
            await_line(said, "job demo was removed, and its logs here with it")
            eventually(lambda: "kept" in units_of(direct), DEADLINE_S, lambda: f"it follows again: {said}")
            lose(direct, cluster_keys.submission("kept"))
            await_line(said, "etcd has lost", "submissions/kept; it is put back")
        assert not directory.exists()
        assert direct.get(SUBMISSION) is None and direct.get(OUTCOME) is None
        assert not any("etcd has lost" in line and "demo" in line for line in said), said
    finally:
        relay.end()
        through.close()
        direct.close()
        etcd.stop()
