"""Keeps the state of a rendezvous as one key of etcd, written by comparison with the revision that was read.

The token of a state is the key's mod revision, so two agents that read the same state cannot both write their own.
A state that etcd has lost is written again by the agents that know it.

The key holds PROTOCOL before torch's state, so agents of other versions of this package are refused, and cannot close
the run: a version without the header finds a state that it can't read.
"""

from __future__ import annotations

import pickle
from contextlib import suppress

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown
from bagua_agent.etcd.client import KeyValue, mod_revision_is
from bagua_torchrun.outage_credit import OutageCredit
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.torchrun_plugin import BACKEND

# Raised with every change of what the agents of a run write for each other.
PROTOCOL = 1
_NAME = b"bagua-torchrun "
HEADER = _NAME + b"%d\n" % PROTOCOL


class StateBackend(RendezvousBackend):
    """Keeps the state of torch's DynamicRendezvousHandler in etcd."""

    def __init__(self, keys: LeasedKeys, key: str, credit: OutageCredit) -> None:
        """Takes the key of the state. credit: added to the heartbeats of every state that is returned."""
        self._keys = keys
        self._key = key
        self._credit = credit
        self._last: bytes | None = None  # what the key held when this agent last read it

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """Returns the state and its token; None if there has been none.

        Raises RendezvousConnectionError, and RendezvousStateError for one of another version of this package.
        """
        try:
            with self._credit.asking():
                read = self._read()
        except InfrastructureLost as error:
            raise _lost(error) from error
        return None if read is None else (self._credit.add_to(_state_in(read)), read.mod_revision)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Writes `state` if the key is as `token` says (None: absent).

        Returns what the key holds afterwards, its token, and whether that is `state`; None if it holds nothing.
        Raises as get_state() does.
        """
        revision = token if isinstance(token, int) else 0
        try:
            with self._credit.asking():
                # What is read below decides: the state holds the writer's own heartbeat, so it is unlike any other.
                with suppress(OutcomeUnknown):
                    self._keys.put_if(mod_revision_is(self._key, revision), self._key, HEADER + state)
                read = self._read()
        except InfrastructureLost as error:
            raise _lost(error) from error
        if read is None:
            return None
        written = _state_in(read)
        return self._credit.add_to(written), read.mod_revision, written == state

    def _read(self) -> KeyValue | None:
        """Returns what the key holds. An absent one gets the state that this agent has seen, unless the run was closed:
        without it a new agent would begin a second training beside the one that runs."""
        read = self._keys.store.get(self._key)
        if read is None and self._last is not None and not _is_closed(self._last):
            with suppress(OutcomeUnknown):
                self._keys.put_if(mod_revision_is(self._key, 0), self._key, self._last)
            read = self._keys.store.get(self._key)  # another agent may have been first
        if read is not None:
            self._last = read.value
        return read


def _state_in(read: KeyValue) -> bytes:
    """Returns torch's state. Raises RendezvousStateError if it has another header."""
    if read.value.startswith(HEADER):
        return read.value[len(HEADER) :]
    line, newline, _ = read.value[:40].partition(b"\n")
    number = line[len(_NAME) :].decode(errors="replace")
    theirs = f"protocol {number}" if line.startswith(_NAME) and newline else "no protocol number"
    raise RendezvousStateError(
        f"the run's state in etcd key {read.key!r} has {theirs}, and this version of Bagua has {PROTOCOL}; install the "
        "same version on all nodes of the run, or give it another --rdzv-id"
    )


def _is_closed(state: bytes) -> bool:
    """Tells whether a run has ended, or its state can't be read."""
    try:
        return bool(pickle.loads(state.removeprefix(HEADER)).closed)  # as torch does
    except pickle.PickleError:
        return True


def _lost(error: InfrastructureLost) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"etcd is away: {error}")
