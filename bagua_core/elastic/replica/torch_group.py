"""Makes torch's default process group for a replica, and the mesh over it that `fully_shard` takes.

The group lives and dies with the replica: when one of its workers is lost all others are ended, so it needs no abort.
A job whose replicas are single workers gets a group of one, and only if the script asks for its mesh.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from bagua_contract.addresses import family_of
from bagua_core.communication.local_interface import interface_of
from bagua_core.errors import InfrastructureLost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(days=1)  # of an operation; the death of a mate ends it
CONNECT_TIMEOUT = timedelta(seconds=60)  # of the whole group, and of each request to its store
_PORT = "port"  # of the replica's store, in the meeting store
_INTERFACE = "GLOO_SOCKET_IFNAME"

_is_made = False
_mesh: DeviceMesh | None = None


class GroupNotConnected(InfrastructureLost, RuntimeError):
    """A shard did not connect in time."""


def make(store: Store, shard_rank: int, size: int, bind_host: str) -> None:
    """Makes torch's default process group for the replica. Blocks for CONNECT_TIMEOUT at most. Raises RuntimeError if a
    mate can't be reached, ValueError if the script has made a group."""
    global _is_made
    has_gpu = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    _bind_gloo_to(bind_host)
    _in_time(
        lambda: torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=store,
            rank=shard_rank,
            world_size=size,
            timeout=TIMEOUT,  # not the limit for connecting, which Gloo would keep for messages between two ranks
        )
    )
    _is_made = True


def _in_time(connect: Callable[[], None]) -> None:
    """Calls `connect` in a thread, which is left behind after CONNECT_TIMEOUT: the call can't be given up, and this
    process is going to end. Raises GroupNotConnected, and what `connect` raises."""
    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_context else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own current device
            connect()
        except Exception as error:  # noqa: BLE001 (the waiter raises it, or has given up)
            ends.put(error)
        else:
            ends.put(None)

    threading.Thread(target=run, name="bagua-torch-group", daemon=True).start()
    limit_s = CONNECT_TIMEOUT.total_seconds()
    try:
        error = ends.get(timeout=limit_s)
    except queue.Empty:
        raise GroupNotConnected(f"torch's group did not connect within {limit_s:g} s") from None
    if error is not None:
        raise error


def is_made() -> bool:
    """Tells whether torch's default group is the replica's."""
    return _is_made


def ensure() -> None:
    """Makes a group of one if there is none: this worker is a replica. Raises ValueError as `make` does."""
    if not _is_made:
        make(HashStore(), 0, 1, "127.0.0.1")


@torch.no_grad()
def share(tensors: Sequence[torch.Tensor]) -> None:
    """Writes shard 0's values to `tensors`, in the replica's group. Every shard calls it."""
    for tensor in tensors:
        if tensor.is_meta:
            continue  # it has no values yet
        value = tensor.detach().contiguous()
        if value.numel():
            # Gloo does not know all types
            torch.distributed.broadcast(value.reshape(-1).view(torch.uint8), 0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)


def mesh() -> DeviceMesh:
    """Returns the replica's workers along one dimension, "shard"; see bagua_core.shard_mesh. Makes a group of one if
    there is none."""
    global _mesh
    if _mesh is None:
        from torch.distributed.device_mesh import init_device_mesh  # late: its import takes a while

        ensure()
        on = "cuda" if torch.cuda.is_available() else "cpu"
        _mesh = init_device_mesh(on, (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    return _mesh


def shared_store(meeting: Store, shard_rank: int, bind_host: str, first_host: str) -> TCPStore:
    """Returns torch's own store for the replica's groups, also for those that a script makes later: Gloo asks a store
    for more than a meeting store can do. It is served by shard 0, at its bind_host alone, and ends with its process.

    meeting: where the shards find it. first_host: of shard 0. Raises RuntimeError, MeetingStoreError.
    """
    if shard_rank:
        port = int(meeting.get(_PORT))
        return TCPStore(first_host, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)
    with socket.create_server((bind_host, 0), family=family_of(bind_host), backlog=128) as listening:
        port = listening.getsockname()[1]
        store = TCPStore(
            bind_host,
            port,
            None,
            True,
            CONNECT_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    meeting.set(_PORT, str(port))
    return store


def _bind_gloo_to(host: str) -> None:
    """Makes torch's Gloo listen on the interface of `host`, by its environment variable, unless the variable is set.

    Otherwise Gloo resolves the host's name. The variable stays set, since the script may make further groups."""
    name = None if _INTERFACE in os.environ else interface_of(host)
    if name is not None:
        os.environ[_INTERFACE] = name
