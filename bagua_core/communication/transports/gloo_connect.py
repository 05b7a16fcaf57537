"""Connects a Gloo group in bounded time.

Gloo's constructor asks the store for one member after the other and connects to each. It can't be interrupted, and
tries a member that does not answer five times, each for the whole time limit. It therefore runs in a thread, which is
left behind when the generation is given up, at once, or when it has not come to another member for three limits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed

# Time limits of a member, after which it is given up. The member may itself wait for one that has not said yet where
# it listens, and the rendezvous lets it wait for three such limits.
LIMITS = 3.0
_LOOK_S = 0.05


class WatchedStore(Store):
    """A wrapper of `store` that knows the time since Gloo last asked it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._asking = 0
        self._since_s = time.monotonic()
        self._lock = threading.Lock()

    def idle_s(self) -> float:
        """Returns the seconds since Gloo last asked; 0 while the store is asked, whose own time-out bounds that."""
        with self._lock:
            return 0.0 if self._asking else time.monotonic() - self._since_s

    def _ask(self, call: Callable[[], Any]) -> Any:
        with self._lock:
            self._asking += 1
        try:
            return call()
        finally:
            with self._lock:
                self._asking -= 1
                self._since_s = time.monotonic()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(lambda: self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout))

    def has_extended_api(self) -> bool:
        return False


class Connecting:
    """A call of Gloo's constructor in a thread. retire(group): for a group that is complete after it was given up."""

    def __init__(self, build: Callable[[], Any], retire: Callable[[Any], None]) -> None:
        self._build = build
        self._retire = retire
        self._changed = threading.Condition()
        self._group: Any = None
        self._error: Exception | None = None
        self._is_done = self._is_given_up = False
        threading.Thread(target=self._run, name="gloo-connect", daemon=True).start()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._group = self._build()
        except Exception as raised:  # noqa: BLE001 (the waiter raises it, or has given up)
            error = raised
        with self._changed:
            self._error, self._is_done = error, True
            if self._is_given_up and self._group is not None:
                self._retire(self._group)
                self._group = None
            self._changed.notify_all()

    def group(self, store: WatchedStore, limit_s: float, abort_flag: AbortFlag) -> Any:
        """Waits for the group and returns it. limit_s: for each member. Raises CollectiveFailed, CollectiveAborted, and
        what Gloo raises."""

        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        abort_flag.add_waiter(wake)
        try:
            with self._changed:
                while not self._is_done:
                    self._is_given_up = True
                    if abort_flag.is_set():
                        raise CollectiveAborted(abort_flag.reason or "aborted")
                    if store.idle_s() > LIMITS * limit_s:
                        raise CollectiveFailed(f"a member did not connect within {LIMITS * limit_s:g} s")
                    self._is_given_up = False
                    self._changed.wait(_LOOK_S)
                if self._error is not None:
                    raise self._error
                group, self._group = self._group, None
                return group
        finally:
            abort_flag.remove_waiter(wake)
