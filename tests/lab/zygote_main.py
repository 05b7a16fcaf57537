"""The zygote's own program, executed by zygote.py with the arguments FILE FD RUNNER IMPORTS OFFER_VARIABLE.

Imports of ours only by path: a worker that is forked from here must not find modules that a script did not import.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import select
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct("!I")
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
ADOPTION_TIMEOUT_MS = 10_000


def main() -> None:
    del sys.path[0]  # the current directory, which is no worker's
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    runner, imports, offer_variable = sys.argv[3:6]
    spec = importlib.util.spec_from_file_location("_run_script", runner)
    assert spec is not None and spec.loader is not None
    run_script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_script)
    del spec
    before = set(sys.modules)
    for name in imports.split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    send(control, {"ready": True})
    while (request := receive(control)) is not None:
        warm = start(control, request, offer_variable)
        if warm is not None:
            become_warm_parent(run_script, before, warm)
        # only the zygote itself goes on here


def start(
    control: socket.socket, request: dict[str, Any], offer_variable: str
) -> tuple[socket.socket, int] | None:
    """Forks an agent's process, which has its warm parent beside it. Returns a socket and the agent's process id in the
    warm parent, None in the zygote; the agent's process never returns."""
    report_read, report_write = os.pipe()
    between = os.fork()
    if between:
        os.close(report_write)
        told = os.read(report_read, 4096)
        os.close(report_read)
        os.waitpid(between, 0)
        send(control, {"pid": int(told)} if told.isdigit() else {"error": told.decode(errors="replace")})
        return None
    own_pidfd = os.pidfd_open(os.getpid())
    agent = os.fork()
    if agent:
        os.write(report_write, b"%d" % agent)
        os._exit(0)
    control.close()
    os.close(report_read)
    os.close(report_write)
    try:
        return be_agent(request, offer_variable, own_pidfd)
    except BaseException as error:  # noqa: BLE001  a forked child must not go on as the zygote
        os.write(2, f"the lab's zygote could not start an agent: {error!r}\n".encode())
        os._exit(70)


def be_agent(request: dict[str, Any], offer_variable: str, between: int) -> tuple[socket.socket, int]:
    os.setsid()
    # a child of the test run by now, which adopts it: readable once the process between is dead
    poll = select.poll()
    poll.register(between, select.POLLIN)
    if not poll.poll(ADOPTION_TIMEOUT_MS):
        raise TimeoutError("the process between did not end")
    os.close(between)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if request["holder"] is not None:
        enter(request["holder"])
    os.chdir(request["cwd"])
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    agent = os.getpid()
    warm = os.fork()
    if warm == 0:
        own.close()
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        os.close(nowhere)
        return other, agent
    other.close()
    own.set_inheritable(True)
    environment = {**request["env"], offer_variable: f"{own.fileno()}:{warm}"}
    os.execve(request["argv"][0], request["argv"], environment)


def enter(holder: int) -> None:
    """As `nsenter --net --uts --mount` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(holder)
    if libc.setns(pidfd, CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
    os.close(pidfd)


def become_warm_parent(run_script: Any, before: set[str], warm: tuple[socket.socket, int]) -> None:
    """Does not return, but in a worker, as its script's end."""
    control, _ = warm
    order = receive(control)
    if order is None:
        os._exit(0)  # the agent ended before it had use for it
    line = order["line"]
    line[line.index("--warm-fd") + 1] = str(control.detach())
    run_script.main(line, before)


def send(control: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    control.sendall(LENGTH.pack(len(body)) + body)


def receive(control: socket.socket) -> dict[str, Any] | None:
    """A length, then JSON; None at the end of the requests."""
    head = exactly(control, LENGTH.size)
    body = exactly(control, LENGTH.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


def exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


if __name__ == "__main__":
    main()
