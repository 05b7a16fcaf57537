"""Implements `bagua-launch collectives`: shows the collectives that a job's workers have under way."""

from __future__ import annotations

import json
from typing import Any

import click

from bagua_agent.base.errors import UserError
from bagua_launch.cluster_access import open_store, values_of
from bagua_launch.cluster_options import CLUSTER_OPTIONS

COLLECTIVES_HELP = (
    "Show the collectives that workers have under way.\n\nFirst those that last, with the ranks that have not begun "
    "them; then each worker's, of Bagua's communicators and of torch's process groups."
)
COLLECTIVES_PARAMETERS = (
    click.Argument(["job"]),
    click.Option(["--rank"], type=click.IntRange(0), metavar="N", help="Show this global rank first."),
)


def collectives(**typed: Any) -> int:
    """Prints a job's collectives under way. Returns the exit code.

    Raises UserError if there is no such job or rank, and StoreUnavailable.
    """
    job_id, rank, as_json = (typed.pop(n) for n in ("job", "rank", "json"))
    with open_store(values_of(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client.cluster_requests import unknown_job
        from bagua_agent.observation import collectives as shown
        from bagua_agent.observation.agent_calls import JobAgents
        from bagua_agent.observation.job_collectives import read_collectives
        from bagua_agent.observation.job_facts import read_facts

        agents = JobAgents(store, job_id)
        try:
            facts = read_facts(store, agents, job_id)
            if facts is None:
                raise unknown_job(store, job_id)
            found = read_collectives(agents, facts)
        finally:
            agents.close()
    if not found:
        why = f" ({facts.problem})" if facts.problem else ""
        raise UserError(f"job {job_id!r} has no worker now{why}; see `bagua-launch status {job_id}`")
    if rank is not None and not any(worker.rank == rank for worker in found):
        raise UserError(
            f"job {job_id!r} has no rank {rank} on a node that answers; leave out --rank to see all"
        )
    if as_json:
        click.echo(json.dumps(shown.as_json(found)))
    else:
        click.echo(shown.text_of(found, rank), nl=False)
    return 0
