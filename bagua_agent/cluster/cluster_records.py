"""Decodes the cluster's records, from bagua_contract's messages to the values of cluster_view.py. Pure.

Each kind of record has one decoder, which checks everything that decisions rely on: ids, ranges, counts. Texts for
people are shortened. A record that can't be read, or that no person could have requested, is treated as absent, and the
reason is returned so that it is logged once. A newer version's record must not end running jobs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped,unused-ignore]

from bagua_agent.base.errors import PeerViolation
from bagua_agent.base.ids import is_id
from bagua_agent.base.plain_text import shortened
from bagua_agent.base.sizes import Groups, SizePolicy
from bagua_agent.cluster.cluster_view import (
    DrainView,
    JobEnd,
    JobProgress,
    NodeView,
    OrderView,
    OutcomeView,
    RemovalView,
    SubmissionView,
    UnitState,
    UnitView,
)
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_contract.records import LARGEST_NUMBER, read_message

M = TypeVar("M", bound=Message)

PROTOCOL = 1
MOST_ORDERS = 1000  # of one node: each is listed in the node's own record, whose size etcd limits
MOST_TROUBLES = 20


class UnreadableRecord(PeerViolation, ValueError):
    """The error of a record that can't be read. Its text is the reason."""


def _read(kind: type[M], value: bytes, what: str) -> M:
    """Returns the message, of this protocol where it names one. Raises UnreadableRecord."""
    try:
        record = kind.FromString(value)
    except DecodeError as error:
        raise UnreadableRecord(f"no {what}: {error}") from error
    protocol = getattr(record, "protocol", PROTOCOL)
    if protocol != PROTOCOL:
        raise UnreadableRecord(
            f"a {what} of protocol {protocol}, this is {PROTOCOL}; use one version of bagua"
        )
    return record


def read_submission(value: bytes, job_id: str) -> SubmissionView:
    """Returns a submission that was read and checked. Raises UnreadableRecord."""
    return _submission_view(parse_submission(value, job_id))


def parse_submission(value: bytes, job_id: str) -> pb.Submission:
    """Returns the record under a key that names `job_id`; its `launch` is not checked here. Raises UnreadableRecord."""
    record = _read(pb.Submission, value, "submission")
    if record.wanted not in (pb.Submission.RUN, pb.Submission.STOP):
        raise UnreadableRecord(f"a submission that wants {record.wanted}")
    if record.job_id != job_id:
        raise UnreadableRecord(f"a submission that names job {record.job_id!r}")
    if record.nonce and not is_id(record.nonce):
        raise UnreadableRecord("a submission whose nonce can be no part of a key")
    _submission_view(record)
    return record


def nonce_of(record: pb.Submission) -> str:
    """Returns the nonce, which names this one submission of its job's name. A submission that was written without a
    nonce gets one of what never changes in it."""
    made = hashlib.sha256(f"{record.job_id} {record.submitted_unix_s!r}".encode("utf-8", "replace"))
    return str(record.nonce) or made.hexdigest()[:16]


def _submission_view(record: pb.Submission) -> SubmissionView:
    try:
        return SubmissionView(
            job_id=record.job_id,
            min_nodes=record.min_nodes,
            max_nodes=record.max_nodes,
            slots_per_node=record.slots_per_node,
            priority=record.priority,
            labels=dict(record.labels),
            stop=record.wanted == pb.Submission.STOP,
            nonce=nonce_of(record),
            size_policy=_size_policy(record),
            submitted_unix_s=_time(record.submitted_unix_s),
        )
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error


def _size_policy(record: pb.Submission) -> SizePolicy:
    """Returns the sizes that the scheduler may give the job. Raises ValueError."""
    policy = SizePolicy.of(record.size_policy)
    if not record.replica_size:
        return policy
    return replace(policy, groups=Groups(record.replica_size, record.slots_per_node))


def read_node(value: bytes, node_name: str) -> NodeView:
    """Returns the node of a record as present, without its drain. Raises UnreadableRecord."""
    record = parse_node(value, node_name)
    units = tuple(map(_read_unit, record.units))
    troubles = tuple(shortened(trouble) for trouble in record.troubles[:MOST_TROUBLES])
    return NodeView(
        record.node_name, record.slots, dict(record.labels), troubles, units, boot_id=record.boot_id
    )


def parse_node(value: bytes, node_name: str) -> pb.Node:
    """Returns the checked record of a node. node_name: as its key says. Raises UnreadableRecord."""
    record = _read(pb.Node, value, "node")
    if record.node_name != node_name:
        raise UnreadableRecord(f"a node that names itself {record.node_name!r}")
    for unit in record.units:
        _check_order(unit.job_id, unit.order)
        if unit.state not in _UNIT_STATES:
            raise UnreadableRecord(f"a node whose unit of job {unit.job_id!r} is in state {unit.state}")
    return record


_UNIT_STATES = frozenset(state.value for state in UnitState)


def _check_order(job_id: str, number: int) -> None:
    if not is_id(job_id):
        raise UnreadableRecord(f"it names job {job_id!r}, which no job can be called")
    if number > LARGEST_NUMBER:
        raise UnreadableRecord(f"its order number {number} exceeds {LARGEST_NUMBER}")


def _read_unit(unit: pb.Unit) -> UnitView:
    return UnitView(
        job_id=unit.job_id,
        state=UnitState(unit.state),
        slots=tuple(unit.slots),
        failures=unit.failures,
        exit_code=unit.exit_code,
        reason=shortened(unit.reason),
        order=unit.order,
    )


def write_unit(unit: UnitView) -> pb.Unit:
    return pb.Unit(
        job_id=unit.job_id,
        state=unit.state.value,
        slots=unit.slots,
        failures=unit.failures,
        exit_code=unit.exit_code,
        reason=unit.reason,
        order=unit.order,
    )


def read_orders(value: bytes) -> tuple[OrderView, ...]:
    """Returns the orders of a record. Raises UnreadableRecord."""
    record = _read(pb.Orders, value, "orders")
    if len(record.orders) > MOST_ORDERS:
        raise UnreadableRecord(f"{len(record.orders)} orders, of which a node takes {MOST_ORDERS}")
    for order in record.orders:
        _check_order(order.job_id, order.number)
    found = {o.job_id: OrderView(o.job_id, o.slots, o.number, o.nonce) for o in record.orders}
    return tuple(found.values())


def write_orders(orders: Iterable[OrderView]) -> bytes:
    made = [pb.Order(job_id=o.job_id, slots=o.slots, number=o.number, nonce=o.nonce) for o in orders]
    return pb.Orders(orders=made).SerializeToString()


def read_drain(value: bytes) -> DrainView:
    """Returns the drain of a record. An unreadable record is a drain all the same: a person wanted jobs to leave the
    node."""
    record = read_message(pb.Drain, value)
    if record is None:
        return DrainView(reason="its record can't be read")
    return DrainView(record.force, shortened(record.reason))


def read_outcome(value: bytes, since_s: float) -> OutcomeView:
    """Returns the outcome of a record. Raises UnreadableRecord."""
    record = _read(pb.JobOutcome, value, "outcome")
    try:
        end = JobEnd(record.outcome)
    except ValueError as error:
        raise UnreadableRecord(f"no outcome: {error}") from error
    return OutcomeView(end, record.exit_code, shortened(record.reason), since_s, _time(record.ended_unix_s))


def unreadable_outcome(since_s: float) -> OutcomeView:
    """Returns the outcome that an unreadable record counts as. It ends the job all the same: no other could be written
    over it."""
    return OutcomeView(JobEnd.FAILED, 1, "its outcome can't be read", since_s)


def write_outcome(outcome: OutcomeView, ended_unix_s: float, nonce: str = "") -> bytes:
    """Returns the record of an outcome. nonce: of the submission that ended."""
    return pb.JobOutcome(
        outcome=outcome.end.value,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        ended_unix_s=ended_unix_s,
        nonce=nonce,
    ).SerializeToString()


def ended_submission(value: bytes) -> str:
    """Returns the nonce of the submission that an outcome is of; empty where the outcome does not contain it, or can't
    be read."""
    record = read_message(pb.JobOutcome, value)
    return record.nonce if record is not None and is_id(record.nonce) else ""


def read_removal(value: bytes) -> RemovalView:
    """Returns the removal of a record. Raises UnreadableRecord. A daemon that puts a job's keys back gives way to any
    record, readable or not."""
    record = _read(pb.Removal, value, "removal")
    if not is_id(record.job_id):
        raise UnreadableRecord(f"a removal of job {record.job_id!r}, which no job can be called")
    return RemovalView(record.job_id, _time(record.removed_unix_s))


def write_removal(removal: RemovalView) -> bytes:
    return pb.Removal(
        protocol=PROTOCOL, job_id=removal.job_id, removed_unix_s=removal.removed_unix_s
    ).SerializeToString()


def _time(unix_s: float) -> float:
    return unix_s if math.isfinite(unix_s) else 0.0


_ENDS = {
    membership_pb2.Result.SUCCEEDED: JobEnd.SUCCEEDED,
    membership_pb2.Result.FAILED: JobEnd.FAILED,
    membership_pb2.Result.STOPPED: JobEnd.STOPPED,
}


def read_progress(
    generation: bytes | None,
    result: bytes | None,
    agents: Mapping[str, bytes],
    members: Mapping[str, bytes],
    replicas: Iterable[bytes],
    result_since_s: float,
) -> JobProgress:
    """Returns how far one job is, read from its own keys. agents, members: records by agent id and worker id. replicas:
    records of replicas; the generation lists them too, but in a large job only its head is read here.

    A worker that waits before its loop does not count: no generation of a job that trains may list it yet, so another
    node's workers can't be let go for it. In restart mode no worker has a record of its own: a node is ready once its
    agent can start workers.
    """
    placed: dict[str, int] = {}
    number = 0
    restarts = False
    if generation is not None:
        record = read_message(membership_pb2.Generation, generation) or membership_pb2.Generation()
        number = record.number
        # by the generation's kind: an agent of a job that has become live still says that it can start workers
        restarts = record.kind == membership_pb2.Generation.RESTART
        for placement in record.members:
            placed[placement.agent_id] = placed.get(placement.agent_id, 0) + 1
    ready: dict[str, int] = {}
    for worker_id, value in members.items():
        member = read_message(membership_pb2.Member, value)
        if member is None or member.stage != membership_pb2.LOOP:
            continue
        agent_id = worker_id.split(".")[0]
        ready[agent_id] = ready.get(agent_id, 0) + 1
    arrived = set()
    for agent_id, value in agents.items():
        agent = read_message(membership_pb2.Agent, value)
        if agent is None:
            continue
        restarted = agent.run_generation == number and agent.run == membership_pb2.Agent.RUNNING
        startable = restarts and agent.ready
        if max(placed.get(agent_id, 0), ready.get(agent_id, 0)) >= agent.slots or restarted or startable:
            arrived.add(agent.node_name)
    several = _over_several_nodes(replicas)
    return JobProgress(number > 0, frozenset(arrived), _read_result(result, result_since_s), several)


def _over_several_nodes(records: Iterable[bytes]) -> tuple[frozenset[str], ...]:
    """Returns the nodes of each replica that is not over; one within a node is lost with it alone."""
    found = set()
    for value in records:
        record = read_message(membership_pb2.Replica, value)
        if record is not None and not record.over:
            found.add(frozenset(member.node_name for member in record.members))
    return tuple(sorted((nodes for nodes in found if len(nodes) > 1), key=sorted))


def _read_result(value: bytes | None, since_s: float) -> OutcomeView | None:
    if value is None:
        return None
    record = read_message(membership_pb2.Result, value)
    end = None if record is None else _ENDS.get(record.outcome)
    if record is None or end is None:
        return OutcomeView(JobEnd.FAILED, 1, "its result can't be read", since_s)
    return OutcomeView(end, record.exit_code, shortened(record.reason), since_s)
