"""A large record comes back from its parts as it was, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs import record_parts
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import head_of, joined, keepers, stored, unpacked
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("job")
LIMITS = Limits(whole_record_members=3, nodes_of_a_keeper=4)


def record(members: int, number: int = 7) -> Generation:
    return Generation(
        number,
        5,
        GenerationKind.FAILOVER,
        tuple(
            Placement(f"n{i}.0.a", f"n{i}", f"host{i}", 0, i, i, 0, f"10.0.0.{i}:1", 3, 9 + i, i == 0)
            for i in range(members)
        ),
        "nonce",
        "lost a rack",
        {"parameters": "p"},
    )


@given(members=st.integers(4, 60), part_bytes=st.integers(1, 400))
def test_it_comes_back_as_it_was(members: int, part_bytes: int) -> None:
    one = record(members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_parts, "PART_BYTES", part_bytes)
        form = stored(one, KEYS, LIMITS)
    head = head_of(form.value)
    assert head is not None and head.number == one.number and head.node_count == members
    assert [p.key for p in form.parts] == head.keys(KEYS)
    assert max(len(p.value) for p in form.parts) <= part_bytes
    packed = joined([p.value for p in form.parts])
    assert packed == form.packed
    value = unpacked(head, form.packed)
    assert value is not None and Generation.decode(value) == one


def test_a_small_one_stands_whole() -> None:
    one = record(3)
    form = stored(one, KEYS, LIMITS)
    assert form.parts == () and Generation.decode(form.value) == one and head_of(form.value) is None


def test_a_head_is_no_record() -> None:
    """Taken for an empty one it would make all workers step aside."""
    with pytest.raises(ValueError, match="generation 7 is a head"):
        Generation.decode(stored(record(9), KEYS, LIMITS).value)


def test_what_is_missing_or_changed_is_refused() -> None:
    form = stored(record(9), KEYS, LIMITS)
    head = head_of(form.value)
    assert head is not None
    assert joined([b"a", None]) is None
    assert unpacked(head, form.packed[:-1]) is None
    assert unpacked(head, form.packed + b"x") is None
    other = stored(replace(record(9), reason="forged"), KEYS, LIMITS)
    assert unpacked(head, other.packed) is None
    assert head_of(b"\xff\xff") is None


def test_one_that_unpacks_to_more_than_any_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_parts, "MOST_RECORD_BYTES", 200)
    form = stored(record(30), KEYS, LIMITS)
    head = head_of(form.value)
    assert head is not None and unpacked(head, form.packed) is None


def test_the_same_record_is_written_in_the_same_place_by_anybody() -> None:
    assert stored(record(9), KEYS, LIMITS).parts == stored(record(9), KEYS, LIMITS).parts
    first, second = (stored(record(9, n), KEYS, LIMITS).parts[0].key for n in (9, 10))
    assert first < second, "older ones can be removed as one range"


def test_one_node_in_so_many_keeps_the_record() -> None:
    addresses = {f"n{i}": f"10.0.0.{i}:5" for i in range(20)}
    assert keepers(record(10), LIMITS, addresses) == ["10.0.0.0:5", "10.0.0.4:5", "10.0.0.8:5"]
    del addresses["n4"]
    assert keepers(record(10), LIMITS, addresses) == ["10.0.0.0:5", "10.0.0.8:5"]


def test_a_head_stays_short() -> None:
    addresses = {f"n{i}": f"10.0.0.{i % 250}:50000" for i in range(4096)}
    usual = Limits()
    of_200, of_4096 = (len(stored(record(n), KEYS, usual, addresses).value) for n in (200, 4096))
    assert of_4096 - of_200 < 30 * (4096 // usual.nodes_of_a_keeper)


@pytest.mark.parametrize(
    "forged", [{"count": 2**32 - 1}, {"folder": "../../jobs"}, {"folder": ""}, {"sha256": b"short"}]
)
def test_a_head_that_no_leader_writes_is_none(forged: dict[str, object]) -> None:
    """4,294,967,295 parts are names that fill the memory; a folder of such a name has no keys."""
    head = pb.Generation.FromString(stored(record(9), KEYS, LIMITS).value)
    for name, value in forged.items():
        setattr(head.parts, name, value)
    assert head_of(head.SerializeToString()) is None
    with pytest.raises(ValueError, match="is a head"):
        Generation.decode(head.SerializeToString())
