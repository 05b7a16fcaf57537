"""The service that other agents of the job call, for probes and large records, on TCP with mutual TLS."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from bagua_agent.rpc.control_client import probe
from bagua_agent.rpc.job_identity import JobIdentity, listen, server_options
from bagua_contract import control_pb2, control_pb2_grpc
from bagua_contract.addresses import joined

STOP_GRACE_S = 0.5
MOST_INDIRECT_TIMEOUT_S = 5.0
MOST_INDIRECT = 32
_THREADS_FOR_ITSELF = 4


class ControlServer(control_pb2_grpc.AgentControlServicer):
    """kept_record(sha256): the packed parts of a large record, if this agent has them."""

    def __init__(
        self,
        bind_host: str,
        identity: JobIdentity,
        agent_id: str,
        workers_alive: Callable[[], list[str]],
        kept_record: Callable[[bytes], bytes | None] = lambda sha256: None,
    ) -> None:
        self._kept_record = kept_record
        self._identity = identity
        self._job_id = identity.job_id
        self._agent_id = agent_id
        self._workers_alive = workers_alive
        # Probes for others wait for silent agents; they must never keep this agent from answering its own probes.
        self._indirect = threading.BoundedSemaphore(MOST_INDIRECT)
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_INDIRECT + _THREADS_FOR_ITSELF, thread_name_prefix="bagua-control"),
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

    def stop(self) -> None:
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
