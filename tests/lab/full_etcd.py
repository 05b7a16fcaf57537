"""A real etcd with a small quota, which a test fills and makes room in as an operator would."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import Connection, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.server.embedded import find_etcd
from bagua_agent.etcd.stubs import etcd3

QUOTA_BYTES = 1 << 20
_FILL = "/fill/"
_DEADLINE_S = 20.0


class FullEtcd:
    """On its own host's loopback. `fill` until it refuses writes, `make_room` as the error says."""

    def __init__(self, directory: Path, port: int, peer_port: int) -> None:
        self.endpoint = f"127.0.0.1:{port}"
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{peer_port}"
        options = {
            "data-dir": str(directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "quota-backend-bytes": str(QUOTA_BYTES),
            "log-level": "error",
        }
        with (directory / "etcd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [find_etcd(), *(f"--{k}={v}" for k, v in options.items())], stdout=log, stderr=log
            )
        self._config = StoreConfig(parse_endpoints(self.endpoint))
        self.store = Store(self._config)
        self.store.connect(_DEADLINE_S)

    def fill(self) -> None:
        for number in range(20 * QUOTA_BYTES // 10_000):  # its size lags behind
            try:
                self.store.put(f"{_FILL}{number}", bytes(10_000))
            except StoreUnavailable:
                return
        raise AssertionError("it takes more than its quota")

    def make_room(self) -> None:
        self.store.delete_prefix(_FILL)
        rpc = etcd3.etcdrpc
        compact = rpc.CompactionRequest(revision=self.store.status().revision, physical=True)
        connection = Connection(self._config.endpoints[0], self._config)
        try:
            connection.call(lambda c: c.raw(c.kvstub.Compact, compact), _DEADLINE_S)
            connection.call(
                lambda c: c.raw(c.maintenancestub.Defragment, rpc.DefragmentRequest()), _DEADLINE_S
            )
            listed = connection.call(
                lambda c: c.raw(c.maintenancestub.Alarm, rpc.AlarmRequest()), _DEADLINE_S
            )
            for raised in listed.alarms:
                disarm = rpc.AlarmRequest(
                    action=rpc.AlarmRequest.DEACTIVATE, memberID=raised.memberID, alarm=raised.alarm
                )
                connection.call(lambda c, d=disarm: c.raw(c.maintenancestub.Alarm, d), _DEADLINE_S)  # type: ignore[misc]
        finally:
            connection.close()

    def stop(self) -> None:
        self.store.close()
        self._process.terminate()
        try:
            self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_DEADLINE_S)
