"""The agent's handle of the warm parent, from which workers are forked: starts, asks, watches and replaces it.

`fork` never fails because of it, nor waits for its imports: without a warm parent that is ready it returns None, and
the worker is spawned. Its death harms no worker. The other side is bagua_core/worker/warm_parent.py; warm_fit.py
decides which workers may be forked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.process_end import wait_for_end
from bagua_agent.base.readable import readable
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.exits.orphans import adopting, reap_orphans
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.process_status import user_ids
from bagua_agent.workers.process.request_socket import HelperGone, RequestSocket
from bagua_agent.workers.start.library_variables import READ_AT_LOAD, READ_LATER
from bagua_agent.workers.start.warm_fit import StartPlace, restart_delay_s, why_not_forked
from bagua_agent.workers.start.worker_command import PREIMPORT, check_command, command_line, worker_python

log = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
# Having lived so long, a warm parent that dies is no sign of something that kills it again and again.
LONG_LIFE_S = 60.0


# "FD:PID" in the agent's environment: a socket to a child of the agent that has its imports done and waits for the
# command line of its start, and that child's process id. Tests that start many agents save the imports so.
OFFER_VARIABLE = "BAGUA_WARM_PARENT"


class WarmParent:
    """The warm parent of one node and job. Any thread may call; `start` only one that lives as long as the agent.

    command: what its workers run; env: the environment of one of them, directory: theirs.
    """

    def __init__(
        self,
        command: WorkerCommand,
        env: Mapping[str, str],
        *,
        directory: Path | None = None,
        preimport: tuple[str, ...] = PREIMPORT,
        account: Account | None = None,
    ) -> None:
        python = worker_python(env.get("PYTHON_EXEC"))
        self._command = command
        where = Path.cwd() if directory is None else directory
        self._place = StartPlace(dict(env), where, python, preimport, account, stays=directory is None)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # notified when it is ready, and when it is ended
        self._popen: subprocess.Popen[bytes] | _Offered | None = None
        self._requests: RequestSocket | None = None
        self._is_ready = False
        self._started_at = 0.0
        self._deaths_in_a_row = 0
        self._is_stopping = False
        self._last_reason: str | None = None
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch = background_thread("warm-parent-watch", self._run_watch, self._watch_ended)

    def start(self) -> None:
        """Starts it and returns at once; the imports go on. Raises UserError when the command cannot be run."""
        place = self._place
        check_command(self._command, place.directory, python=place.python, path=place.env.get("PATH"))
        with self._lock:
            self._launch()
        self._watch.start()

    @property
    def pid(self) -> int | None:
        popen = self._popen
        return None if popen is None else popen.pid

    def wait_ready(self, timeout_s: float = WARM_UP_TIMEOUT_S) -> bool:
        """Waits until everything is imported, and tells whether it is. False too if it is dead; it is ended if the time
        is over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ready or self._requests is None, timeout_s):
                self._give_up_imports(timeout_s)
            return self._is_ready and self._requests is not None

    def fork(
        self,
        command: WorkerCommand,
        place: StartPlace,
        descriptors: tuple[int, ...],
        cpus: frozenset[int] | None,
    ) -> int | None:
        """Returns the process id of a new worker held at its gate, a child of this process; None: spawn it instead, as
        while the imports of the warm parent last. A start that can wait for them calls `wait_ready` before.

        descriptors: for its stdin, stdout, stderr, gate, and the ends of its stack channel. When None is returned
        although a worker came to be, it ends as soon as the gate's other end is closed.
        """
        if command.kind is CommandKind.EXECUTABLE:
            return None
        reason = why_not_forked(self._place, place, bound_to_processors=cpus is not None)
        if reason is not None:
            if reason != self._last_reason:
                log.info("a worker is not forked from the warm parent: %s", reason)
                self._last_reason = reason
            return None
        line = command_line(command, os.getpid(), python=place.python)
        request: dict[str, Any] = {
            "env": dict(place.env),
            "cwd": str(place.directory),
            "cpus": None if cpus is None else sorted(cpus),
            "line": line,
            "read_at_load": READ_AT_LOAD,
            "read_later": READ_LATER,
        }
        if command != self._command:
            form = "script" if command.kind is CommandKind.SCRIPT else command.kind.value
            request["command"] = [form, command.target, list(command.args)]
        with self._lock:
            if not self._is_ready or self._requests is None:
                return None
            reap_orphans()
            try:
                with adopting():
                    answer = self._requests.ask(request, descriptors, FORK_TIMEOUT_S)
            except HelperGone as problem:
                log.warning("the warm parent (pid %s) failed: %s; the worker is spawned", self.pid, problem)
                self._end()
                return None
        if "pid" not in answer:
            log.warning("the warm parent could not fork: %s; the worker is spawned", answer.get("error"))
            return None
        pid = answer["pid"]
        if not self._is_new_worker(pid):
            log.warning("the warm parent names process %r, which is no worker of its; it is ended", pid)
            with self._lock:
                self._end()
            return None
        return int(pid)

    def _is_new_worker(self, pid: object) -> bool:
        """Tells whether `pid` is a new worker. The warm parent runs under the workers' account, and what it names is
        signalled with the agent's rights."""
        if type(pid) is not int or pid <= 1 or pid == self.pid:
            return False
        account = self._place.account
        try:
            # Our child, so its number stays its own
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            leads = os.getsid(pid) == pid
        except (OSError, OverflowError):
            return False
        return leads and user_ids(pid) == {os.geteuid() if account is None else account.uid}

    def _launch(self) -> None:
        place = self._place
        own, other = RequestSocket.pair()
        line = command_line(self._command, os.getpid(), python=place.python, preimport=place.preimport)
        runner = line.index("--parent-pid")
        offered = _take_offer(place)
        if offered is not None:
            own.close()
            other.close()
            self._popen, own = offered
            line[runner:runner] = ["--warm-fd", "-1"]
            self._requests, self._is_ready, self._started_at = own, False, time.monotonic()
            try:
                own.send({"line": line[line.index("--warm-fd") :]}, (), FORK_TIMEOUT_S)
            except HelperGone as problem:
                log.warning("the warm parent that was offered (pid %s) is of no use: %s", self.pid, problem)
            return
        line[runner:runner] = ["--warm-fd", str(other.fileno())]
        try:
            self._popen = _start(line, place, other)
        except OSError as problem:
            own.close()
            log.warning("no warm parent, workers are spawned: %s", problem)
            return
        finally:
            other.close()
        self._requests, self._is_ready, self._started_at = own, False, time.monotonic()

    def _end(self) -> None:
        """Kills it and closes its socket; the watch reaps it and starts another. The lock is held."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            self._changed.notify_all()
        self._kill()

    def _kill(self) -> None:
        """Kills it. The lock is held."""
        if self._popen is not None and self._popen.returncode is None:
            os.kill(self._popen.pid, signal.SIGKILL)  # not Popen.kill, which may reap it under the watch

    def _give_up_imports(self, waited_s: float) -> None:
        """Ends a warm parent whose imports take too long. The lock is held."""
        log.warning("the warm parent (pid %s) has not imported everything in %g s", self.pid, waited_s)
        self._end()

    def _watch_ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.warning("the warm parent is not watched any more: %s; workers are spawned", end.reason)
            with self._lock:
                self._end()

    def _run_watch(self) -> None:
        while (popen := self._popen) is not None:
            pidfd = os.pidfd_open(popen.pid)  # not reaped by anyone else
            try:
                self._wait_for_imports(pidfd)
                if self._wait_for_stop(pidfd, None):
                    return
            finally:
                os.close(pidfd)
            with self._lock:
                self._end()
                code = wait_for_end(popen, STOP_TIMEOUT_S)  # it has ended, as its pidfd shows
                self._popen = None
                lived_s = time.monotonic() - self._started_at
                # one that was never ready may have hung for as long
                is_first = self._is_ready and lived_s > LONG_LIFE_S
                self._deaths_in_a_row = 1 if is_first else self._deaths_in_a_row + 1
            delay_s = restart_delay_s(self._deaths_in_a_row)
            log.warning(
                "the warm parent (pid %d) is gone with code %d; workers are spawned%s",
                popen.pid,
                code,
                "" if delay_s is None else f" until there is another, in {delay_s:g} s",
            )
            if delay_s is None or self._wait_for_stop(None, delay_s):
                return
            with self._lock:
                self._launch()

    def _wait_for_imports(self, pidfd: int) -> None:
        """Waits until it says that it is ready, the pidfd's process ended or `stop` was called; it is ended if the time
        is over, since a successor has no caller of `wait_ready`."""
        with self._lock:
            requests = self._requests
            descriptor = -1 if requests is None else requests.fileno()
        if requests is None:
            return
        timeout_s = WARM_UP_TIMEOUT_S
        ready = readable([self._stop_fd, pidfd, descriptor], timeout_s)
        if not ready:
            with self._lock:
                if self._requests is requests:
                    self._give_up_imports(timeout_s)
            return
        if descriptor not in ready:
            return
        problem: HelperGone | None = None
        try:
            requests.receive(FORK_TIMEOUT_S)
        except HelperGone as raised:
            problem = raised
        with self._lock:
            if self._requests is not requests:
                return  # it was ended meanwhile
            if problem is None:
                self._is_ready = True
                self._changed.notify_all()
            else:
                if not self._is_stopping:
                    log.warning("the warm parent (pid %s) is of no use: %s", self.pid, problem)
                self._end()

    def _wait_for_stop(self, pidfd: int | None, timeout_s: float | None) -> bool:
        """Waits, and returns True when `stop` was called; False when the pidfd's process ended, or the time is over."""
        return self._stop_fd in readable([self._stop_fd, *(() if pidfd is None else (pidfd,))], timeout_s)

    def begin_stop(self) -> None:
        """Ends it without waiting: the kernel takes a tenth of a second to give back its memory. `stop` waits."""
        if self._stop_fd < 0:
            return
        self._is_stopping = True  # first: its end is no news then
        os.eventfd_write(self._stop_fd, 1)
        # held while it is reaped, or a worker forked: `stop` ends it then
        if self._lock.acquire(blocking=False):
            try:
                self._kill()  # the watch, which may wait for the rest of what it says, sees its end
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Ends it; workers go on. May be called twice, and without `start`."""
        if self._stop_fd < 0:
            return
        self.begin_stop()
        if self._watch.ident is not None:
            self._watch.join(FORK_TIMEOUT_S + STOP_TIMEOUT_S)
        with self._lock:
            self._end()
            if self._popen is not None:
                wait_for_end(self._popen, STOP_TIMEOUT_S)
                self._popen = None
        if self._watch.ident is not None and self._watch.is_alive():
            log.error("the warm parent's watch did not end")
            return
        os.close(self._stop_fd)
        self._stop_fd = -1


class _Offered:
    """A child that was there before the agent, with the part of Popen that the warm parent's owner uses."""

    args = ("warm parent",)

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reaps it if it has ended. Returns its return code; None if it has not ended."""
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _take_offer(place: StartPlace) -> tuple[_Offered, RequestSocket] | None:
    """Returns the child that waits for orders, once; it is ended if it can't be this job's: another account, another
    Python."""
    offer = os.environ.pop(OFFER_VARIABLE, None)
    if offer is None:
        return None
    descriptor, pid = map(int, offer.split(":"))
    os.set_inheritable(descriptor, False)
    offered, requests = _Offered(pid), RequestSocket(socket.socket(fileno=descriptor))
    if place.account is not None or place.python != sys.executable:
        requests.close()
        os.kill(pid, signal.SIGKILL)
        wait_for_end(offered, STOP_TIMEOUT_S)
        return None
    return offered, requests


def _start(line: list[str], place: StartPlace, control: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        line,
        env=dict(place.env),
        cwd=place.goes_to,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(control.fileno(),),
        start_new_session=True,
        **(place.account.process_arguments if place.account else {}),
    )
