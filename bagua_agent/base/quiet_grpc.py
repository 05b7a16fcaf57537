"""Keeps gRPC's own log off standard error: it prints many lines for each failed connection and handshake.

We say the same in one line, with the next move. Whoever wants gRPC's own words sets GRPC_VERBOSITY.
"""

from __future__ import annotations

import os


def keep_quiet() -> None:
    """Call it before gRPC is imported: it looks only then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
