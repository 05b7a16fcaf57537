"""A server of S3's protocol on the loopback, and a gate before it that holds back what a client sends.

The server is moto's, in a process of its own. The gate is a TCP proxy: it can stop in the middle of one upload, so that
a test kills the writer there, and it can stop answering.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.lab.wait import eventually

START_S = 40.0
BUCKET = "checkpoints"
_RUNNING = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"


def variables(port: int) -> dict[str, str]:
    """The environment of a client of the server or the gate at `port`."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@dataclass(frozen=True, slots=True)
class Held:
    """An upload that the gate stopped: `sent_bytes` of the body reached the server."""

    sent_bytes: int
    of_bytes: int


class ObjectStore:
    """The server, with a bucket, and its gate."""

    def __init__(self) -> None:
        words = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        port = eventually(self._port, START_S, lambda: f"moto's server runs: {self._said}", 0.05)
        self.gate = Gate(port)
        self.client = self._client(port)
        self.client.create_bucket(Bucket=BUCKET)

    def _read(self) -> None:
        """To the end, so that the server never waits for its log to be read."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if len(self._said) < 100:
                self._said.append(line)

    def _port(self) -> int:
        assert self._process.poll() is None, f"moto's server ended: {self._said}"
        return next((int(match[1]) for line in self._said if (match := _RUNNING.search(line))), 0)

    def _client(self, port: int) -> Any:
        import botocore.session

        session = botocore.session.get_session()
        given = variables(port)
        return session.create_client(
            "s3",
            region_name=given["AWS_DEFAULT_REGION"],
            endpoint_url=given["AWS_ENDPOINT_URL"],
            aws_access_key_id=given["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
        )

    @property
    def keys(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def unfinished_uploads(self) -> list[str]:
        """Keys of multipart uploads that were begun and neither completed nor given up."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def end(self) -> None:
        self.gate.end()
        self.client.close()
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)


class Gate:
    """A TCP proxy before `port`."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._wanted: re.Pattern[bytes] | None = None
        self._held: Held | None = None
        self._is_silent = False
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    # -- for tests

    def hold(self, pattern: str) -> None:
        """Stop in the middle of the body of each upload in whose URL the regular expression matches."""
        with self._changed:
            self._wanted, self._held = re.compile(pattern.encode()), None

    def await_held(self, deadline_s: float = START_S) -> Held:
        return eventually(lambda: self._held, deadline_s, "an upload is held")

    def release(self) -> None:
        """Let the held upload go on."""
        with self._changed:
            self._wanted = self._held = None
            self._changed.notify_all()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing passes in either direction meanwhile."""
        with self._changed:
            self._is_silent = True
        try:
            yield
        finally:
            with self._changed:
                self._is_silent = False
                self._changed.notify_all()

    def drop(self) -> None:
        """Break every connection, as the death of a client or of a network does."""
        with self._changed:
            self._wanted = self._held = None
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_silent = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self.drop()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    # -- threads

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # `end`
                return
            server = socket.create_connection(("127.0.0.1", self._upstream))
            with self._changed:
                self._open |= {client, server}
            pair = threading.Thread(target=self._serve, args=(client, server), daemon=True)
            self._threads.append(pair)
            pair.start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True)
        back.start()
        self._pass_on(client, server, True)
        back.join()
        with self._changed:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        try:
            while chunk := source.recv(1 << 16):
                self._await(lambda: not self._is_silent)
                if is_request and self._is_wanted(chunk):
                    self._hold_back(chunk, source, target)
                else:
                    target.sendall(chunk)
        except OSError:  # broken by `drop`, or by an end
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _is_wanted(self, chunk: bytes) -> bool:
        with self._changed:
            wanted = self._wanted
        line = chunk.split(b"\r\n", 1)[0]
        return wanted is not None and line.startswith(b"PUT ") and wanted.search(line) is not None

    def _hold_back(self, chunk: bytes, source: socket.socket, target: socket.socket) -> None:
        """Pass on the head and half of the body, and wait. chunk: begins with the head."""
        while _HEAD_END not in chunk:
            chunk += source.recv(1 << 16)
        head, _, body = chunk.partition(_HEAD_END)
        found = _LENGTH.search(head + b"\r\n")
        assert found is not None, f"an upload without a length: {head!r}"
        half = int(found[1]) // 2
        target.sendall(head + _HEAD_END)
        sent = 0
        while sent < half:
            now = body[: half - sent] or source.recv(min(half - sent, 1 << 16))
            if not now:
                return
            target.sendall(now)
            sent, body = sent + len(now), body[len(now) :]
        with self._changed:
            self._held = Held(sent, int(found[1]))
            self._changed.notify_all()
        self._await(lambda: self._held is None)
        target.sendall(body)

    def _await(self, passes: Any) -> None:
        with self._changed:
            self._changed.wait_for(passes)
