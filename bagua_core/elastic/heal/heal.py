"""Copies the job's state to a worker that is behind, between members of one generation.

The state travels as a manifest and one run of bytes, striped over all holders, to where received_state.py puts it; its
digest is checked; only then is it handed out. No pickle. Owns the wire form, the threads and how long a peer may be
silent; heal_plan.py decides which member heals from which, copying.py when the copy is swapped in.

SILENCE_S limits every wait for a peer but that for the first message between two ranks. A holder begins when its script
comes to its next step, and serves receivers one after another; a receiver takes the stripes of all holders before it
comes to the next copy. How long that takes depends on the others, so these waits have no limit here. They end by an
abort: a peer that dies ends the generation, and the agents notice one that hangs, since no bytes arrive (bagua_agent,
hang.py).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_core import tracing
from bagua_core.communication import traffic
from bagua_core.communication.communicator import STATE_TAG, CollectiveFailed, Communicator, Pending
from bagua_core.communication.devices.device_order import Handover
from bagua_core.elastic.heal import pinned_chunks
from bagua_core.elastic.heal.received_state import ReceivedState, Staging
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.flat_tensors import byte_ranges

CHUNK_BYTES = 4 << 20
TAG = STATE_TAG  # one transfer at a time between two ranks of one communicator
# A peer that neither dies nor sends: long, for it may be held up as a whole machine can be, but not for ever.
SILENCE_S = 600.0
LARGEST_MANIFEST_BYTES = 1 << 30  # names, numbers and small values; tensors travel beside it


class HealMismatch(CollectiveFailed):
    """The received state differs from the one that was sent."""


def send_state(
    communicator: Communicator, state: Any, holders: Sequence[int], receivers: Sequence[int]
) -> None:
    """Sends this holder's stripe of `state` to every receiver. Blocks; raises CollectiveFailed."""
    manifest, tensors = state_codec.encode(state)
    total_bytes = tensors.size_bytes
    layout = state_codec.layout_of(manifest)
    own = list(holders).index(communicator.global_rank)
    begin, end = byte_ranges(total_bytes, len(holders), own)
    for receiver in receivers:
        if own == 0:
            header = torch.tensor(
                [len(manifest), total_bytes, zlib.crc32(manifest)], dtype=torch.int64, device="cpu"
            )
            _send(communicator, header, receiver, is_first=True)
            _send(communicator, torch.frombuffer(bytearray(manifest), dtype=torch.uint8), receiver)
        announced = torch.tensor([layout], dtype=torch.int64, device="cpu")
        _send(communicator, announced, receiver, is_first=own > 0)
        checksum = 0
        for at in range(begin, end, CHUNK_BYTES):
            chunk = pinned_chunks.read(tensors, at, min(at + CHUNK_BYTES, end))
            checksum = zlib.crc32(chunk.numpy().data, checksum)
            _send(communicator, chunk, receiver)
        _send(communicator, torch.tensor([checksum], dtype=torch.int64, device="cpu"), receiver)


def receive_state(
    communicator: Communicator,
    holders: Sequence[int],
    received: ReceivedState | None = None,
) -> Any:
    """Returns the state that `holders` send, written to `received` (default: Staging).

    Blocks; raises CollectiveFailed, HealMismatch.
    """
    received = Staging() if received is None else received
    header = torch.zeros(3, dtype=torch.int64, device="cpu")
    communicator.receive(header, holders[0], TAG).wait()
    began_s = time.monotonic()  # after the wait for the holders' scripts and for other receivers
    manifest_bytes, total_bytes, checksum = (int(v) for v in header)
    if not 0 < manifest_bytes <= LARGEST_MANIFEST_BYTES:
        raise HealMismatch(f"a manifest of {manifest_bytes} bytes was announced; nothing of it is taken")
    manifest = torch.empty(manifest_bytes, dtype=torch.uint8, device="cpu")
    _receive(communicator, manifest, holders[0])
    if zlib.crc32(manifest.numpy().data) != checksum:
        raise HealMismatch("the manifest of the state arrived with another checksum; it is not used")
    text = manifest.numpy().tobytes()
    expected_bytes = state_codec.announced_bytes(text)
    if total_bytes != expected_bytes:
        raise HealMismatch(f"{total_bytes} bytes were announced for a state of {expected_bytes}")
    received.open(text, total_bytes)
    layout = state_codec.layout_of(text)

    failures: list[Exception] = []
    handover = Handover()

    def stripe(part: int) -> None:
        try:
            with handover.taken_over():
                _receive_stripe(communicator, received, total_bytes, holders, part, layout, failures)
        except Exception as error:  # noqa: BLE001 (handed to the caller below)
            failures.append(error)

    others = [
        threading.Thread(target=stripe, args=(part,), name="bagua-heal-stripe", daemon=True)
        for part in range(1, len(holders))
    ]
    for thread in others:
        thread.start()
    stripe(0)
    for thread in others:
        thread.join()  # it ends: each of its waits does, by an abort or by SILENCE_S once a stripe has failed
    if failures:
        raise failures[0]
    traffic.copied.received(total_bytes, time.monotonic() - began_s)
    return received.state()


def _receive_stripe(
    communicator: Communicator,
    received: ReceivedState,
    total_bytes: int,
    holders: Sequence[int],
    part: int,
    layout: int,
    failures: Sequence[Exception],
) -> None:
    """Receives one holder's stripe. failures: of other stripes; their copy is of no use then."""
    begin, end = byte_ranges(total_bytes, len(holders), part)
    announced = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(communicator, announced, holders[part], is_limited=lambda: part == 0 or bool(failures))
    checksum = 0
    for at in range(begin, end, CHUNK_BYTES):
        chunk = received.chunk(at, min(at + CHUNK_BYTES, end))
        _receive(communicator, chunk, holders[part])
        checksum = zlib.crc32(chunk.numpy().data, checksum)
        received.put(at, chunk)
        traffic.state_arrived.add(chunk.numel())
    expected = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(communicator, expected, holders[part])
    if int(announced) != layout:
        raise HealMismatch(
            f"global rank {holders[part]} holds a state of another layout than global rank {holders[0]}; its stripe "
            "is not used"
        )
    if int(expected) != checksum:
        raise HealMismatch(f"stripe {part} of the state arrived with another checksum; it is not used")


def _send(communicator: Communicator, tensor: torch.Tensor, receiver: int, *, is_first: bool = False) -> None:
    silence = f"global rank {receiver} took nothing of the state"
    _wait(communicator.send(tensor, receiver, TAG), silence, lambda: not is_first)


def _receive(
    communicator: Communicator,
    tensor: torch.Tensor,
    holder: int,
    *,
    is_limited: Callable[[], bool] = lambda: True,
) -> None:
    silence = f"global rank {holder} sent nothing of the state"
    _wait(communicator.receive(tensor, holder, TAG), silence, is_limited)


def _wait(pending: Pending, silence: str, is_limited: Callable[[], bool]) -> None:
    limit_s = SILENCE_S

    def stalled(waited_s: float) -> None:
        if waited_s >= limit_s and is_limited():
            raise CollectiveFailed(f"{silence} for {limit_s:g} s")

    pending.wait(stalled, limit_s)


class Transfer:
    """A copy that runs beside the step. `result` once done; `error` if it failed."""

    def __init__(self, run: Callable[[], Any], changed: threading.Condition) -> None:
        self._run = run
        self._changed = changed
        self._handover = Handover()  # the script's stream may still write the live state
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._work, name="bagua-heal", daemon=True).start()

    def _work(self) -> None:
        try:
            with self._handover.taken_over(), tracing.span("copy of the state"):
                self.result = self._run()
        except Exception as error:  # noqa: BLE001 (the waiter for the transfer raises it)
            self.error = error
        except BaseException as error:  # noqa: BLE001 (as above)
            # An exit of this thread is none of the script, whose exit code it would become.
            self.error = RuntimeError(f"the copy of the state was ended by {error!r}")
            self.error.__cause__ = error
        with self._changed:
            self.done = True
            self._changed.notify_all()
