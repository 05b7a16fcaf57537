"""Messages of a worker that floods its agent are read slowly; an ordinary worker is never slowed down."""

from __future__ import annotations

import pytest

from bagua_agent.rpc.message_pace import MessagePace
from bagua_agent.rpc.session_server import slot_of
from bagua_contract import session_pb2
from tests.core.elastic.agents import DEADLINE_S, Agent
from tests.fuzz.test_session_service import Stranger, hello
from tests.lab.wait import eventually

RECORD_BYTES = 600


def test_a_change_of_membership_every_second_for_a_day_is_heard_at_once() -> None:
    pace = MessagePace()
    for second in range(86_400):
        for kind in ("suspected", "entered", "progress"):
            assert pace.take(kind, RECORD_BYTES, float(second)) == 0.0


def test_what_is_written_to_etcd_is_bounded() -> None:
    pace = MessagePace()
    now_s, written_bytes = 0.0, 0
    while now_s < 3600.0:
        now_s += pace.take("ready", 1 << 20, now_s)
        written_bytes += 1 << 20
    assert written_bytes < 20 << 20


def test_what_is_heard_is_bounded() -> None:
    pace = MessagePace()
    now_s, heard_bytes = 0.0, 0
    while now_s < 60.0:
        now_s += pace.take("straggler", 1000, now_s)
        heard_bytes += 1000
    assert heard_bytes < 24 << 20


def test_a_small_message_counts_with_what_is_written_because_of_it() -> None:
    """At `entered` the worker's whole member key is written again."""
    pace = MessagePace()
    now_s, written_bytes = pace.take("ready", 1 << 20, 0.0), 1 << 20
    while now_s < 3600.0:
        now_s += pace.take("entered", 8, now_s)
        written_bytes += 1 << 20
    assert written_bytes < 20 << 20


def test_a_new_session_of_a_slot_brings_no_new_budget(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent("host-1a2b.3.aaaaaa", "host-1a2b.3.bbbbbb")
    large = session_pb2.Ready(store_address="h:1", fingerprint={"model": "x" * (600 << 10)})
    ready = session_pb2.WorkerMessage(ready=large)
    try:
        first = Stranger(agent.socket, largest_bytes=1 << 20)
        first.say(hello("host-1a2b.3.aaaaaa"), ready)
        agent.wait_for(lambda: len(agent.said_by("host-1a2b.3.aaaaaa")) == 2)
        first.hang_up()
        second = Stranger(agent.socket, largest_bytes=1 << 20)
        second.say(hello("host-1a2b.3.bbbbbb"), *[ready] * 3)
        eventually(lambda: caplog.messages != [], DEADLINE_S, "the slot is named")
        assert len(agent.said_by("host-1a2b.3.bbbbbb")) == 2, "the others are not read yet"
        second.hang_up()
    finally:
        agent.close()
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "the worker in slot 3 sends more than its agent may pass on to etcd"
    ]


@pytest.mark.parametrize(("worker_id", "slot"), [("a.b.3.c0ffee", "3"), ("w0", "w0"), ("", "")])
def test_a_worker_is_of_its_slot(worker_id: str, slot: str) -> None:
    assert slot_of(worker_id) == slot
