"""What do the cluster's records say, as decisions see them? Between bagua_contract's messages and cluster_view; pure.

Reading is forgiving: a record that can't be read, or that no person could have asked for, is as if it were not there,
and its reason is returned to be told once. A newer version's record must not end what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from bagua_agent.cluster.cluster_view import (
    DrainView,
    JobEnd,
    JobProgress,
    NodeView,
    OrderView,
    OutcomeView,
    SubmissionView,
    UnitState,
    UnitView,
)
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2

PROTOCOL = 1


class UnreadableRecord(ValueError):
    """Says why."""


def read_submission(value: bytes) -> SubmissionView:
    """Raises UnreadableRecord."""
    record = parse_submission(value)
    try:
        return SubmissionView(
            job_id=record.job_id,
            min_nodes=record.min_nodes,
            max_nodes=record.max_nodes,
            slots_per_node=record.slots_per_node,
            priority=record.priority,
            labels=dict(record.labels),
            stop=record.wanted == pb.Submission.STOP,
        )
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error


def parse_submission(value: bytes) -> pb.Submission:
    """Raises UnreadableRecord."""
    try:
        record = pb.Submission.FromString(value)
    except DecodeError as error:
        raise UnreadableRecord(f"no submission: {error}") from error
    if record.protocol != PROTOCOL:
        raise UnreadableRecord(
            f"a submission of protocol {record.protocol}, this is {PROTOCOL}; use one version of bagua"
        )
    if record.wanted not in (pb.Submission.RUN, pb.Submission.STOP):
        raise UnreadableRecord(f"a submission that wants {record.wanted}")
    return record


def read_node(value: bytes) -> NodeView:
    """Present, without its drain. Raises UnreadableRecord."""
    try:
        record = pb.Node.FromString(value)
        units = tuple(_read_unit(unit) for unit in record.units)
    except (DecodeError, ValueError) as error:
        raise UnreadableRecord(f"no node: {error}") from error
    if record.protocol != PROTOCOL or not record.node_name:
        raise UnreadableRecord(
            f"a node of protocol {record.protocol}, this is {PROTOCOL}; use one version of bagua"
        )
    return NodeView(record.node_name, record.slots, dict(record.labels), tuple(record.troubles), units)


def _read_unit(unit: pb.Unit) -> UnitView:
    return UnitView(
        job_id=unit.job_id,
        state=UnitState(unit.state),
        slots=tuple(unit.slots),
        failures=unit.failures,
        exit_code=unit.exit_code,
        reason=unit.reason,
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
    """Raises UnreadableRecord."""
    try:
        record = pb.Orders.FromString(value)
    except DecodeError as error:
        raise UnreadableRecord(f"no orders: {error}") from error
    found = {o.job_id: OrderView(o.job_id, o.slots, o.number) for o in record.orders}
    return tuple(found.values())


def write_orders(orders: Iterable[OrderView]) -> bytes:
    made = [pb.Order(job_id=o.job_id, slots=o.slots, number=o.number) for o in orders]
    return pb.Orders(orders=made).SerializeToString()


def read_drain(value: bytes) -> DrainView:
    """An unreadable one is a drain all the same: somebody meant the node to be left."""
    try:
        record = pb.Drain.FromString(value)
    except DecodeError:
        return DrainView(reason="its record can't be read")
    return DrainView(record.force, record.reason)


def read_outcome(value: bytes, since_s: float) -> OutcomeView:
    """Raises UnreadableRecord."""
    try:
        record = pb.JobOutcome.FromString(value)
        return OutcomeView(JobEnd(record.outcome), record.exit_code, record.reason, since_s)
    except (DecodeError, ValueError) as error:
        raise UnreadableRecord(f"no outcome: {error}") from error


def write_outcome(outcome: OutcomeView, ended_unix_s: float) -> bytes:
    return pb.JobOutcome(
        outcome=outcome.end.value,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        ended_unix_s=ended_unix_s,
    ).SerializeToString()


_ENDS = {
    membership_pb2.Result.SUCCEEDED: JobEnd.SUCCEEDED,
    membership_pb2.Result.FAILED: JobEnd.FAILED,
    membership_pb2.Result.STOPPED: JobEnd.STOPPED,
}


def read_progress(
    generation: bytes | None,
    result: bytes | None,
    agents: Mapping[str, bytes],
    members: Iterable[str],
    result_since_s: float,
) -> JobProgress:
    """Of one job, from its own keys. agents: records by agent id. members: ids of the workers that are ready."""
    placed: dict[str, int] = {}
    number = 0
    if generation is not None:
        try:
            record = membership_pb2.Generation.FromString(generation)
        except DecodeError:
            record = membership_pb2.Generation()
        number = record.number
        for placement in record.members:
            placed[placement.agent_id] = placed.get(placement.agent_id, 0) + 1
    ready: dict[str, int] = {}
    for worker_id in members:
        agent_id = worker_id.split(".")[0]
        ready[agent_id] = ready.get(agent_id, 0) + 1
    arrived = set()
    for agent_id, value in agents.items():
        try:
            agent = membership_pb2.Agent.FromString(value)
        except DecodeError:
            continue
        restarted = agent.run_generation == number and agent.run == membership_pb2.Agent.RUNNING
        if max(placed.get(agent_id, 0), ready.get(agent_id, 0)) >= agent.slots or restarted:
            arrived.add(agent.node_name)
    return JobProgress(number > 0, frozenset(arrived), _read_result(result, result_since_s))


def _read_result(value: bytes | None, since_s: float) -> OutcomeView | None:
    if value is None:
        return None
    try:
        record = membership_pb2.Result.FromString(value)
        return OutcomeView(_ENDS[record.outcome], record.exit_code, record.reason, since_s)
    except (DecodeError, KeyError):
        return OutcomeView(JobEnd.FAILED, 1, "its result can't be read", since_s)
