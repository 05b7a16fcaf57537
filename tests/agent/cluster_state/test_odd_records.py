"""A record or a key that is not of this protocol: one line names it, and the rest of the cluster continues."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, read_orders
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_agent.service.units.units import FoundUnit
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_launch.main import cli
from tests.agent.service.daemon_here import LEASE_S, NODE, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 20.0
COMMAND = {"kind": "script", "target": "train.py", "args": []}

ODD_LAUNCHES = {
    "timeout of 400 digits": '{"shutdown_timeout_s": ' + "9" * 400 + "}",
    "integer of 5000 digits": '{"shutdown_timeout_s": ' + "9" * 5000 + "}",
    "timeout that is no number": '{"shutdown_timeout_s": NaN}',
    "timeout without end": '{"shutdown_timeout_s": 1e999}',
    "negative timeout": '{"shutdown_timeout_s": -5}',
    "nested lists": "[" * 200_000,
    "nested lists in a field": '{"role": ' + "[" * 5_000 + "]" * 5_000 + "}",
    "restarts of 400 digits": '{"max_restarts": ' + "9" * 400 + "}",
    "a list as a choice": '{"command": {"kind": [], "target": "x"}}',
    "a NUL in an argument": json.dumps({"command": {**COMMAND, "args": ["a\0b"]}}),
    "half a surrogate pair": json.dumps({"command": COMMAND, "role": "\ud800"}),
    "a field of a megabyte": json.dumps({"x" * 1_000_000: 1}),
}


def submission(job_id: str, launch: str | None = None, **fields: object) -> bytes:
    said = {
        "protocol": PROTOCOL,
        "job_id": job_id,
        "wanted": pb.Submission.RUN,
        "min_nodes": 1,
        "max_nodes": 1,
        "directory": "/",
        "user": "root",
        "launch": json.dumps({"command": COMMAND}) if launch is None else launch,
    }
    return pb.Submission(**{**said, **fields}).SerializeToString()  # type: ignore[arg-type]


def orders(*job_ids: str, nonce: str = "") -> bytes:
    """nonce: of the jobs' submission."""
    made = [pb.Order(job_id=j, slots=1, number=n, nonce=nonce) for n, j in enumerate(job_ids, 1)]
    return pb.Orders(orders=made).SerializeToString()


class StartedUnits:
    """Units that are started and live as long as this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[str, Path] = {}

    def start(self, job_id: str, folder: Path) -> None:
        with self._lock:
            self._started[job_id] = folder

    def found(self) -> list[FoundUnit]:
        with self._lock:
            return [FoundUnit(job_id, os.getpid(), None) for job_id in self._started]

    def forget(self, job_id: str) -> None:
        with self._lock:
            self._started.pop(job_id, None)


def units_of(store: Store) -> dict[str, pb.Unit]:
    found = store.get(cluster_keys.node(NODE))
    return {} if found is None else {u.job_id: u for u in pb.Node.FromString(found.value).units}


# -- a daemon


def runs_good(store: Store) -> bool:
    unit = units_of(store).get("good")
    return unit is not None and unit.state == pb.Unit.RUNNING


def test_a_daemon_refuses_odd_submissions_and_starts_the_next(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    """Each is ordered before the good one, and would have its slot."""
    odd = {f"odd-{n}.": launch for n, launch in enumerate(ODD_LAUNCHES.values())}
    for job_id, launch in odd.items():
        plain_store.put(cluster_keys.submission(job_id), submission(job_id, launch))
    plain_store.put(cluster_keys.submission("good"), submission("good"))
    plain_store.put(cluster_keys.orders(NODE), orders(*odd, "good"))
    with running_daemon(plain_etcd, plain_store, tmp_path, units=StartedUnits()) as said:
        eventually(
            lambda: runs_good(plain_store),
            DEADLINE_S,
            lambda: f"the good job runs; said: {said}, told: {units_of(plain_store)}",
        )
        told = units_of(plain_store)
    for job_id, case in zip(odd, ODD_LAUNCHES, strict=True):
        assert told[job_id].state == pb.Unit.REFUSED, case
        assert 0 < len(told[job_id].reason) < 1000, case
        [line] = [line for line in said if job_id in line and "starts in" not in line]
        assert f"job {job_id} is refused here" in line, case


ODD_RECORDS = {
    cluster_keys.SUBMISSIONS + "my job": submission("my job"),
    cluster_keys.submission("garbage"): b"\xff\xff",
    cluster_keys.submission("misnamed"): submission("another"),
    cluster_keys.submission("no-nodes"): submission("no-nodes", min_nodes=0),
    cluster_keys.OUTCOMES + "my job": b"",
    cluster_keys.SUBMISSIONS + "\udcff": b"",
}


def test_a_daemon_passes_over_odd_records(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    with running_daemon(plain_etcd, plain_store, tmp_path, units=StartedUnits()) as said:
        for key, value in ODD_RECORDS.items():
            plain_store.put(key, value)
        plain_store.put(cluster_keys.submission("good"), submission("good"))
        plain_store.put(cluster_keys.orders(NODE), orders("garbage", "misnamed", "no-nodes", "good"))
        eventually(lambda: runs_good(plain_store), DEADLINE_S, lambda: f"the good job runs; said: {said}")
        plain_store.put(cluster_keys.orders(NODE), b"\xff\xff")
        plain_store.put(cluster_keys.submission("good"), submission("good", wanted=pb.Submission.STOP))
        eventually(lambda: any("asked to leave" in line for line in said), DEADLINE_S, lambda: f"{said}")
        odd = f"{cluster_keys.orders(NODE)}: "
        eventually(lambda: any(line.startswith(odd) for line in said), DEADLINE_S, lambda: f"{said}")
    for key in (*ODD_RECORDS, cluster_keys.orders(NODE)):
        assert sum(line.startswith(f"{key}: ") for line in said) == 1, (key, said)
    assert sum("starts in slots" in line for line in said) == 1, said


def test_a_daemon_outlives_a_record_whose_handling_raises(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last guard: whatever a decoder of ours gets wrong, it is that record's failure."""
    from bagua_agent.service.state_machine import machine

    real, met = machine.parse_submission, list[bytes]()

    def parse(value: bytes, job_id: str) -> pb.Submission:
        if job_id == "odd":
            met.append(value)
            raise ZeroDivisionError("as the test wants")
        return real(value, job_id)

    monkeypatch.setattr(machine, "parse_submission", parse)
    plain_store.put(cluster_keys.submission("odd"), submission("odd"))
    plain_store.put(cluster_keys.submission("good"), submission("good"))
    plain_store.put(cluster_keys.orders(NODE), orders("odd", "good"))
    with running_daemon(plain_etcd, plain_store, tmp_path, units=StartedUnits()) as said:
        eventually(lambda: runs_good(plain_store), DEADLINE_S, lambda: f"the good job runs; said: {said}")
    assert met, "the record was met"
    [line] = [line for line in said if cluster_keys.submission("odd") in line]
    assert "ZeroDivisionError" in line


# -- the scheduler

ODD_KEYS = {
    JOBS_PREFIX + "my job/note": b"",
    JOBS_PREFIX + "../note": b"",
    JOBS_PREFIX + "\udcff/note": b"",
    cluster_keys.NODES + "zz": b"\xff\xff",
    cluster_keys.NODES + "my node": pb.Node(protocol=PROTOCOL, node_name="my node").SerializeToString(),
    cluster_keys.node("renamed"): pb.Node(protocol=PROTOCOL, node_name="n0", slots=9).SerializeToString(),
    cluster_keys.node("odd-unit"): pb.Node(
        protocol=PROTOCOL, node_name="odd-unit", slots=1, units=[pb.Unit(job_id="a b", state=pb.Unit.RUNNING)]
    ).SerializeToString(),
    cluster_keys.orders("zz"): b"\xff\xff",
    cluster_keys.orders("twice"): pb.Orders(orders=[pb.Order(job_id="../a", slots=1)]).SerializeToString(),
    cluster_keys.submission("zz"): b"\xff\xff",
    cluster_keys.SUBMISSIONS + "my job": submission("my job"),
    cluster_keys.outcome("zz"): b"\xff\xff",
    cluster_keys.DRAINS + "my node": b"",
}


@pytest.fixture
def scheduling(plain_store: Store) -> Iterator[list[str]]:
    """What a scheduler says, one node being there."""
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    said: list[str] = []
    leased = LeasedKeys(plain_store, LEASE_S)
    scheduler = Scheduler(plain_store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    scheduler.start()
    yield said
    scheduler.stop()
    leased.close()


def node(name: str, slots: int = 2) -> bytes:
    return pb.Node(protocol=PROTOCOL, node_name=name, slots=slots, address="127.0.0.1:1").SerializeToString()


def ordered(store: Store) -> list[str]:
    found = store.get(cluster_keys.orders("n0"))
    return [] if found is None else [order.job_id for order in read_orders(found.value)]


def test_odd_keys_do_not_stop_scheduling(scheduling: list[str], plain_store: Store) -> None:
    """An ended job's outcome too: no other could be written over it, and every plan would try."""
    for key, value in ODD_KEYS.items():
        plain_store.put(key, value)
    plain_store.put(cluster_keys.outcome("over"), b"\xff\xff")
    result = membership_pb2.Result(outcome=membership_pb2.Result.SUCCEEDED)
    plain_store.put(JobKeys("over").result, result.SerializeToString())
    for job_id in ("over", "good"):
        plain_store.put(cluster_keys.submission(job_id), submission(job_id))
    eventually(lambda: ordered(plain_store) == ["good"], DEADLINE_S, lambda: f"ordered; said: {scheduling}")
    for key in (*ODD_KEYS, cluster_keys.outcome("over")):
        assert sum(line.startswith(f"{key}: ") for line in scheduling) == 1, (key, scheduling)
    assert scheduling.count("this node schedules the cluster's jobs") == 1


def test_orders_of_the_largest_numbers_do_not_stop_scheduling(
    scheduling: list[str], plain_store: Store
) -> None:
    """No number follows them that a record could hold."""
    for number in (2**63 - 1, 2**63, 2**64 - 1):
        far = pb.Orders(orders=[pb.Order(job_id="far", slots=1, number=number)])
        plain_store.put(cluster_keys.orders(f"n-{number}"), far.SerializeToString())
    plain_store.put(cluster_keys.submission("good"), submission("good"))
    eventually(lambda: ordered(plain_store) == ["good"], DEADLINE_S, lambda: f"ordered; said: {scheduling}")


def test_a_scheduler_that_met_a_bug_goes_on_once_its_cause_is_gone(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bagua_agent.service.scheduling import scheduler as scheduling

    real, met = scheduling.plan, list[object]()

    def plan(view: object, *more: object) -> object:
        if any(s.job_id == "odd" for s in view.submissions):  # type: ignore[attr-defined]
            met.append(view)
            raise ZeroDivisionError("as the test wants")
        return real(view, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduling, "plan", plan)
    monkeypatch.setattr(scheduling, "REFUSED_AGAIN_S", 0.05)
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    plain_store.put(cluster_keys.submission("odd"), submission("odd"))
    plain_store.put(cluster_keys.submission("good"), submission("good"))
    said: list[str] = []
    leased = LeasedKeys(plain_store, LEASE_S)
    scheduler = Scheduler(plain_store, leased, "n0", said.append, ClusterPolicy(settle_s=0.0))
    scheduler.start()
    try:
        eventually(lambda: met, DEADLINE_S, lambda: f"the bug is met; said: {said}")
        plain_store.transact(deletes=[cluster_keys.submission("odd")])
        eventually(lambda: ordered(plain_store) == ["good"], DEADLINE_S, lambda: f"ordered; said: {said}")
    finally:
        scheduler.stop()
        leased.close()
    assert sum("a bug" in line for line in said) == 1, said


# -- commands


@pytest.mark.parametrize(
    "words", [["status"], ["nodes"], ["status", "good"], ["events", "good"], ["logs", "good"]]
)
def test_commands_pass_over_odd_keys(words: list[str], plain_etcd: EmbeddedEtcd, plain_store: Store) -> None:
    for key, value in ODD_KEYS.items():
        plain_store.put(key, value)
    keys = JobKeys("good")
    plain_store.put(cluster_keys.SCHEDULER, b"\xff\xff")
    plain_store.put(keys.generation, b"\xff\xff")
    plain_store.put(keys.event("odd"), b"\xff\xff")
    plain_store.put(cluster_keys.submission("good"), submission("good"))
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    by_hand = JobKeys("by-hand")
    for key in (by_hand.spec, by_hand.agent("odd"), by_hand.desired, by_hand.generation, by_hand.result):
        plain_store.put(key, b"\xff\xff")
    done = CliRunner().invoke(
        cli, [words[0], "--etcd", plain_etcd.endpoint, *words[1:]], prog_name="bagua-launch", env={}
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    if words[0] == "status" and not words[1:]:
        assert "by-hand" in done.stdout
    if words[0] in ("status", "nodes"):
        assert done.exit_code == 0, done.output
        assert ("good" if words[0] == "status" else "n0") in done.stdout
        for key in ODD_KEYS:
            if key.startswith(cluster_keys.PREFIX):
                shown = key.replace("\udcff", r"\udcff")
                assert sum(shown in line for line in done.stderr.splitlines()) == 1, (key, done.stderr)


@pytest.mark.parametrize(
    "words", [["stop", "zz"], ["scale", "zz", "2"], ["events", "--follow", "over"], ["drain", "zz"]]
)
def test_commands_say_in_one_line_what_they_cannot_do(
    words: list[str], plain_etcd: EmbeddedEtcd, plain_store: Store
) -> None:
    plain_store.put(cluster_keys.submission("zz"), b"\xff\xff")
    plain_store.put(cluster_keys.outcome("over"), b"\xff\xff")
    plain_store.put(cluster_keys.NODES + "my node", b"\xff\xff")
    etcd = ["--etcd", plain_etcd.endpoint]
    done = CliRunner().invoke(cli, [words[0], *etcd, *words[1:]], prog_name="bagua-launch", env={})
    assert isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code in (1, 2) and len((done.stdout + done.stderr).splitlines()) == 1, done.output
