"""A copy of the state whose sender is broken: the receiver says so; it neither hangs nor takes all memory."""

from __future__ import annotations

import zlib

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.elastic.heal.heal import TAG, HealMismatch, receive_state
from bagua_core.elastic.state.state_codec import StateCodecError, encode
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks

NO_MANIFEST = b"\xff" * 10


def receive_after(header: list[int], *more: torch.Tensor) -> type[Exception] | None:
    """What the receiver raises when rank 0 sends these."""

    def act(communicator: Communicator) -> type[Exception] | None:
        if communicator.global_rank == 0:
            for tensor in (torch.tensor(header, dtype=torch.int64), *more):
                communicator.send(tensor, 1, TAG).wait()
            return None
        try:
            receive_state(communicator, (0,))
        except Exception as error:  # noqa: BLE001 (its kind is the result)
            return type(error)
        return None

    found: type[Exception] | None = run_ranks(build_in_process(2), act)[1]
    return found


@pytest.mark.parametrize(
    "header", [[-1, 0, 0], [1 << 62, 0, 0], [1 << 50, 0, 0]], ids=["negative", "overflowing", "a petabyte"]
)
def test_a_header_that_announces_what_cannot_be(header: list[int]) -> None:
    kind = receive_after(header)
    assert kind is not None and issubclass(kind, CollectiveFailed)


@pytest.mark.parametrize("total_bytes", [-64, 0, 63, 128, 1 << 50])
def test_a_header_that_announces_another_state_than_the_manifest(total_bytes: int) -> None:
    manifest, tensors = encode({"weights": torch.ones(3)})
    assert tensors.size_bytes == 64
    text = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
    assert receive_after([len(manifest), total_bytes, zlib.crc32(manifest)], text) is HealMismatch


def test_a_manifest_that_arrives_changed() -> None:
    kind = receive_after([10, 64, 1], torch.frombuffer(bytearray(NO_MANIFEST), dtype=torch.uint8))
    assert kind is not None and issubclass(kind, CollectiveFailed | StateCodecError)
