"""The error of a node without which the job went on. Separate from lost_keys.py, which needs gRPC."""

from __future__ import annotations

from bagua_agent.base.errors import InfrastructureLost


class JobReplaced(InfrastructureLost):
    """The store lost its keys and the others went on without this node; it can come again as a newcomer."""
