"""etcd on the lab's hosts: real processes of the real program, killed and restarted at will."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bagua_agent.etcd.key_range import end_of_prefix
from bagua_agent.etcd.known_defects import can_diverge
from bagua_agent.etcd.server.embedded import find_etcd
from tests.lab.namespaces import LabError
from tests.lab.network import Host
from tests.lab.process import LabProcess
from tests.lab.wait import HANG_S, eventually

_CLIENT_PORT = 2379
_PEER_PORT = 2380
_START_DEADLINE_S = 20.0
_CALL_TIMEOUT_S = 5.0
_MARK = "/lab/history"


@dataclass(frozen=True, slots=True)
class Change:
    """One write of a key. value None: it was removed, by a client or with its lease."""

    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The value of a key, and its lease. lease: 0 for none."""

    value: bytes
    lease: int


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@cache
def _etcd_for_clusters() -> str:
    """An etcd whose members can be killed: scripts/test has unpacked Debian's, unless there was none."""
    programs = [Path(sys.prefix, "lab-etcd/usr/bin/etcd"), Path("/usr/bin/etcd"), Path(find_etcd())]
    found = {}
    for program in filter(Path.exists, programs):
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=HANG_S, check=True
        )
        found[str(program)] = told.stdout.partition("etcd Version: ")[2].split()[0]
        if not can_diverge(found[str(program)]):
            return str(program)
    raise LabError(
        f"members of {found} can differ after one was killed (etcd #13766); scripts/test unpacks another etcd"
    )


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
        self._joins = False  # a cluster that is there already

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
            "initial-cluster-state": "existing" if self._joins else "new",
            "initial-cluster-token": self.cluster.directory.name,
            # else no member can take a lost member's place in the first five seconds
            "strict-reconfig-check": "false",
            "logger": "zap",
            "log-level": "warn",
        }
        if len(self.cluster.members) == 1:  # it elects itself: no need to wait a second for others
            options |= {"heartbeat-interval": "20", "election-timeout": "100"}
        program = find_etcd() if len(self.cluster.members) == 1 else _etcd_for_clusters()
        argv = [program, *(f"--{key}={value}" for key, value in options.items())]
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

    def wipe(self) -> None:
        """Its disk is lost: kill it, and let an empty one take its place in the cluster; until that serves.

        Needs a majority of the others.
        """
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        other = eventually(
            lambda: next((m for m in self.cluster.members if m is not self and m.is_healthy()), None),
            _START_DEADLINE_S,
            "a majority of etcd without the lost member",
        )
        listed = other.call("cluster/member/list")["members"]
        old = next(m["ID"] for m in listed if m["peerURLs"] == [self.peer_url])
        other.call("cluster/member/remove", ID=old)
        other.call("cluster/member/add", peerURLs=[self.peer_url])
        self._joins = True
        self.start()
        self.await_healthy()

    def call(self, path: str, **request: object) -> dict[str, Any]:
        """Ask etcd's HTTP gateway. Raises OSError if it does not answer, LabError if it refuses."""
        answers = self._ask("POST", f"/v3/{path}", request)
        answer = json.loads("".join(answers))
        if "error" in answer:
            raise LabError(f"etcd {self.name}: {path}: {answer}")
        return dict(answer)

    @property
    def leads(self) -> bool:
        """Whether it answers, and is the cluster's leader."""
        try:
            status = self.call("maintenance/status")
        except OSError:
            return False  # killed, or cut off
        return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]

    def is_healthy(self) -> bool:
        """Whether it answers and sees a leader."""
        try:
            answer = "".join(self._ask("GET", "/health", None, 1.0))
        except OSError:
            return False  # not up yet, or cut off: just what is asked
        return bool(answer) and json.loads(answer)["health"] == "true"

    def _ask(
        self, method: str, path: str, body: dict[str, object] | None, timeout_s: float = _CALL_TIMEOUT_S
    ) -> Iterator[str]:
        """Lines of the answer, as they come."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nHost: {self.endpoint}\r\nContent-Length: {len(content)}\r\n\r\n"
        with self.host.connect((self.host.address, self.port), timeout_s) as connection:
            connection.sendall(head.encode() + content)
            with connection.makefile("r", encoding="utf-8", newline="\n") as lines:
                while line := lines.readline():
                    if not line.strip():
                        break  # the end of the head
                yield from lines

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

    @property
    def leader(self) -> EtcdMember:
        """The member that leads; waits for an election."""
        return eventually(
            lambda: next((m for m in self.members if m.leads), None), _START_DEADLINE_S, "a leader of etcd"
        )

    def let_lead(self, member: EtcdMember) -> None:
        """Returns when it leads."""
        leader = self.leader
        if leader is not member:
            wanted = member.call("maintenance/status")["header"]["member_id"]
            leader.call("maintenance/transfer-leadership", targetID=wanted)
            eventually(lambda: member.leads, _START_DEADLINE_S, f"{member.name} leads")

    @property
    def followers(self) -> list[EtcdMember]:
        leader = self.leader
        return [m for m in self.members if m is not leader]

    def standing(self, prefix: str) -> dict[str, StoredValue]:
        """By key, all that begin with `prefix`. Raises OSError if etcd does not answer, LabError if it refuses."""
        end = base64.b64encode(end_of_prefix(prefix)).decode()
        found = self.leader.call("kv/range", key=_base64(prefix), range_end=end).get("kvs", [])
        return {
            base64.b64decode(kv["key"]).decode(): StoredValue(
                base64.b64decode(kv.get("value", "")), int(kv.get("lease", 0))
            )
            for kv in found
        }

    def history(self, key: str) -> list[Change]:
        """Every write and removal of `key` so far, oldest first, as etcd's own log has it."""
        member = eventually(
            lambda: next((m for m in self.members if m.is_healthy()), None), HANG_S, "a member that answers"
        )
        # The watch of a key does not say when it has told all, so everything is watched, up to a mark.
        mark = member.call("kv/put", key=_base64(_MARK), value=_base64(key))["header"]["revision"]
        everything = {"key": "AA==", "range_end": "AA==", "start_revision": 1}
        changes: list[Change] = []
        for line in member._ask("POST", "/v3/watch", {"create_request": everything}):
            for event in json.loads(line)["result"].get("events", []):
                revision = int(event["kv"]["mod_revision"])
                if base64.b64decode(event["kv"]["key"]).decode() == key:
                    is_removal = event.get("type") == "DELETE"
                    value = None if is_removal else base64.b64decode(event["kv"].get("value", ""))
                    changes.append(Change(revision, value))
                if revision >= int(mark):
                    return changes
        raise LabError(f"etcd {member.name} ended its history before revision {mark}")

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
