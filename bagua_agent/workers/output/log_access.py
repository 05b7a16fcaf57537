"""Makes the directories and files of a job's output, and says who may read them.

The files belong to the job's account and are readable only by it and by the group of the directory that holds all jobs'
output, which an operator chooses. The directories are the agent's own: the account may pass through them to its files,
and can create no other files there for the agent to open.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from bagua_agent.workers.process.account import Account

FILE_MODE = 0o640
OWN_DIRECTORY_MODE = 0o750
# Of an agent whose workers run under another account, which passes through by the last bit: it is of neither.
PASSABLE_DIRECTORY_MODE = 0o751


def make_directories(path: Path, below: Path, account: Account | None) -> None:
    """Makes `path` and what is missing between it and `below`. account: as in `open_file`. Raises OSError."""
    below.mkdir(parents=True, exist_ok=True)
    for directory in (*reversed([p for p in path.parents if p.is_relative_to(below)][:-1]), path):
        try:
            os.mkdir(directory, OWN_DIRECTORY_MODE if account is None else PASSABLE_DIRECTORY_MODE)
        except FileExistsError:
            if not directory.is_dir():
                raise
            if account is not None:
                _check_own(os.lstat(directory), directory)
            continue
        if account is not None:
            os.chmod(directory, PASSABLE_DIRECTORY_MODE)  # whatever the umask
        if os.geteuid() == 0:
            os.chown(directory, -1, directory.parent.stat().st_gid)


def open_file(path: Path, account: Account | None, *, new: bool = False) -> int:
    """Returns a descriptor for appending to `path`, which is made if it is missing. Raises OSError.

    account: whose workers print there; None: the agent's own. new: it must not be there. A file that is there must be
    an ordinary one of this agent or the account, under this name alone.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError:
        if new:
            raise
        descriptor = os.open(path, flags)
        try:
            _check_ours(os.fstat(descriptor), path, account)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    try:
        if os.geteuid() == 0:
            os.fchown(descriptor, -1 if account is None else account.uid, path.parent.stat().st_gid)
        if account is not None:
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_own(found: os.stat_result, directory: Path) -> None:
    """Checks that what was found is a directory of the agent's own; raises OSError if it is not. Where others may make
    directories, one of theirs may lead anywhere."""
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it is there already and is not the agent's own", str(directory))


def _check_ours(found: os.stat_result, path: Path, account: Account | None) -> None:
    owners = {os.geteuid()} if account is None else {os.geteuid(), account.uid}
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in owners:
        raise OSError(errno.EPERM, "it is there already and is no file of this job's", str(path))
