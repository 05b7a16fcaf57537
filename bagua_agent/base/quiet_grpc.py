"""Keeps gRPC quiet: its own log is not printed, and its waiting threads do not poll.

The agent reports what gRPC logs in one line, with what to do next. To see gRPC's own log, set GRPC_VERBOSITY.
"""

from __future__ import annotations

import os

LOOK_S = 1.0


def keep_quiet() -> None:
    """Silences gRPC's own log. Call it before gRPC is imported, which reads the variable only then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def wait_without_polling() -> None:
    """Makes threads that wait for a message look every LOOK_S, and not ten times a second. A message wakes them anyway.

    gRPC has them look so that Python runs signal handlers if it is the main thread that waits. For a process whose main
    thread reads no stream. The name is gRPC's own and no promise: where it is absent, threads look as often as before.
    """
    from grpc import _common

    if hasattr(_common, "MAXIMUM_WAIT_TIMEOUT"):
        _common.MAXIMUM_WAIT_TIMEOUT = LOOK_S
