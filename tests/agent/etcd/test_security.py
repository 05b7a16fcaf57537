"""TLS, client certificates, user and password."""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd import login
from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.failures import CallFailed
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.login import Login
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_agent.etcd.server.embedded import EmbeddedEtcd, ServerTls
from bagua_agent.etcd.stubs import AuthStub
from tests.agent.etcd.conftest import Recorder, Relay, Server
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

MakeStore = Callable[..., Store]


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(certificates: Path, make_store: MakeStore, mutual: bool) -> None:
    def path(name: str) -> str:
        return str(certificates / name)

    tls = ServerTls(path("server.pem"), path("server.key"), path("ca.pem"), require_client_cert=mutual)
    etcd = EmbeddedEtcd.start(f"127.0.0.1:{free_port()}", tls=tls)
    try:
        assert etcd.endpoint.startswith("https://")
        mine = {"cert": path("client.pem"), "key": path("client.key")} if mutual else {}
        store = make_store(etcd.endpoint, ca_cert=path("ca.pem"), **mine)
        store.put("/m/a", b"1")
        changes: Recorder[tuple[Change, ...]] = Recorder()
        mirror = PrefixMirror(store, "/m/", changes)
        mirror.start()
        store.put("/m/a", b"2")
        changes.wait_for(lambda c: len(c) == 2)
        mirror.stop()

        bare = etcd.endpoint.removeprefix("https://")
        assert make_store(bare, ca_cert=path("ca.pem"), **mine).get("/m/a") is not None

        with pytest.raises(StoreUnavailable, match=r"(?i)handshake|certificate|ssl"):
            make_store(etcd.endpoint, ca_cert=path("stranger.pem"), **mine).connect(0.5)
        with pytest.raises(StoreUnavailable):
            make_store(bare).connect(0.5)  # plain
        if mutual:
            with pytest.raises(StoreUnavailable):
                make_store(etcd.endpoint, ca_cert=path("ca.pem")).connect(0.5)
    finally:
        etcd.stop()


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path, make_store: MakeStore) -> None:
    with pytest.raises(UserError, match=r"nowhere\.pem"):
        make_store("https://127.0.0.1:1", ca_cert=str(tmp_path / "nowhere.pem")).connect(0.2)
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(UserError, match=r"empty\.pem.*PEM"):
        make_store("https://127.0.0.1:1", ca_cert=str(tmp_path / "empty.pem")).connect(0.2)


@pytest.fixture
def guarded(tcp_server: Server) -> Iterator[Server]:
    """An etcd with users root (all rights) and ann (only /ann/)."""

    def ask(path: str, **body: object) -> None:
        request = urllib.request.Request(f"{tcp_server.endpoint}/v3/auth/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    ask("user/add", name="root", password="root-secret")
    ask("user/grant", user="root", role="root")
    ask("role/add", name="ann")
    permission = {"permType": "READWRITE", "key": encoded("/ann/"), "range_end": encoded("/ann0")}
    ask("role/grant", name="ann", perm=permission)
    ask("user/add", name="ann", password="ann-secret")
    ask("user/grant", user="ann", role="ann")
    ask("enable")
    yield tcp_server


def test_user_and_password(guarded: Server, make_store: MakeStore) -> None:
    patient_s = 60.0  # a busy machine takes more than the usual 5 s to start etcd again
    store = make_store(guarded.endpoint, user="ann", password="ann-secret", request_timeout_s=patient_s)
    store.connect(patient_s)  # alive, although ann may not read what connect asks for
    store.put("/ann/a", b"1")
    assert store.transact([absent("/ann/b")], [Put("/ann/b", b"")]).succeeded
    with pytest.raises(UserError, match=r"(?s)denies.*ann.*grant-permission"):
        store.put("/bob/a", b"1")
    changes: Recorder[tuple[Change, ...]] = Recorder()
    mirror = PrefixMirror(store, "/ann/", changes)
    mirror.start()
    keys = LeasedKeys(store, 2)
    keys.put("/ann/leased", b"")
    assert keys.flush(patient_s)
    changes.wait_for(lambda c: "/ann/leased" in mirror.state())

    guarded.kill()  # which forgets its tokens
    guarded.restart()
    store.put("/ann/after", b"")
    keys.put("/ann/leased", b"2")
    assert keys.flush(patient_s)
    changes.wait_for(lambda c: {"/ann/after", "/ann/leased"} <= mirror.state().keys())
    changes.wait_for(lambda c: mirror.state()["/ann/leased"].value == b"2")
    keys.close()
    mirror.stop()


def log_in_together(number: int, endpoint: str, make_store: MakeStore) -> set[str]:
    """What those say that have no answer within a try of half a second, until all are in."""
    said: set[str] = set()
    given_up = threading.Event()

    def connect() -> bool:
        store = make_store(endpoint, user="ann", password="ann-secret")
        while not given_up.is_set():
            try:
                store.connect(0.5)
            except StoreUnavailable as error:
                said.add(str(error))
            else:
                return True
        return False

    with ThreadPoolExecutor(number) as pool:
        agents = [pool.submit(connect) for _ in range(number)]
        try:
            eventually(
                lambda: all(agent.done() for agent in agents),
                15.0,
                lambda: f"{sum(agent.done() for agent in agents)} of {number} in; said: {said}",
            )
        finally:
            given_up.set()
    assert all(agent.result() for agent in agents)
    return said


def test_many_that_log_in_at_once_all_get_in(guarded: Server, make_store: MakeStore) -> None:
    """Each log-in costs etcd up to a tenth of a second of a processor, and they share one. Their number is doubled
    until they take longer together than a try: a fast processor serves a few within one."""
    one_processor = {min(os.sched_getaffinity(0))}
    for thread in os.listdir(f"/proc/{guarded.pid}/task"):
        os.sched_setaffinity(int(thread), one_processor)
    for number in (12, 24, 48, 96, 192):
        said = log_in_together(number, guarded.endpoint, make_store)
        of_log_ins = [line for line in said if "the log-in of user 'ann' has no answer after 0.5 s" in line]
        if of_log_ins:
            break
    assert of_log_ins and not [line for line in of_log_ins if "Check that etcd runs" in line], said


class CountedAuthStub(AuthStub):  # type: ignore[misc]
    """Counts log-ins."""

    count = 0

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        CountedAuthStub.count += 1


def test_one_log_in_serves_all_connections_of_a_store(
    guarded: Server,
    make_store: MakeStore,
    make_relay: Callable[[str], Relay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(login, "AuthStub", CountedAuthStub)
    monkeypatch.setattr(CountedAuthStub, "count", 0)
    first, second = make_relay(guarded.endpoint), make_relay(guarded.endpoint)
    patient_s = 60.0
    store = make_store(
        first.endpoint, second.endpoint, user="ann", password="ann-secret", request_timeout_s=patient_s
    )
    store.connect(patient_s)
    changes: Recorder[tuple[Change, ...]] = Recorder()
    mirror = PrefixMirror(store, "/ann/", changes)
    mirror.start(patient_s)
    first.freeze()
    store.put("/ann/a", b"1")
    changes.wait_for(lambda c: "/ann/a" in mirror.state())
    mirror.stop()
    assert second.accepted >= 1 and CountedAuthStub.count == 1


class Timeout(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


def test_log_ins_without_an_answer_are_sent_again_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[float] = []

    class SilentAuthStub:
        def __init__(self, channel: grpc.Channel) -> None:
            pass

        def Authenticate(self, request: object, timeout: float) -> None:
            sent.append(time.monotonic())
            raise Timeout

    monkeypatch.setattr(login, "AuthStub", SilentAuthStub)
    monkeypatch.setattr(login, "_FIRST_PAUSE_S", 0.05)
    endpoint = parse_endpoint("127.0.0.1:1")
    one = Login("ann", "ann-secret", lambda endpoint: grpc.insecure_channel(endpoint.target))
    said = set()
    while len(sent) < 5:
        with pytest.raises(CallFailed) as raised:
            one.metadata(endpoint, 0.02, lambda: False)
        said.add(raised.value.failure.detail)
    pauses_s = [after - before for before, after in itertools.pairwise(sent)]
    assert all(pause_s >= 0.025 * 2**number for number, pause_s in enumerate(pauses_s)), pauses_s
    assert "the log-in of user 'ann' had no answer within 10 s and is sent again soon" in said


def test_a_token_that_is_refused_is_replaced(guarded: Server, make_store: MakeStore) -> None:
    store = make_store(guarded.endpoint, user="ann", password="ann-secret")
    store.put("/ann/a", b"")
    store._failover._login._metadata = (("token", "expired.1"),)
    assert store.transact([absent("/ann/b")], [Put("/ann/b", b"")]).succeeded


def test_a_wrong_password_and_no_password_are_said(guarded: Server, make_store: MakeStore) -> None:
    with pytest.raises(UserError, match="'ann'") as caught:
        make_store(guarded.endpoint, user="ann", password="guess").connect(5)
    assert "guess" not in str(caught.value)
    with pytest.raises(UserError, match="log-in"):
        make_store(guarded.endpoint).get("/ann/a")


def test_a_password_that_etcd_does_not_ask_for_does_no_harm(
    tcp_server: Server, make_store: MakeStore
) -> None:
    assert make_store(tcp_server.endpoint, user="ann", password="x").get("/a") is None
