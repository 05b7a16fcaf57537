"""Named points, most of them around a leader's writes, at which a test can make this agent die, stop or wait.

`BAGUA_AGENT_FAILPOINTS` (the agent's own environment): `name=action[:argument][@generation]`, several
separated by `;`. Actions: kill (SIGKILL itself), stop (SIGSTOP itself), raise, delay:SECONDS, and hold:DIRECTORY,
which lets a test do anything to the agent while it waits there. Each firing is printed on stderr, so a fault test can
assert that its fault happened. Without the variable a point costs one dictionary look-up.

Each fires once, except `hold`, which fires whenever a test creates DIRECTORY/NAME: the file is renamed to
DIRECTORY/NAME.PID, which names the process that waits, and the thread waits until that file is gone. If the file
contains `raise`, the point raises instead. The agent's other threads continue meanwhile.
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
from pathlib import Path

from bagua_agent.base.errors import OutcomeUnknown, UserError

VARIABLE = "BAGUA_AGENT_FAILPOINTS"
# The longest time for which a test that died holds an agent.
HOLD_LIMIT_S = 60.0
_HOLD_LOOK_S = 0.002
POINTS = frozenset(
    f"{write}.{edge}"
    for write in (
        "election",
        "generation",
        "result",
        "agent-removal",
        "leader-removal",
        "hang-order",
        "replicas",
    )
    for edge in ("before", "after")
)
# Of a job with replicas alone, around what its leader writes of them.
REPLICA_POINTS = frozenset({"replicas.before", "replicas.after"})
# Of a daemon, around what a scheduler writes; the "generation" of one counts the transactions of a decision.
SERVICE_POINTS = frozenset({"orders.before", "orders.after"})
# Of the loop, in its own thread.
LOOP_POINTS = frozenset({"worker-end.before"})
_EVERY_POINT = POINTS | REPLICA_POINTS | SERVICE_POINTS | LOOP_POINTS
_FORM = re.compile(
    r"(?P<name>[a-z.-]+)=(?P<action>kill|stop|raise|delay(?=:)|hold(?=:))"
    r"(:(?P<argument>(?<=delay:)\d+(\.\d+)?|(?<=hold:)/[^;@]+))?(@(?P<generation>\d+))?"
)


class FailpointRaised(OutcomeUnknown):
    """Raised by the action `raise`, as if etcd had not answered. Before a write it was not done, after it it was."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One point that is set. generation: the number of the record being written; None: whatever is written, and when.
    directory: for the action `hold` alone."""

    name: str
    action: str
    argument_s: float
    generation: int | None
    directory: str = ""


def parse(text: str) -> tuple[Failpoint, ...]:
    """Parses the variable's text. Raises UserError naming the part that is not a failpoint."""
    points = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None or match["name"] not in _EVERY_POINT:
            names = ", ".join(sorted(_EVERY_POINT))
            raise UserError(f"{VARIABLE}: {part!r} is no failpoint; names are {names}")
        generation = int(match["generation"]) if match["generation"] else None
        name, action, argument = match["name"], match["action"], match["argument"]
        if action == "hold":
            points.append(Failpoint(name, action, 0.0, generation, argument))
        else:
            points.append(Failpoint(name, action, float(argument or 0), generation))
    return tuple(points)


class Failpoints:
    """The points set for this agent. Each fires in the thread that reaches it: once, but a hold each time it is asked
    for."""

    def __init__(self, text: str = "") -> None:
        self._points: dict[str, list[Failpoint]] = {}
        for point in parse(text):
            self._points.setdefault(point.name, []).append(point)

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> Failpoints:
        return Failpoints(environ.get(VARIABLE, ""))

    def reach(self, name: str, generation: int = 0) -> None:
        """Fires the point of this name if it is set. generation: the number of the record concerned, if it is about
        one. Raises FailpointRaised."""
        waiting = self._points.get(name)
        if not waiting:
            return
        for point in waiting:
            if point.generation is not None and point.generation != generation:
                continue
            if point.action == "hold":
                if _is_held(point, generation):
                    return
                continue
            waiting.remove(point)
            self._fire(point, generation)
            return

    def _fire(self, point: Failpoint, generation: int) -> None:
        _say(point, generation)
        if point.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            # To this very thread, so that it gets no further; one to the process may reach it a moment later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif point.action == "delay":
            time.sleep(point.argument_s)  # the fault itself, not synchronisation
        else:
            raise FailpointRaised(f"failpoint {point.name} at generation {generation}")


def _say(point: Failpoint, generation: int, more: str = "") -> None:
    # one write of one line: other threads print too
    sys.stderr.write(
        f"bagua agent failpoint {point.name} fired: {point.action} at generation {generation}{more}\n"
    )
    sys.stderr.flush()


def _is_held(point: Failpoint, generation: int) -> bool:
    """Waits while a test holds the point, and tells whether a test asked for a hold. Raises FailpointRaised if it asks
    for that."""
    asked = Path(point.directory, point.name)
    standing = asked.with_name(f"{point.name}.{os.getpid()}")
    try:
        asked.rename(standing)
    except FileNotFoundError:
        return False
    _say(point, generation)
    until_s = time.monotonic() + HOLD_LIMIT_S
    while time.monotonic() < until_s:
        try:
            said = standing.read_text()
        except FileNotFoundError:
            return True
        if said == "raise":
            raise FailpointRaised(f"failpoint {point.name} at generation {generation}")
        time.sleep(_HOLD_LOOK_S)  # the fault itself, not synchronisation
    _say(point, generation, f": no test let go within {HOLD_LIMIT_S:g} s")
    return True
