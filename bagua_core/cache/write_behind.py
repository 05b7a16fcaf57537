"""Writes frames to the store in the background, through a bounded buffer and one thread.

Nothing is lost on a normal end: `close` writes what is left. Back-pressure: a put into a full buffer waits, so the
store's pace is the loader's; if for PATIENCE_S nothing at all is written, frames are dropped and counted until the
store moves again. The thread starts with the first frame. If it ends by an unexpected error, that is
reported, and frames are dropped from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bagua_core.cache.stores import Item, Store, Written

log = logging.getLogger("bagua.cache")

PATIENCE_S = 5.0
CLOSE_WITHIN_S = 4.0  # torch ends a loader's process that takes more than 5 s
GATHER_S = 0.05  # frames are written together if they come this close


class WriteBehind:
    def __init__(
        self,
        store: Store,
        buffer_size: int,
        report: Callable[[Written], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Takes the store; the thread starts later.

        buffer_size: frames. report: called in the writing thread after every write, and for what was dropped.
        """
        self._store = store
        self._buffer_size = buffer_size
        self._report = report
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._waiting: dict[bytes, Item] = {}
        self._writing: dict[bytes, Item] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._stuck = False
        self._hurried = False

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is the writer's."""
        return self._thread is threading.current_thread()

    def pending(self, raw: bytes) -> bytearray | None:
        """Returns the frame of a key that is not written yet; None if there is none."""
        item = self._waiting.get(raw) or self._writing.get(raw)
        return None if item is None else item.frame

    def put(self, item: Item) -> bool:
        """Puts an item into the buffer. Returns False if it was dropped: the store did not move, or all is closed."""
        with self._changed:
            if self._thread is None:
                self._start()
            if self._is_full() and not self._stuck:
                self._hurried = True
                self._changed.notify_all()
                if not self._changed.wait_for(self._has_room, self._patience_s):
                    self._stuck = True
            if self._closing or self._is_full():
                return False
            self._waiting[item.key] = item
            self._changed.notify_all()
        return True

    def flush(self, within_s: float) -> bool:
        """Waits until all that was put so far is written. Returns whether it is."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(self._is_done, within_s)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> int:
        """Writes what is left and ends the thread. Returns how many frames could not be written in that time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(within_s)
        return len(self._waiting) + len(self._writing)

    def _is_full(self) -> bool:
        return len(self._waiting) + len(self._writing) >= self._buffer_size

    def _has_room(self) -> bool:
        return self._closing or not self._is_full()

    def _is_done(self) -> bool:
        return not self._waiting and not self._writing

    def _start(self) -> None:
        # a daemon: a store that hangs must not keep the process from ending. What a normal end owes, `close` does.
        self._thread = threading.Thread(target=self._run, name="bagua-cache-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._gather():
                written = self._store.write(list(self._writing.values()))
                with self._changed:
                    self._writing = {}
                    self._stuck = False
                    self._changed.notify_all()
                self._report(written)
        except Exception:
            # no store should raise; without this, training would wait for a thread that is gone
            log.exception("the cache's writer failed and ends; values are loaded anew from now on")
            self._fail()

    def _fail(self) -> None:
        with self._changed:
            lost = len(self._waiting) + len(self._writing)
            self._waiting, self._writing = {}, {}
            self._closing = True
            self._changed.notify_all()
        self._report(Written(lost=lost))

    def _gather(self) -> bool:
        """Waits for frames worth a write. Returns False at the end, with nothing left."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
            self._changed.wait_for(self._is_worth_it, GATHER_S)
            self._hurried = False
            self._writing, self._waiting = self._waiting, {}
            return bool(self._writing)

    def _is_worth_it(self) -> bool:
        return self._closing or self._hurried or 2 * len(self._waiting) >= self._buffer_size
