"""Averages flat buffers beside the steps, while training goes on.

Owns one round at a time: its thread, and the buffers that nothing else touches until it is done. Traffic goes in
pieces, one after the other, so that a step's own small messages never queue behind more than one piece. Knows no
parameters and no steps. Invariants: a round that was given up never writes into memory that is used again; a round
that is done is done on the device too, so any stream may read the buffers.

Buffers of a GPU travel through the host's memory, also where NCCL is in use. A round begins at another moment on each
rank, so its operations have no place in the order of the others. NCCL needs one order on all ranks for the operations
of all communicators of a GPU, and may hang without (docs/gpu.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bagua_core.communication.communicator import Communicator, ReduceOp
from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import Handover

# On a link of 100 Mbit/s a quarter of a MiB is 21 ms of traffic: what a step's own message may have to wait for. Larger
# pieces gain nothing on quick links: no step waits for a round.
PIECE_BYTES = 256 * 1024


class Round:
    """An average of `flats` over all members of `communicator`, in place, in a thread of its own.

    Every member must begin its own sooner or later, in the same order. Create it where `flats` were filled: the round
    comes after what the calling thread's stream has been given. Read the buffers once `done` is true and `error` None.
    weight: of this member's values, by which `flats` are multiplied already; the mean is the sum of all members'
    products over the sum of their weights. None: all members count alike, and all of them give None.
    """

    def __init__(
        self, communicator: Communicator, flats: Sequence[torch.Tensor], weight: float | None = None
    ) -> None:
        self.error: Exception | None = None
        self._weight = weight
        self._communicator = communicator
        self._flats = list(flats)
        self._handover = Handover(self._flats)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="bagua-average", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Waits for the end and returns whether it came within limit_s."""
        return self._ended.wait(limit_s)

    def _run(self) -> None:
        try:
            with self._handover.taken_over(self._communicator.abort_flag.check):
                weights = self._sum_of_weights()
                for flat in self._flats:
                    self._average(flat, weights)
        except Exception as error:  # noqa: BLE001 (the mean is not there, whatever it was; see BackgroundMean.take_in)
            self.error = error
        finally:
            self._ended.set()

    def _sum_of_weights(self) -> float | None:
        if self._weight is None:
            return None
        weights = torch.tensor([self._weight], dtype=torch.float64, device="cpu")
        self._communicator.allreduce(weights, ReduceOp.SUM).wait()
        return float(weights)

    def _average(self, flat: torch.Tensor, weights: float | None) -> None:
        order = device_order.order_of([flat])
        host = flat
        if order is not device_order.HOST:
            host = order.copy_to_host(flat)
            order.now().wait(self._communicator.abort_flag.check)
        for piece in torch.split(host, max(1, PIECE_BYTES // host.element_size())):
            if weights is None:
                self._communicator.allreduce(piece, ReduceOp.AVG).wait()
            else:
                self._communicator.allreduce(piece, ReduceOp.SUM).wait()
                piece.div_(weights)
        if host is not flat:
            order.copy_from_host(host, flat)
