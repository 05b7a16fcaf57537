"""The waits for operations that a GlooCommunicator has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted
from bagua_core.communication.pending import Completion, WakeablePending
from bagua_core.communication.transports.gloo_errors import collective_failed

# Waiting in Gloo itself saves a change of threads. An abort has to wait for it, so it must stay short.
BRIEF_S = 0.005
_BRIEF = timedelta(seconds=BRIEF_S)


class BriefWaits:
    """Predicts whether a wait of a communicator ends within BRIEF_S: it does if the one before it did.

    A wait in Gloo that does not end costs an exception, 0.14 ms of a processor. Used by the threads that wait; a race
    between two costs one wrong guess.
    """

    def __init__(self) -> None:
        self.is_likely = True

    def ended(self, waited_s: float) -> None:
        self.is_likely = waited_s < BRIEF_S


class _GlooPending(WakeablePending):
    """An operation of a Gloo group. retire: called once something in the communicator's group may run without end."""

    def __init__(self, abort_flag: AbortFlag, retire: Callable[[], None], what: str) -> None:
        super().__init__(abort_flag)
        self._retire = retire
        self._what = what

    def _abandoned(self) -> None:
        self._retire()

    def _raise(self, error: Exception) -> NoReturn:
        self._retire()
        if self._abort_flag.is_set():
            raise CollectiveAborted(self._abort_flag.reason or "aborted") from error
        if not isinstance(error, RuntimeError):
            raise error
        raise collective_failed(self._what, error) from error


class GlooCollective(_GlooPending):
    """A collective of Gloo. Gloo's own work object keeps the tensor alive while Gloo may touch it, also after an
    abort."""

    def __init__(
        self,
        abort_flag: AbortFlag,
        retire: Callable[[], None],
        what: str,
        work: dist.Work,
        tensor: torch.Tensor,
        finish: Callable[[], None] | None,
        brief_waits: BriefWaits,
    ) -> None:
        super().__init__(abort_flag, retire, what)
        self._brief_waits = brief_waits
        self._began_s: float | None = None  # the wait for it
        self._work = work
        self._tensor = tensor
        self._finish = finish
        self._collect_lock = threading.Lock()

    def is_done(self) -> bool:
        return self._work.is_completed()

    def _wait_briefly(self) -> bool:
        self._began_s = time.monotonic()
        if self._abort_flag.is_set() or not self._brief_waits.is_likely:
            return False
        try:
            return self._work.wait(_BRIEF)
        except RuntimeError:  # the time is over, or the operation failed: then _collect raises it
            return self._work.is_completed()

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        self._work.get_future().add_done_callback(wake)

    def _collect(self) -> None:
        try:
            # done, or its future is and the work follows within the same call in Gloo's thread
            self._work.wait()
        except RuntimeError as error:
            self._raise(error)
        if self._began_s is not None:
            self._brief_waits.ended(time.monotonic() - self._began_s)
            self._began_s = None
        if self._finish is not None:
            with self._collect_lock:
                if self._finish is not None:
                    with torch.no_grad():
                        self._finish()
                    self._finish = None


class GlooThreaded(_GlooPending):
    """An operation that waits in a thread of its own, for send and receive have no future in Gloo and only progress in
    `wait`.

    The thread ends with the operation, at the latest at the group's timeout; it keeps the buffers alive.
    """

    def __init__(
        self,
        abort_flag: AbortFlag,
        retire: Callable[[], None],
        what: str,
        run: Callable[[], object],
        tensor: torch.Tensor | None,
    ) -> None:
        super().__init__(abort_flag, retire, what)
        self._operation: Callable[[], object] | None = run
        self._tensor = tensor
        self._completion = Completion()
        threading.Thread(target=self._run, name=f"gloo-{what}", daemon=True).start()

    def _run(self) -> None:
        error: Exception | None = None
        operation, self._operation = self._operation, None
        assert operation is not None
        try:
            operation()
        except Exception as raised:  # noqa: BLE001 (the waiter raises it; else it would wait for ever)
            error = raised
        del operation  # and with it what it holds of the group, before a waiter goes on
        self._completion.end(error)

    def is_done(self) -> bool:
        return self._completion.is_over

    def _call_when_done(self, wake: Callable[[object], None]) -> None:
        self._completion.call_when_over(wake)

    def _collect(self) -> None:
        if self._completion.error is not None:
            self._raise(self._completion.error)
