"""A worker of a replica without torch: speaks the session's protocol as a training process would, and commits nothing.

Writes one line for each message of its agent, to <STUB_OUT>/<worker>. It follows every generation at once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2, session_pb2_grpc
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import PROTOCOL_VERSION

environment = WorkerEnvironment.decode(os.environ)
out = (Path(os.environ["STUB_OUT"]) / environment.worker_id).open("w", buffering=1)
outbox: queue.SimpleQueue[session_pb2.WorkerMessage | None] = queue.SimpleQueue()
store = f"{environment.bind_host}:{20000 + os.getpid() % 20000}"


def say(**message: object) -> None:
    outbox.put(session_pb2.WorkerMessage(**message))


def ready(stage: pb.Stage, gathering: int = 0) -> None:
    fingerprint = {"model": "stub"} if stage == pb.LOOP else {}
    say(
        ready=session_pb2.Ready(
            store_address=store, stage=stage, gathering=gathering, fingerprint=fingerprint
        )
    )


def messages() -> Iterator[session_pb2.WorkerMessage]:
    while (message := outbox.get()) is not None:
        yield message


def leave_at(generation: pb.Generation) -> None:
    say(left=session_pb2.Left(generation=generation.number))
    out.write(f"left {generation.number}\n")
    outbox.put(None)
    os._exit(0)


def main() -> None:
    channel = grpc.insecure_channel(f"unix:{environment.session_socket}")
    session = session_pb2_grpc.WorkerSessionStub(channel)
    say(hello=session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id=environment.worker_id, pid=os.getpid()))
    leaving = assembled = False
    newest = pb.Generation()
    was_listed = False
    for told in session.Attach(messages()):
        kind = told.WhichOneof("kind")
        if kind == "welcome":
            ready(pb.ASSEMBLING)
        elif kind == "replica" and not assembled:
            assembled = True
            shard = [m.worker_id for m in told.replica.members].index(environment.worker_id)
            out.write(f"replica {told.replica.replica_id} {shard} of {environment.replica_size}\n")
            if newest.number and newest.kind != pb.Generation.GATHERING:
                ready(pb.PREPARING)
                ready(pb.LOOP)
            else:
                ready(pb.WAITING)
        elif kind == "new_generation":
            newest = told.new_generation.generation
            own = next((m for m in newest.members if m.worker_id == environment.worker_id), None)
            out.write(f"generation {newest.number} {'-' if own is None else own.global_rank}\n")
            if own is None and leaving:
                leave_at(newest)
            was_listed |= own is not None
            if own is not None and newest.kind == pb.Generation.GATHERING:
                ready(pb.PREPARING, newest.number)
                ready(pb.LOOP)
            elif own is not None:
                say(entered=session_pb2.Entered(generation=newest.number, step=newest.number))
        elif kind == "leave":
            leaving = True
            out.write("leave\n")
            if not assembled:
                os._exit(0)
            if was_listed and environment.worker_id not in [m.worker_id for m in newest.members]:
                leave_at(newest)  # the generation without it came first
        elif kind == "close":
            os._exit(0)
    threading.Event().wait(1.0)  # the agent is gone: it ends this process


main()
