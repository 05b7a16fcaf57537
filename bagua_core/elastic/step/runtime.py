"""Holds this process's engine, the only global state of the core, which is made on first use.

In a world of one, end_training() ends it, and the next use makes another. A worker of a job has one for its life.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from bagua_contract.environment import WorkerEnvironment
from bagua_core.elastic.script_collectives.default_group import explain_missing_group, forbid_default_group
from bagua_core.elastic.step.engine import Engine
from bagua_core.errors import TrainingOver, UserError

_lock = threading.Lock()
_engine: Engine | None = None
_owner_pid = 0
_is_over = False  # the job's training ended here by end_training()
_at_end: list[Callable[[], object]] = []  # what end_training() calls, once


class ForkedWorkerError(UserError, RuntimeError):
    """The engine was used in a child of the worker, such as a DataLoader process."""


def engine() -> Engine:
    """Returns the engine of this process. Raises ForkedWorkerError in a forked child: it has no part in the job. Raises
    TrainingOver in a worker that has called end_training(), MixedModesError if the script has made torch's default
    process group before."""
    global _engine, _owner_pid
    with _lock:
        if _engine is None:
            environment = (
                WorkerEnvironment.decode(os.environ) if WorkerEnvironment.is_present(os.environ) else None
            )
            if environment is not None:
                forbid_default_group()
            _engine = Engine(environment)
            _owner_pid = os.getpid()
        elif _owner_pid != os.getpid():
            raise ForkedWorkerError(
                "bagua was used in a child process of the worker; only the process that runs the script takes part"
            )
        elif _is_over:
            raise TrainingOver(
                "this worker called bagua.shutdown(), which ends its job: a job is one training. Start one job per "
                "training by bagua-launch, or run the trainings one after another under plain python"
            )
        return _engine


def is_launched() -> bool:
    """Tells whether an agent started this process, also after end_training()."""
    return _is_over or engine().launched


def at_end_of_training(action: Callable[[], object]) -> None:
    """Has `action` called when the present training, or else the next one, is ended by end_training()."""
    if action not in _at_end:
        _at_end.append(action)


def end_training() -> None:
    """Ends the training. Does nothing if there is none, or it has ended. See bagua_core.shutdown."""
    global _engine, _is_over
    if _engine is None or _is_over:
        return
    ended = engine()
    ended.end_training()
    with _lock:
        if ended.launched:
            _is_over = True
        else:
            _engine = None
    while _at_end:
        _at_end.pop()()


def has_left() -> bool:
    """Tells whether this worker has left the job outside the loop. Used by run_script.py."""
    with _lock:
        return _engine is not None and _engine.state.guard.is_taken_out


def script_failed(error: BaseException) -> None:
    """Passes `error`, with which the script has ended and which is not reported yet, to the member. For run_script.py.
    Waits for the agent to end this process if the cause is the end of another shard of its replica."""
    with _lock:
        member = None if _engine is None or _owner_pid != os.getpid() else _engine.member
    if member is not None:
        explain_missing_group(error)
        member.script_failed(error)


def shutdown(exit_code: int) -> bool:
    """Ends this process's part in the job. exit_code: what the script ended with. Raises SystemExit or
    KeyboardInterrupt if the worker leaves the job meanwhile; a second call then closes what is open.

    Returns whether the process must end by os._exit: threads of abandoned communicators can't be joined.
    """
    with _lock:
        if _engine is None or _owner_pid != os.getpid():
            return False
        ended = _engine
    return ended.shutdown(exit_code)
