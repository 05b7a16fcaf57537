"""The account that workers run under, and what it may access.

A foreground agent's workers run under its own. A service's agent, which is root, runs them under the account that the
job asks for: they get that account's ids, groups and home, and of the agent's files only what is given to them here.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_agent.base.account_name import effective_account
from bagua_agent.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Account:
    """An account that this process may change to."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    @property
    def process_arguments(self) -> dict[str, Any]:
        """Returns the arguments by which subprocess.Popen starts a process under this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}

    def admit(self, directory: Path) -> None:
        """Lets the account's processes pass through `directory` and open what they know the name of; not list it."""
        os.chmod(directory, 0o711)

    def give_socket(self, path: Path) -> None:
        """Makes the socket one that only this account and root can connect to."""
        os.chmod(path, 0o600)
        os.chown(path, self.uid, self.gid)


def find_account(name: str) -> Account | None:
    """Returns the account of this name; None if it is the one that this process has. Raises UserError if there is none,
    or it can't be changed to."""
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise UserError(
            f"user {name!r} does not exist on this node; make it, or submit with another --user"
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise UserError(
            f"workers can't run as {name!r}: this agent runs as {effective_account()!r}, and only root can change users"
        )
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)
