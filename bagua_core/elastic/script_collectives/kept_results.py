"""Keeps the results of collectives for workers that come later, and hands them over through the meeting stores.

Each member keeps the results itself and publishes them in its own store, so that any member can answer. Only a result
that all members have in common is kept. Knows nothing of steps or epochs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_contract.addresses import parted
from bagua_core.communication.transports.meeting_frames import LARGEST_FRAME_BYTES
from bagua_core.communication.transports.meeting_store import MeetingStore
from bagua_core.elastic.script_collectives.requests import Allgather, Request, Result
from bagua_core.elastic.state import state_codec

MOST_KEPT_BYTES = 16 << 20  # of all results together; what comes after is not kept
MOST_ANSWERS = 10_000  # with their descriptions, 100 bytes each
ANSWER_WITHIN_S = 2.0
_PART_BYTES = LARGEST_FRAME_BYTES // 2
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one collective of the members. result: None if it can't be given to a later worker; then why says
    why."""

    asked: str
    result: torch.Tensor | None
    why: str = ""


class KeptResults:
    """The results of one sequence of collectives, in the order of the calls."""

    def __init__(self, answers: Sequence[Answer] = ()) -> None:
        self.answers = list(answers)
        self._kept_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no further results are kept."""
        return len(self.answers) >= MOST_ANSWERS

    def add(self, request: Request, root: int | None, result: Result) -> None:
        """Keeps the result of a collective that all members have done."""
        asked = request.asked_of_all_shards(root)
        if self.is_full:
            return
        if not is_answerable(request):
            self.answers.append(Answer(asked, None, "each worker has its own part in it"))
            return
        if self._kept_bytes + result[0].nbytes > MOST_KEPT_BYTES:
            limit = f"results beyond {MOST_KEPT_BYTES >> 20} MiB are not kept"
            self.answers.append(Answer(asked, None, limit))
            return
        self._kept_bytes += result[0].nbytes
        self.answers.append(Answer(asked, result[0].detach().to("cpu", copy=True)))

    def values(self, prefix: str) -> dict[str, bytes]:
        """Returns what a meeting store publishes of the results, by keys that begin with `prefix`."""
        data = _encoded(self.answers)
        parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
        values = {f"{prefix}/part-{i}": part for i, part in enumerate(parts)}
        return {**values, f"{prefix}/parts": str(len(parts)).encode()}


def is_answerable(request: Request) -> bool:
    """Tells whether a later worker can have the members' result. A member with another shard may be the one that
    answers."""
    return request.is_common and not isinstance(request, Allgather) and not request.across_replicas


def fetch(store: MeetingStore, prefix: str) -> KeptResults:
    """Returns the results that the member of `store` published under `prefix`. Waits for them as long as the store
    does. Raises MeetingStoreError, StateCodecError, ValueError."""
    count = int(store.get(f"{prefix}/parts"))
    most = (4 * MOST_KEPT_BYTES) // _PART_BYTES
    if not 0 < count <= most:
        raise ValueError(f"{count} parts of at most {most}")
    return KeptResults(_decoded(b"".join(store.get(f"{prefix}/part-{i}") for i in range(count))))


def store_at(address: str) -> MeetingStore:
    """Connects to the meeting store at `address`. Raises MeetingStoreError, ValueError."""
    return MeetingStore(*parted(address), ANSWER_WITHIN_S)


def _encoded(answers: Sequence[Answer]) -> bytes:
    """Returns the manifest's length, the manifest, the tensors' bytes."""
    manifest, tensors = state_codec.encode([[a.asked, a.result, a.why] for a in answers])
    memory = torch.empty(tensors.size_bytes, dtype=torch.uint8, device="cpu")
    tensors.read(0, memory)
    return _LENGTH.pack(len(manifest)) + manifest + memory.numpy().tobytes()


def _decoded(data: bytes) -> list[Answer]:
    """Returns the answers that `_encoded` wrote. Raises ValueError, StateCodecError."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes")
    (length,) = _LENGTH.unpack_from(data)
    manifest, rest = data[_LENGTH.size :][:length], data[_LENGTH.size + length :]
    memory = (
        torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        if rest
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    rows = state_codec.decode(manifest, memory)
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise ValueError("no list of answers")
    return [Answer(asked, result, why) for asked, result, why in rows]


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    asked, result, why = row
    return (
        isinstance(asked, str)
        and isinstance(why, str)
        and (result is None or isinstance(result, torch.Tensor))
    )
