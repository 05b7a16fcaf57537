"""Replaces heads of large records by whole records before any other part of the agent acts on them.

Asks a keeper first, and the store itself if that fails or if this agent is a keeper. Waits in the mirror's thread, so
that changes after a head are reported after its record; nothing else waits for it. A keeper's answer is accepted only
if it has the digest that the head names.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.large_jobs import record_parts
from bagua_agent.large_jobs.kept_records import KeptRecords
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import Head, StoredRecord
from bagua_agent.large_jobs.stored_record import packed_parts
from bagua_agent.rpc.control_client import read_record
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract.records import Generation

log = logging.getLogger(__name__)

STORE_S = 1.0  # an attempt at the store, and so the longest that the end of this agent waits for one
KEEPER_S = 1.0  # the keeper sees a record when we do, and needs a moment to read it
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class WholeRecords:
    """Replaces the heads of one agent's changes. own_address: of this agent's control service, by which it knows that
    it is a keeper. kept: what that hands on."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        identity: JobIdentity,
        agent_id: str,
        own_address: str,
        kept: KeptRecords,
        limits: Limits,
    ) -> None:
        self._store = store
        self._keys = keys
        self._identity = identity
        self._turn = zlib.crc32(agent_id.encode())
        self._own_address = own_address
        self._limits = limits
        self._stopping = threading.Event()
        self._newest: tuple[int, bytes] = (0, b"")  # mod revision of the head, and the whole record
        self._without_parts = 0  # mod revision of a head whose parts were gone
        self._kept = kept
        self.keepers: tuple[str, ...] = ()  # of the newest record

    def stop(self) -> None:
        """Ends a wait under way."""
        self._stopping.set()

    def stored(self, record: Generation, addresses: Mapping[str, str]) -> StoredRecord:
        """Returns the form in which `record` is written; what this agent has written it need not read."""
        form = record_parts.stored(record, self._keys, self._limits, addresses)
        if form.packed:
            self._kept.keep(form.packed)
        return form

    def whole(self, changes: tuple[Change, ...], within_s: float = math.inf) -> tuple[Change, ...]:
        """Returns `changes` with whole records. One that a newer record has replaced is left out: that one follows.

        Raises StoreUnavailable if a record was not to be had within_s.
        """
        if not any(change.key == self._keys.generation for change in changes):
            return changes
        give_up_at_s = time.monotonic() + within_s
        found = (self._with_record(change, give_up_at_s) for change in changes)
        return tuple(change for change in found if change is not None)

    def whole_state(self, state: Mapping[str, KeyValue]) -> dict[str, KeyValue] | None:
        """Returns `state` with the whole record, or without it if its parts are gone. None while it is still being
        read: a head must not be mistaken for an unreadable value, nor the record for lost, and be overwritten."""
        known = dict(state)
        stands = known.get(self._keys.generation)
        if stands is not None and record_parts.head_of(stands.value) is not None:
            revision, value = self._newest
            if stands.mod_revision == revision:
                known[stands.key] = replace(stands, value=value)
            elif stands.mod_revision == self._without_parts:
                del known[stands.key]
            else:
                return None
        return known

    def _with_record(self, change: Change, give_up_at_s: float) -> Change | None:
        if change.key != self._keys.generation or change.value is None:
            return change
        head = record_parts.head_of(change.value)
        if head is None:
            self.keepers = ()
            return change
        value = self._read(head, give_up_at_s)
        if value is None:
            self._without_parts = change.mod_revision
            return None
        self.keepers = head.keepers
        self._newest = (change.mod_revision, value)
        return replace(change, value=value)

    def _read(self, head: Head, give_up_at_s: float) -> bytes | None:
        """Returns the bytes of the record; None if the parts are gone, or this agent ends. Raises StoreUnavailable at
        the time to give up."""
        pauses = 0
        ask_keepers_until_s = time.monotonic() + KEEPER_S
        keepers = [] if self._own_address in head.keepers else list(head.keepers)
        if keepers:
            first = self._turn % len(keepers)
            keepers = keepers[first:] + keepers[:first]
        attempt = 0
        while not self._stopping.is_set():
            left_s = give_up_at_s - time.monotonic()
            if left_s <= 0:
                raise StoreUnavailable(f"the record of generation {head.number} could not be read")
            packed = self._kept.get(head.packed_sha256)
            remaining_s = ask_keepers_until_s - time.monotonic()
            if packed is None and keepers and remaining_s > 0:
                # the next one when one does not have it; none is asked by all
                packed = read_record(
                    self._identity, keepers[attempt % len(keepers)], head.packed_sha256, remaining_s
                )
                attempt += 1
            elif packed is None:
                try:
                    packed = packed_parts(self._store, self._keys, head, min(STORE_S, left_s))
                except (StoreUnavailable, UserError) as error:  # rights can change while a job runs
                    log.info("reading the record of generation %d: %s", head.number, error)
                else:
                    if packed is None:
                        log.info("the record of generation %d was replaced before it was read", head.number)
                        return None
            value = None if packed is None else record_parts.unpacked(head, packed)
            if value is not None:
                assert packed is not None
                self._kept.keep(packed)
                return value
            pauses += 1
            self._stopping.wait(delay_s(pauses, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
        return None
