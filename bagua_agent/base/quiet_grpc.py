"""May gRPC speak on our stderr? It tells of every connection and handshake that fails, many lines for one outage.

We say the same in one line, with the next move. Whoever wants gRPC's own words sets GRPC_VERBOSITY.
"""

from __future__ import annotations

import os


def keep_quiet() -> None:
    """Call it before gRPC is imported: it looks only then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
