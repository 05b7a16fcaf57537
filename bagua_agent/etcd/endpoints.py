"""Parses the list of etcd endpoints that a user writes. Pure.

An entry is `host`, `host:port`, `[v6]:port`, any of these behind http:// or https://, or `unix:/path`. A
plain entry uses TLS if certificates are configured. Errors name the entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bagua_agent.base.errors import UserError
from bagua_contract.addresses import is_loopback, parted

DEFAULT_PORT = 2379
LONGEST_SOCKET_PATH_BYTES = 107  # sun_path less its final zero byte

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_V6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of etcd. target: what gRPC dials. tls: None means "if certificates are configured"."""

    target: str
    tls: bool | None = None

    @property
    def is_unix(self) -> bool:
        return self.target.startswith("unix:")

    @property
    def is_this_host(self) -> bool:
        """Whether the endpoint is on this host, known without a look-up: a Unix socket, localhost or a loopback
        address."""
        return self.is_unix or is_loopback(parted(self.target)[0])

    def __str__(self) -> str:
        scheme = {None: "", True: "https://", False: "" if self.is_unix else "http://"}[self.tls]
        return scheme + self.target


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Returns the endpoints in the order written, without repetitions. Raises UserError naming the entry."""
    entries = [entry.strip() for entry in text.split(",")]
    if entries == [""]:
        raise UserError("the list of etcd endpoints is empty; write for instance etcd-1:2379,etcd-2:2379")
    if "" in entries:
        raise UserError(f"etcd endpoints {text!r} hold an empty entry; remove the spare comma")
    return tuple(dict.fromkeys(parse_endpoint(entry) for entry in entries))


def parse_endpoint(entry: str) -> Endpoint:
    """Returns the endpoint that an entry describes. Raises UserError naming the entry."""
    if entry.startswith("unix:"):
        return _unix(entry)
    tls: bool | None = None
    address = entry
    if "://" in entry:
        scheme, _, address = entry.partition("://")
        if scheme not in ("http", "https"):
            raise _wrong(entry, f"its scheme is {scheme!r}, not http, https or unix")
        tls = scheme == "https"
        address = address.removesuffix("/")
    host, port = _host_and_port(entry, address)
    return Endpoint(f"{host}:{port}", tls)


def _host_and_port(entry: str, address: str) -> tuple[str, int]:
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or not _V6.fullmatch(host) or (rest and not rest.startswith(":")):
            raise _wrong(entry, "an IPv6 address is written [address]:port")
        return f"[{host}]", _port(entry, rest[1:] if rest else None)
    if address.count(":") > 1:
        raise _wrong(entry, "an IPv6 address is written [address]:port")
    host, colon, port = address.partition(":")
    if not _HOST.fullmatch(host):
        raise _wrong(entry, f"{host!r} is not a host name or address")
    return host, _port(entry, port if colon else None)


def _port(entry: str, text: str | None) -> int:
    if text is None:
        return DEFAULT_PORT
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise _wrong(entry, f"port {text!r} is not a number from 1 to 65535")
    return int(text)


def _unix(entry: str) -> Endpoint:
    path = entry.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path.startswith("/"):
        raise _wrong(entry, "the path of a Unix socket is absolute: unix:/run/etcd/client:1")
    if len(path.encode()) > LONGEST_SOCKET_PATH_BYTES:
        raise _wrong(
            entry, f"its path is longer than {LONGEST_SOCKET_PATH_BYTES} bytes; use a shorter directory"
        )
    return Endpoint(f"unix:{path}", tls=False)


def _wrong(entry: str, why: str) -> UserError:
    return UserError(f"etcd endpoint {entry!r} cannot be read: {why}")
