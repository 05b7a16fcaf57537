"""Which writes must reach the store, however long it is away? Made in a thread of their own, again until taken.

Each is desired state: done twice it does no harm. Knows nothing of what the writes mean; the agent's loop waits
for none, except for its last words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bagua_agent.errors import InfrastructureLost
from bagua_agent.timers import Timers

RETRY_S = 0.5


class DesiredWrites:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="bagua-writer")

    def until_done(self, what: str, write: Callable[[], object]) -> None:
        """Calls `write` until it does not raise InfrastructureLost.

        what: a name; a retry of the same name replaces the one before.
        """

        def attempt() -> None:
            try:
                write()
            except InfrastructureLost:
                self._timers.set_from_thread(
                    f"write {what}", time.monotonic() + RETRY_S, lambda _: self._writer.submit(attempt)
                )

        self._writer.submit(attempt)

    def flush(self, timeout_s: float) -> bool:
        """Whether every write so far was tried once by then; waits at most timeout_s."""
        try:
            self._writer.submit(lambda: None).result(timeout=timeout_s)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        self._writer.shutdown(cancel_futures=True)
