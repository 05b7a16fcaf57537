"""Seeds side by side: one warm process that forks another for each seed, a few at a time.

The warm process imports everything, starts no thread and runs no backward, so that what is forked from it may do both.
A seed that takes too long is killed with all of its processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch._dynamo  # optimizers import it at their first step, which takes a second

from bagua_agent.base.readable import readable
from tests.differential.features import Features
from tests.differential.history import History
from tests.differential.seed import SeedVerdict, judge

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """before: statements that the seed's processes run first; a test breaks something with them."""

    features: Features
    history: History
    before: str = ""


def verdicts(cases: Iterable[Case], at_once: int) -> Iterator[SeedVerdict]:
    """One for each case, as they come."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    waiting = iter(cases)
    running: dict[int, tuple[int, Case, float, bytes]] = {}  # pipe -> pid, case, limit, what was read
    try:
        while True:
            while len(running) < at_once and (case := next(waiting, None)) is not None:
                pid, pipe = _begin(case)
                running[pipe] = (pid, case, time.monotonic() + LIMIT_S, b"")
            if not running:
                return
            talking = readable(running, 1.0)
            for pipe, (pid, case, limit_s, so_far) in list(running.items()):
                text = os.read(pipe, 1 << 20) if pipe in talking else None
                if text:
                    running[pipe] = (pid, case, limit_s, so_far + text)
                elif text == b"" or time.monotonic() > limit_s:
                    del running[pipe]
                    _end(pid, pipe)
                    yield _verdict(case, so_far)
    finally:
        for pipe, (pid, *_) in running.items():
            _end(pid, pipe)


def _begin(case: Case) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.setpgid(0, 0)
    code = 1
    try:
        exec(case.before, {})
        encoded = judge(case.features, case.history).encode()
        while encoded:
            encoded = encoded[os.write(write, encoded) :]
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent sees the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end(pid: int, pipe: int) -> None:
    os.close(pipe)
    with contextlib.suppress(ProcessLookupError):  # it and its workers have ended
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _verdict(case: Case, text: bytes) -> SeedVerdict:
    if text:
        return SeedVerdict.decode(text)
    f, history = case.features, case.history
    problem = "the harness's own process ended without a verdict"
    return SeedVerdict(f.seed, f.names, str(history), (problem,), float("inf"), LIMIT_S)
