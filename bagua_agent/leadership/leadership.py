"""Joins what a leader, or a candidate, does in threads of its own: election, fenced writes, probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.large_jobs.record_parts import StoredRecord
from bagua_agent.leadership.election import Election
from bagua_agent.leadership.fenced_writes import FencedWrites
from bagua_agent.leadership.leader_writes import LeaderWrites
from bagua_agent.leadership.probes import Probes
from bagua_agent.leadership.reports import Report
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract.records import Generation


class Leadership:
    """What an agent may do as the leader, or to become it. Each operation ends in one call of `report`."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        leased: LeasedKeys,
        identity: JobIdentity,
        probe_window_s: float,
        report: Callable[[Report], None],
        stored: Callable[[Generation, Mapping[str, str]], StoredRecord],
    ) -> None:
        """Prepares the operations. stored(record, addresses of agents): how a record is written."""
        self._thread = LeaderWrites(store, report)
        self.election = Election(self._thread, keys, leased)
        self.writes = FencedWrites(self._thread, store, keys, stored)
        self.probes = Probes(identity, probe_window_s, report)

    def stop(self) -> None:
        """Ends the threads."""
        self._thread.stop()
        self.probes.stop()
