"""The agent's end of the worker sessions: one gRPC stream per worker, over a Unix socket.

Owns the server and the open streams. Decides nothing: workers' messages go into the agent's inbox, the agent's messages
into a stream's outbox. A stream is accepted only for a worker that the agent expects, so a client that does not know a
worker id is refused (the socket's directory is also 0700).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import grpc

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.rpc.first_message import first_of
from bagua_agent.rpc.message_pace import MessagePace
from bagua_agent.rpc.trace_relay import TraceRelay
from bagua_contract import membership_pb2, session_pb2, session_pb2_grpc, trace_pb2
from bagua_contract.grpc_channel import WITHOUT_PROBING
from bagua_contract.records import PROTOCOL_VERSION, Generation
from bagua_contract.replica import Replica

log = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 10.0
STOP_GRACE_S = 1.0
# What is passed on to etcd has to fit into a request there, of 1.5 MB at most
LARGEST_MESSAGE_BYTES = 1 << 20
# Streams that have not said who they are hold a thread each; they must not keep a worker waiting. Threads are made
# only when needed.
_THREADS_FOR_STRANGERS = 256

_Outbox = queue.SimpleQueue[session_pb2.AgentMessage | None]


def slot_of(worker_id: str) -> str:
    """Returns the slot in a worker id "agent.slot.random"; another id is its own slot. Pure."""
    parts = worker_id.rsplit(".", 2)
    return parts[1] if len(parts) == 3 else worker_id


class SessionServer(session_pb2_grpc.WorkerSessionServicer):
    """Serves the sessions of a node's workers. on_message(worker_id, message), on_ended(worker_id): called from gRPC's
    threads. The agent sees a worker's end by its exit and needs no on_ended."""

    def __init__(
        self,
        socket_path: str,
        slots: int,
        on_message: Callable[[str, session_pb2.WorkerMessage], None],
        on_ended: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        self._on_message = on_message
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._expected: set[str] = set()
        self._outboxes: dict[str, _Outbox] = {}
        self._paces: defaultdict[str, MessagePace] = defaultdict(MessagePace)  # by slot
        self._welcome: session_pb2.AgentMessage | None = None
        self.traces = TraceRelay(self._tell_trace)
        # A stream keeps one thread for what comes in; respawned workers overlap with the ones that end.
        self._server = grpc.server(
            ThreadPoolExecutor(2 * slots + 2 + _THREADS_FOR_STRANGERS, thread_name_prefix="bagua-session"),
            options=[("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES), *WITHOUT_PROBING],
        )
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{socket_path}")
        self._server.start()

    def admit(self, nonce: str) -> None:
        """Welcomes workers from now on: their agent belongs to the job."""
        message = session_pb2.AgentMessage(
            welcome=session_pb2.Welcome(protocol=PROTOCOL_VERSION, nonce=nonce)
        )
        with self._lock:
            self._welcome = message
            for outbox in self._outboxes.values():
                outbox.put(message)

    def expect(self, worker_id: str) -> None:
        with self._lock:
            self._expected.add(worker_id)

    def forget(self, worker_id: str) -> None:
        with self._lock:
            self._expected.discard(worker_id)
            outbox = self._outboxes.pop(worker_id, None)
        if outbox is not None:
            outbox.put(None)

    # -- to workers

    def tell_generation(self, generation: Generation, worker_ids: list[str] | None = None) -> None:
        self._tell(
            session_pb2.AgentMessage(
                new_generation=session_pb2.NewGeneration(generation=generation.to_proto())
            ),
            worker_ids,
        )

    def tell_replica(self, replica: Replica, worker_ids: list[str]) -> None:
        self._tell(session_pb2.AgentMessage(replica=replica.to_proto()), worker_ids)

    def tell_leave(
        self, within_s: float = 0.0, interrupt: bool = False, worker_ids: list[str] | None = None
    ) -> None:
        """Asks workers to leave. within_s: how long workers have for it; 0: not said. interrupt: the node leaves
        because of a SIGINT."""
        leave = session_pb2.Leave(within_s=within_s, interrupt=interrupt)
        self._tell(session_pb2.AgentMessage(leave=leave), worker_ids)

    def tell_close(self) -> None:
        self._tell(session_pb2.AgentMessage(close=session_pb2.Close()), None)

    def tell_refused(self, worker_id: str, difference: str) -> None:
        refusal = membership_pb2.Refusal(worker_id=worker_id, difference=difference)
        self._tell(session_pb2.AgentMessage(refused=refusal), [worker_id])

    def tell_disagreement(self, difference: str) -> None:
        told = session_pb2.Disagreement(difference=difference)
        self._tell(session_pb2.AgentMessage(disagreement=told), None)

    def _tell_trace(self, order: trace_pb2.TraceOrder, worker_ids: list[str] | None) -> list[str]:
        return self._tell(session_pb2.AgentMessage(trace=order), worker_ids)

    def _tell(self, message: session_pb2.AgentMessage, worker_ids: list[str] | None) -> list[str]:
        """Sends a message to those of worker_ids, None for all, that have a session, and returns them."""
        with self._lock:
            told = [w for w in self._outboxes if worker_ids is None or w in worker_ids]
            for worker_id in told:
                self._outboxes[worker_id].put(message)
        return told

    # -- from workers

    def Attach(
        self, request_iterator: Iterator[session_pb2.WorkerMessage], context: grpc.ServicerContext
    ) -> Iterator[session_pb2.AgentMessage]:
        first = first_of(request_iterator, context, FIRST_MESSAGE_TIMEOUT_S)
        if first is None or not first.HasField("hello"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with Hello")
        assert first is not None
        hello = first.hello
        if hello.protocol != PROTOCOL_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"worker speaks protocol {hello.protocol}, agent {PROTOCOL_VERSION}; install one version of bagua",
            )
        worker_id = hello.worker_id
        outbox: _Outbox = queue.SimpleQueue()
        with self._lock:
            if worker_id not in self._expected or worker_id in self._outboxes:
                known = False
            else:
                known = True
                self._outboxes[worker_id] = outbox
                if self._welcome is not None:
                    outbox.put(self._welcome)
        if not known:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"no worker {worker_id[:100]!r} is expected here"
            )
        context.add_callback(lambda: outbox.put(None))
        messages = chain([first], request_iterator)

        def ended(end: OperationEnd[None]) -> None:
            # however the reading ended: the agent reads no more from the worker, so its session is over
            outbox.put(None)
            with self._lock:
                if self._outboxes.get(worker_id) is outbox:
                    del self._outboxes[worker_id]
            self.traces.gone(worker_id)
            self._on_ended(worker_id)

        reader = background_thread("bagua-session-in", lambda: self._read(worker_id, messages), ended)
        try:
            reader.start()
        except RuntimeError as error:  # the host allows no thread
            ended(Failed(error))
        while (message := outbox.get()) is not None:
            yield message

    def _read(self, worker_id: str, messages: Iterator[session_pb2.WorkerMessage]) -> None:
        slot = slot_of(worker_id)
        try:
            for message in messages:
                if not self.traces.heard(worker_id, message):
                    self._on_message(worker_id, message)
                delay_s = self._pace(slot, message)
                if delay_s and self._stopping.wait(delay_s):
                    return
        except grpc.RpcError:
            pass  # the worker is gone; its exit is seen by pidfd, this is only the second witness
        except Exception as error:
            # gRPC's server iterator raises a bare Exception when the call is cancelled.
            if type(error) is not Exception:
                raise

    def _pace(self, slot: str, message: session_pb2.WorkerMessage) -> float:
        """Returns how long to wait before anything more is read of the slot's workers, in seconds."""
        with self._lock:  # a respawned worker's session may overlap with the last one's
            pace = self._paces[slot]
            delay_s = pace.take(message.WhichOneof("kind"), message.ByteSize(), time.monotonic())
            first, pace.told = delay_s > 0 and not pace.told, pace.told or delay_s > 0
        if first:
            log.warning(
                "the worker in slot %s sends more than its agent may pass on to etcd; its messages are read slowly",
                slot,
            )
        return delay_s

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.put(None)
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S + 1.0)
