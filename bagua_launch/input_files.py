"""Checks that the files which a request names exist.

Reads the file system of this node, so that a typing error is one line now and not a traceback
from every worker later.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from bagua_agent.base.exec_limits import USUAL_STACK_BYTES, why_not_passed
from bagua_agent.config.job_config import CommandKind, StoreCredentials, WorkerCommand
from bagua_agent.workers.process.foreign_files import why_no_script
from bagua_launch.errors import RequestError

OF_AGENT = ("certs", "check", "example-config", "install", "serve", "uninstall")
"""The commands of bagua-agent, which is not imported here."""


def current_directory() -> str:
    """Returns the current directory. Raises RequestError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RequestError("the current directory is gone; change to one that exists") from None


def check_command(command: WorkerCommand, commands: tuple[str, ...] = ()) -> None:
    """Checks that the script, module or program exists and can be used. Raises RequestError.

    commands: bagua-launch's own, for a better hint.
    """
    target, directory = command.target, current_directory()
    if command.kind is CommandKind.MODULE:
        # only its first part is looked up: finding the rest would import the user's packages
        top = target.split(".")[0]
        found = top in sys.builtin_module_names or PathFinder.find_spec(top, [directory, *sys.path])
        # packages that are installed in editable form have a finder of their own
        if not found and not any(finder.find_spec(top, None) for finder in sys.meta_path):
            raise RequestError(f"--module {target!r}: no module {top!r}; use one that python can import here")
        if target.endswith(".py") and os.path.isfile(target):
            raise RequestError(f"--module {target!r}: a file; use {target[:-3]!r}, or leave --module out")
    elif command.kind is CommandKind.EXECUTABLE:
        if shutil.which(target) is None:
            raise RequestError(f"{target!r}: no such program; use a path, or a name found on PATH")
    elif not os.path.exists(target):
        raise RequestError(f"{target!r}: no such script in {directory}; use {_script_hint(target, commands)}")
    elif other_kind := why_no_script(Path(target)):
        raise RequestError(f"{target!r}: {other_kind}; use an ordinary file")
    elif not os.access(target, os.R_OK):
        raise RequestError(f"{target!r}: not readable; use a script that this user may read")


def check_passed(
    command: WorkerCommand, environment: Mapping[str, str], stack_bytes: int = USUAL_STACK_BYTES
) -> None:
    """Checks that Linux can pass these to a program. Raises RequestError. stack_bytes: as for `why_not_passed`."""
    if reason := why_not_passed(command.words, environment, stack_bytes):
        raise RequestError(reason)


def _script_hint(target: str, commands: tuple[str, ...]) -> str:
    from difflib import get_close_matches

    if target in OF_AGENT:
        return f"bagua-agent {target}, whose command that is, or the path of an existing script"
    if os.path.isfile(f"{target}.py"):
        return repr(f"{target}.py")
    # no command is written like a file, and "train.py" is near "drain"
    if target.isalpha() and (near := get_close_matches(target, commands, n=1)):
        return f"bagua-launch {near[0]} ... with the command first, or an existing script"
    if target.isdecimal():
        return f"the path of an existing script, or --dashboard={target} for a page at this port"
    folder = os.path.dirname(target) or "."
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if near := get_close_matches(os.path.basename(target), names, n=1):
        return repr(os.path.join(os.path.dirname(target), near[0]))
    return "the path of an existing script, or --module, or --no-python"


def check_credentials(credentials: StoreCredentials) -> None:
    """Checks that the files of credentials can be read. Raises RequestError."""
    for flag, path in (
        ("--etcd-ca", credentials.ca_file),
        ("--etcd-cert", credentials.cert_file),
        ("--etcd-key", credentials.key_file),
        ("--etcd-password-file", credentials.password_file),
    ):
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise RequestError(f"{flag} {path!r}: {error.strerror}; use a readable file") from error
