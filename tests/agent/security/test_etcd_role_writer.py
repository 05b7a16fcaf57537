"""The rights of each role in a real etcd that asks for certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_agent.etcd.server.embedded import EmbeddedEtcd, ServerTls, find_etcd
from bagua_agent.security import certificate_command
from bagua_agent.security.certificate_files import (
    TlsFiles,
    create_authority,
    files_in,
    issue_files,
    issued_in,
    read_tls,
    retire,
    utc_now,
)
from bagua_agent.security.certificates import ETCD_MEMBER_NAME, CertificateRefused, Role
from bagua_agent.security.etcd_role_writer import apply
from bagua_contract import cluster_pb2
from tests.agent.service.conftest import LOOPBACK, People, store_config
from tests.lab.free_port import free_port

SUBMISSION = "/bagua/v1/cluster/submissions/demo"
ROOT = Path(__file__).parents[3]
DEADLINE_S = 10.0
START_S = 30.0  # for etcd to be up, however busy the machine

Open = Callable[..., Store]


@pytest.fixture(scope="module")
def guarded(etcd: EmbeddedEtcd, people: People) -> EmbeddedEtcd:
    apply(store_config(etcd.endpoint, people.files["root"]), issued_in(people.folder, utc_now()))
    return etcd


@pytest.fixture
def as_user(guarded: EmbeddedEtcd, people: People) -> Iterator[Open]:
    stores: list[Store] = []

    def open_store(name: str, timeout_s: float = 5.0) -> Store:
        stores.append(Store(store_config(guarded.endpoint, people.trusting_us(name), timeout_s)))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def test_an_operator_submits_and_a_viewer_only_looks(as_user: Open) -> None:
    submission = cluster_pb2.Submission(job_id="demo", wanted=cluster_pb2.Submission.RUN).SerializeToString()
    operator, viewer = as_user("ann"), as_user("vic")
    assert operator.transact([absent(SUBMISSION)], [Put(SUBMISSION, submission)]).succeeded

    seen = viewer.get(SUBMISSION)
    assert seen is not None and seen.value == submission
    for write in (
        lambda: viewer.put(SUBMISSION, b""),
        lambda: viewer.delete(SUBMISSION),
        lambda: viewer.delete_prefix("/bagua/v1/"),
        lambda: viewer.transact([absent("/bagua/v1/x")], [Put("/bagua/v1/x", b"")]),
    ):
        with pytest.raises(UserError, match="denies it") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert operator.get(SUBMISSION) == seen


def test_a_jobs_key_pair_is_for_its_agents(as_user: Open) -> None:
    key = JobKeys("demo").identity
    as_user("ann").put(key, b"pair")
    found = as_user("node-1").get(key)
    assert found is not None and found.value == b"pair"
    with pytest.raises(UserError, match="denies it"):
        as_user("vic").get(key)


def test_a_viewer_can_watch(as_user: Open) -> None:
    changed: list[Change] = []
    arrived = threading.Event()

    def remember(changes: tuple[Change, ...]) -> None:
        changed.extend(changes)
        arrived.set()

    mirror = PrefixMirror(as_user("vic"), "/bagua/v1/watched/", remember)
    mirror.start()
    as_user("ann").put("/bagua/v1/watched/a", b"1")
    assert arrived.wait(DEADLINE_S)
    mirror.stop()
    assert [change.key for change in changed] == ["/bagua/v1/watched/a"]


def test_a_node_writes_with_a_lease(as_user: Open) -> None:
    node = as_user("node-1")
    lease = node.lease_grant(5)
    node.put("/bagua/v1/cluster/nodes/node-1", b"", lease_id=lease.lease_id)
    with pytest.raises(UserError, match="denies it"):
        as_user("vic").lease_revoke(lease.lease_id)
    assert node.get("/bagua/v1/cluster/nodes/node-1") is not None


def test_only_root_goes_beyond_our_keys(as_user: Open, guarded: EmbeddedEtcd, people: People) -> None:
    for name in ("ann", "vic", "node-1"):
        for act in (
            lambda s: s.get("/elsewhere"),
            lambda s: s.put("/elsewhere", b""),
            lambda s: s.get("/bagua/v10"),
        ):
            with pytest.raises(UserError, match="denies it"):
                act(as_user(name))
        with pytest.raises(UserError, match=f"'root' alone change users.*of '{name}'"):
            apply(store_config(guarded.endpoint, people.files[name]), ())
    as_user("root").put("/elsewhere", b"")


def test_a_member_of_etcd_is_no_client(as_user: Open) -> None:
    with pytest.raises(UserError, match="denies it"):
        as_user("etcd-1").get(SUBMISSION)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("expired", r"expired/certificate\.pem': certificate of 'expired' expired on .*; issue a new one"),
        ("future", r"'future' is not valid before .*; check this host's clock"),
        ("stranger", r"'stranger' was issued by 'Bagua authority .*; use one of its"),
    ],
)
def test_certificates_that_do_not_hold_are_refused_by_etcd_and_named_here(
    as_user: Open, people: People, name: str, line: str
) -> None:
    with pytest.raises(StoreUnavailable, match="handshake failed"):
        as_user(name, timeout_s=2.0).get(SUBMISSION)
    with pytest.raises(CertificateRefused, match=line):
        read_tls(people.trusting_us(name), utc_now())


def test_without_a_certificate_no_client_gets_in(guarded: EmbeddedEtcd, people: People) -> None:
    plain = guarded.endpoint.replace("https://", "http://")
    for config in (
        StoreConfig(parse_endpoints(guarded.endpoint), people.files["ann"].ca_file, request_timeout_s=0.5),
        StoreConfig(parse_endpoints(plain), request_timeout_s=0.5),
    ):
        store = Store(config)
        with pytest.raises(StoreUnavailable):
            store.get(SUBMISSION)
        store.close()


def test_a_stranger_that_plays_etcd_is_not_believed(people: People) -> None:
    files = people.files["their-node"]
    tls = ServerTls(files.cert_file, files.key_file, files.ca_file, require_client_cert=True)
    impostor = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}", tls=tls)
    try:
        store = Store(store_config(impostor.endpoint, people.files["ann"], 0.5))
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            store.put(SUBMISSION, b"secret")
        store.close()
    finally:
        impostor.stop()


def test_a_second_time_there_is_nothing_to_do(guarded: EmbeddedEtcd, people: People) -> None:
    root = store_config(guarded.endpoint, people.files["root"])
    assert apply(root, issued_in(people.folder, utc_now())) == ()


def test_a_retired_name_is_shut_out_of_open_connections_too(
    guarded: EmbeddedEtcd, people: People, tmp_path: Path, as_user: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    people.files["leaver"] = issue_files(people.folder, "leaver", Role.OPERATOR, now=utc_now())
    command = ["etcd-users", str(people.folder), "--endpoints", guarded.endpoint]
    assert certificate_command.main(command) == 0
    assert "user leaver has role bagua-operator" in capsys.readouterr().out
    leaver = as_user("leaver")
    leaver.put("/bagua/v1/mine", b"")

    retire(people.folder, "leaver", now=utc_now())
    assert certificate_command.main(command) == 0
    assert capsys.readouterr().out == "user leaver removed\n"
    with pytest.raises(UserError, match="denies it"):
        leaver.put("/bagua/v1/mine", b"")
    assert certificate_command.main(command) == 0
    assert capsys.readouterr().out == "nothing to do\n"


def test_an_etcd_that_asks_for_no_certificates_is_left_alone(people: People) -> None:
    """With authentication on and clients without names, not even root could log in again."""
    files = people.files["etcd-1"]
    server = EmbeddedEtcd.start(
        f"127.0.0.1:{free_port()}", tls=ServerTls(files.cert_file, files.key_file, files.ca_file)
    )
    try:
        with pytest.raises(UserError, match=r"without a certificate.*start it with --client-cert-auth"):
            apply(store_config(server.endpoint, people.files["root"]), ())
        store = Store(StoreConfig(parse_endpoints(server.endpoint), files.ca_file))
        store.put("/anything", b"")
        store.close()
    finally:
        server.stop()


def test_an_etcd_that_is_away_is_said_to_be(people: People) -> None:
    with pytest.raises(StoreUnavailable, match=r"no endpoint answers \(127\.0\.0\.1:1: .*127\.0\.0\.1:2: "):
        apply(store_config("127.0.0.1:1,127.0.0.1:2", people.files["root"]), ())


def member_flags(files: TlsFiles) -> tuple[str, ...]:
    """As in deploy/systemd/bagua-etcd.service. Peers differ from clients by name: both have certificates of one
    authority, and a client that speaks to members as a member can write anything."""
    revoked = (f"--client-crl-file={files.revoked_file}", f"--peer-crl-file={files.revoked_file}")
    return (
        f"--cert-file={files.cert_file}",
        f"--key-file={files.key_file}",
        f"--trusted-ca-file={files.ca_file}",
        "--client-cert-auth",
        f"--peer-cert-file={files.cert_file}",
        f"--peer-key-file={files.key_file}",
        f"--peer-trusted-ca-file={files.ca_file}",
        "--peer-client-cert-auth",
        f"--peer-cert-allowed-cn={ETCD_MEMBER_NAME}",
        *(revoked if files.revoked_file else ()),
    )


class Cluster:
    """Members of etcd as docs/security.md says to start them, peers' ports and all."""

    def __init__(self, members: list[TlsFiles], folder: Path) -> None:
        self.client_ports = [free_port() for _ in members]
        self.peer_ports = [free_port() for _ in members]
        peers = [f"https://127.0.0.1:{port}" for port in self.peer_ports]
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._commands: list[list[str]] = []
        for index, files in enumerate(members):
            client_url = f"https://127.0.0.1:{self.client_ports[index]}"
            command = [
                find_etcd(),
                f"--name=m{index}",
                f"--data-dir={folder / f'data-{index}'}",
                f"--listen-client-urls={client_url}",
                f"--advertise-client-urls={client_url}",
                f"--listen-peer-urls={peers[index]}",
                f"--initial-advertise-peer-urls={peers[index]}",
                f"--initial-cluster={','.join(f'm{i}={url}' for i, url in enumerate(peers))}",
                "--unsafe-no-fsync=true",
                *member_flags(files),
            ]
            self._commands.append(command)
        self._start()

    def _start(self) -> None:
        for index, command in enumerate(self._commands):
            with (self._folder / f"log-{index}").open("ab") as log:
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def restart(self) -> None:
        self.end()
        self._start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_ports[0]}"

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(DEADLINE_S)
        self._processes.clear()


StartCluster = Callable[..., Cluster]


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[StartCluster]:
    clusters: list[Cluster] = []

    def start(*members: TlsFiles) -> Cluster:
        clusters.append(Cluster(list(members), tmp_path))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.end()


def test_members_form_a_cluster_and_users_are_the_same_on_all(
    people: People, start_cluster: StartCluster
) -> None:
    names = ("etcd-1", "etcd-2", "etcd-3")
    for name in names[1:]:
        if name not in people.files:
            people.files[name] = issue_files(people.folder, name, Role.ETCD, LOOPBACK, now=utc_now())
    cluster = start_cluster(*(people.files[name] for name in names))
    everywhere = ",".join(f"127.0.0.1:{port}" for port in cluster.client_ports)
    store = Store(store_config(everywhere, people.files["root"], START_S))
    store.connect(START_S)
    assert len(store.member_names()) == 3
    store.close()
    apply(store_config(everywhere, people.files["root"], START_S), issued_in(people.folder, utc_now()))
    for port in cluster.client_ports:
        operator, viewer = (
            Store(store_config(f"127.0.0.1:{port}", people.files[name], DEADLINE_S))
            for name in ("ann", "vic")
        )
        operator.put("/bagua/v1/a", b"")
        with pytest.raises(UserError, match="denies it"):
            viewer.put("/bagua/v1/a", b"")
        operator.close()
        viewer.close()


def test_peers_of_etcd_are_told_from_clients(people: People, start_cluster: StartCluster) -> None:
    """Clients' certificates come from the authority of the members; they must not open the members' own port."""
    cluster = start_cluster(people.files["etcd-1"])
    store = Store(store_config(cluster.endpoint, people.files["ann"], START_S))
    store.connect(START_S)
    store.close()
    (peer_port,) = cluster.peer_ports
    assert _asked_over_tls(peer_port, people, "etcd-1").startswith(b"HTTP/1.1 200")
    for name in ("ann", "node-1", "vic", "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _asked_over_tls(peer_port, people, name)


def test_a_lost_key_does_not_even_connect_to_etcd(tmp_path: Path, start_cluster: StartCluster) -> None:
    now = utc_now()
    folder = tmp_path / "ca"
    create_authority(folder, now=now)
    member_files = issue_files(folder, "etcd-1", Role.ETCD, LOOPBACK, now=now)
    lost, kept = (issue_files(folder, name, Role.OPERATOR, now=now) for name in ("lost", "kept"))
    stolen = tmp_path / "stolen"
    shutil.copytree(folder / "lost", stolen)
    cluster = start_cluster(replace(member_files, revoked_file=str(folder / "revoked.pem")))

    def get_as(files: TlsFiles, timeout_s: float) -> None:
        store = Store(store_config(cluster.endpoint, files, timeout_s))
        try:
            store.get("/anything")
        finally:
            store.close()

    get_as(kept, START_S)
    get_as(lost, DEADLINE_S)
    retire(folder, "lost", now=now)
    with pytest.raises(StoreUnavailable):
        get_as(files_in(stolen), 0.5)
    get_as(kept, DEADLINE_S)


def test_one_authority_takes_the_place_of_another(tmp_path: Path, start_cluster: StartCluster) -> None:
    """Step by step as docs/security.md has it."""
    now = utc_now()
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        create_authority(folder, now=now)
        issue_files(folder, "etcd-1", Role.ETCD, LOOPBACK, now=now)
        for name in ("root", "ann"):
            issue_files(folder, name, Role.OPERATOR, now=now)
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join((folder / "authority/certificate.pem").read_bytes() for folder in (old, new)))
    in_use = tmp_path / "in-use"
    shutil.copytree(old / "etcd-1", in_use)
    cluster = start_cluster(files_in(in_use))

    def put_as_ann(folder: Path, ca_file: Path, timeout_s: float = START_S) -> None:
        files = replace(files_in(folder / "ann"), ca_file=str(ca_file))
        store = Store(store_config(cluster.endpoint, files, timeout_s))
        try:
            store.connect(timeout_s)
            store.put("/bagua/v1/a", b"")
        finally:
            store.close()

    def wait_for_etcd_and_let_ann_in() -> None:
        root = store_config(cluster.endpoint, files_in(old / "root"), START_S)
        store = Store(root)
        store.connect(START_S)
        store.close()
        apply(root, issued_in(old, now))

    wait_for_etcd_and_let_ann_in()
    put_as_ann(old, old / "ann/ca.pem")
    with pytest.raises(StoreUnavailable):
        put_as_ann(new, both, 0.5)

    shutil.copy(both, in_use / "ca.pem")
    cluster.restart()
    put_as_ann(old, both)
    put_as_ann(new, both)

    for file in ("key.pem", "certificate.pem"):
        shutil.copy(new / "etcd-1" / file, in_use / file)
    put_as_ann(new, new / "ann/ca.pem")  # without a restart etcd shows its new certificate

    shutil.copy(new / "etcd-1/ca.pem", in_use / "ca.pem")
    cluster.restart()
    put_as_ann(new, new / "ann/ca.pem")
    with pytest.raises(StoreUnavailable):
        put_as_ann(old, both, 0.5)


def _asked_over_tls(port: int, people: People, name: str) -> bytes:
    """What the peer port answers; raises what the connection ends with."""
    files = people.trusting_us(name)
    context = ssl.create_default_context(cafile=files.ca_file)
    context.load_cert_chain(files.cert_file, files.key_file)
    with (
        socket.create_connection(("127.0.0.1", port), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")
        answer = connection.recv(4096)
        if not answer:
            raise ConnectionResetError("closed without an answer")
        return answer


def test_the_command_says_what_it_did_and_nothing_else(people: People, start_cluster: StartCluster) -> None:
    endpoint = start_cluster(people.files["etcd-1"]).endpoint
    store = Store(store_config(endpoint, people.files["root"], START_S))
    store.connect(START_S)
    store.close()
    command = [
        sys.executable,
        "-m",
        "bagua_agent.service",
        "certs",
        "etcd-users",
        str(people.folder),
    ]
    said = subprocess.run(
        [*command, "--endpoints", endpoint],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )
    assert said.stderr == ""
    assert "role bagua-viewer may read /bagua/v1/*\n" in said.stdout
    assert said.stdout.endswith("authentication enabled\n")


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_authority(tmp_path / "ca", now=utc_now())
    assert certificate_command.main(["etcd-users", str(tmp_path / "ca"), "--endpoints", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "issue root --role operator first" in error and error.count("\n") == 1
