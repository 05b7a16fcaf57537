"""The signal that a member gives once: the others see it without waiting, and forget it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bagua_core.communication.transports import meeting_signal, meeting_store
from bagua_core.communication.transports.meeting_frames import Operation, frame
from bagua_core.communication.transports.meeting_signal import MeetingSignal
from bagua_core.communication.transports.meeting_store import MeetingServer
from tests.lab.wait import eventually

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(HOST)
    yield made
    made.close()


@pytest.fixture
def members(server: MeetingServer) -> Iterator[list[MeetingSignal]]:
    made = [MeetingSignal(HOST, server.port, "job/1/end") for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_all_members_see_what_one_gives_also_those_that_look_later(members: list[MeetingSignal]) -> None:
    for number in range(5):
        assert not members[0].is_given(number)
        members[1].give(number)
        members[1].give(number)  # another member, or the same one again
        for each in members:
            eventually(lambda each=each, number=number: each.is_given(number), 10, "the signal came")


def test_a_member_that_never_looked_at_a_number_sees_a_later_one(members: list[MeetingSignal]) -> None:
    assert not members[0].is_given(0)
    members[1].give(0)
    members[1].give(1)
    eventually(lambda: members[0].is_given(1), 10, "the second came")
    assert members[0].is_given(0)


def test_the_store_keeps_no_more_than_the_last_numbers(
    server: MeetingServer, members: list[MeetingSignal]
) -> None:
    for number in range(50):
        assert not members[0].is_given(number)
        members[1].give(number)
        eventually(lambda number=number: members[0].is_given(number), 10, "the signal came")
    (keys,) = server._groups.values()
    assert len(keys) <= meeting_signal.NUMBERS_KEPT
    assert not server._waiting


def test_the_store_forgets_what_was_asked_and_never_given(
    server: MeetingServer, members: list[MeetingSignal]
) -> None:
    """Rounds that end in another way: a member may ask for more numbers than the store lets one client wait for."""
    for number in range(3 * meeting_store.MOST_QUESTIONS):
        assert not members[0].is_given(number)
    members[1].give(number)
    eventually(lambda: members[0].is_given(number), 10, "the signal came")
    assert len(server._waiting) <= meeting_signal.NUMBERS_KEPT


def test_looking_does_not_wait(members: list[MeetingSignal]) -> None:
    began_s = time.monotonic()
    assert not any(members[0].is_given(0) for _ in range(1000))
    assert time.monotonic() - began_s < meeting_signal.WITHIN_S


def test_a_store_that_ends_is_an_error(server: MeetingServer, members: list[MeetingSignal]) -> None:
    assert not members[0].is_given(0)
    server.close()

    def is_lost() -> bool:
        try:
            return members[0].is_given(0)
        except ConnectionError:
            return True

    eventually(is_lost, 10, "the end was seen")


def test_other_answers_are_not_taken_for_the_signal(members: list[MeetingSignal]) -> None:
    signal = members[0]
    signal._answers.incoming += frame(Operation.VALUE, b"job/1/other/7", b"1")
    signal._answers.incoming += frame(Operation.VALUE, b"job/1/end/x", b"1")
    members[1].give(0)
    eventually(lambda: signal.is_given(0), 10, "the signal came")
    assert not signal.is_given(1)
