"""The guardian: a small process that outlives the agent briefly, to kill and remove what it left.

It reads group ids and directories from a pipe that only the agent holds. End-of-file means that the agent is gone, for
any reason: every group still registered is killed, then the agent's runtime directory is removed, and its log
directory as far as it is empty. Covers grandchildren, which get no parent-death signal: by group, and where they made
a session of their own (setsid) by the agent's mark in their environment. One that wiped its environment is out of
reach.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from bagua_agent.base.errors import InternalError, host_error
from bagua_agent.base.process_end import wait_for_end

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0

# Runs isolated and without site packages, to stay small. A group number can be used again only after
# the group is empty; then its leader has another start time, and it is left alone. A directory is known by its
# inode, so that one made later under the same name is left alone too. Lines: +GROUP, -GROUP, and with the path in
# hexadecimal d (remove) and e (remove what is empty in it); m and in hexadecimal a variable that the agent's
# descendants have.
PROGRAM = r"""
import os
import select
import time
import _signal as signal  # the plain module loads enum and half a megabyte
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)

def started(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19]
    except OSError:
        return None

def inode(path):
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

def watch(pid):
    # A half of the descriptors is for reading /proc: a job may have more processes than this one has descriptors.
    if len(dying) < os.sysconf("SC_OPEN_MAX") // 2:
        try:
            dying.add(os.pidfd_open(pid))
        except OSError:
            pass

def await_end(until):
    poll = select.poll()
    for fd in dying:
        poll.register(fd, select.POLLIN)
    while dying and (left_s := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            poll.unregister(fd)
            os.close(fd)
            dying.remove(fd)

def remove(path, only_empty):
    for parent, directories, files in os.walk(path, topdown=False):
        names = [] if only_empty else [os.path.join(parent, name) for name in files + directories]
        for name in names:
            try:
                os.unlink(name)  # a directory stays for now: it was emptied, and is removed as a parent
            except OSError:
                pass
        try:
            os.rmdir(parent)
        except OSError:
            pass

def marked(mark):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # Bounded: a process may say of any part of its memory that it is its environment.
                with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                    found = b"\0"
                    while len(found) < 16 << 20 and (more := file.read(1 << 20)):
                        found += more
                if b"\0" + mark + b"\0" in found + b"\0":
                    yield int(name)
            except OSError:
                pass

groups = {}
directories = {}
mark = b""
rest = b""
while data := os.read(0, 65536):
    *lines, rest = (rest + data).split(b"\n")
    for line in lines:
        if line[:1] in b"de":
            path = bytes.fromhex(line[1:].decode())
            directories[path] = line[:1] == b"e", inode(path)
            continue
        if line[:1] == b"m":
            mark = bytes.fromhex(line[1:].decode())
            continue
        group = int(line[1:])
        if line[:1] == b"+":
            groups[group] = started(group)
        else:
            groups.pop(group, None)
until = time.monotonic() + 3
dying = set()
for group, start in groups.items():
    now = started(group)
    if now is None or now == start:
        watch(group)
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
while mark and time.monotonic() < until:  # again, for what was forked meanwhile
    found = False
    for pid in marked(mark):
        found = True
        watch(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
    await_end(time.monotonic() + 0.2)
await_end(until)  # what still runs might write into what is removed
for path, (only_empty, known) in directories.items():
    if known is not None and inode(path) == known:
        remove(path, only_empty)
"""


class Guardian:
    """Kills every registered process group, and removes registered directories, when this process is gone. Any
    thread may call."""

    def __init__(self) -> None:
        self._started = False
        self._process: subprocess.Popen[bytes] | None = None  # None also while none can be started
        self._lacking = False  # it was logged that none can be started
        self._groups: set[int] = set()
        self._directories: dict[Path, bytes] = {}
        self._mark = b""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process. Raises InfrastructureLost if this host has no process, memory or descriptor left for it:
        an agent that can't be guarded ends before it has a part in a job, so its end loses nothing."""
        with self._lock:
            if not self._started:
                try:
                    self._process = self._launch()
                except OSError as error:
                    what = "this node's agent can't start the process that ends its workers if the agent is killed"
                    raise host_error(error, what, f"see that {sys.executable} can be run") from error
                self._started = True

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def register(self, pgid: int) -> None:
        """Registers the process group `pgid`, which does not outlive this process from now on. Raises InternalError if
        pgid is 1 or less."""
        if pgid <= 1:
            raise InternalError(f"process group {pgid} cannot be guarded")
        with self._lock:
            self._groups.add(pgid)
            self._tell(b"+%d\n" % pgid)

    def unregister(self, pgid: int) -> None:
        with self._lock:
            self._groups.discard(pgid)
            self._tell(b"-%d\n" % pgid)

    def end_marked(self, variable: str) -> None:
        """Registers a variable (NAME=value): no process with it in its environment outlives this one. Raises
        InternalError if it has another form."""
        name, equals, value = variable.partition("=")
        if not (name and equals and value):
            raise InternalError(f"{variable!r} marks nothing")
        with self._lock:
            self._mark = b"m%b\n" % os.fsencode(variable).hex().encode()
            self._tell(self._mark)

    def remove_directory(self, path: Path) -> None:
        """Registers `path`: it and all in it does not outlive this process from now on."""
        self._directory(path, b"d")

    def prune_directory(self, path: Path) -> None:
        """Registers `path` as `remove_directory` does, but only directories that are empty by then are removed: what
        was written there is kept."""
        self._directory(path, b"e")

    def _directory(self, path: Path, verb: bytes) -> None:
        if not path.is_absolute() or len(path.parts) < 3:
            raise InternalError(f"directory {path} is not one to remove")
        message = b"%b%b\n" % (verb, os.fsencode(path).hex().encode())
        with self._lock:
            self._directories[path] = message
            self._tell(message)

    def stop(self) -> None:
        """Ends the guardian. It kills the groups that are still registered, and removes the directories. A
        guardian that was killed is replaced for that, if this host has a process and memory for it by now."""
        with self._lock:
            if self._started and (self._process is None or self._process.poll() is not None):
                if self._process is not None:
                    self._bury(self._process)
                self._replace()
            process, self._process, self._started = self._process, None, False
            self._groups.clear()
            self._directories.clear()
            if process is None:
                return
            assert process.stdin is not None
            process.stdin.close()
        try:
            wait_for_end(process, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def _tell(self, message: bytes) -> None:
        """Sends the message. A guardian that was killed is replaced by one that knows everything; where this host has
        no process or memory for it, the next message tries again: healthy workers must not end with their guardian."""
        if not self._started:
            raise InternalError("the guardian is not running")
        if self._process is not None:
            assert self._process.stdin is not None
            try:
                os.write(self._process.stdin.fileno(), message)
                return
            except BrokenPipeError:
                self._bury(self._process)
        self._replace()

    def _bury(self, old: subprocess.Popen[bytes]) -> None:
        self._process = None
        assert old.stdin is not None
        old.stdin.close()
        old.kill()
        old.wait(STOP_TIMEOUT_S)
        log.warning("the guardian (pid %d) is gone with code %s", old.pid, old.returncode)

    def _replace(self) -> None:
        try:
            self._process = self._launch()
        except OSError as error:
            if not self._lacking:
                log.warning("no other guardian can be started (%s); workers would outlive this agent", error)
            self._lacking = True
            return
        self._lacking = False
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), self._everything())
        except BrokenPipeError:
            self._bury(self._process)  # the next message starts another

    def _everything(self) -> bytes:
        return b"".join(
            (*(b"+%d\n" % group for group in self._groups), *self._directories.values(), self._mark)
        )

    @staticmethod
    def _launch() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-E", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
            bufsize=0,
        )
