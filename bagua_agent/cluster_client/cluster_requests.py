"""Writes people's requests to a cluster as desired state; daemons and the scheduler do the rest.

Every write compares what it read, so concurrent requests of two people can't overwrite each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown, UserError
from bagua_agent.base.plain_text import in_utf8, some
from bagua_agent.cluster.cluster_records import (
    UnreadableRecord,
    ended_submission,
    nonce_of,
    parse_submission,
    read_outcome,
    unreadable_outcome,
)
from bagua_agent.cluster_client.refused_sizes import refuse_of_submission
from bagua_agent.cluster_state.job_removal import remove_job
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, KeyValue, Put, Store, absent, mod_revision_is, none_below
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JOBS_PREFIX, JobKeys
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2

_MOST_ATTEMPTS = 10
_MOST_NAMED = 20


def submit(store: Store, submission: pb.Submission) -> None:
    """Gives the submission its nonce and writes it; what may be left of a removed job of its name goes.

    Raises UserError if there is a job of this id, InfrastructureLost if it is not known whether it was written.
    """
    job_id = submission.job_id
    key = cluster_keys.submission(job_id)
    keys, over = JobKeys(job_id), cluster_keys.outcome(job_id)
    named = pb.Submission()
    named.CopyFrom(submission)
    named.nonce = secrets.token_hex(8)
    # the removal: a repeated attempt does not submit the job again after an earlier attempt's was deleted
    conditions = [absent(key), absent(keys.spec), absent(over), absent(cluster_keys.removal(named.nonce))]
    conditions.append(none_below(keys.agents))
    leftovers = [KeyRange.of_prefix(keys.prefix), KeyRange.of_prefix(keys.records)]
    unsure: InfrastructureLost | None = None
    for _ in range(_MOST_ATTEMPTS):
        try:
            done = store.transact(
                conditions, [Put(key, named.SerializeToString())], delete_ranges=leftovers
            ).succeeded
            # refused: perhaps because of an earlier attempt, whatever has become of the job since
            done = done or (unsure is not None and _was_submitted(store, job_id, named.nonce))
            break
        except OutcomeUnknown as error:
            unsure = error  # the same again: its conditions let only one attempt be done
        except InfrastructureLost as error:
            if unsure is None:
                raise
            raise _may_be_submitted(job_id, error) from error
    else:
        raise _may_be_submitted(job_id, unsure) from unsure
    if not done and store.get(over) is not None:
        raise UserError(
            f"a job {job_id!r} has ended and is still kept; use another --name, or `bagua-launch delete {job_id}` first"
        )
    if not done:
        raise UserError(f"there is a job {job_id!r} already; use another --name")


def _was_submitted(store: Store, job_id: str, nonce: str) -> bool:
    """Tells whether the submission of this nonce was written, also if it was changed or removed since."""
    found = store.get(cluster_keys.submission(job_id))
    if found is not None and nonce_of(_parsed(found, job_id)) == nonce:
        return True
    return store.get(cluster_keys.removal(nonce)) is not None


def _may_be_submitted(job_id: str, why: InfrastructureLost | None) -> InfrastructureLost:
    return InfrastructureLost(
        f"it is not known whether job {job_id!r} was submitted, and it may start; look with `bagua-launch list` before "
        f"you submit it again ({why})"
    )


def stop(store: Store, job_id: str) -> str:
    """Asks a submitted job to stop, and returns a line for the person who asked. Raises UserError."""

    def change(submission: pb.Submission) -> bool:
        was, submission.wanted = submission.wanted, pb.Submission.STOP
        return bool(was != pb.Submission.STOP)

    changed, _ = _change_submission(store, job_id, change)
    return f"job {job_id!r} stops at its next step boundary" if changed else f"job {job_id!r} stops already"


def delete(store: Store, job_id: str, now_unix_s: float) -> str:
    """Removes an ended job, and returns the line to print. Raises UserError if it has not ended."""
    key, over = cluster_keys.submission(job_id), cluster_keys.outcome(job_id)
    removed = f"job {job_id!r} is removed; the nodes remove its logs, and its name can be used again"
    unsure = ""  # nonce of the submission whose removal got no answer
    for _ in range(_MOST_ATTEMPTS):
        found, outcome = store.get(key), store.get(over)
        if unsure and store.get(cluster_keys.removal(unsure)) is not None:
            return removed
        if found is None and outcome is None and store.get(JobKeys(job_id).spec) is not None:
            return _delete_started_by_hand(store, job_id, now_unix_s)
        if found is None and outcome is None:
            raise unknown_job(store, job_id)
        if outcome is None:
            raise UserError(f"job {job_id!r} has not ended; `bagua-launch stop {job_id}` first")
        # of a submission that etcd has lost the outcome is left
        nonce = ended_submission(outcome.value) if found is None else nonce_of(_parsed(found, job_id))
        if store.get_prefix(JobKeys(job_id).agents)[0]:
            raise UserError(
                f"job {job_id!r} has ended, and its agents are still leaving; try again in a moment"
            )
        unchanged = [
            mod_revision_is(key, 0 if found is None else found.mod_revision),
            mod_revision_is(over, outcome.mod_revision),
        ]
        try:
            if remove_job(store, job_id, nonce, now_unix_s, *unchanged):
                return removed
        except OutcomeUnknown:
            unsure = nonce
    raise _changes_all_the_time(f"job {job_id!r}")


def _delete_started_by_hand(store: Store, job_id: str, now_unix_s: float) -> str:
    """Removes a job that was started by hand, also one whose nodes all ended without a result: it has no node that
    could write one."""
    keys = JobKeys(job_id)
    for _ in range(_MOST_ATTEMPTS):
        spec = store.get(keys.spec)
        if spec is None:
            return f"job {job_id!r} is removed by another request"
        if store.get_prefix(keys.agents)[0]:
            follows = "its agents are still leaving; try again in a moment"
            if store.get(keys.result) is None:
                follows = f"it has not ended; `bagua-launch stop {job_id}` first"
            raise UserError(f"job {job_id!r} was started by hand, and {follows}")
        unchanged = [mod_revision_is(keys.spec, spec.mod_revision), absent(cluster_keys.submission(job_id))]
        try:
            if remove_job(store, job_id, "", now_unix_s, *unchanged):
                return f"job {job_id!r} is removed; its logs stay where its nodes wrote them"
        except OutcomeUnknown:
            continue  # the next look finds its spec, or none
    raise _changes_all_the_time(f"job {job_id!r}")


def scale_submitted(store: Store, job_id: str, min_nodes: int, max_nodes: int) -> tuple[int, int] | None:
    """Changes the number of nodes of a submitted job. Returns the least and most nodes there were before; None if the
    job was not submitted. Raises UserError.

    The job's own desired state changes with it, in one transaction.
    """
    if store.get(cluster_keys.submission(job_id)) is None:
        return None
    desired_key = JobKeys(job_id).desired
    desired = membership_pb2.Desired(min_nodes=min_nodes, max_nodes=max_nodes).SerializeToString()

    def change(submission: pb.Submission) -> bool:
        refuse_of_submission(submission, min_nodes, max_nodes)
        submission.min_nodes, submission.max_nodes = min_nodes, max_nodes
        return True

    def beside() -> tuple[list[Compare], list[Put]]:
        found = store.get(desired_key)
        if found is None:  # it has not begun: its first agent reads the submission
            return [absent(desired_key)], []
        return [mod_revision_is(desired_key, found.mod_revision)], [Put(desired_key, desired)]

    _, before = _change_submission(store, job_id, change, beside)
    return before.min_nodes, before.max_nodes


def _change_submission(
    store: Store,
    job_id: str,
    change: Callable[[pb.Submission], bool],
    beside: Callable[[], tuple[list[Compare], list[Put]]] = lambda: ([], []),
) -> tuple[bool, pb.Submission]:
    """Changes a submission by `change`. Returns whether `change` changed anything, and the submission as it was. Raises
    UserError."""
    key, over = cluster_keys.submission(job_id), cluster_keys.outcome(job_id)
    for _ in range(_MOST_ATTEMPTS):
        found = store.get(key)
        if found is None:
            raise unknown_job(store, job_id)
        if store.get(over) is not None:
            raise UserError(f"job {job_id!r} has ended; `bagua-launch status` shows those that run")
        before, after = _parsed(found, job_id), _parsed(found, job_id)
        if not change(after):
            return False, before
        after.changes += 1
        conditions, writes = beside()
        conditions += [mod_revision_is(key, found.mod_revision), absent(over)]
        if _is_done(store, conditions, [Put(key, after.SerializeToString()), *writes]):
            return True, before
    raise _changes_all_the_time(f"job {job_id!r}")


def submission_nonce(store: Store, job_id: str) -> str:
    """Returns the nonce of the current submission. Raises UserError if there is none."""
    found = store.get(cluster_keys.submission(job_id))
    if found is None:
        raise unknown_job(store, job_id)
    return nonce_of(_parsed(found, job_id))


def _parsed(found: KeyValue, job_id: str) -> pb.Submission:
    try:
        return parse_submission(found.value, job_id)
    except UnreadableRecord as error:
        raise UserError(f"{found.key}: {error}") from error


def unknown_job(store: Store, job_id: str) -> UserError:
    """Returns the error that there is no such job, submitted or started by hand."""
    records, _ = store.get_prefix(cluster_keys.SUBMISSIONS)
    names = {name for kv in records if (name := cluster_keys.id_in(cluster_keys.SUBMISSIONS, kv.key))}
    names |= {name for kv in store.get_prefix(JOBS_PREFIX)[0] if (name := JobKeys.job_in(kv.key))}
    if not names:
        return UserError(f"no job {job_id!r} in this etcd, nor any other; check --etcd")
    return UserError(
        f"no job {job_id!r} in this etcd; there are {some(map(repr, sorted(names)), _MOST_NAMED)}"
    )


# -- nodes


def drain(store: Store, node_name: str, *, force: bool, reason: str) -> str:
    """Drains a node, and returns a line for the person who asked. Raises UserError if there is no such node."""
    _known_node(store, node_name)
    record = pb.Drain(force=force, reason=in_utf8(reason)).SerializeToString()
    key = cluster_keys.drain(node_name)
    for _ in range(_MOST_ATTEMPTS):
        found = store.get(key)
        if found is not None and found.value == record:
            break
        # not a plain put: one that etcd does late, after it was sent again, would undo an undrain in between
        if _is_done(
            store, [mod_revision_is(key, 0 if found is None else found.mod_revision)], [Put(key, record)]
        ):
            break
    else:
        raise _changes_all_the_time(f"node {node_name!r}")
    how = "its jobs leave it now" if force else "its jobs leave it as soon as they can do without it"
    return f"node {node_name!r} gets no more jobs; {how}"


def undrain(store: Store, node_name: str) -> str:
    """Ends the drain of a node, and returns a line for the person who asked. Raises UserError if it was not drained."""
    key = cluster_keys.drain(node_name)
    for attempt in range(_MOST_ATTEMPTS):
        found = store.get(key)
        if found is None and attempt == 0:
            _known_node(store, node_name)
            raise UserError(f"node {node_name!r} is not drained; `bagua-launch nodes` shows which are")
        if found is None or _is_done(store, [mod_revision_is(key, found.mod_revision)], deletes=[key]):
            return f"node {node_name!r} takes jobs again"
    raise _changes_all_the_time(f"node {node_name!r}")


def _is_done(
    store: Store, conditions: list[Compare], writes: list[Put] | None = None, deletes: list[str] | None = None
) -> bool:
    """Makes a transaction. Returns False where it certainly was not made, or the outcome is unknown: the next read
    shows it."""
    try:
        return store.transact(conditions, writes or [], deletes or []).succeeded
    except OutcomeUnknown:
        return False


def _changes_all_the_time(what: str) -> InfrastructureLost:
    return InfrastructureLost(f"{what} changed {_MOST_ATTEMPTS} times meanwhile; try again")


def _known_node(store: Store, node_name: str) -> None:
    if (
        store.get(cluster_keys.node(node_name)) is not None
        or store.get(cluster_keys.orders(node_name)) is not None
    ):
        return
    records, _ = store.get_prefix(cluster_keys.NODES)
    names = sorted(name for kv in records if (name := cluster_keys.id_in(cluster_keys.NODES, kv.key)))
    there = f"there are {some(names, _MOST_NAMED)}" if names else "no daemon runs anywhere"
    raise UserError(f"no node {node_name!r}; {there}")


@dataclass(frozen=True, slots=True)
class JobEnded:
    outcome: str
    exit_code: int
    reason: str


def outcome_of(store: Store, job_id: str) -> JobEnded | None:
    found = store.get(cluster_keys.outcome(job_id))
    return None if found is None else read_end(found.value)


def read_end(value: bytes) -> JobEnded:
    """Returns the end of a job from an outcome's record."""
    try:
        end = read_outcome(value, 0.0)
    except UnreadableRecord:
        end = unreadable_outcome(0.0)
    return JobEnded(end.end.name.lower(), end.exit_code, end.reason)
