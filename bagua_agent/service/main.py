"""Implements `bagua-agent`: the node's daemon, and an operator's commands on a node."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable
from typing import Any

import click

from bagua_agent.base import standard_streams
from bagua_agent.base.account_name import effective_account
from bagua_agent.base.errors import BaguaError, UserError
from bagua_agent.base.quiet_grpc import keep_quiet
from bagua_agent.service.config.agent_config import DEFAULT_PATH
from bagua_agent.service.config.agent_config_keys import Value, example_config, single_machine

_config = click.option(
    "--config", default=DEFAULT_PATH, show_default=True, metavar="FILE", help="Its TOML file."
)
_json = click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from bagua_contract.distribution import own_version

    click.echo(f"bagua-agent {own_version() or '(not installed: running from its sources)'}")
    ctx.exit()


OF_LAUNCH = {
    "collectives", "dashboard", "delete", "drain", "events", "list", "logs", "nodes", "ps", "run", "scale", "status",
    "stop", "submit", "top", "trace", "tune", "undrain",
}  # fmt: skip
"""The commands of bagua-launch, which stays unimported here."""


class _Group(click.Group):
    """Names the other program where a word is a command of that one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in OF_LAUNCH and args[0] not in self.commands:
            ctx.fail(f"{args[0]!r} is a command of bagua-launch; use bagua-launch {args[0]}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def cli() -> None:
    """The daemon of a node: runs the jobs that people submit with `bagua-launch submit`."""


@cli.command()
@_config
@click.option("--plain-units", is_flag=True, help="Run jobs as plain processes also where there is systemd.")
def serve(config: str, plain_units: bool) -> int:
    """Run the daemon until it is stopped; jobs continue."""
    from bagua_agent.service.serve import serve as run

    return run(config, plain_units=plain_units)


@cli.command()
@_config
@click.option(
    "--etcd",
    "--rdzv-endpoint",
    "etcd",
    metavar="ENDPOINTS",
    help="The cluster's etcd, as HOST:PORT or https://HOST:PORT[,...].",
)
@click.option(
    "--ca-file", "--etcd-ca", "ca_file", metavar="FILE", help="Authority of etcd and of the daemons."
)
@click.option(
    "--cert-file", "--etcd-cert", "cert_file", metavar="FILE", help="This node's certificate, role agent."
)
@click.option("--key-file", "--etcd-key", "key_file", metavar="FILE", help="Its key.")
@click.option(
    "--revoked-file",
    metavar="FILE",
    help="Certificates that the daemon refuses. Default: revoked.pem beside --ca-file, if it exists.",
)
@click.option("--node-name", metavar="NAME", help="Default: the host name.")
@click.option("--slots", metavar="N|gpu|cpu", help="Workers it can run.")
@click.option("--user", metavar="NAME", help="Account of jobs, made if there is none.")
@click.option("--insecure", is_flag=True, help="Use etcd beyond this host without TLS and authentication.")
@_json
def install(config: str, as_json: bool, **typed: Any) -> int:
    """Make this node one of a cluster: configuration, account, service. Again does nothing that is done."""
    from bagua_agent.service.install import install as run

    done = run(config, _wanted(typed), _sayer(as_json))
    _tell_changes(done.changes, as_json, "all is there already")
    return 0


@cli.command()
@_config
@click.option("--force", is_flag=True, help="Kill the jobs that run here.")
@_json
def uninstall(config: str, force: bool, as_json: bool) -> int:
    """Stop and remove the service; configuration, account and jobs' output stay."""
    from bagua_agent.service.install import uninstall as run

    done = run(config, _sayer(as_json), force=force)
    _tell_changes(done.changes, as_json, "nothing was there")
    return 0


def _sayer(as_json: bool) -> Callable[[str], None]:
    """Returns a function that prints progress as it happens; with --json the result is printed at the end."""
    return (lambda line: None) if as_json else click.echo


def _tell_changes(changes: tuple[str, ...], as_json: bool, if_none: str) -> None:
    if as_json:
        click.echo(json.dumps({"changes": changes}))
    elif not changes:
        click.echo(if_none)


@cli.command()
@_config
@_json
def check(config: str, as_json: bool) -> int:
    """Look at this node: what would keep jobs away, and what to do about it. Exit code 1 if anything would."""
    from bagua_agent.security.certificate_files import utc_now
    from bagua_agent.service.config.agent_config import read_agent_config
    from bagua_agent.service.install import daemon_is_active
    from bagua_agent.service.node.node_checks import check_node, troubles

    read = read_agent_config(config, utc_now())
    found = check_node(read, daemon_runs=daemon_is_active())
    if as_json:
        click.echo(
            json.dumps([{"what": f.what, "weight": f.weight.name.lower(), "text": f.text} for f in found])
        )
    for finding in () if as_json else found:
        click.echo(str(finding))
    return 1 if troubles(found) else 0


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def certs(words: tuple[str, ...]) -> int:
    """Certificates for etcd, nodes and people: a small authority in a folder."""
    from bagua_agent.security.certificate_command import main as run

    return run(list(words))


def _wanted(typed: dict[str, Any]) -> dict[str, Value]:
    """Returns the keys of the configuration that were asked for."""
    wanted: dict[str, Value] = {}
    if typed["insecure"]:
        wanted["insecure"] = True
    if typed["etcd"]:
        wanted["etcd.endpoints"] = tuple(typed["etcd"].split(","))
    for name in ("ca_file", "cert_file", "key_file"):
        if typed[name]:
            wanted[f"etcd.{name}"] = wanted[f"tls.{name}"] = typed[name]
    if typed["revoked_file"]:
        wanted["tls.revoked_file"] = typed["revoked_file"]
    if typed["node_name"]:
        wanted["node.name"] = typed["node_name"]
    if typed["slots"]:
        wanted["node.slots"] = int(typed["slots"]) if typed["slots"].isdecimal() else typed["slots"]
    if typed["user"]:
        wanted["jobs.default_user"] = typed["user"]
    return wanted


@cli.command("example-config")
@click.option(
    "--single-machine", "alone", is_flag=True, help="Of a cluster of this machine alone, run by this account."
)
def show_example_config(alone: bool) -> int:
    """Print a configuration file with every key and what it means."""
    try:
        account = pwd.getpwuid(os.geteuid()) if alone else None
    except KeyError:
        raise UserError(
            f"{effective_account()} has no name on this machine, and jobs run under a name; use an account that has one"
        ) from None
    click.echo(example_config(single_machine(account.pw_name, account.pw_dir) if account else None))
    if account and account.pw_name == "root":  # a file of another account names it as the default
        click.echo("bagua-agent: jobs do not run as root by default; submit with --user root", err=True)
    return 0


def main() -> None:
    standard_streams.open_missing()
    keep_quiet()
    try:
        sys.exit(cli(prog_name="bagua-agent", standalone_mode=False) or 0)
    except BaguaError as error:
        click.echo(f"bagua-agent: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"bagua-agent: {error.format_message()}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
