"""Asks another agent for the parts of a large record that it keeps. One bounded call."""

from __future__ import annotations

import grpc

from bagua_agent.rpc.job_identity import JobIdentity, open_channel
from bagua_agent.rpc.prober import endpoint_of
from bagua_contract import control_pb2, control_pb2_grpc

MOST_PACKED_BYTES = 64 << 20


def read_record(identity: JobIdentity, address: str, sha256: bytes, timeout_s: float) -> bytes | None:
    """The packed parts; None if it does not have them (yet), does not answer in time, or is no agent of the job."""
    if endpoint_of(address) is None:
        return None
    request = control_pb2.ReadRecordRequest(job_id=identity.job_id, sha256=sha256)
    with open_channel(address, identity, MOST_PACKED_BYTES) as channel:
        stub = control_pb2_grpc.AgentControlStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply: control_pb2.ReadRecordReply = stub.ReadRecord(request, timeout=timeout_s)
        except grpc.RpcError:
            return None
    return reply.packed or None
