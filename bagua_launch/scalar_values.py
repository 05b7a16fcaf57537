"""Parses single values. Each function raises RequestError; none knows the job."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from bagua_agent.config.job_config import LONGEST_WAIT_S
from bagua_launch.errors import refuse
from bagua_launch.written_values import Values, WrittenValue

_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](?:,[0-9]+:[0-3])*")
_LOCAL_RANKS = re.compile(r"[0-9]+(?:,[0-9]+)*")
_DIGITS = re.compile(r"[0-9]{1,9}")


def switch(said: WrittenValue) -> bool:
    word = said.text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise refuse(said, "neither yes nor no", "1 or 0")


def is_on(values: Values, key: str) -> bool:
    """Tells whether a switch is on; it is off without a value."""
    return key in values and switch(values[key])


def text(said: WrittenValue) -> str:
    if not said.text.strip():
        raise refuse(said, "empty", "a value, or leave it out")
    return said.text


def count(said: WrittenValue) -> int:
    if not _DIGITS.fullmatch(said.text):
        raise refuse(said, "not a number", "0, 1, 2, ...")
    return int(said.text)


def port(said: WrittenValue) -> int:
    if not _DIGITS.fullmatch(said.text) or not 1 <= int(said.text) <= 65535:
        raise refuse(said, "not a port", "a number from 1 to 65535")
    return int(said.text)


def port_or_any(said: WrittenValue) -> int:
    """Parses a port, or 0 for any free one."""
    return 0 if said.text == "0" else port(said)


def listening(said: WrittenValue) -> str | None:
    """Parses the place where a dashboard listens; None for a word that means no."""
    word = said.text.lower()
    if word in ("1", "true", "yes", "on"):
        return ""
    if word in ("false", "no", "off"):
        return None
    from bagua_agent.dashboard.listening import Listening

    try:
        Listening.parse(said.text)
    except ValueError:
        raise refuse(
            said, "neither a port nor HOST:PORT", "--dashboard, --dashboard=8080, or HOST:PORT"
        ) from None
    return said.text


def seconds(said: WrittenValue) -> float:
    try:
        value = float(said.text)
    except ValueError:
        raise refuse(said, "not a number", "seconds, such as 0.5") from None
    if not 0 <= value <= LONGEST_WAIT_S:
        raise refuse(said, "not a time", "seconds, such as 0.5")
    return value


def seconds_or_never(said: WrittenValue) -> float | None:
    """Parses seconds, more than 0; None for "never"."""
    if said.text.lower() == "never":
        return None
    value = seconds(said)
    if value == 0:
        raise refuse(said, "not a time to wait", "seconds, such as 600, or never")
    return value


def checkpoint_dir(said: WrittenValue) -> str:
    from bagua_contract.checkpoint_dir import PACKAGES, complete

    # The package that the URL needs is not looked for here: workers may run in another environment.
    try:
        complete(text(said))
    except ValueError as error:
        known = ", ".join(f"{protocol}://" for protocol in PACKAGES)
        raise refuse(
            said, str(error), f"a directory, or a bucket and a prefix behind one of {known}"
        ) from None
    return said.text


def checkpoint_every(said: WrittenValue) -> str:
    # not at the top: the contract's package is not needed for most command lines
    from bagua_contract.checkpoint_every import CheckpointEvery

    try:
        return CheckpointEvery.decode(said.text).encode()
    except ValueError:
        raise refuse(said, "neither steps nor seconds", "steps such as 500, or seconds such as 30s") from None


def choice(*words: str) -> Callable[[WrittenValue], str]:
    def parse(said: WrittenValue) -> str:
        if said.text not in words:
            raise refuse(said, "no such choice", " or ".join(words))
        return said.text

    return parse


def signals(said: WrittenValue) -> tuple[str, ...]:
    """Parses names of signals that a process can handle."""
    names = tuple(name.strip() for name in said.text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__:
            raise refuse(said, f"no signal {name!r}", "names such as SIGTERM,SIGUSR1")
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise refuse(said, f"{name} can't be handled", "names such as SIGTERM,SIGUSR1")
    return names


def streams(said: WrittenValue) -> str:
    if not _STREAMS.fullmatch(said.text):
        raise refuse(said, "no choice of streams", "0 to 3, or LOCAL_RANK:0..3 such as 0:1,1:2")
    return said.text


def local_ranks(said: WrittenValue) -> str:
    if not _LOCAL_RANKS.fullmatch(said.text):
        raise refuse(said, "no list of local ranks", "numbers such as 0,2")
    return said.text
