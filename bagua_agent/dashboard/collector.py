"""Looks at the job again and again in a thread of its own, and keeps the newest data of the page.

Looks once a second while a browser asks for the page, else every five seconds, so that the page has a past when it is
opened. While etcd is away the last facts stay, with a note. Every look is bounded; `stop` ends it.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.errors import BaguaError
from bagua_agent.dashboard.page_data import Page, finite, page_data
from bagua_agent.etcd.client import Store
from bagua_agent.observation.agent_calls import AgentSeen, JobAgents
from bagua_agent.observation.job_facts import JobFacts, read_facts
from bagua_agent.observation.series import JobSeries

log = logging.getLogger(__name__)

LOOK_S = 1.0
LOOK_UNWATCHED_S = 5.0
WATCHED_FOR_S = 15.0  # since the last request of a browser
STOP_S = 10.0
LAST_PAGE_S = 3.0  # an open page gets the job's end within this time


_NOTHING: Page = {"problem": "this agent has not joined its job yet"}


class Collector:
    """Runs between construction and `stop`. store: the caller closes it after `stop`. served_by: see page_data."""

    def __init__(self, store: Store, job_id: str, served_by: str = "") -> None:
        self._store = store
        self._job_id = job_id
        self._served_by = served_by
        self.agents = JobAgents(store, job_id)
        self._changed = threading.Condition()
        self._stopping = False
        self._facts: JobFacts | None = None
        self._page = json.dumps(_NOTHING).encode()
        self._page_is_last = False
        self._asked_s = float("-inf")
        self._series = JobSeries()
        self._thread = background_thread("bagua-dashboard", self._run, self._ended)
        self._thread.start()

    def page(self) -> bytes:
        """The newest data, as JSON."""
        with self._changed:
            was_watched = self._is_watched()
            self._asked_s = time.monotonic()
            if not was_watched:
                self._changed.notify_all()
            page, is_last = self._page, self._page_is_last
            if is_last:
                self._stopping = True
                self._changed.notify_all()
            return page

    def agent(self, agent_id: str) -> AgentSeen | None:
        """As the last look saw it."""
        facts = self._facts
        return next((a for a in facts.agents if a.agent_id == agent_id), None) if facts is not None else None

    def stop(self, *, shows_end: bool = False) -> None:
        """shows_end: the job may have ended: where a page is open, wait until it has asked once more."""
        if shows_end and self._thread.is_alive():
            with self._changed:
                watched = self._is_watched()
            if watched:
                self._look(last=True)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, LAST_PAGE_S)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(STOP_S)
        self.agents.close()

    def _is_watched(self) -> bool:
        return time.monotonic() - self._asked_s < WATCHED_FOR_S

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.warning("the dashboard shows nothing new any more: %s", end.reason)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
            began_s = time.monotonic()
            self._look()
            with self._changed:
                while not self._stopping:
                    period_s = LOOK_S if self._is_watched() else LOOK_UNWATCHED_S
                    left_s = began_s + period_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)

    def _look(self, *, last: bool = False) -> None:
        try:
            facts = read_facts(self._store, self.agents, self._job_id)
        except BaguaError as error:
            self._note(f"etcd does not answer: {error}; what is shown is not new")
            return
        if facts is None:
            self._note(f"etcd has no job {self._job_id!r}")
            return
        with self._changed:
            self._series.take(facts)
            self._facts = facts
            page = page_data(facts, self._series, self._served_by)
            page["problem"] = facts.problem
            self._page = json.dumps(finite(page), allow_nan=False).encode()
            self._page_is_last = last

    def _note(self, problem: str) -> None:
        with self._changed:
            page = json.loads(self._page)
            page["problem"] = problem
            self._page = json.dumps(page).encode()
