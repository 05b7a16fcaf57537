"""Looks again and again in a thread of its own, and keeps the newest data of a page as JSON.

Looks every second while a browser asks for the page. While none asks it looks seldom, or not at all. A look that takes
much of a processor is followed by a longer pause, so that a large cluster can be shown at a small cost. A look that
raises is a note on the page, and the next one follows. Every look is bounded; `stop` ends it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable

from bagua_agent.base.background import Failed, OperationEnd, background_thread, describe
from bagua_agent.base.plain_text import shortened
from bagua_agent.dashboard.page_data import Page, finite

log = logging.getLogger(__name__)

LOOK_S = 1.0
PAUSE_BY_LOOK = 20.0  # from look to look at least so many times the processor time of the last one
WATCHED_FOR_S = 15.0  # since the last request of a browser
FIRST_LOOK_S = 3.0  # a request after a time without looks waits so long for a new one
STOP_S = 10.0
LAST_PAGE_S = 3.0  # an open page gets the end within this time
ALL_ASK_S = 1.5  # the end is served for at least so long, for each open page asks once a second


class PageLoop:
    """Keeps the newest data of a page. It runs between construction and `stop`.

    look: returns a page, or why there is none, which is then noted on the page before; it may block. nothing: the page
    before the first look. unwatched_s: between looks while no browser asks; None: none is made.
    """

    def __init__(self, look: Callable[[], Page | str], nothing: Page, unwatched_s: float | None) -> None:
        self._take_look = look
        self._unwatched_s = unwatched_s
        self._bug = ""  # the last one that was logged
        self._changed = threading.Condition()
        self._stopping = False
        self._page = json.dumps(nothing).encode()
        self._page_is_last = False
        self._last_is_seen = False
        self._looks = 0
        self._asked_s = float("-inf")
        self._thread = background_thread("bagua-dashboard", self._run, self._ended)
        self._thread.start()

    def page(self) -> bytes:
        """Returns the newest data, as JSON."""
        with self._changed:
            was_watched = self.is_watched
            self._asked_s = time.monotonic()
            if not was_watched:
                self._changed.notify_all()
                if self._unwatched_s is None:
                    before = self._looks
                    self._changed.wait_for(lambda: self._looks > before or self._stopping, FIRST_LOOK_S)
            if self._page_is_last:
                self._last_is_seen = True
                self._changed.notify_all()
            return self._page

    @property
    def is_watched(self) -> bool:
        return time.monotonic() - self._asked_s < WATCHED_FOR_S

    @property
    def asked_s(self) -> float:
        """The time of the last request, by the monotonic clock."""
        return self._asked_s

    def stop(self, *, shows_end: bool = False) -> None:
        """Stops the loop. shows_end: what is shown may have ended: where pages are open, wait until they have asked
        once more."""
        if shows_end and self._thread.is_alive():
            with self._changed:
                watched = self.is_watched
            if watched:
                self._look(last=True)
                all_asked_s = time.monotonic() + ALL_ASK_S
                with self._changed:
                    if self._changed.wait_for(lambda: self._last_is_seen or self._stopping, LAST_PAGE_S):
                        # how many pages are open is unknown
                        self._changed.wait_for(
                            lambda: self._stopping, max(0.0, all_asked_s - time.monotonic())
                        )
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(STOP_S)

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.warning("the dashboard shows nothing new any more: %s", end.reason)

    def _run(self) -> None:
        while True:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            if self._unwatched_s is not None or self.is_watched:
                self._look()
            watched_period_s = max(LOOK_S, PAUSE_BY_LOOK * (time.thread_time() - cpu_s))
            with self._changed:
                while not self._stopping:
                    period_s = watched_period_s if self.is_watched else self._unwatched_s
                    if period_s is None:
                        self._changed.wait()  # until a browser asks, or `stop`
                        continue
                    left_s = began_s + period_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
                if self._stopping:
                    return

    def _found(self) -> Page | str:
        try:
            return self._take_look()
        except Exception as error:  # our bug may depend on one record or one worker's report, which changes
            bug = describe(error)
            if bug != self._bug:
                self._bug = bug
                log.exception("bug: a look for the dashboard raised; it goes on")
            return f"a bug of Bagua ({shortened(bug, 200)}): what is shown is not new, and it is tried again"

    def _look(self, *, last: bool = False) -> None:
        found = self._found()
        with self._changed:
            if self._page_is_last and not last:
                return  # it may have begun before the end
            page = found if isinstance(found, dict) else {**json.loads(self._page), "problem": found}
            self._page = json.dumps(finite(page), allow_nan=False).encode()
            self._page_is_last = last and isinstance(found, dict)
            self._looks += 1
            self._changed.notify_all()
