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


def switch(written: WrittenValue) -> bool:
    word = written.text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise refuse(written, "neither yes nor no", "1 or 0")


def is_on(values: Values, key: str) -> bool:
    """Tells whether a switch is on; it is off without a value."""
    return key in values and switch(values[key])


def text(written: WrittenValue) -> str:
    if not written.text.strip():
        raise refuse(written, "empty", "a value, or leave it out")
    return written.text


def count(written: WrittenValue) -> int:
    if not _DIGITS.fullmatch(written.text):
        raise refuse(written, "not a number", "0, 1, 2, ...")
    return int(written.text)


def port(written: WrittenValue) -> int:
    if not _DIGITS.fullmatch(written.text) or not 1 <= int(written.text) <= 65535:
        raise refuse(written, "not a port", "a number from 1 to 65535")
    return int(written.text)


def port_or_any(written: WrittenValue) -> int:
    """Parses a port, or 0 for any free one."""
    return 0 if written.text == "0" else port(written)


def listening(written: WrittenValue) -> str | None:
    """Parses the place where a dashboard listens; None for a word that means no."""
    word = written.text.lower()
    if word in ("1", "true", "yes", "on"):
        return ""
    if word in ("false", "no", "off"):
        return None
    from bagua_agent.dashboard.listening import Listening

    try:
        Listening.parse(written.text)
    except ValueError:
        raise refuse(
            written, "neither a port nor HOST:PORT", "--dashboard, --dashboard=8080, or HOST:PORT"
        ) from None
    return written.text


def seconds(written: WrittenValue) -> float:
    try:
        value = float(written.text)
    except ValueError:
        raise refuse(written, "not a number", "seconds, such as 0.5") from None
    if not 0 <= value <= LONGEST_WAIT_S:
        raise refuse(written, "not a time", "seconds, such as 0.5")
    return value


def seconds_or_never(written: WrittenValue) -> float | None:
    """Parses seconds, more than 0; None for "never"."""
    if written.text.lower() == "never":
        return None
    value = seconds(written)
    if value == 0:
        raise refuse(written, "not a time to wait", "seconds, such as 600, or never")
    return value


def checkpoint_dir(written: WrittenValue) -> str:
    from bagua_contract.checkpoint_dir import PACKAGES, complete

    # The package that the URL needs is not looked for here: workers may run in another environment.
    try:
        complete(text(written))
    except ValueError as error:
        known = ", ".join(f"{protocol}://" for protocol in PACKAGES)
        raise refuse(
            written, str(error), f"a directory, or a bucket and a prefix behind one of {known}"
        ) from None
    return written.text


def checkpoint_every(written: WrittenValue) -> str:
    # not at the top: the contract's package is not needed for most command lines
    from bagua_contract.checkpoint_every import CheckpointEvery

    try:
        return CheckpointEvery.decode(written.text).encode()
    except ValueError:
        raise refuse(
            written, "neither steps nor seconds", "steps such as 500, or seconds such as 30s"
        ) from None


def choice(*words: str) -> Callable[[WrittenValue], str]:
    def parse(written: WrittenValue) -> str:
        if written.text not in words:
            raise refuse(written, "no such choice", " or ".join(words))
        return written.text

    return parse


def signals(written: WrittenValue) -> tuple[str, ...]:
    """Parses names of signals that a process can handle."""
    names = tuple(name.strip() for name in written.text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__:
            raise refuse(written, f"no signal {name!r}", "names such as SIGTERM,SIGUSR1")
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise refuse(written, f"{name} can't be handled", "names such as SIGTERM,SIGUSR1")
    return names


def streams(written: WrittenValue) -> str:
    if not _STREAMS.fullmatch(written.text):
        raise refuse(written, "no choice of streams", "0 to 3, or LOCAL_RANK:0..3 such as 0:1,1:2")
    return written.text


def local_ranks(written: WrittenValue) -> str:
    if not _LOCAL_RANKS.fullmatch(written.text):
        raise refuse(written, "no list of local ranks", "numbers such as 0,2")
    return written.text
