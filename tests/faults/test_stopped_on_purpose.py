"""All workers leave on purpose: the state of the last step is saved, and the next start under the job's id begins at
once and says from where."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.store.embedded import EmbeddedEtcd
from bagua_core.elastic.checkpoint import catalogue
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node

SAMPLES = 1200
LEAVE_S = 15.0
BEGIN_S = 55.0  # a start with its imports on a busy machine; the wait for lost holders alone would take 60 s


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


def newest_step(saved: Path) -> int:
    return next((f.place.name.step for f in catalogue.find(saved) if f.is_complete), 0)


def leave(node: Node, number: signal.Signals) -> None:
    node.send(number)
    assert node.process.wait(LEAVE_S) == 128 + number
    assert not node.says("did not happen") and not node.says("Traceback")


def last_step(one: Job) -> int:
    """Of the steps that any worker committed: the last may have no line yet."""
    return one.step


def test_the_only_node_saves_its_last_step(job: MakeJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    one = job(samples=SAMPLES, options=["--checkpoint-dir", str(saved)])
    node = one.start(slots=2)
    one.await_step(10)
    leave(node, signal.SIGTERM)
    step = newest_step(saved)
    assert one.step <= step <= one.step + 1, "the last step's lines may be written by the next run"
    assert node.says(f"the checkpoint of step {step} is written")
    one.hurry()
    again = one.start(slots=2)
    assert again.process.wait(60) == 0
    assert again.says(f"goes on from the checkpoint of step {step}")
    assert one.ledger.voided == (), "no step is done twice"
    one.check(finished=2)


def test_the_next_start_after_ctrl_c_begins_anew_at_once(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = job(samples=SAMPLES, endpoints=etcd.endpoint)
    node = one.start()
    one.await_step(5)
    leave(node, signal.SIGINT)
    assert node.says("stopped: every worker left")
    one.hurry()
    again = one.start()
    again.await_line("was stopped before", "begins anew")
    again.await_line("generation 1, now", deadline_s=BEGIN_S)
    assert again.process.wait(60) == 0


def test_two_nodes_are_stopped_one_after_the_other_and_started_again(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    options = ["--checkpoint-dir", str(saved)]
    one = job(samples=SAMPLES, endpoints=etcd.endpoint, nodes="2", options=options)
    nodes = [one.start(), one.start()]
    one.await_world(2)
    one.await_step(5)
    nodes[0].send(signal.SIGINT)
    nodes[0].await_line("leaving")
    nodes[1].send(signal.SIGINT)
    assert [node.process.wait(LEAVE_S) in (0, 130) for node in nodes] == [True, True]
    step = newest_step(saved)
    assert one.step <= step <= one.step + 1
    one.hurry()
    again = [one.start(), one.start()]
    for node in again:
        node.await_line("generation 1, now", deadline_s=BEGIN_S)
    assert [node.process.wait(60) for node in again] == [0, 0]
    assert any(node.says(f"goes on from the checkpoint of step {step}") for node in again)
    assert one.ledger.voided == ()
    one.check(finished=2)
