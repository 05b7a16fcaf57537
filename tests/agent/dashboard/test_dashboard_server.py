"""The dashboard's server: where it listens, which requests it refuses, and that silent clients delay no other one."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from bagua_agent.base.small_http import Answer
from bagua_agent.dashboard.listening import Listening
from bagua_agent.dashboard.server import Dashboard
from tests.lab.wait import eventually

TIMEOUT_S = 20


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    served = Dashboard(
        Listening.parse("0"), lambda path: Answer(200, b"alive\n") if path == "/healthz" else None
    )
    served.start()
    yield served
    served.stop()


def get(dashboard: Dashboard, path: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://{dashboard.address}{path}", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_pages_and_what_the_agent_answers(dashboard: Dashboard) -> None:
    assert dashboard.address.startswith("127.0.0.1:")
    assert b"<title>Bagua" in get(dashboard, "/")[1]
    assert get(dashboard, "/static/app.js")[0] == 200
    assert get(dashboard, "/healthz") == (200, b"alive\n")
    assert "has not joined" in json.loads(get(dashboard, "/api/page")[1])["problem"]
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/",
        "/api/log/a/0/out/0",
        "/nothing",
    ):
        assert get(dashboard, path)[0] == 404, path


def test_a_name_of_another_site_is_refused(dashboard: Dashboard) -> None:
    assert get(dashboard, "/api/page", Host="evil.example")[0] == 403
    assert get(dashboard, "/api/page", Host="localhost:80")[0] == 200
    assert get(dashboard, "/api/page", Host="[::1]:80")[0] == 200


def test_names_of_headers_have_no_case(dashboard: Dashboard) -> None:
    """Clients such as Node's send them in lower case."""
    host, port = dashboard.address.split(":")
    for name, path, status in (
        ("host: localhost", "/api/page", 200),
        ("HOST: evil.example", "/api/page", 403),
        ("host: localhost\r\nx-bagua-page: 1", "/api/stacks/a/0", 404),
    ):
        with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\n{name}\r\n\r\n".encode())
            assert client.makefile("rb").readline().split()[1] == str(status).encode(), name


def test_stacks_are_for_the_page_alone(dashboard: Dashboard) -> None:
    assert get(dashboard, "/api/stacks/a/0")[0] == 403
    assert get(dashboard, "/api/stacks/a/0", X_Bagua_Page="1")[0] == 404  # it shows no job yet
    assert get(dashboard, "/api/collectives/a/0")[0] == 403


def test_connections_that_say_nothing_hold_up_no_request(dashboard: Dashboard) -> None:
    host, port = dashboard.address.split(":")
    silent = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(8)]
    try:
        assert get(dashboard, "/healthz")[0] == 200
    finally:
        for connection in silent:
            connection.close()


def test_a_port_that_is_taken() -> None:
    first = Dashboard(Listening("127.0.0.1", 0, or_any_port=False))
    port = int(first.address.rpartition(":")[2])
    second = Dashboard(Listening("127.0.0.1", port, or_any_port=True))
    third = Dashboard(Listening("127.0.0.1", port, or_any_port=False))
    assert second.address not in ("", first.address) and third.address == ""
    for one in (first, second, third):
        one.stop()


def test_a_port_that_is_free_later_is_opened_then(caplog: pytest.LogCaptureFixture) -> None:
    first = Dashboard(Listening("127.0.0.1", 0, or_any_port=False))
    later = Dashboard(Listening("127.0.0.1", int(first.address.rpartition(":")[2]), or_any_port=False))
    never = Dashboard(Listening("127.0.0.1", int(first.address.rpartition(":")[2]), or_any_port=False))
    try:
        later.start()
        assert later.address == "" and "no dashboard at port" in caplog.text
        taken = first.address
        first.stop()
        eventually(lambda: later.address == taken, 60, "the page is served at the port that was taken")
        assert get(later, "/")[0] == 200 and "dashboard is answered at port" in caplog.text
        never.start()
    finally:
        for one in (later, never):
            one.stop()
    assert never.address == "", "one that is stopped before ends its attempts"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("", "127.0.0.1", 7465), ("80", "127.0.0.1", 80), ("[::]:1", "::", 1), ("h1:2", "h1", 2)],
)
def test_where_it_listens(text: str, host: str, port: int) -> None:
    found = Listening.parse(text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["h1", ":80", "80000", "h1:-1", "h1:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="neither a port nor HOST:PORT"):
        Listening.parse(text)
