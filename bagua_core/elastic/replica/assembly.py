"""Meets the other shards of this worker's replica: before the script's model exists, so inside init_process_group().

The leader of the job decides which workers form a replica (`membership/formation/replicas.py` of the agent). Here a
worker reports that it is there, waits for that record, and connects two groups by the meeting store of shard 0: the
control group (own_replica.py) and torch's default group, in which `fully_shard` and the script communicate; and the
connections by which shards notice each other's end (shard_watch.py).
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from bagua_contract.addresses import parted
from bagua_contract.records import Stage
from bagua_contract.replica import Replica
from bagua_core.communication.communicator import AbortFlag, CollectiveFailed
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.communication.transports.meeting_store import MeetingStore, MeetingStoreError
from bagua_core.elastic.replica import shard_watch, torch_group
from bagua_core.elastic.replica.own_replica import OwnReplica, ReplicaLost


class KnownReplica(Protocol):
    """Holds what the agent has said."""

    @property
    def replica(self) -> Replica | None: ...


class Session(Protocol):
    @property
    def news(self) -> KnownReplica: ...

    def ready(
        self,
        store_address: str,
        fingerprint: Mapping[str, str],
        committed_generation: int = 0,
        stage: Stage = Stage.LOOP,
        gathering: int = 0,
    ) -> None:
        """Reports this worker's stage."""


MEETING_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 20.0
OPERATION_TIMEOUT_S = 86400.0  # a shard may compute as long as it likes; a mate's death ends the wait
SAY_AFTER_S = 10.0
SAY_AGAIN_S = 60.0


def await_record(
    session: Session,
    changed: threading.Condition,
    address: str,
    size: int,
    ended: Callable[[], None],
) -> Replica:
    """Reports that this worker has no replica yet, and waits for one: without limit, as for any other place in the job.

    address: of this worker's meeting store. ended: raises if the job is over or this worker leaves.
    """
    session.ready(address, {}, stage=Stage.ASSEMBLING)
    began_s = said_s = time.monotonic()
    say_after_s = SAY_AFTER_S
    while True:
        ended()
        news = session.news
        if news.replica is not None:
            return news.replica
        if time.monotonic() - said_s >= say_after_s:
            said_s, say_after_s = time.monotonic(), SAY_AGAIN_S
            print(
                f"bagua: waits since {said_s - began_s:.0f} s for {size - 1} more workers without a replica: one needs "
                f"{size} (--replica-size {size})",
                file=sys.stderr,
                flush=True,
            )
        with changed:
            if session.news is news:
                changed.wait(timeout=1.0)


def connect(record: Replica, worker_id: str, bind_host: str) -> OwnReplica:
    """Connects this worker to the other shards of its replica. Blocks, for a bounded time. Raises ReplicaLost if a
    shard can't be reached, ValueError for a record without this worker."""
    shard_rank = record.shard_of(worker_id)
    if shard_rank is None:
        raise ValueError(f"replica {record.replica_id} does not list the worker {worker_id}")
    host, port = parted(record.members[0].store_address)
    prefix = f"{record.nonce}/replica-{record.replica_id}"
    store: MeetingStore | None = None
    links: dict[int, socket.socket] = {}
    try:
        store = MeetingStore(host, port, MEETING_TIMEOUT_S)
        control = build_gloo(
            0,
            shard_rank,
            record.size,
            PrefixStore(f"{prefix}/control", store),
            bind_host,
            OPERATION_TIMEOUT_S,
            AbortFlag(),
            CONNECT_TIMEOUT_S,
        )
        of_watch = PrefixStore(f"{prefix}/watch", store)
        links = shard_watch.connect(of_watch, shard_rank, record.size, bind_host, host, CONNECT_TIMEOUT_S)
        of_torch = torch_group.shared_store(
            PrefixStore(f"{prefix}/torch", store), shard_rank, bind_host, host
        )
        torch_group.make(of_torch, shard_rank, record.size, bind_host)
    except (MeetingStoreError, CollectiveFailed, shard_watch.WatchFailed, RuntimeError, OSError) as error:
        for link in links.values():
            link.close()
        shards = ", ".join(f"{m.worker_id} on {m.node_name}" for m in record.members)
        raise ReplicaLost(
            f"shard {shard_rank} of replica {record.replica_id} could not connect to the others ({shards}): {error}. "
            "The agent starts this worker again"
        ) from error
    finally:
        if store is not None:
            store.close()
    return OwnReplica(record, shard_rank, control, links)
