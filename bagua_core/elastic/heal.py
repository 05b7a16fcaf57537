"""How does a worker that is behind get the job's state? Copies between members of one generation.

The state travels as a manifest and one run of bytes, striped over all holders, into staging; its digest is
checked; only then is it handed out. No pickle. Owns the wire form and the threads; who heals from whom is
decided in heal_plan.py, when the copy is swapped in by the engine.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.elastic import state_codec

CHUNK_BYTES = 4 << 20
TAG = 7001  # one transfer at a time between two ranks of one communicator
PROTECTIVE_JOIN_S = 600.0


class HealMismatch(CollectiveFailed):
    """What arrived is not what was sent."""


def send_state(
    communicator: Communicator, state: Any, holders: Sequence[int], receivers: Sequence[int]
) -> None:
    """Send this holder's stripe of `state` to every receiver. Blocks; raises CollectiveFailed."""
    manifest, tensors = state_codec.encode(state)
    total_bytes = state_codec.flat_size_bytes(tensors)
    own = list(holders).index(communicator.global_rank)
    begin, end = state_codec.byte_ranges(total_bytes, len(holders), own)
    for receiver in receivers:
        if own == 0:
            header = torch.tensor([len(manifest), total_bytes, zlib.crc32(manifest)], dtype=torch.int64)
            communicator.send(header, receiver, TAG).wait()
            communicator.send(torch.frombuffer(bytearray(manifest), dtype=torch.uint8), receiver, TAG).wait()
        checksum = 0
        for at in range(begin, end, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, end - at), dtype=torch.uint8)
            state_codec.read_bytes(tensors, at, chunk)
            checksum = zlib.crc32(chunk.numpy().data, checksum)
            communicator.send(chunk, receiver, TAG).wait()
        communicator.send(torch.tensor([checksum], dtype=torch.int64), receiver, TAG).wait()


def receive_state(communicator: Communicator, holders: Sequence[int]) -> Any:
    """The state that `holders` send. Blocks; raises CollectiveFailed, HealMismatch."""
    header = torch.zeros(3, dtype=torch.int64)
    communicator.receive(header, holders[0], TAG).wait()
    manifest_bytes, total_bytes, checksum = (int(v) for v in header)
    manifest = torch.empty(manifest_bytes, dtype=torch.uint8)
    communicator.receive(manifest, holders[0], TAG).wait()
    if zlib.crc32(manifest.numpy().data) != checksum:
        raise HealMismatch("the manifest of the state arrived with another checksum; it is not used")
    staging = torch.empty(total_bytes, dtype=torch.uint8)

    failures: list[Exception] = []

    def stripe(part: int) -> None:
        try:
            _receive_stripe(communicator, staging, holders, part)
        except Exception as error:  # noqa: BLE001 (handed to the caller below)
            failures.append(error)

    others = [
        threading.Thread(target=stripe, args=(part,), name="bagua-heal-stripe", daemon=True)
        for part in range(1, len(holders))
    ]
    for thread in others:
        thread.start()
    stripe(0)
    deadline_s = time.monotonic() + PROTECTIVE_JOIN_S
    for thread in others:
        thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        raise CollectiveFailed(f"a stripe of the state did not arrive within {PROTECTIVE_JOIN_S:g} s")
    if failures:
        raise failures[0]
    return state_codec.decode(manifest.numpy().tobytes(), staging, copy=False)


def _receive_stripe(
    communicator: Communicator, staging: torch.Tensor, holders: Sequence[int], part: int
) -> None:
    begin, end = state_codec.byte_ranges(staging.numel(), len(holders), part)
    checksum = 0
    for at in range(begin, end, CHUNK_BYTES):
        chunk = staging[at : min(at + CHUNK_BYTES, end)]
        communicator.receive(chunk, holders[part], TAG).wait()
        checksum = zlib.crc32(chunk.numpy().data, checksum)
    expected = torch.zeros(1, dtype=torch.int64)
    communicator.receive(expected, holders[part], TAG).wait()
    if int(expected) != checksum:
        raise HealMismatch(f"stripe {part} of the state arrived with another checksum; it is not used")


class Transfer:
    """A copy that runs beside the step. `result` once done; `error` if it failed."""

    def __init__(self, run: Callable[[], Any], changed: threading.Condition) -> None:
        self._run = run
        self._changed = changed
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._work, name="bagua-heal", daemon=True).start()

    def _work(self) -> None:
        try:
            self.result = self._run()
        except Exception as error:  # noqa: BLE001 (whoever waits for the transfer raises it)
            self.error = error
        with self._changed:
            self.done = True
            self._changed.notify_all()
