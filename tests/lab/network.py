"""The lab: hosts on this machine, each a network namespace, joined by a switch in one of its own.

A host has an address, a name that the others resolve, its own host name, and processes; it can be cut
off from all or from one, in one direction too, frozen, killed, its link shaped, its clock set wrong.
Nothing of a lab is visible in the machine's own network, and `close` (or the next lab, after a crash)
ends every process and removes every namespace.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from bagua_agent.base.readable import readable
from tests.lab import namespaces, zygote
from tests.lab.clock import HostClock, build_library
from tests.lab.namespaces import LabError, ip_batch, tc
from tests.lab.process import LabProcess

if TYPE_CHECKING:
    from tests.lab.etcd import EtcdCluster

T = TypeVar("T")

_READY_TIMEOUT_S = 10.0
LINK_BURST_BYTES = 256 * 1024  # that a shaped link sends at once after it was idle
_NOBODY = "02:77:00:00:00:00"  # numbers of labs and hosts begin with 1
_labs_of_this_process = itertools.count(1)


class Host:
    """One host of a lab. `address` is what its peers reach it by; `name` resolves on all of them."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab = lab
        self.number = number
        self.name = f"h{number}"
        self.address = f"10.77.{lab.number}.{number}"
        self.namespace = f"{lab.name}-{self.name}"
        self.port_on_switch = f"p{number}"
        self.processes: list[LabProcess] = []
        self._disks = itertools.count(1)
        self.clock: HostClock | None = None
        self._holder: subprocess.Popen[bytes] | None = None

    def run(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        output: str | Path | None = None,
    ) -> LabProcess:
        """Start a process here. env None: the test's; output: file for stdout and stderr, appended."""
        words = [str(word) for word in argv]
        program = shutil.which(words[0], path=None if env is None else env.get("PATH"))
        if program is None:
            raise LabError(f"no program {words[0]!r}")
        if self.clock is not None:
            env = {**(os.environ if env is None else env), **self.clock.environment}
        process = LabProcess(
            [*self._entrance(), f"--wdns={cwd or os.getcwd()}", "--"],
            [program, *words[1:]],
            env=env,
            output=None if output is None else Path(output),
            host_name=self.name,
        )
        self.processes.append(process)
        return process

    def run_agent(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, cwd: Path | None = None
    ) -> LabProcess:
        """Start `bagua-launch` or a daemon here, by the zygote where that can do it. cwd: the tests' own by default."""
        if self.clock is not None or self._holder is None or not zygote.can_start(argv, env):
            return self.run(argv, env=env, output=output, cwd=cwd)
        forked = zygote.start(argv, env, output, str(cwd or Path.cwd()), self._holder.pid)
        process = LabProcess([], argv, env=env, output=output, host_name=self.name, forked=forked)
        self.processes.append(process)
        return process

    def kill_all(self) -> None:
        """SIGKILL every process of this host, with any parent; returns when they are gone."""
        namespaces.kill_all(self.namespace, self._spare())
        for process in self.processes:
            process.wait(10)

    def power_off(self) -> None:
        """As if the plug were pulled: nothing leaves the host any more, not even the end of a connection."""
        self.cut()
        self.kill_all()

    def freeze(self) -> None:
        """Stop every process; the kernel still answers for them. Returns when all have stopped."""
        namespaces.stop_all(self.namespace, self._spare())

    def thaw(self) -> None:
        namespaces.signal_all(self.namespace, signal.SIGCONT, self._spare())

    def own_clock(self) -> HostClock:
        """Processes started from now on have a wall clock of this host's own, for the test to shift."""
        if self.clock is None:
            self.clock = HostClock(
                build_library(self.lab.directory), self.lab.directory / f"{self.name}-clock"
            )
        return self.clock

    def wall_clock_s(self) -> int:
        """Seconds since 1970 as a process of this host sees them."""
        output = self.lab.directory / f"{self.name}-date"
        output.unlink(missing_ok=True)
        process = self.run(["date", "+%s"], output=output)
        if process.wait(_READY_TIMEOUT_S) != 0:
            raise LabError(f"{self}: date failed: {process.tail()}")
        return int(process.text())

    def small_disk(self, size_bytes: int) -> Path:
        """A directory that holds so much and no more; what is in it only processes of this host see."""
        directory = self.lab.directory / f"{self.name}-disk-{next(self._disks)}"
        directory.mkdir()
        options = f"size={size_bytes},mode=0700"
        process = self.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory])
        if process.wait(_READY_TIMEOUT_S) != 0:
            raise LabError(f"{self}: no disk of {size_bytes} bytes")
        return directory

    def fill(self, directory: Path) -> None:
        """Leave no byte free on the disk that holds `directory`; `directory`/filler takes it."""
        output = self.lab.directory / f"{self.name}-filler"
        # it ends with an error, for the disk is full
        self.run(["dd", "if=/dev/zero", f"of={directory}/filler", "bs=4096"], output=output).wait(20)
        if "No space left" not in output.read_text():
            raise LabError(f"{self}: {directory} did not fill up: {output.read_text()}")

    def cut(self) -> None:
        """Pull the cable at the switch: what is sent is lost, silently, in both directions."""
        namespaces.ip("-n", self.lab.switch, "link", "set", self.port_on_switch, "down")

    def heal(self) -> None:
        namespaces.ip("-n", self.lab.switch, "link", "set", self.port_on_switch, "up")

    def cut_to(self, other: Host, *, one_way: bool = False) -> None:
        """What this host sends to `other` is lost, silently. Unless one_way, so is what comes back."""
        self._send_to(other, _NOBODY)
        if not one_way:
            other._send_to(self, _NOBODY)

    def heal_to(self, other: Host) -> None:
        """Both directions."""
        self._send_to(other, _mac(other))
        other._send_to(self, _mac(self))

    def _send_to(self, other: Host, hardware_address: str) -> None:
        # to an unused address: the switch takes it, and no host does
        words = ("neigh", "replace", other.address, "lladdr", hardware_address)
        namespaces.ip("-n", self.namespace, *words, "dev", "eth0", "nud", "permanent")

    def pids(self) -> list[int]:
        return [pid for pid in namespaces.pids_in(self.namespace) if pid not in self._spare()]

    def inside(self, work: Callable[[], T]) -> T:
        """Call `work` with this host's network; sockets that it makes stay on this host."""
        return namespaces.inside(self.namespace, work)

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """A TCP connection from this host, for the test to use."""
        return self.inside(lambda: socket.create_connection(address, timeout_s))

    def listen(self, port: int = 0) -> socket.socket:
        """A listening TCP socket at this host's address, for the test to use."""
        return self.inside(lambda: socket.create_server((self.address, port)))

    def __repr__(self) -> str:
        return f"<host {self.name} {self.address}>"

    def _entrance(self) -> list[str]:
        if self._holder is None:
            raise LabError(f"{self} is closed")
        # nsenter execs: the process started is the one asked for, and no interpreter stands before it
        nsenter = shutil.which("nsenter") or "nsenter"
        return [nsenter, "--target", str(self._holder.pid), "--net", "--uts", "--mount"]

    def _spare(self) -> frozenset[int]:
        return frozenset() if self._holder is None else frozenset({self._holder.pid})

    def _start_holder(self) -> None:
        """A process that keeps the host's name and its view of /etc alive, for others to enter."""
        script = f"echo {self.name} > /proc/sys/kernel/hostname && echo up && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # not the test's own, which would stay open after a crash
            start_new_session=True,
        )

    def _await_holder(self) -> None:
        assert self._holder is not None and self._holder.stdout is not None
        with self._holder.stdout as stdout:
            line = stdout.readline() if readable([stdout], _READY_TIMEOUT_S) else b"nothing"
            if line != b"up\n":
                raise LabError(f"{self}: its first process did not come up: {line.decode().strip()}")

    def _close(self) -> None:
        holder, self._holder = self._holder, None
        namespaces.remove(self.namespace)
        for process in self.processes:
            process.wait(10)
        if holder is not None:
            holder.wait(10)
            if holder.stdout is not None:
                holder.stdout.close()
        if self.clock is not None:
            self.clock.close()


class Lab:
    """`hosts` hosts on one switch; a context manager.

    directory: where output files and data of the lab lie, removed with it; None: a new one under the
    system's. Raises LabError if the machine can't have it (`namespaces.unavailable` says why).
    """

    def __init__(self, hosts: int = 3, directory: Path | None = None) -> None:
        namespaces.remove_leftovers()
        index = next(_labs_of_this_process)
        self.number = 1 + (os.getpid() + index) % 250
        self.name = f"{namespaces.name_prefix()}-{index}"
        self.switch = f"{self.name}-switch"
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="bagua-lab-"))
        self.clusters: list[EtcdCluster] = []
        self.hosts = [Host(self, number) for number in range(1, hosts + 1)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def shape(self, rate: str | None) -> None:
        """Limit every link to `rate` ("100mbit", "1gbit") in each direction; None: no limit."""
        for host in self.hosts:
            ends = ((host.namespace, "eth0"), (self.switch, host.port_on_switch))
            for namespace, device in ends:
                if rate is None:
                    tc(namespace, "qdisc", "replace", "dev", device, "root", "noqueue")
                else:
                    words = f"qdisc replace dev {device} root tbf rate {rate} burst {LINK_BURST_BYTES}b latency 100ms"
                    tc(namespace, *words.split())

    def etcd(self, *hosts: Host, members: int | None = None) -> EtcdCluster:
        """Start an etcd of `members` (default: one a host) on `hosts` in turn; returns when it answers."""
        from tests.lab.etcd import EtcdCluster

        cluster = EtcdCluster(hosts, members or len(hosts), self.directory / f"etcd-{len(self.clusters)}")
        self.clusters.append(cluster)
        cluster.start()
        return cluster

    def close(self) -> None:
        """End every process and remove every namespace, whatever fails on the way; then raise it."""
        failures: list[Exception] = []
        for host in self.hosts:
            try:
                host._close()
            except Exception as error:  # noqa: BLE001  one host's failure must not leave the others behind
                failures.append(error)
        try:
            namespaces.remove(self.switch)
        except LabError as error:
            failures.append(error)
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)
        if failures:
            raise ExceptionGroup(f"closing {self.name}", failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        for name in (self.switch, *(host.namespace for host in self.hosts)):
            namespaces.ip("netns", "add", name)
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            etc = namespaces.ETC_NETNS_DIR / host.namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            host._start_holder()
        ip_batch(self.switch, ["link set lo up", "link add br0 type bridge", "link set br0 up"])
        ip_batch(self.switch, itertools.chain.from_iterable(map(self._switch_end, self.hosts)))
        for host in self.hosts:
            ip_batch(host.namespace, self._host_end(host))
        for host in self.hosts:
            host._await_holder()

    def _switch_end(self, host: Host) -> list[str]:
        port = host.port_on_switch
        return [
            f"link add {port} type veth peer name eth0 address {_mac(host)} netns {host.namespace}",
            f"link set {port} master br0 up",
        ]

    def _host_end(self, host: Host) -> list[str]:
        # fixed neighbours: a cut host must stay silent, not become "no route to host" after three
        # unanswered questions for its hardware address
        neighbours = [
            f"neigh replace {other.address} lladdr {_mac(other)} dev eth0 nud permanent"
            for other in self.hosts
            if other is not host
        ]
        return [
            "link set lo up",
            "link set eth0 addrgenmode none",
            f"addr add {host.address}/24 dev eth0",
            "link set eth0 up",
            *neighbours,
        ]


def _mac(host: Host) -> str:
    return f"02:77:00:00:{host.lab.number:02x}:{host.number:02x}"
