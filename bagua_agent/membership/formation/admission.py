"""Decides which workers' fingerprints fit the job's.

The job's fingerprint is that of its newest generation; before the first one, that of the worker that was
ready first. Revisions decide which one that was, so all leaders refuse the same workers. A worker has a fingerprint
from its first step boundary on, so the workers of a gathering are checked there.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagua_agent.base.plain_text import shortened, some
from bagua_agent.membership.view import JobView
from bagua_contract.records import Stage

_MOST_FIELDS, _MOST_CHARACTERS = 16, 200


def job_fingerprint(view: JobView) -> Mapping[str, str]:
    if view.generation is not None and not view.generation.is_gathering:
        return view.generation.fingerprint
    first = min(
        (m for m in view.members.values() if m.worker_id not in view.refused and m.stage is Stage.LOOP),
        key=lambda m: (m.join_revision, m.worker_id),
        default=None,
    )
    return {} if first is None else first.fingerprint


def difference(job: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Describes every field in which fingerprints differ, for the refused worker's log; empty if they fit."""
    if job == worker:
        return ""
    parts = (
        f"{_said(name)}: the job has {_said(job.get(name))!r}, this worker {_said(worker.get(name))!r}"
        for name in sorted(job.keys() | worker.keys())
        if job.get(name) != worker.get(name)
    )
    return some(parts, _MOST_FIELDS, "; ")


def _said(text: str | None) -> str:
    """Shortens a value: a worker writes what it likes into its fingerprint, and a refusal has to fit into a record."""
    return "nothing" if text is None else shortened(text, _MOST_CHARACTERS)


def misfits(view: JobView) -> dict[str, str]:
    """Returns the ready workers that may not join, not refused yet, with the difference.

    Members of the generation in the record are never refused: they are already in.
    """
    job = job_fingerprint(view)
    record = view.generation
    inside = set() if record is None or record.is_gathering else {m.worker_id for m in record.members}
    return {
        worker_id: what
        for worker_id, member in view.members.items()
        if worker_id not in view.refused and worker_id not in inside and member.stage is Stage.LOOP
        if (what := difference(job, member.fingerprint))
    }
