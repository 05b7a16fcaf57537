"""The worker's end of the session with its agent.

Owns the gRPC stream and the newest generation record. Decides nothing: the engine reads `news` under
its condition. A lost agent ends the process: an orphan must not train on.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc

from bagua_contract import membership_pb2, session_pb2, session_pb2_grpc
from bagua_contract.collective_wait import CollectiveWait
from bagua_contract.grpc_channel import open_channel
from bagua_contract.records import PROTOCOL_VERSION, Generation, Stage, SuspicionKind
from bagua_contract.replica import Replica
from bagua_core import tracing
from bagua_core.errors import InfrastructureLost
from bagua_core.worker.closed_terminal import discard_output_once_closed

CONNECT_TIMEOUT_S = 30.0
EXIT_CODE_AGENT_LOST = 75  # EX_TEMPFAIL: nothing is wrong with the script


# What the agent answers to a hello that it does not accept, rather than what a lost connection looks like.
_REFUSALS = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class SessionError(InfrastructureLost, RuntimeError):
    """The session could not be opened, or the agent speaks another protocol."""


@dataclass(frozen=True, slots=True)
class AgentMessages:
    """Holds everything the agent has said so far, the newest of each kind.

    leave_by_s: monotonic time by which a worker that leaves has to be done; infinite if the agent set no limit.
    interrupted: the node leaves because of a SIGINT.
    disagreement: what ranks wait in that do not call the same collectives; the job fails with it.
    replica: the one that this worker is in; None in a job without replicas, and until there is one.
    """

    welcome: bool = False
    nonce: str = ""
    generation: Generation | None = None
    leave: bool = False
    leave_by_s: float = float("inf")
    interrupted: bool = False
    close: bool = False
    refused: str = ""
    disagreement: str = ""
    replica: Replica | None = None


class Session:
    """The session of a worker process with its agent. There is one per process. All methods are safe from any
    thread."""

    def __init__(self, socket_path: str, worker_id: str, changed: threading.Condition) -> None:
        self._changed = changed
        self._news = AgentMessages()
        self._listeners: list[Callable[[AgentMessages], None]] = []
        self._outbox: queue.SimpleQueue[session_pb2.WorkerMessage | None] = queue.SimpleQueue()
        self._closed = False
        self._refusal = ""
        self._channel = open_channel(
            f"unix:{socket_path}", options=[("grpc.max_receive_message_length", 64 << 20)]
        )
        self._say(hello=session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id=worker_id, pid=os.getpid()))
        stub = session_pb2_grpc.WorkerSessionStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream = stub.Attach(self._outgoing(), wait_for_ready=True)
        self._thread = threading.Thread(target=self._read, name="bagua-session", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._news.welcome or self._refusal, CONNECT_TIMEOUT_S)
        if not self._news.welcome:
            self._closed = True
            self._outbox.put(None)
            self._channel.close()
            if self._refusal:
                raise SessionError(f"the agent on {socket_path} refused this worker: {self._refusal}")
            raise SessionError(
                f"the agent did not answer on {socket_path} within {CONNECT_TIMEOUT_S:g} s; is it running?"
            )
        discard_output_once_closed()  # the agent lets this worker leave then, as after any other SIGHUP

    # -- from the agent

    @property
    def news(self) -> AgentMessages:
        return self._news

    def on_news(self, listener: Callable[[AgentMessages], None]) -> None:
        """Calls `listener` from the session's thread at every message, before waiters wake."""
        self._listeners.append(listener)

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._take(message)
        except grpc.RpcError as error:
            if self._closed:
                return
            reason = f"{error.code().name}: {error.details()}"
            if not self._news.welcome and error.code() in _REFUSALS:
                with self._changed:
                    self._refusal = str(error.details())
                    self._changed.notify_all()
                return
        except Exception as error:  # noqa: BLE001 (it ends the process)
            # Without this thread the worker would hear of nothing any more, and peers would wait for it.
            traceback.print_exc()
            reason = f"a message could not be taken: {error}"
        else:
            if self._closed:
                return
            reason = "the agent ended the session"
        print(f"bagua: worker ends, for its agent is gone ({reason})", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE_AGENT_LOST)

    def _take(self, message: session_pb2.AgentMessage) -> None:
        news = self._news
        kind = message.WhichOneof("kind")
        if kind == "trace":
            tracing.take(message.trace, lambda spans: self._say(spans=spans))
            return
        if kind == "welcome":
            news = replace(news, welcome=True, nonce=message.welcome.nonce)
        elif kind == "new_generation":
            record = Generation.from_proto(message.new_generation.generation)
            if news.generation is not None and record.number <= news.generation.number:
                return  # a repeated or late record says nothing new
            news = replace(news, generation=record)
            if (recorder := tracing.active) is not None:
                recorder.instant("generation is announced", record.number)
        elif kind == "leave":
            within_s, no_limit = message.leave.within_s, float("inf")
            leave_by_s = time.monotonic() + within_s if within_s > 0 else no_limit
            news = replace(news, leave=True, leave_by_s=leave_by_s, interrupted=message.leave.interrupt)
        elif kind == "close":
            news = replace(news, close=True)
        elif kind == "refused":
            news = replace(news, refused=message.refused.difference)
        elif kind == "disagreement":
            news = replace(news, disagreement=message.disagreement.difference)
        elif kind == "replica" and news.replica is None:  # a worker has one in its life; it may be sent again
            news = replace(news, replica=Replica.from_proto(message.replica))
        self._news = news
        for listener in self._listeners:
            listener(news)
        with self._changed:
            self._changed.notify_all()

    # -- to the agent

    def _say(self, **kind: Any) -> None:
        self._outbox.put(session_pb2.WorkerMessage(**kind))

    def _outgoing(self) -> Iterator[session_pb2.WorkerMessage]:
        while (message := self._outbox.get()) is not None:
            yield message

    def ready(
        self,
        store_address: str,
        fingerprint: Mapping[str, str],
        committed_generation: int = 0,
        stage: Stage = Stage.LOOP,
        gathering: int = 0,
    ) -> None:
        self._say(
            ready=session_pb2.Ready(
                store_address=store_address,
                fingerprint=dict(fingerprint),
                committed_generation=committed_generation,
                stage=stage.value,
                gathering=gathering,
            )
        )

    def entered(self, generation: int, step: int, lost_s: Mapping[str, float]) -> None:
        """Reports the first commit in `generation`. lost_s: by the names of TimeUse."""
        self._say(entered=session_pb2.Entered(generation=generation, step=step, lost_s=lost_s))

    def progress(self, progress: session_pb2.Progress) -> None:
        self._say(progress=progress)

    def suspect(
        self,
        generation: int,
        kind: SuspicionKind,
        *,
        hosts: tuple[str, ...],
        detail: str,
        waited_s: float = 0.0,
        usual_step_s: float = 0.0,
        waits_in: CollectiveWait | None = None,
    ) -> None:
        self._say(
            suspected=session_pb2.Suspected(
                generation=generation,
                kind=kind.value,
                hosts=hosts,
                detail=detail[:500],
                waited_s=waited_s,
                usual_step_s=usual_step_s,
                waits_in=None if waits_in is None else waits_in.to_proto(),
            )
        )

    def went_on(self, generation: int) -> None:
        self._say(went_on=session_pb2.WentOn(generation=generation))

    def straggler(self, told: session_pb2.Straggler) -> None:
        self._say(straggler=told)

    def left(self, generation: int, last: membership_pb2.LastCheckpoint | None = None) -> None:
        """Reports that this worker has left. last: what it did for the last checkpoint; None: it held no state of the
        job."""
        self._say(left=session_pb2.Left(generation=generation, last=last))

    def training_done(self, generation: int, step: int) -> None:
        self._say(training_done=session_pb2.TrainingDone(generation=generation, step=step))

    def close(self) -> None:
        """Half-closes the stream after everything said so far is on its way, then waits for the agent's end of it."""
        self._closed = True
        self._outbox.put(None)
        self._thread.join(timeout=2.0)
        self._channel.close()
