"""How are flat buffers averaged beside the steps, while training goes on?

Owns one round at a time: its thread, and the buffers that nothing else touches until it is done. Traffic goes in
pieces, one after the other, so that a step's own small messages never queue behind more than one piece. Knows no
parameters and no steps. Invariant: a round that was given up never writes into memory that is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, ReduceOp

# On a link of 100 Mbit/s a quarter of a MiB is 21 ms of traffic: what a step's own message may have to wait for. Larger
# pieces gain nothing worth having on quick links, for nobody waits for a round.
PIECE_BYTES = 256 * 1024


class Round:
    """The mean of `flats` over all members of `communicator`, in place, in a thread of its own. Every member must begin
    its own sooner or later, in the same order. Read the buffers once `done` is true and `error` None."""

    def __init__(self, communicator: Communicator, flats: Sequence[torch.Tensor]) -> None:
        self.error: CollectiveFailed | None = None
        self._communicator = communicator
        self._flats = list(flats)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="bagua-average", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Whether it came to its end within limit_s."""
        return self._ended.wait(limit_s)

    def _run(self) -> None:
        try:
            for flat in self._flats:
                for piece in torch.split(flat, max(1, PIECE_BYTES // flat.element_size())):
                    self._communicator.allreduce(piece, ReduceOp.AVG).wait()
        except CollectiveFailed as error:
            self.error = error
        finally:
            self._ended.set()
