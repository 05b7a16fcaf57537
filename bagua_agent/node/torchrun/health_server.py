"""Answers health checks over HTTP at the port that TORCHELASTIC_HEALTH_CHECK_PORT names, as torchrun does.

200 or 503, as loop_health.py says. Any path is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bagua_agent.base.errors import UserError
from bagua_agent.base.messages import HealthAsked

if TYPE_CHECKING:
    from bagua_agent.base.small_http import SmallHttpServer

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"


def health_port(environ: Mapping[str, str]) -> int | None:
    """Returns the port of the health checks; None if no server is asked for. Raises UserError."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text[:6]) < 65536:
        raise UserError(f"{VARIABLE}={text!r} is no port; give a number from 1 to 65535, or unset it")
    return int(text)


def health_server(port: int, put: Callable[[HealthAsked], None]) -> SmallHttpServer:
    """Makes the server that answers health checks. put: gives the agent's loop a message."""
    # only where it is asked for: workers start after this module is loaded, and HTTP takes a while
    from bagua_agent.base.loop_health import LoopHealth
    from bagua_agent.base.small_http import SmallHttpServer

    health = LoopHealth(put)
    return SmallHttpServer(port, "health checks", lambda path: health.answer())
