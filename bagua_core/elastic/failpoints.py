"""Where may a test make this process die, stop or wait? Named points at the protocol's edges.

`BAGUA_FAILPOINTS` (through the worker's environment): `name=action[:argument][@step][#slot]`, several
separated by `;`. Actions: kill (SIGKILL itself), stop (SIGSTOP itself), exit:CODE, raise, sleep:SECONDS.
Every firing is printed, so a fault test can assert that its fault happened. Without the variable a
point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass

POINTS = frozenset(
    {
        "step.begin",
        "reduction.before",
        "reduction.done",
        "commit.before",
        "commit.after",
        "ledger.before",
        "switch.before",
        "entry.built",
        "entry.exchanged",
        "heal.send",
        "heal.receive",
        "heal.swap",
        "outside.done",
        "finish.done",
    }
)
_FORM = re.compile(
    r"(?P<name>[a-z.]+)="
    r"(?P<action>kill|stop|raise|exit(?=:)|sleep(?=:))"
    r"(:(?P<argument>(?<=exit:)\d+|(?<=sleep:)\d+(\.\d+)?))?"
    r"(@(?P<step>\d+))?(#(?P<slot>\d+))?"
)


class FailpointRaised(RuntimeError):
    """The failpoint's own exception, for the action `raise`."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    name: str
    action: str
    argument: float
    step: int | None
    slot: int | None


def parse(text: str) -> tuple[Failpoint, ...]:
    """Raises ValueError naming the part that is not a failpoint."""
    points = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None or match["name"] not in POINTS:
            raise ValueError(f"{part!r} is no failpoint; names are {', '.join(sorted(POINTS))}")
        points.append(
            Failpoint(
                match["name"],
                match["action"],
                float(match["argument"] or 0),
                int(match["step"]) if match["step"] else None,
                int(match["slot"]) if match["slot"] else None,
            )
        )
    return tuple(points)


class Failpoints:
    """The points set for this process; each fires once."""

    def __init__(self, text: str = "", slot: int = 0) -> None:
        self._points: dict[str, list[Failpoint]] = {}
        for point in parse(text):
            if point.slot is None or point.slot == slot:
                self._points.setdefault(point.name, []).append(point)

    def reach(self, name: str, step: int) -> None:
        waiting = self._points.get(name)
        if not waiting:
            return
        for point in waiting:
            if point.step is None or point.step == step:
                waiting.remove(point)
                self._fire(point, step)
                return

    def _fire(self, point: Failpoint, step: int) -> None:
        print(
            f"bagua failpoint {point.name} fired: {point.action} at step {step}", file=sys.stderr, flush=True
        )
        if point.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            # To this very thread, so that it gets no further; one to the process may reach it a moment later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif point.action == "exit":
            os._exit(int(point.argument))
        elif point.action == "sleep":
            time.sleep(point.argument)  # the fault itself, not synchronisation
        else:
            raise FailpointRaised(f"failpoint {point.name} at step {step}")
