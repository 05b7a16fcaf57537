"""Reports how a job proceeds until it ends, for `submit --follow` and `events -f`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from bagua_agent.base.errors import UserError
from bagua_agent.cluster_client.cluster_requests import JobEnded, read_end, submission_nonce
from bagua_agent.cluster_client.started_jobs import end_of, is_submitted, started_job
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_agent.history.job_history import JobEvent, events_of
from bagua_agent.observation.cluster_status import cluster_status

LAST_NEWS_S = 1.0  # the outcome of a job that was removed comes by a watch of its own, perhaps a moment later
QUEUE_LOOK_S = 2.0  # while a job waits, its reason changes with every other job


def follow(
    store: Store, job_id: str, tell_event: Callable[[JobEvent], object], tell: Callable[[str], object]
) -> JobEnded:
    """Reports how a job proceeds, and returns when it has ended. tell: called with why it waits, whenever that changes.
    Raises StoreUnavailable, and UserError if there is no such job or it is removed meanwhile."""
    keys = JobKeys(job_id)
    # a job that was started by hand has no outcome but its own result, and is not removed before it has one
    by_hand = not is_submitted(store, job_id) and started_job(store, job_id) is not None
    end_key, read = (keys.result, end_of) if by_hand else (cluster_keys.outcome(job_id), read_end)
    removal = "" if by_hand else cluster_keys.removal(submission_nonce(store, job_id))
    news: queue.SimpleQueue[None] = queue.SimpleQueue()
    events = PrefixMirror(store, keys.events, lambda changes: news.put(None))
    ends: list[bytes] = []  # kept, for the job may be removed as soon as it has ended

    def take_outcome(changes: tuple[Change, ...]) -> None:
        ends.extend(c.value for c in changes if c.key == end_key and c.value is not None)
        news.put(None)

    outcome = PrefixMirror(store, end_key, take_outcome)
    removed = None if by_hand else PrefixMirror(store, removal, lambda changes: news.put(None))
    mirrors = [mirror for mirror in (events, outcome, removed) if mirror is not None]
    told: set[tuple[str, float]] = set()  # name and time: an event may be written again under its name
    waiting = ""
    gone_s: float | None = None
    try:
        for mirror in mirrors:
            mirror.start()
        while True:
            for event in events_of(events.state().values(), keys):
                if (event.name, event.time_unix_s) not in told:
                    told.add((event.name, event.time_unix_s))
                    tell_event(event)
            if ends:
                return read(ends[-1])
            if removed is not None and removal in removed.state():
                gone_s = time.monotonic() if gone_s is None else gone_s
                if time.monotonic() >= gone_s + LAST_NEWS_S:
                    raise UserError(f"job {job_id!r} was removed, and its outcome with it")
            if not told and not by_hand:
                job = next(
                    (j for j in cluster_status(store, complain=lambda text: None).jobs if j.job_id == job_id),
                    None,
                )
                if job is not None and job.state == "queued" and job.reason != waiting:
                    waiting = job.reason
                    tell(waiting)
            try:
                news.get(timeout=LAST_NEWS_S if gone_s is not None else None if told else QUEUE_LOOK_S)
            except queue.Empty:
                continue
    finally:
        for mirror in mirrors:
            mirror.stop()
