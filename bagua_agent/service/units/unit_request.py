"""Decides exactly what this node runs for a submission, and whether it may. Pure, apart from checks of what exists.

The submission contains what its submitter may choose. Account, log directory, store, slots and where the agent sends
and serves metrics are this node's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from bagua_agent.autotune.sampling import check_installed
from bagua_agent.base.errors import UserError
from bagua_agent.base.exec_limits import why_not_passed
from bagua_agent.base.sizes import SizePolicy
from bagua_agent.cluster.cluster_records import nonce_of
from bagua_agent.config.job_config_file import SUBMITTED, decode
from bagua_agent.dashboard.listening import Listening
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.units.units import PATH, UnitRequest
from bagua_contract import cluster_pb2 as pb

REDIRECTS = "3"  # a service's workers have no terminal: both streams go to files, which `logs` reads
_TIME_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}")


def unit_request(
    submission: pb.Submission, slots: tuple[int, ...], config: AgentConfig, *, have_gpus: bool
) -> UnitRequest:
    """Returns what this node runs for a submission. Raises UserError if this node does not run such a job."""
    account = submission.user or config.jobs_default_user
    if not config.may_run_as(account):
        allowed = ", ".join((config.jobs_default_user, *config.jobs_users))
        raise UserError(
            f"jobs don't run as {account!r} on {config.node_name}; use {allowed}, or list it in jobs.users"
        )
    if not submission.directory.startswith("/"):
        raise UserError(
            f"directory {submission.directory!r} is not absolute; submit from the script's directory"
        )
    if "\0" in submission.directory:
        raise UserError(f"directory {submission.directory!r} holds a zero byte; submit from another")
    job = decode(
        submission.launch,
        SUBMITTED,
        job_id=submission.job_id,
        min_nodes=submission.min_nodes,
        max_nodes=submission.max_nodes,
        size_policy=SizePolicy.of(submission.size_policy),
        slots=len(slots),
        endpoints=config.etcd_endpoints,
        store_credentials=config.store_credentials,
        log_dir=config.directories_log,
        max_log_mib=config.jobs_max_log_mib,
        redirects=REDIRECTS,
        run_as=account,
        node_name=config.node_name,
        submission=nonce_of(submission),
        ends_when_all_leave=False,
        local_addr=config.listen_address or None,
        **_metrics(config),
        otel=config.jobs_otel or None,
    )
    if job.autotune_level:
        check_installed()
    environment = {"PATH": PATH, "LANG": "C.UTF-8", **_allowed(submission.environment, config)}
    if have_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    if reason := why_not_passed(job.command.words, environment):
        raise UserError(f"{config.node_name} can't run it: {reason}")
    return UnitRequest(job, environment, submission.directory)


def _metrics(config: AgentConfig) -> dict[str, Any]:
    """Returns the configuration of the agent's metrics. They are served where the daemon serves its own, and to the
    same callers."""
    if not config.jobs_metrics:
        return {}
    return {
        "metrics_port": 0,
        "metrics_host": Listening.parse(config.dashboard_listen).host,
        "metrics_tls": () if config.tls_files is None else astuple(config.tls_files),
    }


def _allowed(asked: Mapping[str, str], config: AgentConfig) -> dict[str, str]:
    refused = sorted(name for name in asked if not config.may_set(name))
    if refused:
        raise UserError(
            f"{config.node_name} lets no job set {', '.join(refused)}; leave it out, or list it in jobs.environment"
        )
    zone = asked.get("TZ", "")
    if zone and not _TIME_ZONE.fullmatch(zone):
        # the C library opens what it names, in the agent too
        raise UserError(
            f"TZ {zone!r} is no time zone; use a name such as Europe/Berlin or UTC, or leave it out"
        )
    return dict(asked)
