"""Calls another agent's control service, each time once and bounded.

A probe tells whether an agent is alive, certainly gone, or silent: directly, or through a third agent.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc

from bagua_agent.rpc.job_identity import JobIdentity, open_channel
from bagua_contract import control_pb2, control_pb2_grpc

_GONE = {errno.ECONNREFUSED, errno.ECONNRESET}
_UNANSWERED = control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.UNANSWERED)
MOST_PACKED_BYTES = 64 << 20
_VERDICTS = {control_pb2.ProbeReply.ALIVE, control_pb2.ProbeReply.REFUSED, control_pb2.ProbeReply.UNANSWERED}


def probe(identity: JobIdentity, address: str, agent_id: str, timeout_s: float) -> control_pb2.ProbeReply:
    """Asks the agent at `address` whether it is alive. identity: of the job. REFUSED only on proof: the host refused
    the connection, or another agent of the job answered. An answer without proof of the job's identity counts as none.
    Never raises for network errors."""
    deadline_s = time.monotonic() + timeout_s
    endpoint = endpoint_of(address)
    if endpoint is None:
        # It comes from a key that another agent wrote; an invalid address proves nothing.
        return _UNANSWERED
    try:
        # A plain connect first: gRPC hides the difference between refused and silent.
        with socket.create_connection(endpoint, timeout=timeout_s):
            pass
    except OSError as error:
        if error.errno in _GONE:
            return control_pb2.ProbeReply(verdict=control_pb2.ProbeReply.REFUSED)
        return _UNANSWERED
    except ValueError:  # a time that no connection can be given
        return _UNANSWERED
    request = control_pb2.ProbeRequest(job_id=identity.job_id, agent_id=agent_id)
    remaining_s = max(0.01, deadline_s - time.monotonic())
    return _known(_ask(identity, address, lambda agent: agent.Probe(request, timeout=remaining_s)))


def probe_through(
    identity: JobIdentity, helper_address: str, address: str, agent_id: str, timeout_s: float
) -> control_pb2.ProbeReply:
    """Asks the agent at helper_address to probe the one at address. UNANSWERED if the helper is silent."""
    request = control_pb2.ProbeForRequest(
        request=control_pb2.ProbeRequest(job_id=identity.job_id, agent_id=agent_id),
        control_address=address,
        timeout_s=timeout_s,
    )
    return _known(
        _ask(identity, helper_address, lambda agent: agent.ProbeFor(request, timeout=timeout_s + 0.2))
    )


def read_record(identity: JobIdentity, address: str, sha256: bytes, timeout_s: float) -> bytes | None:
    """Returns the packed parts of a large record that another agent keeps; None if it does not have them (yet), does
    not answer in time, or is no agent of the job."""
    if endpoint_of(address) is None:
        return None
    request = control_pb2.ReadRecordRequest(job_id=identity.job_id, sha256=sha256)
    reply: control_pb2.ReadRecordReply | None = _ask(
        identity, address, lambda agent: agent.ReadRecord(request, timeout=timeout_s), MOST_PACKED_BYTES
    )
    return reply.packed or None if reply is not None else None


def endpoint_of(address: str) -> tuple[str, int] | None:
    """Returns host and port, None for anything else. Numbers only, as agents write them: a name would be looked up
    without a time limit."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return host, int(port)


def _ask(
    identity: JobIdentity,
    address: str,
    call: Callable[[control_pb2_grpc.AgentControlStub], Any],
    most_bytes: int | None = None,
) -> Any:
    """Makes a call to an agent and returns the reply; None if there was none. call: bounded."""
    with open_channel(address, identity, most_bytes) as channel:
        try:
            return call(control_pb2_grpc.AgentControlStub(channel))  # type: ignore[no-untyped-call]
        except grpc.RpcError:
            return None


def _known(reply: control_pb2.ProbeReply | None) -> control_pb2.ProbeReply:
    """Returns the reply; UNANSWERED if there is none, or if its verdict is one that no agent of this version gives:
    that proves nothing."""
    return reply if reply is not None and reply.verdict in _VERDICTS else _UNANSWERED
