"""Decides whether this daemon was out of touch with etcd so long that its memory may be of removed jobs. No IO.

A removal is kept only for some days. A daemon that was away for longer, or frozen, or asleep, can't know whether a
missing key was lost or removed, so it puts no key back until it has been in touch for a while.
"""

from __future__ import annotations

SETTLED_AFTER_S = 60.0  # by then what is gone has been heard of


class EtcdContact:
    """Watches how long this daemon has been in touch with etcd. Times are of a clock that goes on while the machine
    sleeps."""

    def __init__(self, longest_away_s: float, now_s: float) -> None:
        self._longest_away_s = longest_away_s
        self._in_touch_s = now_s
        self._connected = False
        self._stale_since_s: float | None = None

    def passed(self, now_s: float) -> None:
        """Takes the present time. It is to be called often: a long time between two calls is time that this process did
        not run."""
        if now_s - self._in_touch_s > self._longest_away_s:
            self._stale_since_s = now_s
            self._in_touch_s = now_s
        if not self._connected:
            if self._stale_since_s is not None:
                self._stale_since_s = now_s
            return
        self._in_touch_s = now_s
        if self._stale_since_s is not None and now_s - self._stale_since_s > SETTLED_AFTER_S:
            self._stale_since_s = None

    def connected(self, up: bool, now_s: float) -> None:
        self.passed(now_s)
        self._connected = up

    @property
    def may_put_back(self) -> bool:
        return self._stale_since_s is None
