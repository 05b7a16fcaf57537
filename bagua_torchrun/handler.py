"""Builds the handler of a rendezvous over etcd's keys."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Store
from bagua_torchrun.agents_store import AgentsStore
from bagua_torchrun.outage_credit import OutageCredit
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.settings import OURS, Settings, parse
from bagua_torchrun.state_backend import StateBackend
from bagua_torchrun.watched_handler import WatchedHandler

# torch (2.13) shares the store of the first round's rank 0 with later rounds, and writes its address in that round
# only: if rank 0 stays, an agent that joins later waits for it in vain. Without sharing each round has its own address.
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Creates the handler of one torchrun agent.

    Raises UserError for an option that cannot be used, RendezvousConnectionError if no endpoint answers.
    """
    settings = parse(parameters.endpoint, parameters.run_id, parameters.config)
    store = Store(settings.store)
    try:
        store.connect(settings.store.request_timeout_s)
    except StoreUnavailable as error:
        store.close()
        raise RendezvousConnectionError(str(error)) from error
    os.environ[NO_SHARED_STORE] = "1"
    return handler_on(store, settings, parameters)


def handler_on(store: Store, settings: Settings, parameters: RendezvousParameters) -> WatchedHandler:
    """Creates the handler on a connected client. Raises ValueError for a setting of torch that can't be used."""
    interval_s, attempts = (
        parameters.get_as_int(name, OURS[name]) for name in ("keep_alive_interval", "keep_alive_max_attempt")
    )
    assert interval_s is not None and attempts is not None
    keys = LeasedKeys(store, settings.ttl_s)
    credit = OutageCredit(interval_s, interval_s * attempts)
    handler: WatchedHandler = WatchedHandler.from_backend(
        parameters.run_id,
        AgentsStore(keys, settings.store_prefix),
        StateBackend(keys, settings.state_key, credit),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(
            **{name: _timeout(parameters, name) for name in ("join", "last_call", "close", "heartbeat")}
        ),
        interval_s,
        attempts,
    )
    return handler


def _timeout(parameters: RendezvousParameters, name: str) -> timedelta | None:
    """Returns a timeout of torch's settings; None for torch's default."""
    key = f"{name}_timeout"
    seconds = parameters.get_as_int(key, OURS.get(key))
    return None if seconds is None else timedelta(seconds=seconds)
