"""Any value in the job's keys is read or reported, never a crash, and an unreadable one changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state.decode import StoreEvents
from bagua_agent.membership import actions as do
from bagua_agent.membership import events as ev
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Stage
from tests.fuzz.any_message import any_message
from tests.fuzz.store_picture import KEYS, NONCE, Watcher, generation_of, member_value

FUZZ = settings(max_examples=150)
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
    KEYS.finished(WORKER): pb.Finished,
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
    """About the subject of its key, so that it is not skipped for that alone."""
    tail = key.rpartition("/")[2]
    if isinstance(message, pb.Agent):
        message.agent_id = tail
    elif isinstance(message, pb.Member | pb.Suspicion | pb.Failure | pb.Departure | pb.Finished):
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
def test_a_message_with_anything_in_it_crashes_no_agent(key: str, data: st.DataObject) -> None:
    watcher = Watcher()
    for _ in range(data.draw(st.integers(1, 2))):
        message = owned(data.draw(any_message(KINDS[key])), key)
        watcher.read(key, message.SerializeToString())
        watcher.let_time_pass(data.draw(st.sampled_from([0.0, 1.0, 1000.0])))
    watcher.read(key, None)
    watcher.let_time_pass(1.0)


@given(data=st.data())
@FUZZ
def test_a_generation_with_anything_in_it_crashes_no_agent(data: st.DataObject) -> None:
    watcher = Watcher()
    message = data.draw(any_message(pb.Generation))
    assert isinstance(message, pb.Generation)
    for place, member in enumerate(message.members):
        member.global_rank = place  # else it is refused for that alone
    watcher.read(KEYS.generation, message.SerializeToString())
    watcher.let_time_pass(1000.0)


ODD_IDS = ["", ".", "..", "a/b", "../../control/spec", "a\x00b", "a\n", "a" * 500, "b", "c", "\u202e", "%2e"]


@given(
    kind=st.sampled_from([k for k in GenerationKind]),
    stages=st.tuples(*[st.sampled_from([None, *Stage])] * 2),
    listed=st.tuples(st.booleans(), st.booleans()),
    agent_ids=st.none() | st.tuples(*[st.sampled_from(ODD_IDS)] * 2),
    worker_id=st.none() | st.sampled_from(ODD_IDS),
    number=st.sampled_from([1, 2, 3, 7]),
    based=st.booleans(),
    again=st.booleans(),
    answers_at=st.lists(st.sampled_from(["", "127.0.0.1:2", "no address", "[::1]:99999"]), max_size=2),
    then=st.sampled_from(["nothing", "the first is gone", "the first has finished", "its agent is gone"]),
)
@settings(FUZZ, max_examples=600)
def test_every_stage_with_every_kind_of_generation(
    kind: GenerationKind,
    stages: tuple[Stage | None, Stage | None],
    listed: tuple[bool, bool],
    agent_ids: tuple[str, str] | None,
    worker_id: str | None,
    number: int,
    based: bool,
    again: bool,
    answers_at: list[str],
    then: str,
) -> None:
    """No leader would write most of these. The watcher goes on, and decides nothing that can't be written."""
    watcher = Watcher()
    members = [m for m, is_listed in zip(generation_of(number).members, listed, strict=True) if is_listed]
    placed = tuple(
        replace(
            m,
            global_rank=rank,
            agent_id=m.agent_id if agent_ids is None else agent_ids[rank],
            worker_id=worker_id if worker_id is not None and rank == 0 else m.worker_id,
            holder=m.holder and kind is not GenerationKind.GATHERING,
        )
        for rank, m in enumerate(members)
    )
    record = Generation(
        number, (number - 1) * based, kind, placed, NONCE, again=again, answers_at=tuple(answers_at)
    )
    for agent_id, stage in zip(("a", "b"), stages, strict=True):
        key = KEYS.member(f"{agent_id}.0.w")
        if stage is None:
            watcher.read(key, None)
        else:
            member = pb.Member.FromString(member_value(agent_id))
            member.stage = stage.value
            watcher.read(key, member.SerializeToString())
    watcher.performed.clear()
    watcher.read(KEYS.generation, record.encode())
    check_gatherings(watcher)
    watcher.let_time_pass(1.0)
    check_gatherings(watcher)
    if then == "the first is gone":
        watcher.read(KEYS.member(WORKER), None)
    elif then == "the first has finished":
        watcher.read(KEYS.finished(WORKER), pb.Finished(worker_id=WORKER, step=3).SerializeToString())
    elif then == "its agent is gone":
        watcher.read(KEYS.agent("a"), None)
    check_gatherings(watcher)
    for passed_s in (0.5, 5.0, 1000.0):
        watcher.let_time_pass(passed_s)
        check_gatherings(watcher)
    assert watcher.unreadable == []


def check_gatherings(watcher: Watcher) -> None:
    """B1, B3 and B5 of what was written since the last call."""
    view = watcher.state.view
    stages = {m.worker_id: m.stage for m in view.members.values()}
    before = view.generation
    for action in watcher.writes:
        if isinstance(action, do.WriteGeneration) and action.generation.is_gathering:
            members = action.generation.members
            assert before is None or not any(m.holder for m in before.members), "B3"
            assert not any(m.holder for m in members), "B5"
            assert Stage.PREPARING not in {stages[m.worker_id] for m in members}, "B1"
    watcher.performed.clear()


@given(
    value=st.binary(max_size=40)
    | st.builds(
        lambda a, g: pb.Meeting(address=a, generation=g).SerializeToString(),
        st.sampled_from(
            ["", ":", "h:", ":1", "h:0", "h:99999", "[::1", "h:1", "a b:1", "\u0131:1", "x" * 500 + ":1"]
        )
        | st.text(max_size=12),
        st.integers(0, 2**64 - 1),
    )
)
@FUZZ
def test_a_meeting_is_an_address_or_is_named(value: bytes) -> None:
    named: list[str] = []
    events = StoreEvents(KEYS, lambda key, why: named.append(key))
    meeting = events.meeting_of(Change(KEYS.meeting, value, 1, 1))
    if meeting is None:
        assert named == [KEYS.meeting]
        return
    host, _, port = meeting.address.rpartition(":")
    assert host and 0 < int(port) < 65536 and named == []


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


def test_a_commit_in_a_generation_beyond_the_newest_stops_no_agent() -> None:
    """The worker that reported it is gone: the others are asked for a generation without it."""
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
