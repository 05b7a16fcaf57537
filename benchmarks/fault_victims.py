"""Chooses the host that a fault strikes: the leader's host, as etcd records it, or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Host

H = TypeVar("H")


class NoLeaderError(RuntimeError):
    """A leader's host was to be struck, and no host of the job leads."""


def pick(hosts: Sequence[H], leader: H | None, *, of_leader: bool) -> H:
    """The leader's host, or the last of `hosts` that does not lead. Raises NoLeaderError."""
    if of_leader:
        if leader is None or leader not in hosts:
            raise NoLeaderError("no host of the job leads")
        return leader
    return next(host for host in reversed(hosts) if host is not leader)


def leading_host(cluster: EtcdCluster, job_id: str, hosts: Sequence[Host]) -> Host | None:
    """The host whose agent holds the leader key now."""
    key = JobKeys(job_id).leader
    found = cluster.standing(key).get(key)
    if found is None:
        return None
    address = pb.Leader.FromString(found.value).control_address.rpartition(":")[0]
    return next((host for host in hosts if host.address == address), None)
