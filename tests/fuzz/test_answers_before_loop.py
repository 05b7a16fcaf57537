"""A late worker fetches the answers of a member: any other data is skipped, and the next member is asked."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_contract.records import Generation, GenerationKind
from bagua_core.communication.transports.meeting_store import MeetingServer
from bagua_core.elastic.script_collectives import kept_results
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.kept_results import Answer, _decoded, _encoded
from bagua_core.elastic.state.state_codec import StateCodecError

HOST = "127.0.0.1"
FUZZ = settings(max_examples=150)
ANSWERS = [
    Answer("barrier", torch.zeros(1)),
    Answer("broadcast of 3 elements", torch.arange(3)),
    Answer("allgather", None, "each worker has its own part in it"),
]
WHOLE = _encoded(ANSWERS)
ADDRESSES = st.sampled_from(
    [
        "",
        ":",
        "h",
        ":1",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "[::1:1",
        "\x00:1",
        "a..b:1",
    ]
) | st.text(max_size=8)


@pytest.fixture
def server() -> Iterator[MeetingServer]:
    made = MeetingServer(HOST)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "ANSWER_WITHIN_S", 0.2)


def late_worker() -> BeforeLoop:
    return BeforeLoop(cast(Any, SimpleNamespace(replica=None)))


def holders_at(nonce: str, *addresses: str) -> Generation:
    return Generation(3, 2, GenerationKind.FAILOVER, (), nonce, answers_at=addresses)


def put(server: MeetingServer, nonce: str, parts: bytes, *data: bytes) -> None:
    values = {f"{nonce}/before-loop/part-{i}".encode(): part for i, part in enumerate(data)}
    server.publish({**values, f"{nonce}/before-loop/parts".encode(): parts})


def test_whole_answers_are_taken(server: MeetingServer) -> None:
    put(server, "whole", b"1", WHOLE)
    late = late_worker()
    assert late._trains(holders_at("whole", f"{HOST}:{server.port}"))
    assert [(a.asked, a.why) for a in late._kept.answers] == [(a.asked, a.why) for a in ANSWERS]
    assert late.place() == (1, 2)


@given(data=st.binary(max_size=200))
@example(data=struct.pack("!I", 2**32 - 1) + b"{}")
@FUZZ
def test_answers_of_any_bytes_decode_or_say_why_not(data: bytes) -> None:
    try:
        found = _decoded(data)
    except (ValueError, StateCodecError):
        return
    assert all(isinstance(answer, Answer) for answer in found)


@given(
    at=st.integers(0, len(WHOLE) - 1),
    put_in=st.binary(max_size=8),
    cut=st.integers(0, 8),
)
@settings(FUZZ, max_examples=600)
def test_answers_that_were_changed_decode_or_say_why_not(at: int, put_in: bytes, cut: int) -> None:
    try:
        found = _decoded(WHOLE[:at] + put_in + WHOLE[at + cut :])
    except (ValueError, StateCodecError):
        return
    for answer in found:
        if answer.result is not None:
            answer.result.clone()


@given(
    parts=st.sampled_from([b"", b"0", b"-1", b"x", b"1" * 5000, b"129", b"1", b"2"]) | st.binary(max_size=4),
    data=st.binary(max_size=30),
)
@settings(FUZZ, max_examples=40)
def test_a_member_that_gives_something_else_is_passed_over(
    server: MeetingServer, parts: bytes, data: bytes
) -> None:
    if parts == b"1" and data == WHOLE:
        return
    put(server, "odd", parts, data)
    put(server, "good", b"1", WHOLE)
    late = late_worker()
    if not late._trains(holders_at("odd", f"{HOST}:{server.port}")):
        assert late._kept.answers == [] and late.place() is None
    assert late._trains(holders_at("good", f"{HOST}:{server.port}")), "it goes on"


@given(address=ADDRESSES)
@FUZZ
def test_an_address_that_is_none_is_passed_over(server: MeetingServer, address: str) -> None:
    late = late_worker()
    put(server, "good", b"1", WHOLE)
    if address.startswith((":", "h", "[::1")) or not late._trains(holders_at("good", address)):
        assert late._trains(holders_at("good", address, f"{HOST}:{server.port}")), "the next one is asked"
