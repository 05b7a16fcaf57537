"""Ends a node's part in a job: flushes its final writes, and keeps its etcd running while others need it.

Bounded, whatever the store does. node_ending.py decides when the node's part is over.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence

from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.base.messages import HealthAsked, SignalCame
from bagua_agent.job.create_or_join import remove_unused_identity
from bagua_agent.job.messages import StoreChanged
from bagua_agent.job_state.context import JoinedJob

FINAL_WRITES_S = 2.0
# How long the node that hosts etcd waits for the others, beside the time that their workers have to end: they read the
# result, kill what is left, and write.
FOLLOWERS_LEAVE_S = 30.0
LOOK_S = 0.2


def flush_final_writes(job: JoinedJob, timeout_s: float = FINAL_WRITES_S) -> None:
    """Returns when the store has this node's writes, or did not accept them in time, which is reported."""
    deadline_s = time.monotonic() + timeout_s
    if not job.writes.flush(timeout_s) or not job.leased.flush(max(0.0, deadline_s - time.monotonic())):
        job.terminal.tell("timed out writing this node's final state to etcd")
        return
    job.history.flush(max(0.0, deadline_s - time.monotonic()))


def remove_key_pair(job: JoinedJob, timeout_s: float = FINAL_WRITES_S) -> None:
    """Removes the key pair of a job that is left without a result: its leader does not, so the last of its agents
    does."""
    if not job.leased.flush(timeout_s):
        job.terminal.tell("etcd did not remove this node's key in time; the job's key pair may stay there")
        return
    try:
        remove_unused_identity(job.store, job.keys)
    except (InfrastructureLost, UserError) as error:
        job.terminal.tell(f"the job's key pair stays in etcd: {error}")


def take_signals(inbox: queue.SimpleQueue[object], changes: list[StoreChanged]) -> list[int]:
    """Takes the messages that came while this node's workers end: returns the signals, answers questions of health, and
    appends changes of the store to `changes`."""
    numbers = []
    while not inbox.empty():
        message = inbox.get()
        if isinstance(message, StoreChanged):
            changes.append(message)
        elif isinstance(message, HealthAsked):
            message.answered.set()
        elif isinstance(message, SignalCame):
            numbers.append(message.number)
    return numbers


def wait_for_followers(
    job: JoinedJob,
    inbox: queue.SimpleQueue[object],
    on_change: Callable[[StoreChanged, float], None],
    changes: Sequence[StoreChanged],
    workers_end_within_s: float,
) -> None:
    """Waits until the other agents have left. For the node that hosts etcd, which goes last so that the others learn
    how it ended, and can write how theirs did. changes: taken out of the inbox before. A signal ends the wait."""
    for change in changes:
        on_change(change, time.monotonic())
    deadline_s = time.monotonic() + workers_end_within_s + FOLLOWERS_LEAVE_S
    while time.monotonic() < deadline_s:
        if all(agent_id == job.agent_id for agent_id in job.seen.view.agents):
            return
        try:
            message = inbox.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        if isinstance(message, StoreChanged):
            on_change(message, time.monotonic())
        elif isinstance(message, HealthAsked):
            message.answered.set()
        elif isinstance(message, SignalCame):
            return
