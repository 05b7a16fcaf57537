"""Where may a test make this agent die, stop or wait? Named points around what a leader writes.

`BAGUA_AGENT_FAILPOINTS` (the agent's own environment): `name=action[:argument][@generation]`, several
separated by `;`. Actions: kill (SIGKILL itself), stop (SIGSTOP itself), raise, delay:SECONDS. Each fires
once and says so on stderr, so a fault test can assert that its fault happened. Without the variable a
point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bagua_agent.errors import OutcomeUnknown, UserError

VARIABLE = "BAGUA_AGENT_FAILPOINTS"
POINTS = frozenset(
    f"{write}.{edge}"
    for write in ("election", "generation", "result", "agent-removal", "leader-removal")
    for edge in ("before", "after")
)
_FORM = re.compile(
    r"(?P<name>[a-z.-]+)=(?P<action>kill|stop|raise|delay(?=:))"
    r"(:(?P<argument>(?<=delay:)\d+(\.\d+)?))?(@(?P<generation>\d+))?"
)


class FailpointRaised(OutcomeUnknown):
    """For the action `raise`: as if etcd had not answered. Before a write it was not done, after it it was."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """generation: the number of the record being written; None: whatever is written, and when."""

    name: str
    action: str
    argument_s: float
    generation: int | None


def parse(text: str) -> tuple[Failpoint, ...]:
    """Raises UserError naming the part that is not a failpoint."""
    points = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None or match["name"] not in POINTS:
            raise UserError(f"{VARIABLE}: {part!r} is no failpoint; names are {', '.join(sorted(POINTS))}")
        generation = int(match["generation"]) if match["generation"] else None
        points.append(Failpoint(match["name"], match["action"], float(match["argument"] or 0), generation))
    return tuple(points)


class Failpoints:
    """The points set for this agent; each fires once, in the thread that reaches it."""

    def __init__(self, text: str = "") -> None:
        self._points: dict[str, list[Failpoint]] = {}
        for point in parse(text):
            self._points.setdefault(point.name, []).append(point)

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> Failpoints:
        return Failpoints(environ.get(VARIABLE, ""))

    def reach(self, name: str, generation: int = 0) -> None:
        """generation: the number of the record concerned, if it is about one. Raises FailpointRaised."""
        waiting = self._points.get(name)
        if not waiting:
            return
        for point in waiting:
            if point.generation is None or point.generation == generation:
                waiting.remove(point)
                self._fire(point, generation)
                return

    def _fire(self, point: Failpoint, generation: int) -> None:
        # one write of one line: other threads print too
        sys.stderr.write(
            f"bagua agent failpoint {point.name} fired: {point.action} at generation {generation}\n"
        )
        sys.stderr.flush()
        if point.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            # To this very thread, so that it gets no further; one to the process may reach it a moment later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif point.action == "delay":
            time.sleep(point.argument_s)  # the fault itself, not synchronisation
        else:
            raise FailpointRaised(f"failpoint {point.name} at generation {generation}")
