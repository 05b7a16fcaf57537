"""Controls when a thread other than the script's may read the committed state.

The script's thread holds the guard while it changes what a state consists of: a commit, a roll-back, a snapshot, a
copy that is swapped in. An optimizer's step is code of others and may take long, so it is not done under the guard:
`stepping` says that it is under way. Once a reader has taken the worker out of the job (`take_out`), a thread that
wants to hold the guard sees LeaveInterrupt instead: what was saved stays the newest state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from bagua_core.communication.devices.device_order import Handover, handover_of_device
from bagua_core.errors import BaguaError, LeaveInterrupt

_NOTICE_S = 0.1


class StateBusy(BaguaError, TimeoutError):
    """The script's thread did not let go of the state in time."""


class _Held:
    """The context of `StateGuard.held`. One object serves all steps, also nested: a step enters it several times."""

    def __init__(self, guard: StateGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        guard = self._guard
        guard._lock.acquire()
        try:
            if guard._taken_out_by:
                guard.check()
            guard._depth += 1
        except BaseException:
            guard._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        guard = self._guard
        try:
            guard._depth -= 1
            if not guard._depth:
                guard._work = handover_of_device()
        finally:
            guard._lock.release()


class StateGuard:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held = _Held(self)
        self._depth = 0
        self._taken_out_by = 0  # the thread that leaves in the script's place; 0: none does
        self._until_s = 0.0  # monotonic; no one waits for that thread for longer
        self._is_out = False  # it is done
        self._script_knows = False  # the script's thread has met the leave, and needs no signal
        self.stepping = False  # an optimizer is changing parameters
        self.provisional = False  # an exchange has changed weights in the step under way
        # what the script's stream had been given when the guard was let go
        self._work: Handover | None = None

    # -- the script's thread

    def held(self) -> AbstractContextManager[None]:
        """Returns a context that holds the guard, so that no other thread reads the state meanwhile.

        Entering it raises LeaveInterrupt once this worker was taken out.
        """
        return self._held

    def check(self) -> None:
        """Checks that this worker was not taken out. If it was, raises LeaveInterrupt when that is done."""
        with self._lock:
            if not self._taken_out_by or self._taken_out_by == threading.get_ident():
                return
            self.wait_out()
            raise LeaveInterrupt

    def wait_out(self) -> None:
        """Waits until the thread that takes this worker out is done, or has no time left.

        Returns at once if none does.
        """
        with self._changed:
            if self._taken_out_by:
                self._script_knows = True
                self._changed.wait_for(lambda: self._is_out, max(0.0, self._until_s - time.monotonic()))

    # -- the thread that leaves in the script's place

    @contextmanager
    def reading(self, limit_s: float) -> Iterator[Handover | None]:
        """Keeps the script's thread from changing the state meanwhile, but for an optimizer that is `stepping`.

        Yields the device's work that has to be done before the state can be read. Raises StateBusy after limit_s.
        """
        if not self._changed.acquire(timeout=max(0.0, limit_s)):
            raise StateBusy
        try:
            yield self._work
        finally:
            self._changed.release()

    @property
    def is_taken_out(self) -> bool:
        return bool(self._taken_out_by)

    def take_out(self, until_s: float) -> None:
        """Takes this worker out: the script's thread has no part in the job from now on.

        until_s: monotonic time at which a thread that waits for the end of the leave stops waiting.
        """
        self._taken_out_by, self._until_s = threading.get_ident(), until_s

    def taken_out(self) -> bool:
        """Records that the leave is done. Returns whether the script's thread has met it already.

        Does not wait for a thread that holds the state and does not let go of it.
        """
        self._is_out = True
        if self._changed.acquire(timeout=_NOTICE_S):
            self._changed.notify_all()
            self._changed.release()
        return self._script_knows
