"""Network namespaces of the machine: made, entered, searched for processes, removed.

Thin over `ip` and setns. Knows nothing of hosts and labs but the form of their names, which tells whose
run they belong to: bagua-<pid>-<start>-<lab>-<what>.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

NETNS_DIR = Path("/run/netns")
ETC_NETNS_DIR = Path("/etc/netns")
_NAME = re.compile(r"bagua-(\d+)-(\d+)-\d+-\w+")
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20.0
_DEATH_TIMEOUT_S = 10.0
_STOP_AGAIN_S = 0.1


class LabError(RuntimeError):
    """The lab itself does not work; says nothing of what is tested in it."""


def unavailable() -> str | None:
    """Why there can be no lab here, or None."""
    if os.geteuid() != 0:
        return "the lab needs root, for network namespaces"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"the lab needs {', '.join(missing)} (iproute2, util-linux)"
    probe = f"{name_prefix()}-0-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"`ip netns` does not work here: {made.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def ip(*args: str) -> str:
    return _command(["ip", *args])


def ip_batch(namespace: str, lines: Iterable[str]) -> None:
    """Several `ip` commands in one process, which makes labs quick to start."""
    _command(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def tc(namespace: str, *args: str) -> None:
    _command(["tc", "-n", namespace, *args])


def _command(argv: list[str], text: str | None = None) -> str:
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def name_prefix() -> str:
    """Of every namespace that this process makes; a process id alone would come again."""
    return f"bagua-{os.getpid()}-{start_time_of(os.getpid())}"


def start_time_of(pid: int) -> int | None:
    """When the process started, in ticks since boot; None if it has ended."""
    fields = _stat(pid)
    return None if fields[0] in "ZX" else int(fields[19])


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; "X" (dead) if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def pids_in(namespace: str) -> list[int]:
    """Processes whose network is `namespace`; quicker than `ip netns pids`, which does the same."""
    wanted = os.stat(NETNS_DIR / namespace)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            net = os.stat(f"/proc/{entry}/ns/net")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, a zombie, or shielded even from root: none of ours
        if (net.st_ino, net.st_dev) == (wanted.st_ino, wanted.st_dev):
            found.append(int(entry))
    return found


def signal_all(namespace: str, number: signal.Signals, spare: frozenset[int] = frozenset()) -> list[int]:
    """Send a signal to every process of the namespace; the ids it went to."""
    reached = []
    for pid in pids_in(namespace):
        if pid in spare:
            continue
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        reached.append(pid)
    return reached


def stop_all(namespace: str, spare: frozenset[int] = frozenset()) -> None:
    """SIGSTOP until every process has stopped.

    The signal only asks, and a process may fork before it stops, a child that this listing of processes lacks. So two
    listings in a row must find all of them stopped.
    """
    deadline = time.monotonic() + _DEATH_TIMEOUT_S
    again_at = time.monotonic() + _STOP_AGAIN_S
    listings_at_rest = 0
    while listings_at_rest < 2:
        left = [pid for pid in pids_in(namespace) if pid not in spare and _stat(pid)[0] not in "TtZX"]
        if not left:
            listings_at_rest += 1
            continue
        listings_at_rest = 0
        if time.monotonic() >= deadline:
            raise LabError(f"processes {left} in {namespace} do not stop")
        if time.monotonic() >= again_at:
            # One that stopped between vfork and exec keeps its parent from stopping: let it get past that.
            signal_all(namespace, signal.SIGCONT, spare)
            again_at = time.monotonic() + _STOP_AGAIN_S
        signal_all(namespace, signal.SIGSTOP, spare)
        time.sleep(0.001)


def kill_all(namespace: str, spare: frozenset[int] = frozenset()) -> None:
    """SIGKILL until no process is left: a process may fork while the first round runs."""
    deadline = time.monotonic() + _DEATH_TIMEOUT_S
    while left := signal_all(namespace, signal.SIGKILL, spare):
        if time.monotonic() >= deadline:
            raise LabError(f"processes {left} in {namespace} outlive SIGKILL")
        time.sleep(0.001)


def remove(namespace: str) -> None:
    """The namespace, its processes and its files; nothing of it need be there."""
    if (NETNS_DIR / namespace).exists():
        kill_all(namespace)
        ip("netns", "del", namespace)
    shutil.rmtree(ETC_NETNS_DIR / namespace, ignore_errors=True)


def remove_leftovers() -> list[str]:
    """Remove what runs that no longer live left behind; the names."""
    names = {path.name for base in (NETNS_DIR, ETC_NETNS_DIR) if base.is_dir() for path in base.iterdir()}
    left = []
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match and start_time_of(int(match[1])) != int(match[2]):
            left.append(name)
    for name in left:
        try:
            remove(name)
        except LabError:
            # another run may be removing the same one
            if (NETNS_DIR / name).exists():
                raise
    return left


def inside(namespace: str, work: Callable[[], T]) -> T:
    """Call `work` in a thread whose network is `namespace`: sockets made there stay there."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            with open(NETNS_DIR / namespace) as entrance:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(entrance.fileno(), _CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise LabError(f"setns {namespace}: {os.strerror(number)}")
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001  carried over to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=enter_and_work, name=f"in-{namespace}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
