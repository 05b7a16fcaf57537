from __future__ import annotations

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import Endpoint, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("e1:2379", Endpoint("e1:2379")),
        ("e1", Endpoint("e1:2379")),
        ("10.0.0.1:1", Endpoint("10.0.0.1:1")),
        ("http://e1:80", Endpoint("e1:80", tls=False)),
        ("https://e1.example.org/", Endpoint("e1.example.org:2379", tls=True)),
        ("[fe80::1]:99", Endpoint("[fe80::1]:99")),
        ("[::1]", Endpoint("[::1]:2379")),
        ("unix:/run/e/client:1", Endpoint("unix:/run/e/client:1", tls=False)),
        ("unix:///run/e/client:1", Endpoint("unix:/run/e/client:1", tls=False)),
    ],
)
def test_reads(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


def test_keeps_order_and_drops_repetitions() -> None:
    assert [str(e) for e in parse_endpoints("b:1, a:2,b:1,https://a:2")] == ["b:1", "a:2", "https://a:2"]


@pytest.mark.parametrize(
    "entry",
    ["e1:", "e1:0", "e1:65536", "e1:x", ":2379", "e 1:2", "ftp://e1:1", "unix:relative", "::1:2379", "[::1",
     "[x]:1", "unix:/" + "x" * 107, "http://", "e1:2379/path", "-e:1", "e1:٣"],
)  # fmt: skip
def test_names_the_entry_it_cannot_read(entry: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_endpoints(f"fine:1,{entry}")
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "a,,b", "a,"])
def test_refuses_empty_lists_and_entries(text: str) -> None:
    with pytest.raises(UserError, match="empty"):
        parse_endpoints(text)


def test_tls_follows_the_scheme_and_else_the_certificates() -> None:
    plain, tls = parse_endpoints("e1,https://e1")
    assert not StoreConfig((plain,)).uses_tls(plain)
    assert StoreConfig((plain,), ca_cert="ca.pem").uses_tls(plain)
    assert StoreConfig((tls,)).uses_tls(tls)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cert": "c.pem"}, "c.pem"),
        ({"key": "k.pem"}, "k.pem"),
        ({"user": "ann"}, "ann"),
        ({"password": "x"}, "password"),
        ({"request_timeout_s": 0}, "above 0"),
    ],
)
def test_refuses_half_a_configuration(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        StoreConfig(parse_endpoints("e1"), **settings)  # type: ignore[arg-type]


def test_refuses_certificates_with_a_plain_endpoint() -> None:
    with pytest.raises(UserError, match="http://e1:2379"):
        StoreConfig(parse_endpoints("http://e1"), ca_cert="ca.pem")


def test_never_shows_the_password() -> None:
    assert "secret" not in repr(StoreConfig(parse_endpoints("e1"), user="ann", password="secret"))
