"""Collects everything about one job at one moment, for `bagua-launch top`, `logs` and the dashboard.

`read_facts` is the thin shell: two reads of etcd and one call to each agent. `JobFacts` is a value; what it means is
decided elsewhere, by pure functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.history.job_history import JobEvent, events_of
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.agent_calls import AgentSeen, JobAgents
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, read_message


@dataclass(frozen=True, slots=True)
class SuspicionSeen:
    """A suspicion of a worker that can't go on. stalled: its collective takes long; else it broke."""

    worker_id: str
    stalled: bool
    detail: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts about a job at one moment. at_unix_s: when the agents were asked, by the reader's clock. A silent agent
    delays the facts, and not what the others have answered by then. generation: the newest record; None before the
    first. failures: in the order in which they were reported. problem: why agents could not be asked; empty if they
    were. store_problem: why etcd could not be read, so that all but the answers of agents is older; empty if it was."""

    job_id: str
    at_unix_s: float
    spec: pb.JobSpec
    desired: pb.Desired
    generation: Generation | None
    agents: tuple[AgentSeen, ...]
    members: int
    suspicions: tuple[SuspicionSeen, ...]
    failures: tuple[FailureView, ...]
    events: tuple[JobEvent, ...]
    result: pb.Result | None
    closing: bool
    problem: str = ""
    store_problem: str = ""

    @property
    def workers(self) -> list[tuple[AgentSeen, control_pb2.WorkerNow]]:
        """The workers that agents report: by global rank, then those outside the generation."""
        found = [(agent, worker) for agent in self.agents if agent.node for worker in agent.node.workers]
        return sorted(
            found,
            key=lambda pair: (
                not pair[1].HasField("global_rank"),
                pair[1].global_rank,
                pair[0].node_name,
                pair[1].slot,
            ),
        )


def read_facts(
    store: Store, agents: JobAgents, job_id: str, clock_unix_s: Callable[[], float] = time.time
) -> JobFacts | None:
    """Returns the facts about a job; None if etcd has no such job. Raises StoreUnavailable."""
    keys = JobKeys(job_id)
    records, _ = store.get_prefix(keys.prefix)
    values = {kv.key: kv for kv in records}
    if keys.spec not in values:
        return None

    def control(key: str) -> bytes:
        return values[key].value if key in values else b""

    problem = ""
    seen: tuple[AgentSeen, ...] = ()
    asked_unix_s = clock_unix_s()
    try:
        seen = agents.look([kv for kv in records if kv.key.startswith(keys.agents)])
    except UserError as error:
        problem = str(error)
    result = read_message(pb.Result, control(keys.result)) if keys.result in values else None
    failures = (
        FailureView.of(failure, kv.create_revision)
        for kv in records
        if kv.key.startswith(keys.failures) and (failure := read_message(pb.Failure, kv.value)) is not None
    )
    suspicions = (
        SuspicionSeen(s.worker_id, s.kind == pb.Suspicion.STALLED, s.detail, s.waited_s)
        for kv in records
        if kv.key.startswith(keys.suspicions) and (s := read_message(pb.Suspicion, kv.value)) is not None
    )
    return JobFacts(
        job_id=job_id,
        at_unix_s=asked_unix_s,
        spec=read_message(pb.JobSpec, control(keys.spec)) or pb.JobSpec(),
        desired=read_message(pb.Desired, control(keys.desired)) or pb.Desired(),
        generation=_generation(store, keys, control(keys.generation)),
        agents=seen,
        members=sum(kv.key.startswith(keys.members) for kv in records),
        suspicions=tuple(suspicions),
        failures=tuple(sorted(failures, key=lambda failure: failure.order)),
        events=tuple(events_of(records, keys)),
        result=result,
        closing=keys.closing in values,
        problem=problem,
    )


def facts_without_store(
    last: JobFacts, agents: JobAgents, problem: str, clock_unix_s: Callable[[], float] = time.time
) -> JobFacts:
    """Asks the agents of `last` again, and returns the facts; the rest is as old as `last`. problem: why etcd could not
    be read."""
    asked_unix_s = clock_unix_s()
    return replace(last, agents=agents.ask_again(last.agents), at_unix_s=asked_unix_s, store_problem=problem)


def _generation(store: Store, keys: JobKeys, value: bytes) -> Generation | None:
    """Returns the generation of a record; None for none, and for a record that this version can't read."""
    whole = whole_value(store, keys, value) if value else None
    if not whole:
        return None
    try:
        return Generation.decode(whole)
    except (DecodeError, ValueError):
        return None
