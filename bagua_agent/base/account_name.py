"""Names this process's account for people. An account may have no name: one of a container, or of a directory service
that is away."""

from __future__ import annotations

import getpass
import os
import pwd
import socket

from bagua_agent.base.plain_text import in_utf8


def effective_account() -> str:
    """Returns the name of the account whose rights this process has, or `uid N`."""
    uid = os.geteuid()
    try:
        return in_utf8(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"uid {uid}"


def user_at_host() -> str:
    """Returns the user who has logged in, as its variables or the accounts of this host name it, and the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # which one depends on the version of Python
        user = f"uid {os.getuid()}"
    return in_utf8(f"{user}@{socket.gethostname()}")
