"""Implements `bagua-launch`: reads the request, passes it to the agent, exits with its code.

Imports nothing heavy (no torch, gRPC, etcd) before the request is checked: mistakes and --help are
answered at once, and the agent starts sooner.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import click

from bagua_agent.base import standard_streams
from bagua_agent.base.imports import uncollected
from bagua_agent.base.quiet_grpc import keep_quiet
from bagua_launch import cluster_commands, scalar_values
from bagua_launch.bagua_net import net_variables
from bagua_launch.cluster_options import FILE_OPTIONS
from bagua_launch.command_line import (
    CONTEXT,
    PROGRAM,
    DefaultRunGroup,
    GroupedCommand,
    completion_script,
    note,
    parameters,
    program_argument,
)
from bagua_launch.config_file import read_config_file
from bagua_launch.environment_request import parse_environment
from bagua_launch.errors import refuse
from bagua_launch.input_files import check_command, check_credentials, check_passed
from bagua_launch.job_request import parse_job_fields, parse_request, parse_scale
from bagua_launch.options import RUN_OPTIONS, SCALE_OPTIONS
from bagua_launch.original_flags import HINTS
from bagua_launch.precedence import merge
from bagua_launch.rendezvous_request import parse_job_id, without_other_nodes
from bagua_launch.ssh_hosts import parse_hosts
from bagua_launch.written_values import Values

_RUN_HELP = """Start this node's part in a job: one agent, and its workers running SCRIPT.

Every node runs the same line. Options go before SCRIPT; what follows it is the script's own. Dashes and
underscores are alike.

Each option can also be set by a variable (PET_NNODES for --nnodes; BAGUA_LEDGER for our own --ledger) or
in the TOML file $BAGUA_CONFIG, else ~/.config/bagua/launch.toml (nnodes = "2:8"). The flag is strongest, then
the variable, then the file."""

_GROUP_HELP = (
    _RUN_HELP
    + """

\b
Examples:
  bagua-launch --nproc-per-node 2 train.py --lr 0.1
  bagua-launch --nnodes 2:8 --rdzv-endpoint etcd-1:2379 --rdzv-id demo train.py
  bagua-launch scale --etcd etcd-1:2379 demo 4:8"""
)

_SCALE_HELP = """Change how many nodes a running job may have.

NODES is a number, or the least and the most as MIN:MAX. JOB is the job's id, which --rdzv-id can give too. The job
follows at its next step boundary."""


def run(**typed: Any) -> int:
    program = typed.pop("program")
    only_typed = click.get_current_context().obj or frozenset()  # of a node that --hosts started
    values = merge(RUN_OPTIONS, typed, os.environ, read_config_file(os.environ, FILE_OPTIONS), only_typed)
    values = without_other_nodes(typed, values)
    if "print_completion" in values:
        click.echo(completion_script(values["print_completion"], cli))
        return 0
    if "hosts" in values:
        return _run_on_hosts(values, program)
    request = parse_request(values, program)
    check_command(request.config.command, tuple(cli.commands))
    check_passed(request.config.command, os.environ, resource.getrlimit(resource.RLIMIT_STACK)[0])
    if not scalar_values.is_on(values, "standalone") or request.config.dashboard is not None:
        check_credentials(request.config.store_credentials)
    if request.config.autotune_level:
        from bagua_agent.autotune.sampling import check_installed

        check_installed()
    for line in request.notes:
        note(line)
    os.environ.update(net_variables(values))  # which the workers inherit

    _load_run_job()
    from bagua_agent.job.run import run_job

    return run_job(request.config)


@cache
def _load_run_job() -> None:
    """Once: nothing of a job may escape collection."""
    with uncollected():
        import bagua_agent.job.run  # noqa: F401


def _run_on_hosts(values: Values, program: Sequence[str]) -> int:
    hosts = parse_hosts(values["hosts"])
    fields, _ = parse_job_fields(values, program)
    if fields.get("max_nodes", len(hosts)) > len(hosts):
        raise refuse(
            values["nnodes"], f"{len(hosts)} hosts are given", f"at most {len(hosts)}, or more --hosts"
        )
    check_command(fields["command"], tuple(cli.commands))
    job_id = parse_job_id(values["rdzv_id"]) if "rdzv_id" in values else f"job-{secrets.token_hex(4)}"
    environment = parse_environment(values.get("env"), os.environ)
    check_passed(fields["command"], environment)

    from bagua_launch.ssh_run import SshJob

    return SshJob(hosts, values, program, job_id=job_id, environment=environment).run()


def scale(**typed: Any) -> int:
    words, as_json = typed.pop("words"), typed.pop("json")
    asked = parse_scale(
        merge(SCALE_OPTIONS, typed, os.environ, read_config_file(os.environ, FILE_OPTIONS)), words
    )
    check_credentials(asked.credentials)

    from bagua_agent.cluster_client.scale import request_scale

    change = request_scale(
        asked.endpoints, asked.job_id, asked.min_nodes, asked.max_nodes, credentials=asked.credentials
    )
    click.echo(json.dumps(asdict(change)) if as_json else str(change))
    return 0


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from bagua_contract.distribution import own_version

    click.echo(f"{PROGRAM} {own_version() or '(not installed: running from its sources)'}")
    ctx.exit()


cli = DefaultRunGroup(
    PROGRAM,
    help=_GROUP_HELP,
    context_settings=CONTEXT,
    subcommand_metavar="[OPTIONS] SCRIPT [ARGUMENTS]...",
    options_metavar="",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        )
    ],
    commands={
        "run": GroupedCommand(
            "run",
            callback=run,
            help=_RUN_HELP,
            short_help="Start this node's part in a job (the default).",
            context_settings=CONTEXT,
            options_metavar="[OPTIONS]",
            params=[
                *parameters(RUN_OPTIONS),
                program_argument(),
            ],
        ),
        "scale": GroupedCommand(
            "scale",
            callback=scale,
            help=_SCALE_HELP,
            short_help="Change how many nodes a running job may have.",
            context_settings={**CONTEXT, "allow_interspersed_args": True},
            params=[
                *parameters(SCALE_OPTIONS),
                click.Argument(["words"], nargs=-1, required=True, metavar="[JOB] NODES"),
                cluster_commands.JSON,
            ],
        ),
        **cluster_commands.COMMANDS,
    },
)

cli.hints = HINTS


def main() -> None:
    standard_streams.open_missing()
    keep_quiet()
    cli(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
