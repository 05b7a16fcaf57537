"""One worker ends a round for all members of its generation, and a lost signal is said once and costs time alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagua_contract.addresses import joined
from bagua_contract.records import Generation
from bagua_core.communication.transports.meeting_store import MeetingServer
from bagua_core.elastic.step.early_end import EarlyEnd
from tests.core.elastic.records import generation
from tests.lab.wait import eventually

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(HOST)
    yield made
    made.close()


def served_by(server: MeetingServer, number: int) -> Generation:
    return generation(number, "a", "b", store_address=joined(HOST, server.port))


def test_the_signal_is_of_one_round_of_one_generation(server: MeetingServer) -> None:
    said: list[str] = []
    first, second = EarlyEnd(said.append), EarlyEnd(said.append)
    old, new = served_by(server, 1), served_by(server, 2)
    assert not second.is_due(old, 4)
    first.end(old, 4)
    eventually(lambda: second.is_due(old, 4), 10, "the round ends")
    assert not second.is_due(old, 5)
    assert not second.is_due(new, 4), "the round is repeated in another generation"
    first.end(new, 4)
    eventually(lambda: second.is_due(new, 4), 10, "the round ends")
    assert said == []
    first.close()
    second.close()


def test_a_lost_signal_is_said_once_and_the_next_generation_has_another(server: MeetingServer) -> None:
    said: list[str] = []
    one = EarlyEnd(said.append)
    lost = MeetingServer(HOST)
    old = served_by(lost, 1)
    assert not one.is_due(old, 0)
    lost.close()
    eventually(lambda: one.is_due(old, 0) or said, 10, "the end of the store is seen")
    for step in range(3):
        assert not one.is_due(old, step)
        one.end(old, step)
    (line,) = said
    assert "generation 1" in line and joined(HOST, lost.port) in line
    new = served_by(server, 2)
    one.end(new, 3)
    assert one.is_due(new, 3)
    one.close()
