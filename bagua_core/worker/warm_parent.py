"""Forks workers from a process that has imported everything already.

The warm parent's loop: it answers the agent's requests over one socket and ends when the agent closes it. It
starts no thread, never touches CUDA, and is never a worker's parent: an intermediate process forks the
worker and ends, so that the agent, a subreaper for that moment, becomes the parent. See forked_identity.py for
what makes the fork look like a process of its own.

Loaded by path (run_script.py), so it imports only the standard library.
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import socket
import struct
from typing import Any

ADOPTION_TIMEOUT_S = 10.0
MAX_DESCRIPTORS = 6
LENGTH = struct.Struct("!I")


def serve(control_fd: int, printed: tuple[bytes, bytes], face: Any) -> dict[str, Any]:
    """Answers requests. Returns only in a forked worker: the request that it answers.

    printed: what the imports wrote to stdout and stderr; every worker writes it to its own. face: forked_identity.py.
    """
    name = face.exchange_name("bagua-warm")
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    # Keeps what is there out of every later collection, which would copy its pages in each worker. Without collecting
    # first: that takes longer than the fork, and imports leave little.
    gc.freeze()
    _send(control, {"ready": True})
    while True:
        request, descriptors = _receive(control)
        if request is None:
            os._exit(0)
        is_worker, answer = _fork_worker(descriptors)
        if is_worker:
            control.close()
            face.put_on(request, descriptors, printed, name)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, answer)


def _fork_worker(descriptors: list[int]) -> tuple[bool, dict[str, Any]]:
    """Forks a worker. Returns (True, {}) in it; else (False, the answer with its process id or what went wrong)."""
    report_read, report_write = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(report_read)
        os.close(report_write)
        return False, {"error": f"fork: {error.strerror}"}
    if between == 0:
        os.close(report_read)
        _fork_and_leave(report_write)
        return True, {}
    os.close(report_write)
    told = os.read(report_read, 64)  # end-of-file when the process between is gone
    os.close(report_read)
    os.waitpid(between, 0)  # it has ended, so the worker is the agent's child by now
    return False, {"pid": int(told)} if told else {"error": "the new process ended before it was a worker"}


def _fork_and_leave(report_write: int) -> None:
    """Forks the worker and ends; returns in the worker, once it has its new parent."""
    own_pidfd = os.pidfd_open(os.getpid())
    ready_read, ready_write = os.pipe()
    try:
        worker = os.fork()
    except OSError:
        os._exit(1)
    if worker:
        os.close(ready_write)
        # Only a session's leader may be handed over: the agent takes others for orphans (orphans.py).
        if os.read(ready_read, 1):
            os.write(report_write, b"%d" % worker)
        os._exit(0)
    os.setsid()
    os.write(ready_write, b"s")
    for fd in (ready_read, ready_write, report_write):
        os.close(fd)
    # Readable once the process between is dead, and the kernel finds a new parent before it says so.
    poll = select.poll()
    poll.register(own_pidfd, select.POLLIN)
    if not poll.poll(ADOPTION_TIMEOUT_S * 1000):
        os._exit(1)
    os.close(own_pidfd)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    try:
        control.sendall(LENGTH.pack(len(body)) + body)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the agent is gone


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Returns a request and its descriptors; None when the agent is gone. A request is a length, then JSON."""
    descriptors = array.array("i")
    try:
        head, ancillary, _, _ = control.recvmsg(
            LENGTH.size, socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        head += _exactly(control, LENGTH.size - len(head)) if head else b""
        body = _exactly(control, LENGTH.unpack(head)[0]) if head else b""
    except ConnectionResetError:
        return None, []
    return (json.loads(body) if body else None), list(descriptors)


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            raise ConnectionResetError("end of the agent's requests")
        data += part
    return bytes(data)
