"""After the store lost its keys: what is put again, over what, and when an agent gives way instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.etcd.client import Compare, KeyValue, Put, absent, mod_revision_is
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.lost_store.recreation import (
    GiveWay,
    Memory,
    NothingLost,
    PutAgain,
    RecreationVerdict,
    after_a_loss,
)
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("job")
SPEC = pb.JobSpec(nonce="ours").SerializeToString()
OTHER_SPEC = pb.JobSpec(nonce="other").SerializeToString()
DESIRED = pb.Desired(min_nodes=1, max_nodes=3).SerializeToString()
RESULT = pb.Result(outcome=pb.Result.SUCCEEDED).SerializeToString()


def generation(number: int, worker_id: str = "w", reason: str = "", nonce: str = "ours") -> Generation:
    place = Placement(worker_id, "a", "n", 0, 0, 0, 0, "h:1", 1, 7, True)
    return Generation(number, number - 1, GenerationKind.FAILOVER, (place,), nonce, reason)


MEMORY = Memory("ours", {KEYS.spec: SPEC, KEYS.desired: DESIRED}, generation(5), committed=True)


def standing(**values: bytes) -> dict[str, KeyValue]:
    """What stands, by the name of the key in JobKeys; revisions count from 11."""
    keys = {"member": KEYS.member("w2")} | {
        name: getattr(KEYS, name) for name in ("spec", "desired", "generation", "closing", "result")
    }
    found = {}
    for revision, (name, value) in enumerate(values.items(), 11):
        found[keys[name]] = KeyValue(keys[name], value, revision, revision, 1, 0)
    return found


def puts(verdict: RecreationVerdict) -> dict[str, tuple[bytes, int]]:
    """Key -> value and the revision that it must be written over."""
    assert isinstance(verdict, PutAgain)
    over = {c.key: c.expected for c in verdict.compares}
    return {p.key: (p.value, int(over[p.key])) for p in verdict.puts}


def test_an_empty_store_gets_everything_back() -> None:
    assert after_a_loss(KEYS, MEMORY, {}) == PutAgain(
        (absent_now(KEYS.spec), absent_now(KEYS.desired), absent_now(KEYS.generation), absent(KEYS.result)),
        (Put(KEYS.spec, SPEC), Put(KEYS.desired, DESIRED), Put(KEYS.generation, generation(5).encode())),
    )


def absent_now(key: str) -> Compare:
    return mod_revision_is(key, 0)


def test_the_key_pair_goes_where_its_spec_goes() -> None:
    """No agent follows it, so no agent sees whether it exists."""
    memory = replace(MEMORY, values={**MEMORY.values, KEYS.identity: b"pair"})
    verdict = after_a_loss(KEYS, memory, {})
    assert isinstance(verdict, PutAgain) and Put(KEYS.identity, b"pair") in verdict.puts
    verdict = after_a_loss(KEYS, memory, standing(spec=OTHER_SPEC))
    assert isinstance(verdict, PutAgain) and Put(KEYS.identity, b"pair") in verdict.puts, "over another job's"
    verdict = after_a_loss(KEYS, memory, standing(spec=SPEC))
    assert isinstance(verdict, PutAgain) and KEYS.identity not in {put.key for put in verdict.puts}


def test_nothing_is_put_where_nothing_is_missing() -> None:
    found = standing(spec=SPEC, desired=DESIRED, generation=generation(5).encode())
    assert after_a_loss(KEYS, MEMORY, found) == NothingLost()
    newer = standing(spec=SPEC, desired=DESIRED, generation=generation(6).encode())
    assert after_a_loss(KEYS, MEMORY, newer) == NothingLost()


def test_the_highest_number_known_wins() -> None:
    found = standing(spec=SPEC, desired=DESIRED, generation=generation(4).encode())
    verdict = after_a_loss(KEYS, MEMORY, found)
    assert puts(verdict) == {KEYS.generation: (generation(5).encode(), 13)}
    assert isinstance(verdict, PutAgain)
    assert mod_revision_is(KEYS.spec, 11) in verdict.compares, "never into another job"


def test_a_scaled_job_keeps_what_stands() -> None:
    scaled = pb.Desired(min_nodes=2, max_nodes=2).SerializeToString()
    found = standing(spec=SPEC, desired=scaled)
    assert set(puts(after_a_loss(KEYS, MEMORY, found))) == {KEYS.generation}


def test_two_records_of_one_number_are_never_written() -> None:
    found = standing(spec=SPEC, desired=DESIRED, generation=generation(5, reason="another").encode())
    assert isinstance(after_a_loss(KEYS, MEMORY, found), GiveWay)


def test_the_end_is_remembered_and_nothing_is_formed_after_it() -> None:
    ended = replace(MEMORY, values={KEYS.spec: SPEC, KEYS.result: RESULT})
    assert puts(after_a_loss(KEYS, ended, {})) == {KEYS.spec: (SPEC, 0), KEYS.result: (RESULT, 0)}
    assert after_a_loss(KEYS, ended, standing(spec=OTHER_SPEC)) == NothingLost()


def test_a_result_that_stands_is_not_written_around() -> None:
    verdict = after_a_loss(KEYS, MEMORY, standing(spec=SPEC, desired=DESIRED))
    assert isinstance(verdict, PutAgain) and absent(KEYS.result) in verdict.compares


def test_memory_beats_a_job_that_has_trained_nothing() -> None:
    verdict = after_a_loss(KEYS, MEMORY, standing(spec=OTHER_SPEC, desired=b""))
    assert puts(verdict) == {
        KEYS.spec: (SPEC, 11),
        KEYS.desired: (DESIRED, 12),
        KEYS.generation: (generation(5).encode(), 0),
    }
    untrained = pb.Member(worker_id="w2").SerializeToString()
    found = standing(
        spec=OTHER_SPEC, generation=generation(7, "w2", nonce="other").encode(), member=untrained
    )
    assert puts(after_a_loss(KEYS, MEMORY, found))[KEYS.generation] == (generation(5).encode(), 12)


def test_another_jobs_record_is_no_newer_one() -> None:
    found = standing(spec=SPEC, desired=DESIRED, generation=generation(9, "w2", nonce="other").encode())
    assert puts(after_a_loss(KEYS, MEMORY, found)) == {KEYS.generation: (generation(5).encode(), 13)}


def test_a_job_that_has_trained_is_given_way_to() -> None:
    trained = pb.Member(worker_id="w2", committed_generation=1).SerializeToString()
    found = standing(spec=OTHER_SPEC, generation=generation(1, "w2", nonce="other").encode(), member=trained)
    assert isinstance(after_a_loss(KEYS, MEMORY, found), GiveWay)
    assert isinstance(after_a_loss(KEYS, MEMORY, standing(spec=OTHER_SPEC, result=RESULT)), GiveWay)


def test_an_agent_that_has_trained_nothing_gives_way() -> None:
    newcomer = replace(MEMORY, committed=False)
    assert isinstance(after_a_loss(KEYS, newcomer, standing(spec=OTHER_SPEC)), GiveWay)
    assert isinstance(after_a_loss(KEYS, newcomer, {}), PutAgain), "its own job it puts again"


@pytest.mark.parametrize("name", ["spec", "generation"])
def test_what_cannot_be_read_is_written_over_or_left(name: str) -> None:
    found = standing(**{"spec": SPEC, "desired": DESIRED, name: b"\xff"})
    assert name in {p.key.rpartition("/")[2] for p in _puts(after_a_loss(KEYS, MEMORY, found))}


def test_a_spec_that_cannot_be_read_is_no_other_job() -> None:
    """No agent began it, so none gives way to it, trained or not; the other keys are ours."""
    found = standing(spec=b"\xff", desired=DESIRED, generation=generation(5).encode())
    for committed in (True, False):
        verdict = after_a_loss(KEYS, replace(MEMORY, committed=committed), found)
        assert puts(verdict) == {KEYS.spec: (SPEC, 11)}
    ended = replace(MEMORY, values={KEYS.spec: SPEC, KEYS.result: RESULT})
    assert after_a_loss(KEYS, ended, found) == NothingLost()


def _puts(verdict: RecreationVerdict) -> tuple[Put, ...]:
    assert isinstance(verdict, PutAgain)
    return verdict.puts


class Etcd:
    """As much of it as transactions of this kind need."""

    def __init__(self) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 1

    def do(self, work: PutAgain) -> bool:
        for compare in work.compares:
            kv = self.keys.get(compare.key)
            revision = (
                0 if kv is None else kv.create_revision if compare.target == "CREATE" else kv.mod_revision
            )
            if revision != compare.expected:
                return False
        self.revision += 1
        for put in work.puts:
            self.keys[put.key] = KeyValue(put.key, put.value, self.revision, self.revision, 1, 0)
        return True


@given(
    known=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    turns=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30),
)
def test_however_agents_interleave_the_highest_stands(
    known: list[int], turns: list[tuple[int, bool]]
) -> None:
    """Each agent looks and later writes; in between others may have written."""
    etcd = Etcd()
    memories = [replace(MEMORY, generation=generation(number)) for number in known]
    pending: dict[int, PutAgain] = {}
    numbers = [0]

    def write(index: int) -> None:
        if (work := pending.pop(index, None)) is not None:
            etcd.do(work)
            numbers.append(Generation.decode(etcd.keys[KEYS.generation].value).number)

    def look(index: int) -> None:
        verdict = after_a_loss(KEYS, memories[index], dict(etcd.keys))
        if isinstance(verdict, PutAgain):
            pending[index] = verdict

    for turn, looks in turns:
        index = turn % len(known)
        look(index) if looks else write(index)
    for index in [*range(len(known))] * 2:  # every agent looks again until nothing is left to do
        write(index)
        look(index)
        write(index)
    assert numbers == sorted(numbers), "numbers only grow"
    assert Generation.decode(etcd.keys[KEYS.generation].value).number == max(known)
    assert all(after_a_loss(KEYS, m, etcd.keys) == NothingLost() for m in memories)
