"""Answers a script that asks for ranks or collectives before its loop.

The job's first workers gather (`membership/formation/gathering.py` of the agent): their ranks are real, and their
collectives run among all of them. The result of each is kept. A worker that comes while the job trains takes no part in
them any more: a member hands it the results, and the same calls of its script are answered from these. Before its first
step boundary it has the rank after the last one, in a world of one more, so it is never rank 0.

Runs in the script's thread. Knows nothing of steps. From the first step boundary on nothing here is used any more.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_contract.addresses import parted
from bagua_contract.records import Generation
from bagua_core.communication.transports.meeting_frames import LARGEST_FRAME_BYTES
from bagua_core.communication.transports.meeting_store import MeetingStore, MeetingStoreError
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.script_collectives.requests import Allgather, Request, Result
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_codec import StateCodecError
from bagua_core.elastic.waiting.operations import MismatchedCollective
from bagua_core.errors import LateWorkerError

MOST_KEPT_BYTES = 16 << 20  # of all results together; what comes after is not kept
MOST_ANSWERS = 10_000  # with their descriptions, 100 bytes each
ANSWER_WITHIN_S = 2.0
MEMBERS_ASKED = 4  # in one attempt; each may be on a host that does not answer
_PART_BYTES = LARGEST_FRAME_BYTES // 2
_LENGTH = struct.Struct("!I")
_RECIPE = (
    "compute it from what every worker has, ask for it inside the loop, or let rank 0 share it with "
    "broadcast_object(), whose results are kept for workers that come later"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one collective of the first workers. result: None if it can't be given to a late worker; then why
    says why."""

    asked: str
    result: torch.Tensor | None
    why: str = ""


class BeforeLoop:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._answers: list[Answer] = []
        self._kept_bytes = 0
        self._next = 0  # of a late worker: the answer to its next collective
        self._late_place: tuple[int, int] | None = None
        self._asked = False
        self._loop_began = False

    @property
    def is_late(self) -> bool:
        """Whether this worker came while the job trains, and is not at its first step boundary yet."""
        return self._late_place is not None and not self._loop_began

    def join(self) -> None:
        """Joins the job, so that this worker has ranks from now on. Does nothing from the second call on, and once the
        loop has begun. SystemExit or LeaveInterrupt when this worker is to end instead."""
        if self._asked or self._loop_began:
            return
        self._asked = True
        if self._member.gather(self._trains):
            self._late_place, self._answers = None, []

    def place(self) -> tuple[int, int] | None:
        """Returns (rank, world size) of a worker that comes later; None for all others."""
        return self._late_place if self.is_late else None

    def boundary(self) -> None:
        """Publishes the results at the first step boundary: they are complete, and later workers can have them."""
        if not self._loop_began:
            self._loop_began = True
            self._publish()

    # -- one of the first workers

    def completed(self, request: Request, root: int | None, result: Result) -> None:
        """Keeps the result of a collective that all first workers have done."""
        asked = request.asked_of_all_shards(root)
        if len(self._answers) >= MOST_ANSWERS:
            return
        # a late worker may be answered by a worker with another shard
        if not request.is_common or isinstance(request, Allgather) or request.across_replicas:
            self._answers.append(Answer(asked, None, "each worker has its own part in it"))
            return
        if self._kept_bytes + result[0].nbytes > MOST_KEPT_BYTES:
            limit = f"results beyond {MOST_KEPT_BYTES >> 20} MiB are not kept"
            self._answers.append(Answer(asked, None, limit))
            return
        self._kept_bytes += result[0].nbytes
        self._answers.append(Answer(asked, result[0].detach().to("cpu", copy=True)))

    # -- one that comes later

    def answer(self, request: Request) -> Result:
        """Returns what the first workers got. Raises MismatchedCollective, LateWorkerError."""
        asked = request.asked_of_all_shards(request.root)
        if self._next >= MOST_ANSWERS:
            raise LateWorkerError(
                f"this worker came while the job trains, and no more than {MOST_ANSWERS} results of collectives before "
                f"the loop are kept, so it has none of {asked}. Instead {_RECIPE}"
            )
        known = self._answers[self._next] if self._next < len(self._answers) else None
        if known is None or known.asked != asked:
            did = f"{known.asked} there" if known is not None else "nothing more"
            raise MismatchedCollective(
                f"this worker came while the job trains and asks for {asked} before its first step, where the job's "
                f"first workers asked for {did}. Every worker must call the same collectives in the same order"
            )
        self._next += 1
        if known.result is None:
            raise LateWorkerError(
                f"this worker came while the job trains, so it has no part in {asked} before the loop: {known.why}. "
                f"Instead {_RECIPE}"
            )
        return [known.result.clone()]

    def refuse(self, what: str) -> LateWorkerError:
        """Returns the error for `what`, something that a late worker can't do."""
        return LateWorkerError(
            f"{what}: this worker came while the job trains and is before its first step, so it has no peers. "
            f"Instead {_RECIPE}"
        )

    # -- from the first to the later ones

    def _publish(self) -> None:
        nonce = self._member.session.news.nonce
        data = _encoded(self._answers)
        parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
        values = {_key(nonce, f"part-{i}"): part for i, part in enumerate(parts)}
        self._member.rendezvous.publish({**values, _key(nonce, "parts"): str(len(parts)).encode()})

    def _trains(self, record: Generation) -> bool:
        """Tells whether a member of `record` is there, or one that waits if all have stepped aside; it gives the
        results."""
        addresses = [m.store_address for m in record.members] or list(record.answers_at)
        for address in random.sample(addresses, min(MEMBERS_ASKED, len(addresses))):
            try:
                store = _store_at(address)
            except (MeetingStoreError, ValueError):
                continue
            try:
                count = int(store.get(_key(record.nonce, "parts")))
                most = (4 * MOST_KEPT_BYTES) // _PART_BYTES
                if not 0 < count <= most:
                    raise MeetingStoreError(f"{count} parts of at most {most}")
                data = b"".join(store.get(_key(record.nonce, f"part-{i}")) for i in range(count))
                self._answers = _decoded(data)
            except (MeetingStoreError, StateCodecError, ValueError):
                continue
            finally:
                store.close()
            shard_rank, size = (0, 1) if self._member.replica is None else self._member.replica.place
            self._late_place = (len(addresses) + shard_rank, len(addresses) + size)
            return True
        return False


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


def _store_at(address: str) -> MeetingStore:
    return MeetingStore(*parted(address), ANSWER_WITHIN_S)


def _key(nonce: str, what: str) -> str:
    return f"{nonce}/before-loop/{what}"
