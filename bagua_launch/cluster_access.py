"""Opens the etcd that a cluster command names: its options, its credentials, its connection."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bagua_agent.config.job_config import StoreCredentials
from bagua_launch.cluster_options import FILE_OPTIONS
from bagua_launch.config_file import read_config_file
from bagua_launch.errors import ETCD_MISSING, RequestError
from bagua_launch.input_files import check_credentials
from bagua_launch.job_request import parse_credentials
from bagua_launch.options import Option
from bagua_launch.precedence import merge
from bagua_launch.rendezvous_request import parse_endpoints
from bagua_launch.written_values import Values

if TYPE_CHECKING:
    from bagua_agent.etcd.client import Store

CONNECT_TIMEOUT_S = 5.0


def values_of(options: Sequence[Option], typed: dict[str, Any]) -> Values:
    """Merges the values given to a command: typed, in variables, and in the configuration file."""
    return merge(options, typed, os.environ, read_config_file(os.environ, FILE_OPTIONS))


@contextmanager
def open_store(values: Values) -> Iterator[Store]:
    """Opens a connected store and closes it at the end. Raises RequestError without --etcd, StoreUnavailable if none
    answers."""
    if "etcd" not in values:
        raise RequestError(ETCD_MISSING)
    endpoints = parse_endpoints(values["etcd"])
    credentials = credentials_of(values)
    check_credentials(credentials)

    from bagua_agent.config.etcd_credentials import store_config
    from bagua_agent.etcd.client import Store

    store = Store(store_config(endpoints, credentials))
    try:
        store.connect(CONNECT_TIMEOUT_S)
        yield store
    finally:
        store.close()


def credentials_of(values: Values) -> StoreCredentials:
    """Returns the credentials for etcd that the options name. Raises RequestError."""
    return parse_credentials({**values, "rdzv_endpoint": values["etcd"]} if "etcd" in values else values)


def daemon_credentials(values: Values) -> Any:
    """Returns gRPC's credentials for calls to daemons, from the certificates that etcd is shown. None: without TLS."""
    credentials = credentials_of(values)
    if credentials.ca_file is None or credentials.cert_file is None or credentials.key_file is None:
        return None
    from bagua_agent.security.certificate_files import TlsFiles, utc_now
    from bagua_agent.security.grpc_security import channel_credentials

    return channel_credentials(
        TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file), utc_now()
    )
