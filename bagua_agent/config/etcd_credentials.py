"""Turns a job's etcd options into the configuration of the store's client.

The only place where the password file is read; the password goes nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint


def store_config(endpoints: Iterable[str], credentials: StoreCredentials) -> StoreConfig:
    """Returns the configuration of the store's client. Raises UserError for an endpoint, a user that can't be sent, or
    a password file that can't be read."""
    return StoreConfig(
        endpoints=tuple(parse_endpoint(endpoint) for endpoint in endpoints),
        ca_cert=credentials.ca_file,
        cert=credentials.cert_file,
        key=credentials.key_file,
        user=_user(credentials.user),
        password=None if credentials.password_file is None else _password_in(credentials.password_file),
    )


def _user(name: str | None) -> str | None:
    try:
        (name or "").encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8
        raise UserError(f"etcd user {name!r} is not UTF-8, as names of etcd's users are") from error
    return name


def _password_in(path: str) -> str:
    try:
        content = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"etcd password file {path!r} can't be read: {error}") from error
    password = content.rstrip("\r\n")
    if not password:
        raise UserError(f"etcd password file {path!r} is empty")
    return password
