"""Records come back from their wire form as they were; those that no leader writes are refused at birth."""

from __future__ import annotations

import dataclasses

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind, Placement, StateName

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    worker_ids = draw(st.lists(TEXT, unique=True, max_size=5))
    members = tuple(
        Placement(
            worker_id=worker_id,
            agent_id=draw(TEXT),
            node_name=draw(TEXT),
            slot=draw(UINT32),
            global_rank=global_rank,
            node_rank=draw(UINT32),
            local_rank=draw(UINT32),
            store_address=draw(TEXT),
            since_generation=draw(UINT64),
            join_revision=draw(UINT64),
            holder=draw(st.booleans()),
        )
        for global_rank, worker_id in enumerate(worker_ids)
    )
    return Generation(
        number=draw(st.integers(1, 2**63 - 1)),
        base=draw(UINT64),
        kind=draw(st.sampled_from(GenerationKind)),
        members=members,
        nonce=draw(TEXT),
        reason=draw(TEXT),
        fingerprint=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


def placement(worker_id: str, global_rank: int, agent_id: str = "a") -> Placement:
    return Placement(worker_id, agent_id, "node", 0, global_rank, 0, 0, "h:1", 1, 1, True)


@given(generations())
def test_a_generation_comes_back_as_it_was(generation: Generation) -> None:
    assert Generation.decode(generation.encode()) == generation
    assert generation.to_proto().protocol == PROTOCOL_VERSION


def test_every_field_of_the_message_is_written() -> None:
    """A field added to the .proto but forgotten in records.py would be lost without a word."""
    # a record with parts is a head, and no Generation
    known = {f.name for f in dataclasses.fields(Generation)} | {"protocol", "parts"}
    assert {f.name for f in pb.Generation.DESCRIPTOR.fields} == known
    assert {f.name for f in pb.Placement.DESCRIPTOR.fields} == {f.name for f in dataclasses.fields(Placement)}


@pytest.mark.parametrize(
    ("number", "members", "words"),
    [
        (0, (), "at least 1"),
        (-3, (), "at least 1"),
        (4, (placement("w", 1),), "generation 4: ranks"),
        (4, (placement("w", 1), placement("v", 0)), "in order"),
        (4, (placement("w", 0), placement("v", 0)), "in order"),
        (4, (placement("w", 0), placement("w", 1)), "generation 4: a worker is listed twice"),
    ],
)
def test_a_record_that_cannot_be_is_refused(number: int, members: tuple[Placement, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Generation(number, 0, GenerationKind.FAILOVER, members)


@pytest.mark.parametrize(
    "message",
    [
        pb.Generation(number=0, kind=pb.Generation.FAILOVER),
        pb.Generation(number=1),  # of no kind
        pb.Generation(number=1, kind=pb.Generation.FAILOVER, members=[pb.Placement(global_rank=1)]),
    ],
)
def test_a_message_that_no_leader_writes_is_a_value_error(message: pb.Generation) -> None:
    with pytest.raises(ValueError):
        Generation.decode(message.SerializeToString())


def test_bytes_that_are_no_message_are_a_decode_error() -> None:
    with pytest.raises(DecodeError):
        Generation.decode(b"\xff\xff\xff")


def test_what_a_generation_says_of_its_members() -> None:
    members = (placement("w", 0, "a"), placement("v", 1, "a"), placement("u", 2, "b"))
    generation = Generation(1, 0, GenerationKind.PLANNED, members)
    assert (generation.world_size, generation.node_count) == (3, 2)
    assert generation.placement_of("v") is members[1]
    assert generation.placement_of("x") is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        generation.number = 2  # type: ignore[misc]


@given(st.tuples(UINT64, UINT64, UINT64), st.tuples(UINT64, UINT64, UINT64))
def test_names_order_as_their_parts_do(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert (StateName(*one) < StateName(*other)) == (one < other)
    assert StateName() <= StateName(*one)
    assert StateName(*one).is_none == (one == (0, 0, 0))
