"""How do neighbours swap buffers? Everything is sent and received at once, so no rank waits for another to go first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua_core.communication.communicator import Communicator, Pending

TAG = 7101  # and one more for each further buffer; messages of one tag between two ranks keep their order


def swap(
    communicator: Communicator,
    outgoing: Sequence[torch.Tensor],
    incoming: Mapping[int, Sequence[torch.Tensor]],
) -> list[Pending]:
    """Send `outgoing` to each rank in `incoming`, and receive what it sends: as many buffers, of the same shapes."""
    begun: list[Pending] = []
    for peer, theirs in incoming.items():
        begun += [communicator.receive(buffer, peer, TAG + i) for i, buffer in enumerate(theirs)]
    for peer in incoming:
        begun += [communicator.send(buffer, peer, TAG + i) for i, buffer in enumerate(outgoing)]
    return begun
