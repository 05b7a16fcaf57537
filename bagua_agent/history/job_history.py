"""Short events of a job for people, under their keys, and the reader that orders them. Pure.

Where possible, a key is derived from the event, so that an event exists once even if two leaders write it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import DecodeError

from bagua_agent.base.plain_text import counted, in_utf8, listed
from bagua_agent.etcd.client import KeyValue
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.replica import Replica

ENDED = "ended"  # the name of the last event
KEPT = 1000
LONGEST_TEXT = 500
MOST_NODES = 16  # that an event of a generation lists
LONGEST_NODE_TEXT = 120


class EventKind(Enum):
    JOB_CREATED = pb.Event.JOB_CREATED
    GENERATION_FORMED = pb.Event.GENERATION_FORMED
    WORKER_LOST = pb.Event.WORKER_LOST
    WORKER_FAILED = pb.Event.WORKER_FAILED
    SCALED = pb.Event.SCALED
    NODE_JOINED = pb.Event.NODE_JOINED
    NODE_LEAVING = pb.Event.NODE_LEAVING
    NODE_LOST = pb.Event.NODE_LOST
    STORE_AWAY = pb.Event.STORE_AWAY
    STORE_BACK = pb.Event.STORE_BACK
    KEYS_LOST = pb.Event.KEYS_LOST
    JOB_ENDED = pb.Event.JOB_ENDED
    AGENT_FAILED = pb.Event.AGENT_FAILED
    REPLICA_ASSEMBLED = pb.Event.REPLICA_ASSEMBLED
    REPLICA_OVER = pb.Event.REPLICA_OVER
    TUNED = pb.Event.TUNED
    GENERATION_IN_FORCE = pb.Event.GENERATION_IN_FORCE


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job. name: of its key, unique in the job. time_unix_s: of the writer's clock, for people only; 0:
    not written yet. generation, world_size: 0 if it is about none. text: one line. lost_s: of GENERATION_IN_FORCE, what
    the change took. members: of GENERATION_FORMED, see ranks_by_node."""

    name: str
    kind: EventKind
    text: str
    node_name: str = ""
    time_unix_s: float = 0.0
    generation: int = 0
    generation_kind: str = ""
    world_size: int = 0
    worker_id: str = ""
    lost_s: float = 0.0
    members: tuple[str, ...] = ()

    def encode(self, node_name: str, time_unix_s: float) -> bytes:
        """Returns the value to store. node_name: the writer's, unless the event happened on another node."""
        return pb.Event(
            kind=self.kind.value,
            time_unix_s=time_unix_s,
            node_name=self.node_name or node_name,
            text=in_utf8(" ".join(self.text.split()))[:LONGEST_TEXT],
            generation=self.generation,
            generation_kind=self.generation_kind or None,
            world_size=self.world_size,
            worker_id=self.worker_id,
            lost_s=self.lost_s,
            members=[text[:LONGEST_NODE_TEXT] for text in self.members],
        ).SerializeToString()


def created(script: str) -> JobEvent:
    return JobEvent("created", EventKind.JOB_CREATED, f"job created: {script}")


def formed(generation: Generation, what_changed: str) -> JobEvent:
    return JobEvent(
        f"generation-{generation.number}",
        EventKind.GENERATION_FORMED,
        what_changed,
        generation=generation.number,
        generation_kind=generation.kind.name,
        world_size=generation.world_size,
        members=ranks_by_node(generation, MOST_NODES),
    )


def ranks_by_node(generation: Generation, most_nodes: int) -> tuple[str, ...]:
    """Lists the ranks of each node, such as "h1: rank 0, 1", in the order of ranks; the last text counts the nodes that
    most_nodes leaves out."""
    ranks: dict[str, list[int]] = {}
    for member in generation.members:
        ranks.setdefault(member.node_name, []).append(member.global_rank)
    shown = [f"{node}: rank {listed(found)}" for node, found in list(ranks.items())[:most_nodes]]
    left_out = len(ranks) - len(shown)
    return (*shown, f"and {counted(left_out, 'node')} more") if left_out else tuple(shown)


def in_force(generation: int, text: str, lost_s: float) -> JobEvent:
    """Makes the event of a generation whose first step is committed."""
    return JobEvent(
        f"in-force-{generation}",
        EventKind.GENERATION_IN_FORCE,
        text,
        generation=generation,
        lost_s=lost_s,
    )


def replica_written(replica: Replica) -> JobEvent:
    nodes = " and ".join(dict.fromkeys(m.node_name for m in replica.members))
    digest = hashlib.sha256(replica.replica_id.encode("utf-8", "replace")).hexdigest()[:16]
    if replica.over:
        return JobEvent(
            f"replica-over-{digest}",
            EventKind.REPLICA_OVER,
            f"the replica of {nodes} is over: {replica.over}; its other workers start again",
            node_name=replica.members[0].node_name,
        )
    return JobEvent(
        f"replica-{digest}",
        EventKind.REPLICA_ASSEMBLED,
        f"{replica.size} workers of {nodes} form a replica",
        node_name=replica.members[0].node_name,
    )


def worker_ended_name(worker_id: str) -> str:
    """Returns the name of the event of a worker's failure."""
    return f"ended-{worker_id}"


def worker_ended(failure: pb.Failure) -> JobEvent:
    kind = EventKind.WORKER_FAILED if failure.script_failure else EventKind.WORKER_LOST
    where = f"global rank {failure.global_rank}" if failure.global_rank >= 0 else "in no generation"
    files = f"; files in {failure.log_path}" if failure.log_path else ""
    return JobEvent(
        worker_ended_name(failure.worker_id),
        kind,
        f"worker in slot {failure.slot}, {where}: {failure.cause}{files}",
        worker_id=failure.worker_id,
    )


def scaled(revision: int, text: str) -> JobEvent:
    return JobEvent(f"scaled-{revision}", EventKind.SCALED, text)


def tuned(revision: int, text: str) -> JobEvent:
    """Makes the event of written settings. revision: at which the settings were written."""
    return JobEvent(f"tuned-{revision}", EventKind.TUNED, text)


def tried(study: int, trials: int, text: str) -> JobEvent:
    """Makes the event of what happened in a study. study: its number. trials: that it has by now."""
    return JobEvent(
        f"study-{study}-{trials}-{hashlib.sha256(text.encode()).hexdigest()[:8]}", EventKind.TUNED, text
    )


def node_joined(agent_id: str, slots: int) -> JobEvent:
    return JobEvent(f"joined-{agent_id}", EventKind.NODE_JOINED, f"joined with {slots} slots")


def node_leaving(agent_id: str) -> JobEvent:
    return JobEvent(f"leaving-{agent_id}", EventKind.NODE_LEAVING, "was asked to leave")


def node_lost(agent_id: str, node_name: str, generation: int) -> JobEvent:
    return JobEvent(
        f"lost-{agent_id}-{generation}",
        EventKind.NODE_LOST,
        f"lost; generation {generation} goes on without it",
        node_name=node_name,
    )


def store_away(agent_id: str, outage: int) -> JobEvent:
    return JobEvent(f"away-{agent_id}-{outage}", EventKind.STORE_AWAY, "etcd does not answer")


def store_back(agent_id: str, outage: int, after_s: float) -> JobEvent:
    return JobEvent(
        f"back-{agent_id}-{outage}", EventKind.STORE_BACK, f"etcd answers again after {after_s:.1f} s"
    )


def keys_lost(agent_id: str, loss: int) -> JobEvent:
    return JobEvent(
        f"keys-lost-{agent_id}-{loss}",
        EventKind.KEYS_LOST,
        "etcd has lost the job's keys; they were put again from memory",
    )


def agent_failed(node_name: str, failures: int, reason: str) -> JobEvent:
    """Makes the event of a node that could not start the job's agent, or whose agent ended with an error. failures: in
    a row; 0: it was refused.

    As many events of a node as it may fail in a row: later ones are written over those of the same count.
    """
    text = f"the job's agent can't be started: {reason}" if not failures else reason
    # With a long name it would be no id
    node = hashlib.sha256(node_name.encode("utf-8", "replace")).hexdigest()[:16]
    return JobEvent(f"agent-failed-{node}-{failures}", EventKind.AGENT_FAILED, text, node_name=node_name)


def ended(outcome: str, reason: str) -> JobEvent:
    return JobEvent(ENDED, EventKind.JOB_ENDED, f"job {outcome}: {reason}")


def events_of(values: Iterable[KeyValue], keys: JobKeys) -> list[JobEvent]:
    """Returns the events among `values`, in the order in which the store got them. One that was written again is at its
    newest place. What can't be read is passed over."""
    found = []
    for kv in values:
        name = keys.id_in(keys.events, kv.key)
        event = read_event(name, kv.value) if name is not None else None
        if event is not None:
            found.append((kv.mod_revision, kv.key, event))
    return [event for _, _, event in sorted(found, key=lambda entry: entry[:2])]


def read_event(name: str, value: bytes) -> JobEvent | None:
    """Reads an event; returns None for what this version can't read."""
    try:
        event = pb.Event.FromString(value)
        kind = EventKind(event.kind)
        about = pb.Generation.Kind.Name(event.generation_kind) if event.generation_kind else ""
    except (DecodeError, ValueError):
        return None  # another version's, or written by hand
    return JobEvent(
        name,
        kind,
        event.text,
        event.node_name,
        event.time_unix_s,
        event.generation,
        about,
        event.world_size,
        event.worker_id,
        event.lost_s,
        tuple(event.members),
    )


def superfluous(revisions: dict[str, int], kept: int = KEPT) -> list[str]:
    """Returns the keys of the oldest events beyond `kept`. revisions: mod revision by key."""
    oldest = sorted(revisions, key=lambda key: (revisions[key], key))
    return oldest[: max(0, len(oldest) - kept)]
