"""Decides what is written again after the store lost its keys, from this agent's memory and the store. Pure.

The highest generation that any agent remembers wins, and a write compares what was read, so two agents that write at
the same time cannot undo each other. The leader waits for the others (SETTLE_S) before it forms a new generation: a
number must not be used twice (I5).

Another agent may have started the job anew meanwhile, since it found an empty store. Members' memory takes precedence
over a job without committed steps. A job with committed steps is never touched: all agents see its history, so later
agents give way to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from bagua_agent.etcd.client import Compare, KeyValue, Put, absent, mod_revision_is
from bagua_agent.etcd.keys import AfterLoss, JobKeys
from bagua_agent.large_jobs.limits import USUAL_LIMITS, Limits
from bagua_agent.large_jobs.record_parts import stored
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, read_message

# From the moment an agent sees that the job's keys or its own are lost until it stands for election: about what agents
# take to notice that etcd answers again, so that the first leader finds the newest record, and the keys, of all agents
# that come back.
SETTLE_S = 1.5


@dataclass(frozen=True, slots=True)
class Memory:
    """Holds what this agent remembers of its job. nonce: of the job that this agent is in. values: by key, as last
    seen: keys that AfterLoss lets an agent put again, of the replicas its own alone. committed: a step of this job was
    committed, as far as this agent knows."""

    nonce: str
    values: Mapping[str, bytes]
    generation: Generation | None
    committed: bool


@dataclass(frozen=True, slots=True)
class PutAgain:
    """A transaction that writes lost keys again. before: what it points to, written first; these keys never hold
    another agent's values."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...]
    before: tuple[Put, ...] = ()


@dataclass(frozen=True, slots=True)
class GiveWay:
    """States that this node's part is void; it may come again as a newcomer."""

    reason: str


@dataclass(frozen=True, slots=True)
class NothingLost:
    pass


RecreationVerdict = PutAgain | GiveWay | NothingLost


def after_a_loss(
    keys: JobKeys, memory: Memory, found: Mapping[str, KeyValue], limits: Limits = USUAL_LIMITS
) -> RecreationVerdict:
    """Decides what is written again. found: all keys under the job's prefix, with whole records."""
    spec = found.get(keys.spec)
    over: dict[str, int] = {}
    if spec is not None and (nonce := nonce_of(spec.value)) != memory.nonce:
        if nonce:
            return _another_job(keys, memory, found, limits)
        if keys.result in memory.values:
            return NothingLost()  # ours is over
        over[keys.spec] = spec.mod_revision  # garbage is no job that was begun meanwhile
    record = _own_generation(keys, memory, found)
    known = memory.generation
    if record is not None and known is not None and record.number == known.number and record != known:
        return GiveWay(f"etcd lost its keys, and the others went on with another generation {known.number}")
    return _missing(keys, memory, found, limits, over)


def _another_job(
    keys: JobKeys, memory: Memory, found: Mapping[str, KeyValue], limits: Limits
) -> RecreationVerdict:
    if keys.result in memory.values:
        return NothingLost()  # ours is over; the name is free
    if not memory.committed:
        return GiveWay("the job was written anew by others, and nothing was trained here")
    if keys.result in found or _has_committed(keys, memory, found):
        return GiveWay("etcd lost its keys, and another job of this id has trained since")
    begun = keys.after_loss(AfterLoss.PUT_OVER_A_NEW_JOB)
    over = {key: kv.mod_revision for key in begun if (kv := found.get(key)) is not None}
    return _missing(keys, memory, found, limits, over)


def _missing(
    keys: JobKeys,
    memory: Memory,
    found: Mapping[str, KeyValue],
    limits: Limits,
    over: Mapping[str, int],
) -> RecreationVerdict:
    """Decides which keys are written again. over: keys that exist and are not ours, with the revision that was read."""
    work = _Work()
    with_spec = keys.after_loss(AfterLoss.WITH_SPEC)
    for key, value in memory.values.items():
        if key in with_spec:
            continue  # no agent follows it: whether it was lost is not known
        standing = found.get(key)
        if key in over:
            work.add(key, value, over[key])
        elif standing is None:
            work.add(key, value, 0)
    if memory.generation is not None and keys.result not in memory.values:
        stands = found.get(keys.generation)
        record = _own_generation(keys, memory, found)
        if record is None or record.number < memory.generation.number:
            form = stored(memory.generation, keys, limits)
            work.before = form.parts
            work.add(keys.generation, form.value, stands.mod_revision if stands is not None else 0)
    if not work.puts:
        return NothingLost()
    if keys.spec in {put.key for put in work.puts}:
        if keys.result not in memory.values:
            work.puts += [Put(key, memory.values[key]) for key in with_spec if key in memory.values]
    else:
        # never into another job
        work.compares.append(mod_revision_is(keys.spec, found[keys.spec].mod_revision))
    if keys.result not in memory.values:
        work.compares.append(_unended(keys, found))
    return PutAgain(tuple(work.compares), tuple(work.puts), work.before)


def _unended(keys: JobKeys, found: Mapping[str, KeyValue]) -> Compare:
    """Returns the condition that there is no readable result."""
    standing = found.get(keys.result)
    if standing is None or _is_result(standing.value):
        return absent(keys.result)
    return mod_revision_is(keys.result, standing.mod_revision)


def _is_result(value: bytes) -> bool:
    result = read_message(pb.Result, value)
    return result is not None and result.outcome != pb.Result.OUTCOME_UNSPECIFIED


@dataclass(slots=True)
class _Work:
    compares: list[Compare] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    before: tuple[Put, ...] = ()

    def add(self, key: str, value: bytes, over_revision: int) -> None:
        self.compares.append(mod_revision_is(key, over_revision))
        self.puts.append(Put(key, value))


def _has_committed(keys: JobKeys, memory: Memory, found: Mapping[str, KeyValue]) -> bool:
    """Tells whether the job in the store has committed a step, our own workers aside."""
    record = _generation(found.get(keys.generation))
    if record is None or record.nonce == memory.nonce:
        return False
    ours = {m.worker_id for m in memory.generation.members} if memory.generation is not None else set()
    for placement in record.members:
        stands = found.get(keys.member(placement.worker_id))
        member = None if stands is None else read_message(pb.Member, stands.value)
        if member is not None and placement.worker_id not in ours and member.committed_generation:
            return True
    return False


def nonce_of(value: bytes) -> str:
    """Returns the nonce of a spec; empty for one that can't be read: it belongs to no job."""
    spec = read_message(pb.JobSpec, value)
    return "" if spec is None else spec.nonce


def _own_generation(keys: JobKeys, memory: Memory, found: Mapping[str, KeyValue]) -> Generation | None:
    record = _generation(found.get(keys.generation))
    return record if record is not None and record.nonce == memory.nonce else None


def _generation(stands: KeyValue | None) -> Generation | None:
    """Decodes a generation; None also for one that can't be read: it conflicts with no other."""
    if stands is None:
        return None
    try:
        return Generation.decode(stands.value)
    except (DecodeError, ValueError):
        return None
