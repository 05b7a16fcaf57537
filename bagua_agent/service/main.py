"""`bagua-agent`: the node's daemon, and what an operator does on a node."""

from __future__ import annotations

import sys

import click

from bagua_agent.errors import BaguaError
from bagua_agent.service.agent_config import DEFAULT_PATH
from bagua_agent.service.agent_config_keys import example_config

_config = click.option(
    "--config", default=DEFAULT_PATH, show_default=True, metavar="FILE", help="Its TOML file."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The daemon of a node: runs the jobs that people submit with `bagua-launch submit`."""


@cli.command()
@_config
@click.option("--plain-units", is_flag=True, help="Run jobs as plain processes also where there is systemd.")
def serve(config: str, plain_units: bool) -> int:
    """Run the daemon until it is told to stop; jobs go on."""
    from bagua_agent.service.serve import serve as run

    return run(config, plain_units=plain_units)


@cli.command("example-config")
def show_example_config() -> int:
    """Print a configuration file with every key and what it means."""
    click.echo(example_config())
    return 0


def main() -> None:
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
