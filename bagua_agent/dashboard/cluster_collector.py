"""Keeps the newest data of a cluster's page, and the collectors of the jobs whose pages were opened below it.

Reads etcd only while a browser asks: the daemon of every node may serve this page, and each read is of the whole
cluster. A job that no browser asks for is not read either, and gives its place to another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bagua_agent.base.errors import BaguaError
from bagua_agent.base.ids import is_id
from bagua_agent.dashboard.cluster_page import cluster_page
from bagua_agent.dashboard.collector import Collector
from bagua_agent.dashboard.page_data import Page
from bagua_agent.dashboard.page_loop import WATCHED_FOR_S, PageLoop
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.observation.cluster_facts import ClusterWatch

MOST_JOB_PAGES = 8

_NOTHING: Page = {"problem": "the cluster is being read"}
_NO_JOB_YET: Page = {"problem": "the job is being read"}


class ClusterCollector:
    """Collects the data of a cluster's page. It runs between construction and `stop`. store: the caller closes it after
    `stop`. served_by: see cluster_page. complain: called with each record that can't be read."""

    def __init__(self, store: Store, complain: Callable[[str], object], served_by: str = "") -> None:
        self._store = store
        self._served_by = served_by
        self._watch = ClusterWatch(store, complain)
        self._lock = threading.Lock()
        self._jobs: dict[str, Collector] = {}
        self._stopped = False
        self._loop = PageLoop(self._look, _NOTHING, None)

    def page(self) -> bytes:
        """Returns the newest data, as JSON."""
        return self._loop.page()

    def job(self, job_id: str) -> Collector | str:
        """Returns the collector of a job's page, which is made if need be; or why there is none. Raises
        StoreUnavailable."""
        with self._lock:
            if (found := self._jobs.get(job_id)) is not None:
                return found
        if not is_id(job_id) or self._store.get(JobKeys(job_id).spec) is None:
            return (
                f"job {job_id!r} has not begun, or there is none; the cluster's page says what it waits for"
            )
        given_up: Collector | None = None
        with self._lock:
            if (found := self._jobs.get(job_id)) is not None:
                return found
            if self._stopped:
                return "this page is not served any more"
            if len(self._jobs) >= MOST_JOB_PAGES:
                oldest = min(self._jobs, key=lambda other: self._jobs[other].loop.asked_s)
                if self._jobs[oldest].loop.is_watched:
                    return f"{MOST_JOB_PAGES} jobs are open here already; close one, and wait {WATCHED_FOR_S:.0f} s"
                given_up = self._jobs.pop(oldest)
            made = self._jobs[job_id] = Collector(
                self._store, job_id, self._served_by, _NO_JOB_YET, unwatched_s=None
            )
        if given_up is not None:
            given_up.stop()
        return made

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            jobs, self._jobs = list(self._jobs.values()), {}
        for collector in jobs:
            collector.stop()
        self._loop.stop()
        self._watch.close()

    def _look(self) -> Page | str:
        try:
            return cluster_page(self._watch.look(), self._served_by)
        except BaguaError as error:
            return f"etcd does not answer: {error}; what is shown is not new"
