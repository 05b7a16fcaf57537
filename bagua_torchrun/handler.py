"""Builds torch's handler of a rendezvous over etcd's keys."""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Store
from bagua_torchrun.agents_store import AgentsStore
from bagua_torchrun.outage_credit import OutageCredit
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.settings import OURS, parse
from bagua_torchrun.state_backend import StateBackend

# torch (2.13) shares the store of the first round's rank 0 with later rounds, and writes its address in that round
# only: if rank 0 stays, an agent that joins later waits for it in vain. Without sharing each round has its own address.
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Creates the handler of one torchrun agent.

    Raises UserError for an option that cannot be used, RendezvousConnectionError if no endpoint answers.
    """
    settings = parse(parameters.endpoint, parameters.run_id, parameters.config)
    for name, value in OURS.items():
        parameters.config.setdefault(name, str(value))
    store = Store(settings.store)
    try:
        store.connect(settings.store.request_timeout_s)
    except StoreUnavailable as error:
        store.close()
        raise RendezvousConnectionError(str(error)) from error
    os.environ[NO_SHARED_STORE] = "1"
    keys = LeasedKeys(store, settings.ttl_s)
    backend = StateBackend(keys, settings.state_key, outage_credit(parameters))
    return create_handler(AgentsStore(keys, settings.store_prefix), backend, parameters)


def outage_credit(parameters: RendezvousParameters) -> OutageCredit:
    """Returns the credit for the heartbeats that torch's handler will use."""
    interval_s, attempts = (
        parameters.get_as_int(name, OURS[name]) for name in ("keep_alive_interval", "keep_alive_max_attempt")
    )
    assert interval_s is not None and attempts is not None
    return OutageCredit(interval_s, interval_s * attempts)
