"""The service of a daemon that people's commands call, over mutual TLS where there are certificates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificates import Role
from bagua_agent.security.grpc_security import RoleInterceptor, server_credentials, server_options
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node.caller_limits import (
    MOST_READERS,
    AwaitedRequests,
    CallerLimits,
    TooManyReaders,
    caller_name,
)
from bagua_contract import node_pb2, node_pb2_grpc

MOST_CALLS = MOST_READERS + 16  # so that logs are listed, and refusals are answered, while all readers read
STOP_GRACE_S = 1.0
LARGEST_OFFSET = 1 << 62

# Workers' output may contain anything, so reading it needs the role of a viewer.
LEAST_ROLES = {
    "/bagua.v1.NodeService/ListLogs": Role.VIEWER,
    "/bagua.v1.NodeService/ReadLog": Role.VIEWER,
}


class NodeServer(node_pb2_grpc.NodeServiceServicer):
    """The gRPC server of a daemon. is_running(job_id): whether a unit of the job lives here."""

    def __init__(
        self, address: str, logs: JobLogs, is_running: Callable[[str], bool], tls: RenewedTls | None
    ) -> None:
        """Starts the server. Raises UserError if it can't listen at the address."""
        self._logs = logs
        self._is_running = is_running
        self._stopping = threading.Event()
        self._limits = CallerLimits()
        roles = [] if tls is None else [RoleInterceptor(tls, LEAST_ROLES)]
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="bagua-node"),
            interceptors=[*roles, AwaitedRequests()],  # roles first: whom to count
            options=server_options(),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, server_credentials(tls))
        except RuntimeError:
            bound = 0
        if not bound:
            raise UserError(
                f"{address} can't be listened at; is listen.port taken (ss -ltnp), or listen.address not this "
                "node's?"
            )
        self._server.start()

    def ListLogs(
        self, request: node_pb2.ListLogsRequest, context: grpc.ServicerContext
    ) -> node_pb2.ListLogsReply:
        try:
            found = self._logs.list(request.job_id)
        except UserError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        workers = [
            node_pb2.WorkerLogs(
                directory=f.directory, stdout_bytes=f.stdout_bytes, stderr_bytes=f.stderr_bytes
            )
            for f in found
        ]
        return node_pb2.ListLogsReply(workers=workers)

    def ReadLog(
        self, request: node_pb2.ReadLogRequest, context: grpc.ServicerContext
    ) -> Iterator[node_pb2.LogChunk]:
        def goes_on(wait_s: float) -> bool:
            if not request.follow or not context.is_active() or self._stopping.wait(wait_s):
                return False
            return self._is_running(request.job_id)

        try:
            with self._limits.reading(caller_name(context.auth_context(), context.peer())):
                pieces = self._logs.read(
                    request.job_id,
                    request.directory,
                    stderr=request.stream == node_pb2.ReadLogRequest.STDERR,
                    last_bytes=request.last_bytes,
                    from_bytes=min(request.from_bytes, LARGEST_OFFSET),
                    goes_on=goes_on,
                )
                for piece in pieces:
                    yield node_pb2.LogChunk(data=piece.data, position=piece.position)
        except TooManyReaders as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except UserError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
