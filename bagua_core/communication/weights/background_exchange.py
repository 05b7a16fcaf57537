"""Runs exchanges beside the steps, in threads of their own, one after the other on each lane.

Owns the threads and the order. Knows no parameters and no steps. Invariants: on a lane the exchanges run in the order
in which they were created, which must be the same on all members; after one that failed none runs any more; each ends
exactly once, whatever it raises.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.devices.device_order import Handover
from bagua_core.communication.pending import Completion, WakeablePending

_newest: weakref.WeakKeyDictionary[Communicator, Completion] = weakref.WeakKeyDictionary()


class BackgroundExchange(WakeablePending):
    """An exchange that calls act(lane), in a thread, once the exchange before it on `lane` has ended.

    tensors: what `act` reads or writes; it comes after what the calling thread's streams have been given, and its own
    work on a device has ended when this is done. act: waits for its own collectives; raises CollectiveFailed. Whatever
    it raises is raised by `wait`. It releases its waits when the lane is aborted.
    """

    def __init__(
        self, lane: Communicator, tensors: Sequence[torch.Tensor], act: Callable[[Communicator], None]
    ) -> None:
        super().__init__(lane.abort_flag)
        self._lane = lane
        self._act = act
        self._handover = Handover(tensors)
        self._completion = Completion()
        before = _newest.get(lane)
        _newest[lane] = self._completion
        if before is None:
            self._start(None)
        else:
            before.call_when_over(lambda _: self._start(before.error))

    def _start(self, error: Exception | None) -> None:
        if error is not None:
            self._completion.end(copy.copy(error))
            return
        threading.Thread(target=self._run, name="bagua-exchange", daemon=True).start()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with torch.no_grad(), self._handover.taken_over(self._abort_flag.check):
                self._act(self._lane)
        except Exception as raised:  # noqa: BLE001 (the wait for the exchange raises it)
            error = raised
        self._completion.end(error)

    def is_done(self) -> bool:
        return self._completion.is_over

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        self._completion.call_when_over(wake)

    def _collect(self) -> None:
        if self._completion.error is not None:
            raise self._completion.error
