"""Opens /dev/null in place of standard streams that a program was started without.

Otherwise the next file or socket that the program opens takes the number of stdin, stdout or stderr, and what is
printed there, by this program or by a worker that inherits it, goes into that file.
"""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Opens /dev/null in place of missing streams. Call it before anything is opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the life of the program
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
