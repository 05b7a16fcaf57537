"""Checks a person's request to a cluster. Pure: values in, a submission out, or one RequestError."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from bagua_agent.base.plain_text import in_utf8
from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.config.job_config import JobConfig
from bagua_agent.config.job_config_file import SUBMITTED, encode
from bagua_contract import cluster_pb2 as pb
from bagua_launch.environment_request import parse_environment
from bagua_launch.errors import RequestError, refuse
from bagua_launch.job_request import parse_job_fields
from bagua_launch.rendezvous_request import parse_job_id
from bagua_launch.replica_request import group_size
from bagua_launch.written_values import Values, WrittenValue

_PRIORITY = re.compile(r"-?[0-9]{1,6}")
_PAIR = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*)=([A-Za-z0-9][A-Za-z0-9._/-]*)")


def parse_submission(
    values: Values,
    program: Sequence[str],
    *,
    directory: str,
    environ: Mapping[str, str],
    submitter: str,
    now_unix_s: float,
) -> pb.Submission:
    """Returns the submission of a job. Raises RequestError.

    directory: the one, on every node, from which the script is named.
    """
    for key, given in values.items():
        if not key.startswith("etcd_"):  # credentials: read here, no part of the submission
            _refuse_bytes(given.where, given.text)
    fields, _ = parse_job_fields(values, program)
    fields.setdefault("min_nodes", 1)
    fields.setdefault("max_nodes", 1)
    written = values.get("name")
    job_id = parse_job_id(written) if written else _made_up(program[0])
    slots = _slots(values.get("nproc_per_node"))
    environment = parse_environment(values.get("env"), environ)
    _refuse_bytes("directory", directory)
    for word in program:
        _refuse_bytes("argument", word)
    for variable, value in environment.items():
        _refuse_bytes(f"variable {variable}", value)
    job = JobConfig(job_id=job_id, **fields)
    replica_size = group_size(values, job, slots)
    return pb.Submission(
        protocol=PROTOCOL,
        job_id=job_id,
        wanted=pb.Submission.RUN,
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        slots_per_node=slots,
        priority=_priority(values.get("priority")),
        labels=_labels(values.get("label")),
        user=values["user"].text if "user" in values else "",
        directory=directory,
        environment=environment,
        launch=encode(job, SUBMITTED),
        submitter=submitter,
        submitted_unix_s=now_unix_s,
        size_policy=job.size_policy.record,
        replica_size=replica_size,
    )


def _refuse_bytes(what: str, text: str) -> None:
    """Raises RequestError for a text that is not UTF-8, as which other nodes read a submission."""
    if in_utf8(text) != text:
        raise RequestError(f"{what} {text!r} is not UTF-8; submit with another")


def _made_up(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", PurePath(script).stem)[:40].strip("-")
    return f"{stem or 'job'}-{secrets.token_hex(3)}"


def _slots(written: WrittenValue | None) -> int:
    if written is None or written.text == "auto":
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,4}", written.text):
        raise refuse(written, "not a number of workers", "a number from 1 on, or auto")
    return int(written.text)


def _priority(written: WrittenValue | None) -> int:
    if written is None:
        return 0
    if not _PRIORITY.fullmatch(written.text):
        raise refuse(written, "not a priority", "a whole number, 0 as most jobs have, higher to go first")
    return int(written.text)


def _labels(written: WrittenValue | None) -> dict[str, str]:
    found = {}
    for part in written.text.split(",") if written else ():
        match = _PAIR.fullmatch(part)
        if match is None:
            assert written is not None
            raise refuse(written, f"{part!r} is no label", "NAME=VALUE, several separated by commas")
        found[match[1]] = match[2]
    return found
