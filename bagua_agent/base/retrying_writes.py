"""Makes writes that must reach the store, in a thread of their own, again and again until the store takes them.

Each write is desired state, so it is idempotent. Does not know what the writes mean. The agent's loop waits only for
the final ones. Each attempt ends in exactly one event (background.py): a failed one, whatever it raised, sets the timer
of the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bagua_agent.base import backoff
from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.timers import Timers

log = logging.getLogger(__name__)

RETRY_S = 0.5
LONGEST_RETRY_S = 30.0


def retry_after_s(error: BaseException, failed: int) -> float:
    """Returns how long to wait after an attempt that failed with `error`, the failed-th in a row; pure.

    An outage is over without notice, so it is tried evenly. A refusal or a bug hardly passes: it is tried ever more
    rarely, but without end, since the record is needed as soon as it can be written.
    """
    if isinstance(error, InfrastructureLost):
        return RETRY_S
    return backoff.delay_s(failed, RETRY_S, LONGEST_RETRY_S)


class DesiredWrites:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._writer = Background("bagua-writer")

    def until_done(self, what: str, write: Callable[[], object]) -> None:
        """Calls `write` until it raises nothing.

        what: a name; a retry of the same name replaces the one before.
        """
        self._attempt(what, write, failed=0)

    def _attempt(self, what: str, write: Callable[[], object], failed: int) -> None:
        def ended(end: OperationEnd[object]) -> None:
            if not isinstance(end, Failed):
                return
            again_s = retry_after_s(end.error, failed + 1)
            if not isinstance(end.error, InfrastructureLost):  # an outage is reported by the store's watcher
                log.warning("writing %s failed: %s; trying again in %g s", what, end.reason, again_s)
            self._timers.set_from_thread(
                f"write {what}",
                time.monotonic() + again_s,
                lambda _: self._attempt(what, write, failed + 1),
            )

        self._writer.run(f"writing {what}", write, ended)

    def flush(self, timeout_s: float) -> bool:
        """Waits at most timeout_s, and tells whether every write so far was tried once by then."""
        return self._writer.flush(timeout_s)

    def stop(self) -> None:
        """Gives up writes that have not begun; waits for the one under way, which is bounded."""
        self._writer.stop()
