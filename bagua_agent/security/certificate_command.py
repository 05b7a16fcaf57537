"""Makes certificates from the command line: bagua-agent certs --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Errors are one line on stderr."""
    asked = _parser().parse_args(arguments)
    try:
        for line in _do(asked):
            print(line)
    except BaguaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua-agent certs",
        description="A certificate authority in FOLDER for etcd, nodes and people; see docs/security.md.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.add_argument("folder", type=Path, metavar="FOLDER")
        return added

    authority = command("authority", "Make a new authority.")
    authority.add_argument("--days", type=int, default=AUTHORITY_DAYS, help="Default %(default)s.")

    issue = command("issue", "Issue a certificate into FOLDER/NAME.")
    issue.add_argument("name", metavar="NAME", help="The holder, who is etcd's user of this name.")
    issue.add_argument("--role", type=Role, choices=list(Role), required=True)
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        help="Name or address at which an agent or etcd is reached; repeat it.",
    )
    issue.add_argument("--days", type=int, default=CERTIFICATE_DAYS, help="Default %(default)s.")
    issue.add_argument("--replace", action="store_true", help="Replace the certificate that NAME has.")

    command("list", "Who holds a certificate.")
    retired = command("retire", "Never use NAME again: its key was lost, or it has left.")
    retired.add_argument("name", metavar="NAME")

    users = command("etcd-users", "Make etcd's users and rights those of the certificates; retired ones go.")
    users.add_argument("--endpoints", required=True, metavar="HOST:PORT,...")
    return parser


def _do(asked: argparse.Namespace) -> list[str]:
    now = utc_now()
    folder: Path = asked.folder
    match asked.command:
        case "authority":
            path = create_authority(folder, now=now, days=asked.days)
            return [f"{path} {_expiry(path)}", "Its key stays here; copy what is issued, never this."]
        case "issue":
            files = issue_files(
                folder, asked.name, asked.role, asked.host, now=now, days=asked.days, replace=asked.replace
            )
            return [f"{files.cert_file} {_expiry(Path(files.cert_file))}"]
        case "list":
            end = read_authority(folder).certificate.not_valid_after_utc
            holders = [f"{h.name}  {h.role}  until {h.expires:%Y-%m-%d}" for h in issued_in(folder, now)]
            return [
                f"the authority  until {end:%Y-%m-%d}",
                *holders,
                *(f"{name}  retired" for name in retired_in(folder)),
            ]
        case "retire":
            path = retire(folder, asked.name, now=now)
            return [
                f"{asked.name} is retired; copy {path} to every node and member of etcd, and run etcd-users"
            ]
        case _:
            steps = apply(_as_root(folder, asked.endpoints), issued_in(folder, now), retired_in(folder))
            return [str(step) for step in steps] or ["nothing to do"]


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
