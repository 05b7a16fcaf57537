"""An authority with holders of every role, a stranger's authority, and an etcd that asks for their certificates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint, parse_endpoints
from bagua_agent.etcd.server.embedded import EmbeddedEtcd, ServerTls
from bagua_agent.security.certificate_files import TlsFiles, create_authority, issue_files, utc_now
from bagua_agent.security.certificates import Role
from tests.agent.etcd.conftest import make_store, tcp_server
from tests.lab.free_port import free_port

__all__ = ["make_store", "tcp_server"]

LOOPBACK = ("127.0.0.1", "localhost")


class People:
    """Folders of certificates: `files["ann"]`. Some are of no use: `expired` and `future` (operators), and `stranger`,
    whose operator's certificate another authority issued."""

    def __init__(self, folder: Path, now: datetime) -> None:
        self.folder = folder / "ours"
        self.files: dict[str, TlsFiles] = {}
        long_ago = now - timedelta(days=30)
        create_authority(self.folder, now=long_ago)
        create_authority(folder / "theirs", now=now)
        for name, role in (("root", Role.OPERATOR), ("ann", Role.OPERATOR), ("vic", Role.VIEWER)):
            self.files[name] = issue_files(self.folder, name, role, now=now)
        for name, role in (("node-1", Role.AGENT), ("etcd-1", Role.ETCD)):
            self.files[name] = issue_files(self.folder, name, role, LOOPBACK, now=now)
        self.files["expired"] = issue_files(self.folder, "expired", Role.OPERATOR, now=long_ago, days=3)
        self.files["future"] = issue_files(
            self.folder, "future", Role.OPERATOR, now=now + timedelta(days=30), days=3
        )
        self.files["stranger"] = issue_files(folder / "theirs", "stranger", Role.OPERATOR, now=now)
        self.files["their-node"] = issue_files(folder / "theirs", "their-node", Role.AGENT, LOOPBACK, now=now)

    def trusting_us(self, name: str) -> TlsFiles:
        """The holder's certificate with our authority to check the server by."""
        theirs = self.files[name]
        return TlsFiles(self.files["ann"].ca_file, theirs.cert_file, theirs.key_file)


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> People:
    return People(tmp_path_factory.mktemp("people"), utc_now())


@pytest.fixture(scope="module")
def etcd(people: People) -> Iterator[EmbeddedEtcd]:
    """Asks for certificates; every holder of one may still do everything."""
    files = people.files["etcd-1"]
    tls = ServerTls(files.cert_file, files.key_file, files.ca_file, require_client_cert=True)
    server = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}", tls=tls)
    yield server
    server.stop()


@pytest.fixture
def plain_etcd() -> Iterator[EmbeddedEtcd]:
    """Without certificates, and empty."""
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


@pytest.fixture
def plain_store(plain_etcd: EmbeddedEtcd) -> Iterator[Store]:
    made = Store(StoreConfig((parse_endpoint(plain_etcd.endpoint),)))
    yield made
    made.close()


def store_config(endpoint: str, files: TlsFiles, timeout_s: float = 5.0) -> StoreConfig:
    return StoreConfig(
        parse_endpoints(endpoint), files.ca_file, files.cert_file, files.key_file, request_timeout_s=timeout_s
    )
