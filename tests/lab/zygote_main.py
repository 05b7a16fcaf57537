"""The zygote's own program, executed by zygote.py with the arguments FILE FD RUNNER IMPORTS OFFER_VARIABLE.

Imports of ours only by path: a worker that is forked from here must not find modules that a script did not import. What
the agent imports is loaded last, and is removed from sys.modules in warm parents.

A daemon of service mode gets a zygote of its own instead of a warm parent, which forks its units. It stays outside the
daemon's host, whose processes tests count, and ends with the daemon.

A forked process would spend a third of a second at its end on destroying what the zygote had imported, and on copying
the memory for it. So these modules outlive the interpreter there (`keep_at_end`), and C++ objects are not destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import select
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = struct.Struct("!I")
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
ADOPTION_TIMEOUT_MS = 10_000
AGENTS = ("bagua_launch", "bagua_core.distributed.launch", "bagua_core.distributed.run")
IMPORTS_VARIABLE = "BAGUA_TESTS_IMPORTS"  # as zygote.py has it
DAEMON, UNIT = "bagua_agent.service", "bagua_agent.service.units.run_unit"


class Loaded(NamedTuple):
    """What every fork begins with."""

    run_script: Any
    before: set[str]  # names of the modules that were loaded before anything was imported ahead
    of_agents: set[str]
    offer_variable: str


def main() -> None:
    del sys.path[0]  # the current directory, which is no worker's
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    runner, imports, offer_variable = sys.argv[3:6]
    atexit.register(keep_at_end)  # first, so it is called last
    run_script = by_path(Path(runner))
    before = set(sys.modules)
    for name in imports.split(","):
        importlib.import_module(name)
    for_workers = set(sys.modules)
    for name in ("bagua_launch.main", "bagua_agent.job.loop", "bagua_agent.service.serve", UNIT):
        importlib.import_module(name)
    loaded = Loaded(run_script, before, set(sys.modules) - for_workers, offer_variable)
    keep_libraries()
    gc.collect()
    gc.freeze()
    send(control, {"ready": True})
    serve(control, loaded)


def serve(control: socket.socket, loaded: Loaded) -> None:
    """Answers requests and ends the process with them. Returns in a forked process, when what it became has ended."""
    while (request := receive(control)) is not None:
        become = start(control, request, loaded)
        if become is not None:
            return become()
        # only the zygote itself goes on here
    os._exit(0)  # it has nothing to put in order


def by_path(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_" + path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_libraries() -> None:
    """Keep the end of every fork from taking torch's operators out of its tables one by one (0.05 s)."""
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def keep_at_end() -> None:
    """Keep the interpreter's end from destroying imported modules: it destroys what sys.modules names."""
    gc.collect()  # without what is frozen; destructors may still import
    modules = dict(sys.modules)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name in modules.keys() - {"__main__", "builtins", "sys"}:
        sys.modules[name] = None  # type: ignore[assignment]  an import fails then, as it does later in any case


def skip_destructors() -> None:
    """End the process, with its status, where C and C++ destroy what was loaded so far; C's streams are flushed."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def start(control: socket.socket, request: dict[str, Any], loaded: Loaded) -> Callable[[], None] | None:
    """Forks an agent's process, which has its warm parent beside it. Returns None in the zygote, and in the two others
    what they become."""
    report_read, report_write = os.pipe()
    between = os.fork()
    if between:
        os.close(report_write)
        told = os.read(report_read, 4096)
        os.close(report_read)
        os.waitpid(between, 0)
        for descriptor in request["descriptors"]:
            os.close(descriptor)
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
        skip_destructors()
        return be_agent(request, own_pidfd, loaded)
    except BaseException as error:  # noqa: BLE001  a forked child must not go on as the zygote
        os.write(2, f"the lab's zygote could not start an agent: {error!r}\n".encode())
        os._exit(70)


def be_agent(request: dict[str, Any], between: int, loaded: Loaded) -> Callable[[], None]:
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
    for number, file in enumerate((request.get("stdin"), None, request.get("errors"))):
        if file is not None:
            replace_descriptor(number, file)
    module, argv, environment = request["module"], request["argv"], request["env"]
    more_imports = environment.pop(IMPORTS_VARIABLE, "")
    if module not in (None, *AGENTS, DAEMON, UNIT):
        move(request)
        return lambda: run_module(module, argv, environment, loaded)
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if module == DAEMON:
        if os.fork() == 0:
            own.close()
            leave_terminal()
            return lambda: serve(other, loaded)
        other.close()
        move(request)
        return lambda: run_daemon(argv, environment, loaded, own, request["holder"])
    move(request)
    warm = os.fork()
    if warm == 0:
        own.close()
        leave_terminal()
        return lambda: become_warm_parent(loaded, other, more_imports)
    other.close()
    own.set_inheritable(True)
    environment[loaded.offer_variable] = f"{own.detach()}:{warm}"
    if module is None:
        os.execve(argv[0], argv, environment)
    if module == UNIT:
        return lambda: run_unit(argv, environment, loaded)
    return lambda: run_module(module, argv, environment, loaded)


def replace_descriptor(number: int, file: str) -> None:
    opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(opened, number)
    os.close(opened)


def move(request: dict[str, Any]) -> None:
    if request["holder"] is not None:
        enter(request["holder"])
    os.chdir(request["cwd"])


def leave_terminal() -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def run_module(module: str, argv: list[str], environment: dict[str, str], loaded: Loaded) -> None:
    """As `python -m module ...` does, in this process."""
    take_on(argv, environment, loaded)
    sys.argv[:] = argv[2:]  # runpy replaces the first
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_daemon(
    argv: list[str], environment: dict[str, str], loaded: Loaded, units: socket.socket, holder: int | None
) -> None:
    by_path(Path(sys.argv[1]).with_name("unit_starter.py")).take_place(units, holder)
    run_module(DAEMON, argv, environment, loaded)


def run_unit(argv: list[str], environment: dict[str, str], loaded: Loaded) -> None:
    """As `python -P -m ...run_unit FOLDER --record-process`; the agent's environment keeps the offered warm parent."""
    take_on(argv, environment, loaded)
    program: Any = sys.modules[UNIT]
    program.KEPT |= {loaded.offer_variable}
    sys.exit(program.main(Path(argv[4]), record=program.RECORD_PROCESS in argv))


def take_on(argv: list[str], environment: dict[str, str], loaded: Loaded) -> None:
    face = by_path(Path(loaded.run_script.__file__).with_name("forked_identity.py"))
    os.environ.clear()
    os.environ.update(environment)
    face._show(argv, environment)
    tempfile.tempdir = None  # of TMPDIR at the first use, which is not this process's
    sys.orig_argv[:] = argv


def enter(holder: int) -> None:
    """As `nsenter --net --uts --mount` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(holder)
    if libc.setns(pidfd, CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
    os.close(pidfd)


def become_warm_parent(loaded: Loaded, control: socket.socket, more_imports: str) -> None:
    """Does not return, but in a worker, as its script's end. more_imports: modules that workers share too."""
    order = receive(control)
    if order is None:
        os._exit(0)  # the agent ended before it had use for it
    for name in loaded.of_agents:
        del sys.modules[name]
    line = order["line"]
    line[line.index("--warm-fd") + 1] = str(control.detach())
    if more_imports:
        line[line.index("--preimport") + 1] += f",{more_imports}"
    loaded.run_script.main(line, loaded.before)


def send(control: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    control.sendall(LENGTH.pack(len(body)) + body)


def receive(control: socket.socket) -> dict[str, Any] | None:
    """A length, then JSON; None at the end of the requests. Descriptors that came with it are its "descriptors"."""
    head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
    head += exactly(control, LENGTH.size - len(head)) if head else b""
    body = exactly(control, LENGTH.unpack(head)[0]) if head else b""
    return {**json.loads(body), "descriptors": descriptors} if body else None


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
