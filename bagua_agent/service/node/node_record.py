"""This daemon's record of its node in etcd: claims the node's name with it, keeps it under the lease, and watches it.

own_name.py decides whether another daemon has the name.
"""

from __future__ import annotations

import threading

from bagua_agent.cluster.cluster_records import write_unit
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.service.node.own_name import check_own, claim, taker
from bagua_agent.service.state_machine import messages as ms
from bagua_contract import cluster_pb2 as pb

LEASES_OF_ANOTHER = 2.0  # a change of etcd's leader gives each lease its whole time again


class NodeRecord:
    """Keeps the record `node`, whose units, troubles and note are those of the newest report. claim_within_s: how long
    to wait for the end of another daemon's lease. stopping: the daemon is asked to stop."""

    def __init__(
        self,
        store: Store,
        leased: LeasedKeys,
        node: pb.Node,
        claim_within_s: float,
        stopping: threading.Event,
    ) -> None:
        self.node = node
        self.key = cluster_keys.node(node.node_name)
        self._store = store
        self._leased = leased
        self._claim_within_s = claim_within_s
        self._stopping = stopping
        self._told = b""

    def changed(self, change: Change) -> None:
        """Takes a change of the record's key. Raises NameTaken if another daemon wrote it."""
        if change.value is None:
            return
        check_own(change.value, change.lease_id, self.node)
        if change.lease_id != self._leased.lease_id:  # an odd record, which is written over
            self.recheck()

    def recheck(self) -> None:
        """Has the record written again where etcd does not have it."""
        self._leased.recheck()

    def report(self, report: ms.Report) -> bool:
        """Writes what is reported, if it is new. Returns False if the daemon was asked to stop before its first record
        was written. Raises NameTaken."""
        node = self.node
        del node.units[:]
        node.units.extend(map(write_unit, report.units))
        del node.troubles[:]
        node.troubles.extend(report.troubles)
        node.note = report.note
        value = node.SerializeToString(deterministic=True)
        if value == self._told:
            return True
        is_first = not self._told
        if is_first and not claim(self._store, self._leased, node, self._claim_within_s, self._stopping):
            return False
        self._told = value
        self._leased.put(self.key, value, lambda found: taker(found.value, found.lease_id, node) is not None)
        return True
