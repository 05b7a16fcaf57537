"""Numbers what this worker does with all members of its generation, so that what ranks wait in can be compared.

An operation is a collective of the script, or a run of the runtime's own waits of one name. Its position is (steps
committed, place since that commit). All members number alike, because they enter a generation with the same state
and commit the same steps. What only some of them do (groups, messages between two, copies, entering) takes no place,
and a worker that waits in it tells of no operation. Knows nothing of sessions and communicators. Not thread-safe: the
script's thread alone waits.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from bagua_contract.collective_wait import LONGEST_NAME, MOST_OPERATIONS, CollectiveWait, Operation

# Names read on from "rank 0 waits".
FORWARD = "in the step's forward"
STEP = "in the step's reductions"
BOUNDARY = "at the step boundary"
COMPARISON = "in the comparison of the replicas"
EPOCH_END = "at the end of the epoch"
TRAINING_END = "at the end of training"
FIRST_BOUNDARY = "at its first step boundary"

_CORE = Path(__file__).parents[2] / "__init__.py"
_SCRIPT_ENDED = "its script has ended"
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (_CORE, torch.__file__, sysconfig.get_path("stdlib") + "/os.py")
)


class OperationTrail:
    def __init__(self) -> None:
        # step, place and name of each; an Operation is made of them once it is asked for
        self._newest: deque[tuple[int, int, str]] = deque(maxlen=MOST_OPERATIONS)
        self._step: int | None = None  # None: no generation has been entered
        self._place = 0
        self._is_merging = False  # the next wait of the runtime may belong to the newest operation
        self._depth = 0  # of operations of the script
        self._aside = 0

    def entering(self) -> None:
        """Forgets the operations so far. Until `at`, nothing can be compared."""
        self._newest.clear()
        self._step = None

    def at(self, step: int) -> None:
        """Begins to number operations after `step` committed steps. All members number alike from here: they entered
        the generation with one state, or committed. Not for one that copies the state beside its first step, until that
        is committed."""
        self._step, self._place, self._is_merging = step, 0, False

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Counts a collective of the script, by all members. All waits until the end of this context belong to it."""
        self._append(name)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._is_merging = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Neither counts nor reports what is done within this context: operations of some of the members."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def wait_begins(self, name: str = STEP) -> None:
        """Counts a wait in a collective of all members. name: of the runtime's own, unless the script asked for it."""
        if self._step is None or self._aside:
            return
        if self._depth or (self._is_merging and self._newest[-1][2] == name):
            return  # it belongs to the newest operation
        self._append(name)
        self._is_merging = True

    def _append(self, name: str) -> None:
        if self._step is None or self._aside:
            return
        self._newest.append((self._step, self._place, name))
        self._place += 1

    def waits_in(self) -> CollectiveWait | None:
        """Returns what the current wait is in; None where it can't be compared. Called from the waiting thread."""
        if self._step is None or self._aside or not self._newest:
            return None
        newest = (Operation(step, place, name[:LONGEST_NAME]) for step, place, name in self._newest)
        return CollectiveWait(call_site(), tuple(newest))


def call_site() -> str:
    """Returns file:line in the script of what the calling thread does; of the main thread if this one has no frame of
    it."""
    site = _site(sys._getframe())
    if site is None:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        site = _site(main)
    return site or _SCRIPT_ENDED


def _site(frame: FrameType | None) -> str | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and not path.startswith("<"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
