"""Whatever stands in the job's keys: read or reported, never a crash, and what nobody can read changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_agent.membership import actions as do
from bagua_agent.membership import events as ev
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from tests.fuzz.any_message import any_message
from tests.fuzz.store_picture import KEYS, Watcher, generation_of

FUZZ = settings(max_examples=150, deadline=None)
WORKER = "a.0.w"

KINDS: dict[str, type[Message]] = {
    KEYS.spec: pb.JobSpec,
    KEYS.desired: pb.Desired,
    KEYS.leader: pb.Leader,
    KEYS.generation: pb.Generation,
    KEYS.closing: pb.Closing,
    KEYS.result: pb.Result,
    KEYS.hang: pb.HangOrder,
    KEYS.agent("a"): pb.Agent,
    KEYS.member(WORKER): pb.Member,
    KEYS.suspicion(WORKER): pb.Suspicion,
    KEYS.failure(WORKER): pb.Failure,
    KEYS.departed(WORKER): pb.Departure,
    KEYS.refused(WORKER): pb.Refusal,
}
FOLDERS = [
    "agents",
    "members",
    "suspicions",
    "failures",
    "finished",
    "departed",
    "refused",
    "control",
    "events",
    "new",
]


def owned(message: Message, key: str) -> Message:
    """About whom its key says, so that it is not passed over for that alone."""
    tail = key.rpartition("/")[2]
    if isinstance(message, pb.Agent):
        message.agent_id = tail
    elif isinstance(message, pb.Member | pb.Suspicion | pb.Failure):
        message.worker_id = tail
    return message


def is_unreadable(key: str, value: bytes) -> bool:
    try:
        KINDS[key].FromString(value)
    except DecodeError:
        return True
    return False


# -- bytes that are no message


@pytest.mark.parametrize("key", KINDS)
@given(value=st.binary(max_size=60))
@example(value=b"\xff" * 2000)
@example(value=b"\x0a\xff\xff\xff\xff\x07")  # a string of 2 GB is announced
@FUZZ
def test_bytes_that_are_no_message_change_nothing(key: str, value: bytes) -> None:
    if not is_unreadable(key, value):
        return
    watcher = Watcher()
    before = watcher.state.view
    event = watcher.read(key, value)
    watcher.let_time_pass(1.0)
    assert watcher.writes == []
    if isinstance(event, ev.MemberRefused):
        return  # that the key stands is what it says; its value is only the reason
    assert event is None
    assert watcher.state.view == before
    if key not in (KEYS.spec, KEYS.leader):  # read elsewhere: create_or_join.py, message_of
        assert [told for told, _ in watcher.unreadable] == [key]


@pytest.mark.parametrize("key", [KEYS.closing, KEYS.result])
@pytest.mark.parametrize("value", [b"", b"\x78\x01", b"\x08\x00"])
def test_an_empty_record_neither_closes_nor_ends_a_job(key: str, value: bytes) -> None:
    watcher = Watcher()
    before = watcher.state.view
    assert watcher.read(key, value) is None
    assert watcher.state.view == before and not watcher.state.ended
    assert [told for told, _ in watcher.unreadable] == [key]


# -- keys of any name


@given(
    folder=st.sampled_from(FOLDERS),
    tail=st.sampled_from(["..", ".", "../../spec", "a/b", "", "a\x00b", "\udcff", "a" * 500, "%2e%2e", "a\n"])
    | st.text(max_size=12),
    value=st.binary(max_size=20) | st.none(),
)
@FUZZ
def test_a_key_of_any_name_changes_nothing(folder: str, tail: str, value: bytes | None) -> None:
    watcher = Watcher()
    key = f"{KEYS.prefix}{folder}/{tail}"
    known = {*KINDS, KEYS.member("b.0.w"), KEYS.agent("b")}
    if key in known or tail in ("a", "b", WORKER):
        return
    before = watcher.state.view
    watcher.read(key, value)
    watcher.let_time_pass(1.0)
    assert watcher.writes == []
    assert watcher.state.view.agents == before.agents and watcher.state.view.members == before.members


@pytest.mark.parametrize("tail", ["..", "."])
def test_an_id_that_no_agent_can_have_is_passed_over(tail: str) -> None:
    """Its own key could not be removed: JobKeys refuses to name it."""
    watcher = Watcher()
    assert watcher.read(KEYS.agents + tail, pb.Agent(agent_id=tail).SerializeToString()) is None
    assert (
        watcher.read(KEYS.members + tail, pb.Member(worker_id=tail, agent_id="a").SerializeToString()) is None
    )


# -- messages of the right kind with anything in them


@pytest.mark.parametrize("key", [k for k in KINDS if k != KEYS.generation])
@given(data=st.data())
@FUZZ
def test_a_message_with_anything_in_it_crashes_nobody(key: str, data: st.DataObject) -> None:
    watcher = Watcher()
    for _ in range(data.draw(st.integers(1, 2))):
        message = owned(data.draw(any_message(KINDS[key])), key)
        watcher.read(key, message.SerializeToString())
        watcher.let_time_pass(data.draw(st.sampled_from([0.0, 1.0, 1000.0])))
    watcher.read(key, None)
    watcher.let_time_pass(1.0)


@given(data=st.data())
@FUZZ
def test_a_generation_with_anything_in_it_crashes_nobody(data: st.DataObject) -> None:
    watcher = Watcher()
    message = data.draw(any_message(pb.Generation))
    assert isinstance(message, pb.Generation)
    for place, member in enumerate(message.members):
        member.global_rank = place  # else it is refused for that alone
    watcher.read(KEYS.generation, message.SerializeToString())
    watcher.let_time_pass(1000.0)


def _other_members(record: pb.Generation) -> None:
    del record.members[1]


def _other_job(record: pb.Generation) -> None:
    record.number, record.base, record.nonce = 2, 1, "another job's"


def _from_the_far_end(record: pb.Generation) -> None:
    record.number = 2**64 - 1


@pytest.mark.parametrize("forge", [_other_members, _other_job, _from_the_far_end])
def test_a_generation_that_no_leader_of_this_job_wrote_is_passed_over(
    forge: Callable[[pb.Generation], None],
) -> None:
    """Of the number in force with other members; of another job; of a number that leaves none after it."""
    watcher = Watcher()
    before = watcher.state.view.generation
    record = generation_of(1).to_proto()
    forge(record)
    watcher.read(KEYS.generation, record.SerializeToString())
    watcher.let_time_pass(1000.0)
    assert watcher.state.view.generation == before


def test_a_commit_in_a_generation_beyond_the_newest_stops_nobody() -> None:
    """Who told of it is gone: the others are asked for a generation without it."""
    watcher = Watcher()
    lie = pb.Member(worker_id=WORKER, agent_id="a", committed_generation=2**63, fingerprint={"model": "m"})
    watcher.read(KEYS.member(WORKER), lie.SerializeToString())
    watcher.read(KEYS.member(WORKER), None)
    watcher.let_time_pass(1.0)
    watcher.let_time_pass(100.0)
    assert any(isinstance(a, do.WriteGeneration) for a in watcher.writes), "the loss is decided"


@given(st.binary(max_size=200))
@FUZZ
def test_a_record_decodes_or_says_why_not(value: bytes) -> None:
    try:
        record = Generation.decode(value)
    except (DecodeError, ValueError):
        return
    assert Generation.decode(record.encode()) == record
