"""Messages that processes and signals send to the agent's loop. Separate from job/messages.py, which needs gRPC."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker_id: str
    returncode: int


@dataclass(frozen=True, slots=True)
class SignalCame:
    number: int


@dataclass(frozen=True, slots=True)
class HealthAsked:
    """A health check asks whether the loop goes on; the loop sets the event."""

    answered: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HelperFailed:
    """A thread that this process can't do without has ended. what: its part in the process."""

    what: str
    reason: str
