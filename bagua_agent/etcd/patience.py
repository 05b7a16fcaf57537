"""Decides how long an attempt of a request may take: longer with each round of all endpoints without an answer.

An attempt is short at first, so that a frozen endpoint costs little. It grows, since an etcd that takes longer than one
attempt would otherwise never answer. Pure: times are arguments.
"""

from __future__ import annotations

from bagua_agent.base.backoff import delay_s


class Patience:
    """Holds the limit of the next attempt, for requests that etcd answers about equally fast."""

    def __init__(self, first_s: float, longest_s: float, endpoints: int) -> None:
        """Begins with first_s. endpoints: how many take turns."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._endpoints = endpoints
        self._silent_attempts = 0  # one after the other, since the last answer within first_s
        self._last_silent_end_s = float("-inf")

    @property
    def limit_s(self) -> float:
        return delay_s(1 + self._silent_attempts // self._endpoints, self._first_s, self._longest_s)

    def answered(self, took_s: float) -> None:
        if took_s < self._first_s:
            self._silent_attempts = 0

    def timed_out(self, began_s: float, ended_s: float) -> None:
        """Notes an attempt without an answer. Of attempts at the same time only one counts."""
        if began_s >= self._last_silent_end_s:
            self._silent_attempts += 1
            self._last_silent_end_s = ended_s
