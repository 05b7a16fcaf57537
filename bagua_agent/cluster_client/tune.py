"""Reads and pins the settings of a running job's steps, for `bagua-launch tune`.

Writes only desired state; the job's leader writes a generation with them. Never creates a job, and never writes to one
that has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from bagua_agent.autotune.records import decode_study
from bagua_agent.autotune.study_records import Study
from bagua_agent.autotune.tuned_records import model_of
from bagua_agent.autotune.tuned_store import forget_tuned
from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown, UserError
from bagua_agent.base.plain_text import counted
from bagua_agent.cluster_client.cluster_requests import unknown_job
from bagua_agent.etcd.client import KeyValue, Put, Store, absent, mod_revision_is
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message
from bagua_contract.step_settings import (
    AS_SCRIPTED,
    QADAM_OPTIMIZER,
    SWITCHABLE,
    StepSettings,
    takes,
    takes_settings,
    why_not_qadam,
)

# each met another writer at that very moment
_MOST_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Shown:
    """The settings of a job's steps. generation: of the newest record; 0: there is none yet. newest: its settings.
    pinned: by people. tuning: what the tuner does, in a line; empty: nothing. forgotten: records of earlier jobs that
    were removed."""

    job_id: str
    generation: int
    newest: StepSettings
    pinned: StepSettings
    tuning: str = ""
    forgotten: int = 0

    def __str__(self) -> str:
        number = f"generation {self.generation}" if self.generation else "no generation yet"
        follows = (
            "" if self.pinned.over(self.newest) == self.newest else "; the next one follows what is pinned"
        )
        tuning = f"; {self.tuning}" if self.tuning else ""
        if self.forgotten:
            tuning += f"; forgot what trials of this model had found ({counted(self.forgotten, 'record')})"
        return f"job {self.job_id!r}: {number}: {self.newest}; pinned: {self.pinned}{follows}{tuning}"


def show(store: Store, job_id: str) -> Shown:
    """Reads the settings of a job's steps. Raises UserError if there is no such job, InfrastructureLost."""
    keys, without_parts = JobKeys(job_id), 0
    for _ in range(_MOST_ATTEMPTS):
        found, _ = store.get_and_count([keys.spec, keys.settings, keys.generation, keys.study], keys.agents)
        if keys.spec not in found:
            raise unknown_job(store, job_id)
        record = _generation(store, keys, found.get(keys.generation))
        if record is not None:
            return Shown(
                job_id,
                record.number,
                _settings(record.settings, keys.generation),
                _pinned(found.get(keys.settings), keys),
                _tuning(found.get(keys.study)),
            )
        without_parts = _replaced(job_id, found[keys.generation], without_parts)
    raise _changes_too_often(job_id, "read")


def read_study(store: Store, job_id: str) -> Study:
    """Returns the newest study of the job, which may have ended. Raises UserError if it has none,
    InfrastructureLost."""
    keys = JobKeys(job_id)
    found, _ = store.get_and_count([keys.spec, keys.study], keys.agents)
    if keys.spec not in found:
        raise unknown_job(store, job_id)
    if keys.study not in found:
        raise UserError(f"job {job_id!r} has no study; start jobs with --autotune-level 1 or 2")
    try:
        return decode_study(found[keys.study].value)
    except (DecodeError, ValueError) as error:
        raise UserError(f"{keys.study} can't be read: {error}") from error


def _tuning(record: KeyValue | None) -> str:
    if record is None:
        return ""
    try:
        study = decode_study(record.value)
    except (DecodeError, ValueError):
        return "the study can't be read"
    best = "" if study.best is None else f", best: {study.best.settings} ({study.best.rate:.3g} steps/s)"
    trials = counted(len(study.trials), "trial")
    proposal = "" if study.proposal is None else f"; {study.proposal}"
    return (
        f"study {study.number} of {study.world} is {study.phase.name.lower()} after {trials}{best}{proposal}"
    )


def pin(store: Store, job_id: str, asked: Mapping[str, object], *, forgets: bool = False) -> Shown:
    """Fixes settings of the job's steps; it follows at a step boundary, and nothing is started again.

    asked: fields of StepSettings; a field's default leaves it to the script again. forgets: all others too, what the
    job's trials have found, and what is kept of earlier jobs of the same model. Raises UserError for a value or a job
    that can't have them, InfrastructureLost.
    """
    keys, forgotten, without_parts = JobKeys(job_id), 0, 0
    for _ in range(_MOST_ATTEMPTS):
        found, _ = store.get_and_count([keys.spec, keys.result, keys.settings, keys.generation], keys.agents)
        spec = found.get(keys.spec)
        if spec is None:
            raise unknown_job(store, job_id)
        record = _generation(store, keys, found.get(keys.generation))
        if record is None:
            without_parts = _replaced(job_id, found[keys.generation], without_parts)
            continue
        _check(job_id, found, keys, record)
        before = found.get(keys.settings)
        wanted = _changed(AS_SCRIPTED if forgets else _pinned(before, keys), asked)
        _check_algorithm(job_id, wanted, record.fingerprint)
        unchanged = (
            absent(keys.settings) if before is None else mod_revision_is(keys.settings, before.mod_revision)
        )
        # the spec too: between reading and writing the job may have ended, and another one of its id begun
        still_the_job = (mod_revision_is(keys.spec, spec.mod_revision), absent(keys.result), unchanged)
        asked_to_forget = _forgets(before) + forgets
        value = pb.PinnedSettings(settings=wanted.to_proto(), forgets=asked_to_forget).SerializeToString()
        if forgets:  # first: the leader reads what is kept once it sees the request
            forgotten += forget_tuned(store, model_of(record.fingerprint))
        try:
            written = store.transact(still_the_job, [Put(keys.settings, value)]).succeeded
        except OutcomeUnknown:
            continue  # the next look finds what was asked for there, or writes it
        if written:
            newest = _settings(record.settings, keys.generation)
            return Shown(job_id, record.number, newest, wanted, forgotten=forgotten)
    raise _changes_too_often(job_id, "tuned")


def _changes_too_often(job_id: str, what: str) -> InfrastructureLost:
    return InfrastructureLost(
        f"job {job_id!r} changed {_MOST_ATTEMPTS} times while it was to be {what}; try again"
    )


def _replaced(job_id: str, head: KeyValue, before: int) -> int:
    """Returns the mod revision of a head whose parts are gone, as when a newer record replaces it. before: of the head
    that was read before. Raises InfrastructureLost if it is the same: no record has replaced it."""
    if head.mod_revision == before:
        raise InfrastructureLost(
            f"job {job_id!r}: parts of its newest generation's record are missing in etcd; its next generation "
            "writes a new record"
        )
    return head.mod_revision


def _check(job_id: str, found: Mapping[str, KeyValue], keys: JobKeys, record: pb.Generation) -> None:
    if keys.result in found:
        raise UserError(f"job {job_id!r} has ended; use the id of a running job")
    spec = read_message(pb.JobSpec, found[keys.spec].value)
    if spec is not None and spec.mode == pb.JobSpec.RESTART:
        raise UserError(
            f"job {job_id!r} runs a script that knows nothing of this runtime (restart mode), so its steps have no "
            "settings; set what its own framework has"
        )
    if "virtual_shards" in record.fingerprint:
        raise UserError(
            f"job {job_id!r} is deterministic: the order of its sums is fixed; leave its settings alone"
        )


def _check_algorithm(job_id: str, wanted: StepSettings, fingerprint: Mapping[str, str]) -> None:
    declared, optimizers = fingerprint.get("algorithm", ""), fingerprint.get("optimizers", "")
    if optimizers and not takes(wanted.algorithm, fingerprint):
        why_not = (
            f"job {job_id!r}: {why_not_qadam(fingerprint)}"
            if optimizers == QADAM_OPTIMIZER
            else f"job {job_id!r} has the optimizer {optimizers[:80]}, and {wanted.algorithm} needs "
            f"bagua.algorithms.{QADAM_OPTIMIZER}, which only the script can make"
        )
        raise UserError(
            f"{why_not}; use {' or '.join(name for name in SWITCHABLE if takes(name, fingerprint))}"
        )
    if wanted.is_empty or takes_settings(fingerprint):
        return
    raise UserError(
        f"job {job_id!r} uses {declared[:80]}, which keeps state that can't be dropped; only jobs of "
        f"{', '.join(SWITCHABLE)} can be tuned while they run"
    )


def _changed(pinned: StepSettings, asked: Mapping[str, object]) -> StepSettings:
    try:
        return replace(pinned, **asked)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(str(error)) from None


def _generation(store: Store, keys: JobKeys, record: KeyValue | None) -> pb.Generation | None:
    """Returns the generation of a record; an empty one if there is none. None: it was replaced while it was read."""
    if record is None:
        return pb.Generation()
    value = whole_value(store, keys, record.value)
    return None if value is None else read_message(pb.Generation, value) or pb.Generation()


def _pinned(record: KeyValue | None, keys: JobKeys) -> StepSettings:
    read = None if record is None else read_message(pb.PinnedSettings, record.value)
    return AS_SCRIPTED if read is None else _settings(read.settings, keys.settings)


def _forgets(record: KeyValue | None) -> int:
    read = None if record is None else read_message(pb.PinnedSettings, record.value)
    return 0 if read is None else read.forgets


def _settings(message: pb.StepSettings, key: str) -> StepSettings:
    try:
        return StepSettings.from_proto(message)
    except (ValueError, DecodeError) as error:
        raise UserError(f"{key} can't be read: {error}; remove it with etcdctl del") from error
