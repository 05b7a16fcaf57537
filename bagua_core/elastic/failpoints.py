"""Defines failpoints: named points at the protocol's edges at which a test can make this process die, stop or wait.

`BAGUA_FAILPOINTS` (through the worker's environment): `name=action[:argument][@step][#slot]`, several
separated by `;`. Actions: kill (SIGKILL itself), stop (SIGSTOP itself), exit:CODE, raise, sleep:SECONDS, and
hold:DIRECTORY, which lets a test do anything to the process while it waits there. Every firing is printed,
so a fault test can assert that its fault happened. Without the variable a point costs a look whether any is set.

Each fires once but `hold`, which fires whenever a test asks for it: DIRECTORY/NAME is renamed to
DIRECTORY/NAME.PID, which names the held process, and the thread stays until that file is gone. If the file contains
`raise`, the point raises instead.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bagua_core.errors import BaguaError

# A test that died holds no process for longer; a worker hung on purpose is replaced before.
HOLD_LIMIT_S = 60.0
_HOLD_LOOK_S = 0.002

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
    r"(?P<action>kill|stop|raise|exit(?=:)|sleep(?=:)|hold(?=:))"
    r"(:(?P<argument>(?<=exit:)\d+|(?<=sleep:)\d+(\.\d+)?|(?<=hold:)/[^;@#]+))?"
    r"(@(?P<step>\d+))?(#(?P<slot>\d+))?"
)


class FailpointRaised(BaguaError, RuntimeError):
    """The failpoint's own exception, for the action `raise`."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """A failpoint with its action. directory: for the action `hold` alone."""

    name: str
    action: str
    argument: float
    step: int | None
    slot: int | None
    directory: str = ""


def parse(text: str) -> tuple[Failpoint, ...]:
    """Returns the failpoints that `text` sets. Raises ValueError naming the part that is not a failpoint."""
    points = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None or match["name"] not in POINTS:
            raise ValueError(f"{part!r} is no failpoint; names are {', '.join(sorted(POINTS))}")
        holds = match["action"] == "hold"
        points.append(
            Failpoint(
                match["name"],
                match["action"],
                0.0 if holds else float(match["argument"] or 0),
                int(match["step"]) if match["step"] else None,
                int(match["slot"]) if match["slot"] else None,
                match["argument"] if holds else "",
            )
        )
    return tuple(points)


class Failpoints:
    """The points set for this process; each fires once, but holds as often as asked for."""

    def __init__(self, text: str = "", slot: int = 0) -> None:
        self._points: dict[str, list[Failpoint]] = {}
        for point in parse(text):
            if point.slot is None or point.slot == slot:
                self._points.setdefault(point.name, []).append(point)
        self.are_set = bool(self._points)

    def reach(self, name: str, step: int) -> None:
        waiting = self._points.get(name)
        if not waiting:
            return
        for point in waiting:
            if point.step is not None and point.step != step:
                continue
            if point.action == "hold":
                if _is_held(point, step):
                    return
                continue
            waiting.remove(point)
            self._fire(point, step)
            return

    def _fire(self, point: Failpoint, step: int) -> None:
        _say(point, step)
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


def _say(point: Failpoint, step: int, more: str = "") -> None:
    # one write of one line: agents and other workers write to the same terminal
    sys.stderr.write(f"bagua failpoint {point.name} fired: {point.action} at step {step}{more}\n")
    sys.stderr.flush()


def _is_held(point: Failpoint, step: int) -> bool:
    """Holds this thread if a test asked for it, until the test lets go, and tells whether one did. Raises
    FailpointRaised if the test asks for that."""
    asked = Path(point.directory, point.name)
    standing = asked.with_name(f"{point.name}.{os.getpid()}")
    try:
        asked.rename(standing)
    except FileNotFoundError:
        return False
    _say(point, step)
    until_s = time.monotonic() + HOLD_LIMIT_S
    while time.monotonic() < until_s:
        try:
            said = standing.read_text()
        except FileNotFoundError:
            return True
        if said == "raise":
            raise FailpointRaised(f"failpoint {point.name} at step {step}")
        time.sleep(_HOLD_LOOK_S)  # the fault itself, not synchronisation
    _say(point, step, f": no test let go within {HOLD_LIMIT_S:g} s")
    return True
