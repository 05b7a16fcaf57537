"""Changes this process's working directory with the rights of another account, and not with ours.

A process that is in a directory can access the files below it, whatever the directories above allow. A root agent that
changed into a directory which a job names would give the job's workers access to places that are closed to them.
"""

from __future__ import annotations

import os

from bagua_agent.workers.process.account import Account


def enter_as(directory: str, account: Account) -> None:
    """Changes into `directory` with the rights of `account`. For a process with one thread, as for a moment it acts as
    `account`. Raises OSError if the account may not enter it."""
    groups, group, user = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups(account.groups)
    try:
        os.setegid(account.gid)
        os.seteuid(account.uid)  # last, and first to be undone: it takes the right to change the others
        os.chdir(directory)
    finally:
        os.seteuid(user)
        os.setegid(group)
        os.setgroups(groups)
