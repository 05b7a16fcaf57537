"""A worker whose agent is something else: it ends with one line and the code for a lost agent; it never hangs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION
from bagua_core.elastic.membership.session import EXIT_CODE_AGENT_LOST
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[2]
WELCOME = session_pb2.AgentMessage(
    welcome=session_pb2.Welcome(protocol=PROTOCOL_VERSION, nonce="n")
).SerializeToString()

# torch is imported once; each path's worker is a fork from before there is any thread.
WORKERS = """
import os, sys, threading
from bagua_core.elastic.membership import session
session.CONNECT_TIMEOUT_S = 5.0

def work(path):
    try:
        session.Session(path, "w0", threading.Condition())
    except session.SessionError as error:
        print(f"SessionError: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    threading.Event().wait(20)
    os._exit(99)

children = {}
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{path}.said", os.O_WRONLY | os.O_CREAT), 2)
        work(path)
    children[child] = path
while children:
    child, status = os.wait()
    print(children.pop(child), os.waitstatus_to_exitcode(status), flush=True)
"""


class Impostor(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every stream with the same bytes and ends it."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self._directory = tempfile.TemporaryDirectory(prefix="bagua-test-")
        self.path = f"{self._directory.name}/s"
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(self._answers))

    def close(self) -> None:
        self._server.stop(0).wait(5.0)
        self._directory.cleanup()


@pytest.fixture
def impostors() -> Iterator[list[Impostor]]:
    made: list[Impostor] = []
    yield made
    for one in made:
        one.close()


def message(**kind: object) -> bytes:
    return session_pb2.AgentMessage(**kind).SerializeToString()  # type: ignore[arg-type]


CASES: dict[str, list[bytes]] = {
    "nothing": [],
    "no message": [b"\xff\xff"],
    "welcome, then no message": [WELCOME, b"\xff\xff"],
    "welcome, then no generation": [WELCOME, message(new_generation=session_pb2.NewGeneration())],
    "welcome, then an empty message": [WELCOME, b""],
    "another protocol": [message(welcome=session_pb2.Welcome(protocol=99, nonce="n"))],
    "a generation before the welcome": [message(new_generation=session_pb2.NewGeneration())],
}


def test_an_agent_that_is_none(impostors: list[Impostor]) -> None:
    impostors += [Impostor(answers) for answers in CASES.values()]
    worker = subprocess.run(
        [sys.executable, "-c", WORKERS, *(one.path for one in impostors)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    codes = {path: int(code) for path, code in map(str.split, worker.stdout.splitlines())}
    for name, impostor in zip(CASES, impostors, strict=True):
        said = Path(f"{impostor.path}.said").read_text()
        assert codes[impostor.path] in (1, EXIT_CODE_AGENT_LOST), (name, said, worker.stderr)
        assert "its agent is gone" in said or "SessionError: " in said, (name, said)
