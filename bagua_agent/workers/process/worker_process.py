"""One worker's process as the agent holds it: ids, pipes, gate, and the only place that reaps it.

Invariant: its process group is signalled only while its leader is not reaped, since the leader (even
as a zombie) pins the group's number; what is left of the group is killed just before reaping.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time

from bagua_agent.workers.process.stack_channel import StackChannel


class AdoptedProcess:
    """A child that a helper started for us; used like a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class WorkerProcess:
    """A started worker. Its process id is also its session's and process group's id."""

    def __init__(
        self,
        worker_id: str,
        slot: int,
        popen: subprocess.Popen[bytes] | AdoptedProcess,
        gate_fd: int | None,
        stdout_fd: int | None,
        stderr_fd: int | None,
        stack_channel: StackChannel | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.slot = slot
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.stdout_fd = stdout_fd  # read ends, non-blocking; their reader closes them
        self.stderr_fd = stderr_fd
        self.stack_channel = stack_channel  # None: an executable, which knows nothing of it
        self._popen = popen
        self._gate_fd = gate_fd
        self._returncode: int | None = None
        self._closed = False
        self._asked_to_end_s: float | None = None  # when; None: it was not
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"WorkerProcess({self.worker_id!r}, slot={self.slot}, pid={self.pid})"

    @property
    def returncode(self) -> int | None:
        """The exit code, or the signal's number negated; None until the worker is reaped."""
        return self._returncode

    def open_gate(self) -> bool:
        """Lets the script start. Returns False if the worker is gone already, or was let through before."""
        return self._write_gate(b"g")

    def refuse_gate(self) -> bool:
        """Ends a worker that is not needed: one still at the gate exits with 0."""
        return self._write_gate(b"")

    def _write_gate(self, word: bytes) -> bool:
        with self._lock:
            if self._gate_fd is None:
                return False
            gate, self._gate_fd = self._gate_fd, None
            try:
                os.write(gate, word)
            except BrokenPipeError:
                return False  # its exit is reported by ExitWatch
            finally:
                os.close(gate)
            return True

    def signal_group(self, signal_number: int) -> bool:
        """Signals the whole group. Returns False once the worker is reaped (the group is killed by then)."""
        with self._lock:
            if self._returncode is not None:
                return False
            self._signal_group(signal_number)
            return True

    def ask_to_end(self, signal_number: int) -> float:
        """Signals the whole group, once: a later call sends nothing, since a second signal would interrupt the handler
        that saves a snapshot. Returns when the signal was sent, by the monotonic clock."""
        if self._asked_to_end_s is None:
            self._asked_to_end_s = time.monotonic()
            self.signal_group(signal_number)
        return self._asked_to_end_s

    def _signal_group(self, signal_number: int) -> None:
        try:
            os.killpg(self.pid, signal_number)
        except ProcessLookupError:
            # possible only before the child's setsid, which Popen has waited for
            os.kill(self.pid, signal_number)

    def has_ended(self) -> bool:
        """Tells whether the process is over, reaped or not. Reaps nothing."""
        with self._lock:
            if self._returncode is not None:
                return True
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int | None:
        """Returns the return code, or None while it runs. The first call after the exit kills the group's rest."""
        with self._lock:
            if self._returncode is None:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                # Children it left would hold its sockets open and peers would wait for them.
                self._signal_group(signal.SIGKILL)
                exited = ended.si_code == os.CLD_EXITED
                self._popen.wait()
                self._returncode = ended.si_status if exited else -ended.si_status
            return self._returncode

    def duplicate_pidfd(self) -> int | None:
        """Returns a pidfd for the caller to poll and close; None when this object is closed."""
        with self._lock:
            return None if self._closed else fcntl.fcntl(self.pidfd, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        """Releases descriptors; the process itself must be reaped. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self.pidfd)
            if self.stack_channel is not None:
                self.stack_channel.close()
            if self._gate_fd is not None:
                os.close(self._gate_fd)
                self._gate_fd = None
