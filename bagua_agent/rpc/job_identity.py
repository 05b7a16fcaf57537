"""Proves that an agent belongs to the job: agents hold the job's key pair and use it in mutual TLS.

The first agent makes the pair and writes it with the job's spec in one transaction, under a prefix of etcd that
viewers have no right to; every agent that joins reads it there. So it is as secret as etcd is: a client that may write
the job's keys could act as one of its agents anyway. All agents share one pair, since agents of a job trust each other;
the certificate is its own authority, names no host and never expires, so trust depends on neither addresses nor clocks.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

import grpc

from bagua_agent.base.errors import UserError
from bagua_agent.rpc import key_pair
from bagua_contract import grpc_channel

_END_OF_CERTIFICATE = b"-----END CERTIFICATE-----\n"
_MS_FOR_A_HANDSHAKE = 5000  # of any client
_MOST_CONNECTIONS = 16384  # one takes 25 KiB


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job's certificate and key in PEM."""

    job_id: str
    certificate: bytes
    key: bytes

    def encode(self) -> bytes:
        return self.certificate + self.key

    @staticmethod
    def decode(job_id: str, value: bytes) -> JobIdentity:
        """Reads an identity from its value in etcd. Raises ValueError for what is no identity."""
        certificate, end, key = value.partition(_END_OF_CERTIFICATE)
        if not (
            certificate.startswith(b"-----BEGIN CERTIFICATE-----") and end and b"PRIVATE KEY-----" in key
        ):
            raise ValueError("it is no certificate with its key in PEM")
        return JobIdentity(job_id, certificate + end, key)

    def __repr__(self) -> str:
        return f"JobIdentity({self.job_id!r})"  # the key is for no log


def listen(server: grpc.Server, address: str, identity: JobIdentity) -> int:
    """Makes `server` accept only agents of the job, and returns the port. Raises UserError."""
    credentials = grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        root_certificates=identity.certificate,
        require_client_auth=True,
    )
    try:
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        # gRPC tells which to its log alone, and that is off
        raise UserError(
            f"can't listen at {address} for the other agents of job {identity.job_id!r}: it is no address of this "
            f"host, or what stands as the job's key pair is none; check --local-addr, or choose another --rdzv-id"
        ) from error


def server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a taken port must fail, not share
        *limits_of_connections(),
    ]


def limits_of_connections() -> list[tuple[str, int]]:
    """Returns options of grpc.server: what clients may take that have not proved their identity."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        ("grpc.server_handshake_timeout_ms", _MS_FOR_A_HANDSHAKE),
        # The other half of the descriptors is this process's own.
        ("grpc.max_allowed_incoming_connections", min(descriptors // 2, _MOST_CONNECTIONS)),
    ]


def open_channel(address: str, identity: JobIdentity, most_received_bytes: int | None = None) -> grpc.Channel:
    """Opens a channel to another agent of the job; calls on it fail as UNAVAILABLE if the server is not one."""
    options: list[tuple[str, str | int]] = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", key_pair.NAME),
    ]
    if most_received_bytes is not None:
        options.append(("grpc.max_receive_message_length", most_received_bytes))
    credentials = grpc.ssl_channel_credentials(identity.certificate, identity.key, identity.certificate)
    return grpc_channel.open_channel(address, credentials, options)
