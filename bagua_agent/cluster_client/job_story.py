"""How does a submitted job go, told as it happens, until it ends? For whoever stays: `submit --follow`, `events -f`."""

from __future__ import annotations

import queue
from collections.abc import Callable

from bagua_agent.cluster_client.cluster_requests import Ended, outcome_of, submission_nonce
from bagua_agent.cluster_client.cluster_status import cluster_status
from bagua_agent.errors import UserError
from bagua_agent.history.job_history import JobEvent, events_of
from bagua_agent.store import cluster_keys
from bagua_agent.store.client import Store
from bagua_agent.store.keys import JobKeys
from bagua_agent.store.mirror import PrefixMirror

QUEUE_LOOK_S = 2.0  # while a job waits its reason changes with everybody else's affairs


def follow(
    store: Store, job_id: str, tell_event: Callable[[JobEvent], object], tell: Callable[[str], object]
) -> Ended:
    """Returns when the job has ended. tell: why it waits, whenever that changes. Raises StoreUnavailable, and UserError
    if there is no such job or it is removed meanwhile."""
    keys = JobKeys(job_id)
    removal = cluster_keys.removal(submission_nonce(store, job_id))
    news: queue.SimpleQueue[None] = queue.SimpleQueue()
    events = PrefixMirror(store, keys.events, lambda changes: news.put(None))
    outcome = PrefixMirror(store, cluster_keys.outcome(job_id), lambda changes: news.put(None))
    removed = PrefixMirror(store, removal, lambda changes: news.put(None))
    told: set[str] = set()
    waiting = ""
    try:
        events.start()
        outcome.start()
        removed.start()
        while True:
            for event in events_of(events.state().values(), keys):
                if event.name not in told:
                    told.add(event.name)
                    tell_event(event)
            if cluster_keys.outcome(job_id) in outcome.state():
                ended = outcome_of(store, job_id)
                if ended is not None:
                    return ended
            if removal in removed.state():
                raise UserError(f"job {job_id!r} was removed, so nobody knows how it ended")
            if not told:
                job = next(
                    (j for j in cluster_status(store, complain=lambda text: None).jobs if j.job_id == job_id),
                    None,
                )
                if job is not None and job.state == "queued" and job.reason != waiting:
                    waiting = job.reason
                    tell(waiting)
            try:
                news.get(timeout=QUEUE_LOOK_S if not told else None)
            except queue.Empty:
                continue
    finally:
        events.stop()
        outcome.stop()
        removed.stop()
