"""Keeps a node's name for one daemon: two of one name, as on hosts made from one image, would run the same jobs.

The daemon that writes the node's record first has the name for as long as its lease lives. The record tells its host
and address, so a daemon that starts again knows that of its own last run, and takes it over at once.
"""

from __future__ import annotations

import threading
import time

from bagua_agent.base.errors import BaguaError, UserError
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_contract import cluster_pb2 as pb
from bagua_contract.records import read_message

TRY_AGAIN_S = 0.2


class NameTaken(UserError):
    """The error that another daemon has this node's name."""


def taker(value: bytes, lease_id: int, own: pb.Node) -> pb.Node | None:
    """Returns the record of another daemon that has the node's key; None if none has it. Pure.

    value, lease_id: of the key in etcd. own: this daemon's record. A daemon keeps the key on a lease; a record without
    one is passed over as any odd record.
    """
    found = read_message(pb.Node, value) if lease_id else None
    is_own = found is None or (found.boot_id, found.address) == (own.boot_id, own.address)
    return None if is_own else found


def check_own(value: bytes, lease_id: int, own: pb.Node) -> None:
    """Checks that no other daemon has the node's key. Raises NameTaken if one has it. Pure. Arguments as of `taker`."""
    if (found := taker(value, lease_id, own)) is not None:
        raise NameTaken(
            f"another daemon, at {found.address}, has the node name {own.node_name!r}, and both would run its jobs; "
            f"set another node.name in agent.toml here, at {own.address}, or there"
        )


def claim(store: Store, leased: LeasedKeys, own: pb.Node, within_s: float, stopping: threading.Event) -> bool:
    """Writes this daemon's first record. Returns False if it was asked to stop before. Returns True also where etcd
    does not take the record now, for `leased` writes it later.

    within_s: how long to wait for the end of another daemon's lease. Raises NameTaken.
    """
    key, value = cluster_keys.node(own.node_name), own.SerializeToString(deterministic=True)
    deadline_s = time.monotonic() + within_s
    while not stopping.is_set():
        try:
            if leased.put_if_absent(key, value) is not None:
                return True
            seen = store.get(key)
        except BaguaError:
            return True
        try:
            if seen is not None:
                check_own(seen.value, seen.lease_id, own)
                return True
        except NameTaken:
            if time.monotonic() >= deadline_s:
                raise
        stopping.wait(TRY_AGAIN_S)
    return False
