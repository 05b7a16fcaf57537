"""Scheduler, daemon and commands skip any invalid value of a cluster's key, name the key once, and continue."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_agent.base.errors import UserError
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import (
    PROTOCOL,
    read_removal,
    write_orders,
    write_outcome,
    write_removal,
    write_unit,
)
from bagua_agent.cluster.retention import beyond_retention, expired_removals
from bagua_agent.cluster.scheduling import plan
from bagua_agent.cluster_client.cluster_requests import outcome_of, submission_nonce
from bagua_agent.cluster_client.log_reader import LogReader
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.cluster_state.odd_records import OddRecords
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history.job_history import events_of
from bagua_agent.observation.cluster_status import cluster_status
from bagua_agent.service.config import agent_config
from bagua_agent.service.units.unit_request import unit_request
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2 as job_pb
from tests.agent.cluster_state.test_odd_records import (
    DEADLINE_S,
    StartedUnits,
    node,
    orders,
    runs_good,
    submission,
)
from tests.agent.service.conftest import plain_etcd, plain_store
from tests.agent.service.daemon_here import NODE, running_daemon
from tests.fuzz.any_message import any_message
from tests.lab.wait import eventually

__all__ = ["plain_etcd", "plain_store"]

EXAMPLES = [50, pytest.param(2_000, marks=pytest.mark.long)]
KEYS = JobKeys("a")
KINDS: dict[str, type[Message]] = {
    cluster_keys.submission("a"): pb.Submission,
    cluster_keys.submission("b"): pb.Submission,
    cluster_keys.node("a"): pb.Node,
    cluster_keys.node("b"): pb.Node,
    cluster_keys.drain("a"): pb.Drain,
    cluster_keys.orders("a"): pb.Orders,
    cluster_keys.orders("b"): pb.Orders,
    cluster_keys.outcome("a"): pb.JobOutcome,
    cluster_keys.removal("a"): pb.Removal,
    cluster_keys.removal("b"): pb.Removal,
    cluster_keys.SCHEDULER: pb.Scheduler,
    KEYS.generation: job_pb.Generation,
    KEYS.result: job_pb.Result,
    KEYS.desired: job_pb.Desired,
    KEYS.spec: job_pb.JobSpec,
    KEYS.agent("a"): job_pb.Agent,
    KEYS.member("a.0.w"): job_pb.Member,
    KEYS.replica("a.0.w"): job_pb.Replica,
    KEYS.event("x"): job_pb.Event,
}
FOLDERS = [
    *("nodes/", "submissions/", "orders/", "outcomes/", "drains/", "removals/", "scheduler/", "new/"),
    *("../jobs/", "../jobs/a/", "../jobs/a/agents/", "../jobs/a/control/", "../jobs/../"),
]
ODD_KEYS = st.builds(
    lambda folder, tail: f"/bagua/v1/{'cluster/' + folder if folder[0] != '.' else folder[3:]}{tail}",
    st.sampled_from(FOLDERS),
    st.sampled_from(["..", ".", "", "a b", "a/b", "a\0", "\udcff", "\x1b[2J", "a" * 500])
    | st.text(max_size=8),
)


@st.composite
def records(draw: st.DrawFn) -> tuple[str, bytes | None]:
    """A key with a value that a client of this protocol, or another one, might have written there."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ODD_KEYS), draw(st.binary(max_size=20))
    key = draw(st.sampled_from(sorted(KINDS)))
    if draw(st.integers(0, 4)) == 0:
        return key, draw(st.binary(max_size=60) | st.none())
    message = draw(any_message(KINDS[key]))
    for field, value in (
        ("protocol", PROTOCOL),
        ("job_id", key.rpartition("/")[2]),
        ("node_name", key.rpartition("/")[2]),
        ("agent_id", key.rpartition("/")[2]),
    ):
        if field in message.DESCRIPTOR.fields_by_name and draw(st.integers(0, 9)):
            setattr(message, field, value)  # else it is mostly passed over for that alone
    if "nonce" in message.DESCRIPTOR.fields_by_name and draw(st.integers(0, 2)):
        message.nonce = draw(st.sampled_from(["a", "b", "", "no/id"]))
    if isinstance(message, pb.Submission) and draw(st.integers(0, 4)):
        message.wanted = draw(st.sampled_from([pb.Submission.RUN, pb.Submission.STOP]))
        message.min_nodes = draw(st.integers(1, 3))
        message.max_nodes = max(message.max_nodes, message.min_nodes)
    return key, message.SerializeToString()


# -- the scheduler's mind


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_records_leave_a_scheduler_deciding(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.lists(records(), max_size=12), st.sampled_from([0.0, 1.0, 1e6]))
    def decide(written: list[tuple[str, bytes | None]], pause_s: float) -> None:
        said: list[str] = []
        picture = ClusterPicture(0.0, said.append)
        good = [(cluster_keys.submission("good"), submission("good")), (cluster_keys.node("n0"), node("n0"))]
        now_s = 0.0
        for revision, (key, value) in enumerate([*good, *written], 1):
            picture.take([Change(key, value, revision, revision)], now_s)
            now_s += pause_s
            view = picture.view()
            made = plan(view, now_s, ClusterPolicy(settle_s=0.0))
            assert "good" in made.jobs
            policy = ClusterPolicy(ended_kept_jobs=0)
            removed = beyond_retention(picture.ended_jobs(), now_s, policy)
            assert {each.job.job_id for each in removed} <= view.outcomes.keys()
            for nonce in (*expired_removals(picture.removals, now_s, policy), *picture.removals):
                cluster_keys.removal(nonce)
            for removal in picture.removals.values():
                assert read_removal(write_removal(removal)) == removal
            for job in picture.put_back_jobs():
                cluster_keys.removal(job.nonce)
            for job_id, outcome in made.outcomes.items():
                picture.take(
                    [Change(cluster_keys.outcome(job_id), write_outcome(outcome, 0.0), revision, revision)],
                    now_s,
                )
            for node_name, ordered in made.orders.items():
                key = cluster_keys.orders(node_name)
                picture.take([Change(key, write_orders(ordered), revision, revision)], now_s)
            for seen in view.nodes.values():
                for unit in seen.units:
                    write_unit(unit)
        assert not any("a bug" in line for line in said), said

    decide()


# -- a daemon


class Launches:
    """JSON of any shape, and shapes that break parsers."""

    VALUES = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        | st.sampled_from([10**400, -1, 2**31, "\0", "\ud800", 1e308]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    NAMES = st.sampled_from(
        ["command", "shutdown_timeout_s", "max_restarts", "role", "job_id", "min_nodes", "log_dir", "zz"]
    )
    BROKEN = st.sampled_from(["[" * 200_000, "{", "", "NaN", "1e999", "9" * 5000, '"\\ud800"', "null", "[]"])
    ANY = BROKEN | st.dictionaries(NAMES, VALUES, max_size=4).map(json.dumps) | st.text(max_size=20)


CONFIG = agent_config.check(
    {
        "insecure": True,
        "etcd": {"endpoints": ["127.0.0.1:2379"]},
        "node": {"name": "n0", "slots": 4},
        "jobs": {"users": ["root"], "environment": ["A*"]},
    },
    "test",
    "n0",
)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_launch_makes_a_request_or_is_refused(examples: int) -> None:
    made_or_not: set[bool] = set()
    good = json.loads(pb.Submission.FromString(submission("good")).launch)

    @settings(max_examples=examples)
    @given(
        Launches.ANY,
        st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        st.dictionaries(Launches.NAMES, Launches.VALUES, max_size=1),
        st.booleans(),
    )
    def ask(launch: str, environment: dict[str, str], more: dict[str, object], whole: bool) -> None:
        asked = pb.Submission.FromString(submission("a", json.dumps({**good, **more}) if whole else launch))
        if not all(_is_utf8(text) for pair in environment.items() for text in pair):
            return
        asked.environment.update({f"A{name}": value for name, value in environment.items()})
        try:
            request = unit_request(asked, (0,), CONFIG, have_gpus=False)
        except UserError:
            made_or_not.add(False)
            return
        made_or_not.add(True)
        assert 0 <= request.config.shutdown_timeout_s <= 1e9

    ask()
    assert made_or_not == {True, False}, "both were tried"


def _is_utf8(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


@pytest.mark.parametrize("examples", [30, pytest.param(1_000, marks=pytest.mark.long)])
def test_any_records_leave_a_daemon_serving(
    examples: int, plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    """After all of them it starts the next job, and none was our bug."""

    @settings(max_examples=examples)
    @given(records(), Launches.ANY)
    def write(record: tuple[str, bytes | None], launch: str) -> None:
        key, value = record
        key = re.sub("(orders|nodes)/(a|b)$", rf"\1/{NODE}", key)
        if _is_utf8(launch):
            plain_store.put(cluster_keys.submission("a"), submission("a", launch))
        if value is None:
            plain_store.transact(deletes=[key])
        else:
            plain_store.put(key, value)

    with running_daemon(plain_etcd, plain_store, tmp_path, units=StartedUnits()) as said:
        own = cluster_keys.node(NODE)
        eventually(lambda: plain_store.get(own), DEADLINE_S, "it serves, so it sees each record by itself")
        plain_store.put(cluster_keys.orders(NODE), orders("a"))
        for _ in range(2):  # one at least that is odd, whatever was drawn
            plain_store.put(cluster_keys.SUBMISSIONS + "my job", b"")
        write()
        plain_store.transact(deletes=[cluster_keys.outcome("good")])
        plain_store.put(cluster_keys.submission("good"), submission("good"))
        plain_store.put(cluster_keys.orders(NODE), orders("good"))
        eventually(
            lambda: (
                (found := plain_store.get(own)) is not None
                and not _is_unreadable(pb.Node, found.value)  # its own key may be what was written last
                and runs_good(plain_store)
            ),
            DEADLINE_S,
            lambda: f"the good job runs; said: {said[-20:]}",
        )
    assert not any("a bug" in line for line in said), said
    lines = [line for line in said if line.startswith("/bagua/v1/")]
    assert lines and len(lines) == len(set(lines)), f"each is reported once: {said}"


# -- commands


class FakeStore:
    """The values in etcd, for those that only read."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = {k: KeyValue(k, v, n, n) for n, (k, v) in enumerate(values.items(), 1)}

    def get(self, key: str) -> KeyValue | None:
        return self._values.get(key)

    def get_prefix(self, prefix: str, timeout_s: float | None = None) -> tuple[list[KeyValue], int]:
        return [kv for key, kv in sorted(self._values.items()) if key.startswith(prefix)], 1000


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_records_leave_commands_answering(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.lists(records(), max_size=12))
    def ask(written: list[tuple[str, bytes | None]]) -> None:
        values = {cluster_keys.submission("good"): submission("good"), cluster_keys.node("n0"): node("n0")}
        values |= {key: value for key, value in written if value is not None}
        store, said = FakeStore(values), list[str]()
        found = cluster_status(store, said.append)  # type: ignore[arg-type]
        assert "good" in {job.job_id for job in found.jobs} and "n0" in {n.node_name for n in found.nodes}
        assert not any("a bug" in line for line in said), said
        for key, value in values.items():
            odd_name = key.startswith((JOBS_PREFIX, cluster_keys.NODES)) and " " in key.split("/")[4]
            if odd_name or (key == cluster_keys.node("a") and _is_unreadable(pb.Node, value)):
                assert sum(line.startswith(f"{key}: ") for line in said) == 1, (key, said)
        for job_id in ("a", "b", "good"):
            outcome_of(store, job_id)  # type: ignore[arg-type]
            with suppress(UserError):
                cluster_keys.removal(submission_nonce(store, job_id))  # type: ignore[arg-type]
            reader = LogReader(store, job_id, None)  # type: ignore[arg-type]
            reader._addresses()
            try:
                reader._ranks()
            except UserError as error:
                assert KEYS.generation in str(error)
        events_of(store.get_prefix(KEYS.events)[0], KEYS)

    ask()


def _is_unreadable(kind: type[Message], value: bytes) -> bool:
    try:
        kind.FromString(value)
    except DecodeError:
        return True
    return False


def test_so_many_odd_records_are_told_and_no_more() -> None:
    said: list[str] = []
    odd = OddRecords(said.append)
    for n in range(5000):
        odd.tell(f"key {n}", "x" * 10_000 if n else "why")
    assert len(said) == 1001 and "passed over in silence" in said[-1]
