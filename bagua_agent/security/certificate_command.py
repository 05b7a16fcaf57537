"""Makes certificates from the command line: bagua-agent certs --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bagua_agent.base.errors import BaguaError, UserError
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.security.certificate_files import (
    create_authority,
    files_in,
    issue_files,
    issued_in,
    read_authority,
    read_certificates,
    retire,
    retired_in,
    utc_now,
)
from bagua_agent.security.certificates import AUTHORITY_DAYS, CERTIFICATE_DAYS, ROOT_NAME, Role
from bagua_agent.security.etcd_role_writer import apply

_folder = click.argument("folder", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def certs() -> None:
    """A certificate authority in FOLDER for etcd, nodes and people; see docs/security.md."""


@certs.command()
@_folder
@click.option("--days", type=int, default=AUTHORITY_DAYS, show_default=True)
def authority(folder: Path, days: int) -> None:
    """Make a new authority."""
    path = create_authority(folder, now=utc_now(), days=days)
    click.echo(f"{path} {_expiry(path)}\nIts key stays here; copy what is issued, never this.")


@certs.command()
@_folder
@click.argument("name")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True)
@click.option(
    "--host", multiple=True, help="Name or address at which an agent or etcd is reached; repeat it."
)
@click.option("--days", type=int, default=CERTIFICATE_DAYS, show_default=True)
@click.option("--replace", is_flag=True, help="Replace the certificate that NAME has.")
def issue(folder: Path, name: str, role: str, host: tuple[str, ...], days: int, replace: bool) -> None:
    """Issue a certificate into FOLDER/NAME. NAME is the holder, who is etcd's user of this name."""
    files = issue_files(folder, name, Role(role), host, now=utc_now(), days=days, replace=replace)
    click.echo(f"{files.cert_file} {_expiry(Path(files.cert_file))}")


@certs.command("list")
@_folder
def list_holders(folder: Path) -> None:
    """Who holds a certificate."""
    end = read_authority(folder).certificate.not_valid_after_utc
    click.echo(f"the authority  until {end:%Y-%m-%d}")
    for holder in issued_in(folder, utc_now()):
        click.echo(f"{holder.name}  {holder.role}  until {holder.expires:%Y-%m-%d}")
    for name in retired_in(folder):
        click.echo(f"{name}  retired")


@certs.command("retire")
@_folder
@click.argument("name")
def retire_holder(folder: Path, name: str) -> None:
    """Never use NAME again: its key was lost, or it has left."""
    path = retire(folder, name, now=utc_now())
    click.echo(f"{name} is retired; copy {path} to every node and member of etcd, and run etcd-users")


@certs.command()
@_folder
@click.option("--etcd", "--rdzv-endpoint", "--endpoints", "endpoints", required=True, metavar="HOST:PORT,...")
def etcd_users(folder: Path, endpoints: str) -> None:
    """Make etcd's users and rights those of the certificates; retired ones go."""
    steps = apply(_as_root(folder, endpoints), issued_in(folder, utc_now()), retired_in(folder))
    click.echo("\n".join(map(str, steps)) or "nothing to do")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code. Errors of the commands are one line on stderr; raises ClickException
    for words that are wrong."""
    try:
        return certs.main(arguments, "bagua-agent certs", standalone_mode=False) or 0
    except BaguaError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _as_root(folder: Path, endpoints: str) -> StoreConfig:
    files = files_in(folder / ROOT_NAME)
    if not Path(files.cert_file).exists():
        raise UserError(
            f"{str(folder / ROOT_NAME)!r}: etcd's users are changed as {ROOT_NAME!r}, who has no certificate; "
            f"issue {ROOT_NAME} --role {Role.OPERATOR} first"
        )
    return StoreConfig(parse_endpoints(endpoints), files.ca_file, files.cert_file, files.key_file)


def _expiry(path: Path) -> str:
    return (
        f"is valid until {read_certificates(path, 'certificate')[0].not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    )
