"""Finds the peers that a Gloo error blames, by the addresses in its text. Pure."""

from __future__ import annotations

import re

from bagua_core.communication.communicator import CollectiveFailed

# "[127.0.0.1]:49590"; the source location "[/.../pair.cc:537]" has slashes and no port behind it
_ADDRESS = re.compile(r"\[([0-9A-Za-z_.:%-]+)\]:\d+")
_REMOTE = re.compile(r"remote=\[([0-9A-Za-z_.:%-]+)\]:\d+")
_SOURCE_LOCATION = re.compile(r"^\[[^\]]*\] ")
_ADVICE = " This is typically caused by"


def peers_in(message: str) -> tuple[str, ...]:
    """Returns the hosts named as peers, each once, in order of appearance. A `local=` address is not a peer."""
    found = _REMOTE.findall(message) or _ADDRESS.findall(message)
    return tuple(dict.fromkeys(found))


def collective_failed(what: str, error: BaseException) -> CollectiveFailed:
    """Returns an error that says that `what` failed with `error`: the short text, and the hosts it names."""
    message = str(error)
    detail = _SOURCE_LOCATION.sub("", message).split(_ADVICE)[0].strip()
    return CollectiveFailed(f"{what}: {detail}", peers_in(message))
