"""etcd on the lab's hosts: real processes of the real program, killed and restarted at will."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

from bagua_agent.store.embedded import find_etcd
from tests.lab.namespaces import LabError
from tests.lab.network import Host
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

_CLIENT_PORT = 2379
_PEER_PORT = 2380
_START_DEADLINE_S = 20.0


class EtcdMember:
    """One member; its data outlive its process."""

    def __init__(self, cluster: EtcdCluster, host: Host, index: int, place: int) -> None:
        """place: how many members its host has before it, as each needs ports of its own."""
        self.cluster = cluster
        self.host = host
        self.name = f"m{index}"
        self.port = _CLIENT_PORT + 10 * place
        self.endpoint = f"{host.address}:{self.port}"
        self.peer_url = f"http://{host.address}:{_PEER_PORT + 10 * place}"
        self.data = cluster.directory / self.name
        self.log = cluster.directory / f"{self.name}.log"
        self.process: LabProcess | None = None

    def start(self) -> None:
        """Start it, with the data it has; does not wait."""
        if self.process is not None and self.process.is_running:
            raise LabError(f"etcd {self.name} runs already")
        client = f"http://{self.endpoint}"
        peers = ",".join(f"{m.name}={m.peer_url}" for m in self.cluster.members)
        options = {
            "name": self.name,
            "data-dir": str(self.data),
            # loopback too, so that an endpoint of localhost:2379 works on its host
            "listen-client-urls": f"{client},http://127.0.0.1:{self.port}",
            "advertise-client-urls": client,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": peers,
            "initial-cluster-token": self.cluster.directory.name,
            "logger": "zap",
            "log-level": "warn",
        }
        if len(self.cluster.members) == 1:  # it elects itself: no need to wait a second for others
            options |= {"heartbeat-interval": "20", "election-timeout": "100"}
        argv = [find_etcd(), *(f"--{key}={value}" for key, value in options.items())]
        self.process = self.host.run(argv, cwd=self.cluster.directory, output=self.log)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """SIGTERM; returns when it is gone."""
        if self.process is not None:
            self.process.send(signal.SIGTERM)
            self.process.wait(_START_DEADLINE_S)

    def restart(self) -> None:
        """Kill it if it runs, start it with the data it has, and wait until it serves."""
        self.kill()
        self.start()
        self.await_healthy()

    def is_healthy(self) -> bool:
        """Whether it answers and sees a leader."""
        try:
            with self.host.connect((self.host.address, self.port), 1.0) as connection:
                request = f"GET /health HTTP/1.0\r\nHost: {self.endpoint}\r\n\r\n"
                connection.sendall(request.encode())
                answer = b""
                while part := connection.recv(4096):
                    answer += part
        except OSError:
            return False  # not up yet, or cut off: just what is asked
        head, _, body = answer.partition(b"\r\n\r\n")
        return b" 200 " in head.splitlines()[0] and json.loads(body)["health"] == "true"

    def await_healthy(self, deadline_s: float = _START_DEADLINE_S) -> None:
        def healthy_or_ended() -> bool:
            if self.process is not None and not self.process.is_running:
                raise LabError(
                    f"etcd {self.name} ended with {self.process.returncode}\n{self.process.tail()}"
                )
            return self.is_healthy()

        eventually(healthy_or_ended, deadline_s, lambda: f"etcd {self.name} healthy\n{self.tail()}")

    def tail(self) -> str:
        return "" if self.process is None else self.process.tail()


class EtcdCluster:
    """One to three members. `endpoints` is what --rdzv-endpoint takes."""

    def __init__(self, hosts: Sequence[Host], members: int, directory: Path) -> None:
        if not hosts or not 1 <= members <= 3:
            raise LabError(f"etcd with {members} members on {len(hosts)} hosts; one to three on at least one")
        self.directory = directory
        directory.mkdir(parents=True)
        self.members = [
            EtcdMember(self, hosts[index % len(hosts)], index, index // len(hosts))
            for index in range(members)
        ]

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start all members; returns when all of them serve."""
        for member in self.members:
            member.start()
        for member in self.members:
            member.await_healthy()

    def kill(self) -> None:
        """SIGKILL all of them."""
        for member in self.members:
            member.kill()

    def restart(self) -> None:
        """Start all that do not run, with their data; returns when all of them serve."""
        for member in self.members:
            if member.process is None or not member.process.is_running:
                member.start()
        for member in self.members:
            member.await_healthy()
