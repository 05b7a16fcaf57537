"""The service that other agents of the job call for probes and large records, and people's commands for a node's state,
output, stacks, collectives and traces. On TCP with mutual TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from bagua_agent.rpc.control_client import probe
from bagua_agent.rpc.job_identity import JobIdentity, listen, server_options
from bagua_agent.rpc.node_answers import NoAnswers, NodeAnswers
from bagua_agent.rpc.trace_relay import TraceBusy, TraceRelay
from bagua_contract import control_pb2, control_pb2_grpc, trace_pb2
from bagua_contract.addresses import joined

STOP_GRACE_S = 0.5
MOST_INDIRECT_TIMEOUT_S = 5.0
MOST_INDIRECT = 32
MOST_LOOKING = 4  # calls of people at once, which may wait for the agent's loop or for stacks
_THREADS_FOR_ITSELF = 4


class ControlServer(control_pb2_grpc.AgentControlServicer):
    """Serves probes, large records, and what people's commands read. kept_record(sha256): the packed parts of a large
    record, if this agent has them. traces: of this node's workers. restarts(): whether the job is in restart mode.
    is_stuck(): whether the agent's loop does not go on, so that the agent counts as one that does not answer."""

    def __init__(
        self,
        bind_host: str,
        identity: JobIdentity,
        agent_id: str,
        workers_alive: Callable[[], list[str]],
        kept_record: Callable[[bytes], bytes | None] = lambda sha256: None,
        answers: NodeAnswers | None = None,
        traces: TraceRelay | None = None,
        node_name: str = "",
        restarts: Callable[[], bool] = lambda: False,
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self._answers: NodeAnswers = NoAnswers() if answers is None else answers
        self._traces = traces
        self._node_name = node_name
        self._restarts = restarts
        self._is_stuck = is_stuck
        self._kept_record = kept_record
        self._identity = identity
        self._job_id = identity.job_id
        self._agent_id = agent_id
        self._workers_alive = workers_alive
        # Probes for others wait for silent agents; they must never keep this agent from answering its own probes.
        self._indirect = threading.BoundedSemaphore(MOST_INDIRECT)
        self._looking = threading.BoundedSemaphore(MOST_LOOKING)
        self._server = grpc.server(
            ThreadPoolExecutor(
                MOST_INDIRECT + MOST_LOOKING + _THREADS_FOR_ITSELF, thread_name_prefix="bagua-control"
            ),
            options=server_options(),
        )
        control_pb2_grpc.add_AgentControlServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = listen(self._server, joined(bind_host, 0), identity)
        self.address = joined(bind_host, port)
        self._server.start()

    def Probe(
        self, request: control_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> control_pb2.ProbeReply:
        if request.job_id != self._job_id or request.agent_id != self._agent_id:
            return control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.REFUSED)
        if self._is_stuck():
            return control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.UNANSWERED)
        return control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.ALIVE, workers=self._workers_alive())

    def ProbeFor(
        self, request: control_pb2.ProbeForRequest, context: grpc.ServicerContext
    ) -> control_pb2.ProbeReply:
        unanswered = control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.UNANSWERED)
        # Only agents of this job are probed: a stranger must not scan ports through this agent.
        if request.request.job_id != self._job_id or not request.timeout_s > 0:
            return unanswered
        if not self._indirect.acquire(blocking=False):
            return unanswered
        try:
            timeout_s = min(request.timeout_s, MOST_INDIRECT_TIMEOUT_S)
            return probe(self._identity, request.control_address, request.request.agent_id, timeout_s)
        finally:
            self._indirect.release()

    def ReadRecord(
        self, request: control_pb2.ReadRecordRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReadRecordReply:
        packed = self._kept_record(request.sha256) if request.job_id == self._job_id else None
        return control_pb2.ReadRecordReply(packed=packed or b"")

    def ReadNode(
        self, request: control_pb2.ReadNodeRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReadNodeReply:
        with self._looker(request.job_id, context):
            return self._answers.node()

    def ReadOutput(
        self, request: control_pb2.ReadOutputRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReadOutputReply:
        with self._looker(request.job_id, context):
            return self._answers.output(request.slot, request.stream, request.position)

    def ReadStacks(
        self, request: control_pb2.ReadStacksRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReadStacksReply:
        with self._looker(request.job_id, context):
            return self._answers.stacks(request.slot)

    def ReadCollectives(
        self, request: control_pb2.ReadCollectivesRequest, context: grpc.ServicerContext
    ) -> control_pb2.ReadCollectivesReply:
        with self._looker(request.job_id, context):
            return self._answers.collectives(request.slot)

    @contextmanager
    def _looker(self, job_id: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Surrounds a call of a person: only MOST_LOOKING at once, so that probes always find a thread."""
        if job_id != self._job_id:
            context.abort(grpc.StatusCode.NOT_FOUND, "this agent is of another job")
        if not self._looking.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once; try again")
        try:
            yield
        finally:
            self._looking.release()

    def Trace(
        self, request: trace_pb2.TraceRequest, context: grpc.ServicerContext
    ) -> Iterator[trace_pb2.TraceReply]:
        if request.job_id != self._job_id or request.agent_id != self._agent_id or self._traces is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "another agent listens here")
        assert self._traces is not None
        try:
            trace = self._traces.begin(request)
        except TraceBusy as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        try:
            if not context.add_callback(trace.end):
                return  # the caller is gone
            begun = trace_pb2.TraceBegun(
                node_name=self._node_name, restart_mode=self._restarts(), workers=trace.workers
            )
            yield trace_pb2.TraceReply(begun=begun)
            yield from trace.replies()
        finally:
            self._traces.end(trace)

    def ReadClock(
        self, request: trace_pb2.ClockRequest, context: grpc.ServicerContext
    ) -> trace_pb2.ClockReply:
        is_asked = request.job_id == self._job_id and request.agent_id == self._agent_id
        return trace_pb2.ClockReply(monotonic_ns=time.monotonic_ns() if is_asked else 0)

    def stop(self) -> None:
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
