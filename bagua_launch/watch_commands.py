"""Implements `top` and `dashboard`: show a job in this terminal, or as a page of this machine.

Thin: look, then show.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from bagua_agent.base.plain_text import plain_line
from bagua_launch.command_line import note
from bagua_launch.errors import RequestError
from bagua_launch.live_screen import live_screen

if TYPE_CHECKING:
    from bagua_agent.config.job_config import StoreCredentials
    from bagua_agent.dashboard.listening import Listening
    from bagua_agent.etcd.client import Store
    from bagua_agent.security.https import HttpsSide

    DashboardPlace = tuple[Listening, HttpsSide | None]

TOP_HELP = (
    "Show a job live: its verdict, nodes, ranks, speed and goodput.\n\nIn a terminal the screen is renewed; elsewhere "
    "each look prints a line. Ends with the job, or by q."
)
DASHBOARD_HELP = (
    "Serve the page about a job, or about the cluster, from this machine.\n\nFor any job that the etcd knows, "
    "submitted or started by hand; a job that was started with --dashboard serves one itself. Without JOB: nodes, "
    "slots, the queue, and a page for each job."
)
TOP_OPTIONS = (
    click.Option(
        ["--every"],
        type=click.FloatRange(0.2, 3600),
        metavar="SECONDS",
        help="Between two looks. Default 1, and 5 elsewhere.",
    ),
    click.Option(["--once"], is_flag=True, help="Print one whole look and exit."),
)
LISTEN = click.Option(
    ["--listen"],
    default="",
    metavar="PORT",
    help="A port, or HOST:PORT. Default 127.0.0.1:7465, or a free port.",
)
_FIRST_LOOKS_S = 1.0  # between the first two of --once: a speed needs two


def top(store: Store, job_id: str, *, every_s: float | None, once: bool, as_json: bool) -> int:
    """Shows a job live. Returns the exit code. Raises UserError if there is no such job, and StoreUnavailable."""
    from bagua_agent.cluster_client.cluster_requests import unknown_job
    from bagua_agent.dashboard import terminal_text
    from bagua_agent.dashboard.page_data import finite, page_data
    from bagua_agent.observation.agent_calls import JobAgents
    from bagua_agent.observation.job_facts import read_facts
    from bagua_agent.observation.series import JobSeries

    live = sys.stdout.isatty() and not as_json and not once
    period_s = every_s or (1.0 if live else 5.0)
    agents, series = JobAgents(store, job_id), JobSeries()
    looks = 0
    try:
        with live_screen() if live else nullcontext() as screen:
            while True:
                facts = read_facts(store, agents, job_id)
                if facts is None:
                    raise unknown_job(store, job_id)
                series.take(facts)
                looks += 1
                page = page_data(facts, series, "")
                over = facts.result is not None or (once and looks > 1)
                if as_json:
                    if over or not once:
                        click.echo(json.dumps(finite(page), allow_nan=False))
                elif screen is not None:
                    size = screen.size
                    screen.show(terminal_text.screen(page, size.columns, size.lines), size.lines)
                elif once:
                    if over:
                        click.echo("\n".join(terminal_text.whole(page)))
                else:
                    click.echo(terminal_text.summary_line(page))
                if over:
                    break
                if screen is None:
                    time.sleep(_FIRST_LOOKS_S if once else period_s)
                elif screen.quits_within(period_s):
                    return 0
    except KeyboardInterrupt:
        return 0
    finally:
        agents.close()
    if live:
        click.echo(terminal_text.summary_line(page))
    return 0


def dashboard_place(listen: str, credentials: StoreCredentials) -> DashboardPlace:
    """Returns where a page is served, and with which TLS. Raises RequestError and UserError."""
    from bagua_agent.dashboard.exposure import https_side
    from bagua_agent.dashboard.listening import Listening

    try:
        listening = Listening.parse(listen)
    except ValueError as error:
        raise RequestError(f"--listen: {error}; use a port, or HOST:PORT") from error
    return listening, https_side(listening, credentials, "--listen")


def dashboard(store: Store, place: DashboardPlace, job_id: str | None) -> int:
    """Serves the page until Ctrl-C. Returns the exit code. job_id: None for the cluster.

    Raises UserError if there is no such job, and InfrastructureLost if the address can't be used.
    """
    from bagua_agent.base.errors import InfrastructureLost
    from bagua_agent.cluster_client.cluster_requests import unknown_job
    from bagua_agent.dashboard.cluster_collector import ClusterCollector
    from bagua_agent.dashboard.collector import Collector
    from bagua_agent.dashboard.server import Dashboard
    from bagua_agent.etcd.keys import JobKeys

    if job_id is not None and store.get(JobKeys(job_id).spec) is None:
        raise unknown_job(store, job_id)
    cluster = ClusterCollector(store, note) if job_id is None else None
    listening, tls = place
    page = Dashboard(listening, cluster=cluster, tls=tls)
    collector: Collector | None = None
    try:
        if not page.address:
            what = "the cluster's page" if job_id is None else f"the page of job {job_id!r}"
            raise InfrastructureLost(f"can't serve {what}: see above; use another --listen")
        page.start()
        if job_id is not None:
            collector = Collector(store, job_id)
            page.watch(collector)
        ends = "the cluster goes on" if job_id is None else "the job goes on"
        click.echo(plain_line(f"dashboard at {page.url}; Ctrl-C ends it, and {ends}"))
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        for made in (collector, cluster):
            if made is not None:
                made.stop()
        page.stop()
