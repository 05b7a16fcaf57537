"""The layout that goes before buffers of a model on many devices."""

from __future__ import annotations

import torch

from bagua_core.communication.reduction import buffer_broadcast


def test_a_layout_has_room_for_every_device_of_a_host() -> None:
    """A host may have 16 GPUs, and a model that is spread over them has buffers on the CPU too."""
    row = buffer_broadcast._layout([[torch.zeros(count)] for count in range(1, 18)])
    assert [size_bytes for is_there, _, size_bytes in row[1:].tolist() if is_there] == [
        4 * count for count in range(1, 18)
    ]
