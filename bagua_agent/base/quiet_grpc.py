"""Keeps gRPC's own log off standard error: it prints many lines for each failed connection and handshake.

The agent reports the same in one line, with what to do next. To see gRPC's own log, set GRPC_VERBOSITY.
"""

from __future__ import annotations

import os


def keep_quiet() -> None:
    """Silences gRPC's own log. Call it before gRPC is imported, which reads the variable only then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
