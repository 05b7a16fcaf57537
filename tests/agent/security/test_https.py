"""A dashboard over TLS, on real sockets: holders of our certificates are served, others are refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_agent.base import small_http
from bagua_agent.base.errors import UserError
from bagua_agent.base.messages import HealthAsked
from bagua_agent.base.small_http import Answer
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.dashboard.exposure import https_side, why_refused
from bagua_agent.dashboard.listening import Listening
from bagua_agent.dashboard.server import Dashboard
from bagua_agent.job.watching import open_dashboard, open_metrics
from bagua_agent.metrics.daemon_picture import DaemonPictureAsked, picture_of
from bagua_agent.security.certificate_files import TlsFiles, issue_files, utc_now
from bagua_agent.security.certificates import Role
from bagua_agent.security.https import HttpsSide
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.cluster_page_service import open_page
from bagua_agent.service.config import agent_config
from bagua_agent.service.scheduling.queue_account import QueueAccount
from bagua_contract import cluster_pb2 as pb
from tests.agent.service.conftest import LOOPBACK, People, people

__all__ = ["people"]

TIMEOUT_S = 40.0


@pytest.fixture
def dashboard(people: People) -> Iterator[Dashboard]:
    served = Dashboard(
        Listening.parse("0"),
        lambda path: Answer(200, b"alive\n") if path == "/healthz" else None,
        tls=HttpsSide(RenewedTls(people.files["node-1"])),
    )
    served.start()
    yield served
    served.stop()


def client(ca_file: str, files: TlsFiles | None) -> ssl.SSLContext:
    """files: what the client shows; None for nothing."""
    context = ssl.create_default_context(cafile=ca_file)
    if files is not None:
        context.load_cert_chain(files.cert_file, files.key_file)
    return context


def get(url: str, context: ssl.SSLContext) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_people_and_nodes_of_the_cluster_are_served(dashboard: Dashboard, people: People) -> None:
    assert dashboard.url.startswith("https://127.0.0.1:")
    for name in ("vic", "ann", "node-1"):
        context = client(people.files["ann"].ca_file, people.files[name])
        assert get(f"{dashboard.url}healthz", context) == (200, "alive\n"), name
        assert "<title>Bagua" in get(dashboard.url, context)[1]
    members = client(people.files["ann"].ca_file, people.files["etcd-1"])
    status, said = get(f"{dashboard.url}healthz", members)
    assert (
        status == 403
        and "needs role viewer, and 'bagua-etcd' has role etcd" in said
        and said.count("\n") == 1
    )


@pytest.mark.parametrize("name", [None, "stranger", "expired"])
def test_others_get_nothing(dashboard: Dashboard, people: People, name: str | None) -> None:
    context = client(people.files["ann"].ca_file, people.files[name] if name else None)
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)) as refused:
        get(f"{dashboard.url}healthz", context)
    assert "timed out" not in str(refused.value)
    plain = f"http://{dashboard.address}/healthz"
    with pytest.raises(OSError) as hung_up:
        urllib.request.urlopen(plain, timeout=TIMEOUT_S)
    assert "timed out" not in str(hung_up.value)
    assert get(f"{dashboard.url}healthz", client(people.files["ann"].ca_file, people.files["vic"]))[0] == 200


def test_a_renewed_certificate_is_shown_without_a_restart(people: People, tmp_path: Path) -> None:
    for file in (
        people.files["node-1"].ca_file,
        people.files["node-1"].cert_file,
        people.files["node-1"].key_file,
    ):
        shutil.copy2(file, tmp_path)
    names = (Path(f).name for f in (people.files["node-1"].ca_file, people.files["node-1"].cert_file))
    ca, certificate = (str(tmp_path / name) for name in names)
    files = TlsFiles(ca, certificate, str(tmp_path / Path(people.files["node-1"].key_file).name))
    served = Dashboard(Listening.parse("0"), tls=HttpsSide(RenewedTls(files)))
    served.start()
    try:
        context = client(people.files["ann"].ca_file, people.files["vic"])
        before = shown_by(served, context)
        renewed = issue_files(people.folder, "node-9", Role.AGENT, LOOPBACK, now=utc_now())
        for source, target in ((renewed.key_file, files.key_file), (renewed.cert_file, files.cert_file)):
            shutil.copy2(source, f"{target}.new")
            os.replace(f"{target}.new", target)
        assert shown_by(served, context) != before
    finally:
        served.stop()


def shown_by(served: Dashboard, context: ssl.SSLContext) -> bytes:
    host, port = served.address.split(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def test_clients_that_say_nothing_hold_up_no_other(
    dashboard: Dashboard, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = dashboard.address.split(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S)) for _ in range(8)
        ]
        silent[0].sendall(b"\x16\x03\x01")  # the beginning of a handshake
        context = client(people.files["ann"].ca_file, people.files["vic"])
        assert get(f"{dashboard.url}healthz", context)[0] == 200
        for connection in silent:
            connection.settimeout(TIMEOUT_S + small_http.REQUEST_TIMEOUT_S)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "the server hangs up"


BEYOND = Listening.parse("10.0.0.5:7465")


def credentials(files: TlsFiles) -> StoreCredentials:
    return StoreCredentials(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)


def test_beyond_loopback_a_page_needs_the_certificate_of_a_node(people: People) -> None:
    assert https_side(Listening(), StoreCredentials(), "--dashboard") is None
    assert https_side(Listening(), credentials(people.files["node-1"]), "--dashboard") is None, (
        "plain at loopback"
    )
    assert https_side(BEYOND, credentials(people.files["node-1"]), "--dashboard") is not None
    with pytest.raises(
        UserError, match=r"^--listen: 10\.0\.0\.5:7465 is beyond this host.*ssh -L.*--etcd-cert"
    ) as met:
        https_side(BEYOND, StoreCredentials(), "--listen")
    assert "\n" not in str(met.value)
    with pytest.raises(UserError, match="'ann' has role operator, which serves no page"):
        https_side(BEYOND, credentials(people.files["ann"]), "--listen")
    missing = replace(credentials(people.files["node-1"]), cert_file="/no/certificate.pem")
    with pytest.raises(UserError, match=r"/no/certificate\.pem"):
        https_side(BEYOND, missing, "--listen")
    assert why_refused(Listening.parse("0.0.0.0:1"), "--listen", has_certificates=False)
    assert not why_refused(Listening.parse("localhost:1"), "--listen", has_certificates=False)


def test_an_agent_serves_beyond_loopback_over_tls_or_not_at_all(people: People) -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py", ())
    plain = JobConfig("demo", command, 1, 1, dashboard="0.0.0.0:0")
    with pytest.raises(UserError, match=r"--dashboard: 0\.0\.0\.0:0 is beyond this host"):
        open_dashboard(plain, "h1", lambda message: None, print)
    said: list[str] = []
    node = replace(plain, store_credentials=credentials(people.files["node-1"]))
    served = open_dashboard(node, "h1", lambda message: None, said.append)
    try:
        assert said == [f"bagua-launch: dashboard at https://{served.address}/"]
        port = served.address.rpartition(":")[2]
        context = client(people.files["ann"].ca_file, people.files["vic"])
        assert get(f"https://127.0.0.1:{port}/static/app.js", context)[0] == 200
    finally:
        served.stop()


def test_a_daemon_with_certificates_serves_its_page_and_metrics_over_tls_alone(people: People) -> None:
    node = people.files["node-1"]
    content = {
        "etcd": {"endpoints": ["127.0.0.1:1"]},
        "tls": {"ca_file": node.ca_file, "cert_file": node.cert_file, "key_file": node.key_file},
        "dashboard": {"listen": "0.0.0.0:0"},
    }
    picture = picture_of(pb.Node(node_name="n1", slots=3), in_touch=True)

    def loop(question: HealthAsked | DaemonPictureAsked) -> None:
        if isinstance(question, DaemonPictureAsked):
            question.answer.put(picture)

    daemon, said = SimpleNamespace(ask=loop), list[str]()
    config = agent_config.check(content, "test", "n1")
    page = open_page(config, cast(Any, None), cast(Any, daemon), QueueAccount(), said.append)
    try:
        assert said == [f"the cluster's page is at {page.dashboard.url}"] and "https" in page.dashboard.url
        address = f"https://127.0.0.1:{page.dashboard.address.rpartition(':')[2]}"
        context = client(people.files["ann"].ca_file, people.files["vic"])
        assert 'bagua_node_slots{node="n1"} 3.0' in get(f"{address}/metrics", context)[1]
        assert "cluster.js" in get(f"{address}/", context)[1]
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            get(f"{address}/metrics", client(people.files["ann"].ca_file, None))
    finally:
        page.stop()


def test_the_metrics_of_a_job_are_served_over_tls_where_its_node_has_certificates(
    people: People, tmp_path: Path
) -> None:
    files = astuple(people.files["node-1"])
    command = WorkerCommand(CommandKind.SCRIPT, "train.py", ())
    config = JobConfig("demo", command, metrics_port=0, metrics_host="127.0.0.1", metrics_tls=files)
    said, places = list[str](), list[str]()

    def loop(message: object) -> None:
        if isinstance(message, HealthAsked):
            message.answered.set()

    with contextlib.ExitStack() as opened:
        open_metrics(config, loop, said.append, places.append, opened)
        [place] = places
        assert place.startswith("127.0.0.1:") and said == [f"bagua-launch: metrics at port {place[10:]}"]
        ours = people.files["ann"].ca_file
        assert get(f"https://{place}/healthz", client(ours, people.files["vic"]))[0] == 200
        for nameless in (client(ours, None), client(ours, people.files["stranger"])):
            with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
                get(f"https://{place}/healthz", nameless)
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{place}/healthz", timeout=TIMEOUT_S)

        gone = replace(config, metrics_tls=(files[0], str(tmp_path / "none.pem"), files[2]))
        open_metrics(gone, loop, said.append, places.append, opened)
        assert len(places) == 1 and said[1].startswith("bagua-launch: no metrics are served: ")
