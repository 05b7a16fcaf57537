"""Keeps the state of a rendezvous as one key of etcd, written by comparison with the revision that was read.

The token of a state is the key's mod revision, so two agents that read the same state cannot both write their own.
"""

from __future__ import annotations

from contextlib import suppress

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown
from bagua_agent.etcd.client import KeyValue, mod_revision_is
from bagua_torchrun.outage_credit import OutageCredit
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.torchrun_plugin import BACKEND


class StateBackend(RendezvousBackend):
    """Keeps the state of torch's DynamicRendezvousHandler in etcd."""

    def __init__(self, keys: LeasedKeys, key: str, credit: OutageCredit) -> None:
        """Takes the key of the state. credit: added to the heartbeats of every state that is returned."""
        self._keys = keys
        self._key = key
        self._credit = credit

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """Returns the state and its token; None if there is none. Raises RendezvousConnectionError."""
        try:
            with self._credit.asking():
                read = self._read()
        except InfrastructureLost as error:
            raise _lost(error) from error
        return None if read is None else (self._credit.add_to(read.value), read.mod_revision)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Writes `state` if the key is as `token` says (None: absent).

        Returns what the key holds afterwards, its token, and whether that is `state`; None if the key is gone.
        Raises RendezvousConnectionError.
        """
        revision = token if isinstance(token, int) else 0
        try:
            with self._credit.asking():
                # What is read below decides: the state holds the writer's own heartbeat, so it is unlike any other.
                with suppress(OutcomeUnknown):
                    self._keys.put_if(mod_revision_is(self._key, revision), self._key, state)
                read = self._read()
        except InfrastructureLost as error:
            raise _lost(error) from error
        if read is None:
            return None
        return self._credit.add_to(read.value), read.mod_revision, read.value == state

    def _read(self) -> KeyValue | None:
        return self._keys.store.get(self._key)


def _lost(error: InfrastructureLost) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"etcd is away: {error}")
