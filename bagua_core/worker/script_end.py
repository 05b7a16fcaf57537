"""Ends a worker's process after its script: notifies the runtime and leaves with the exit code of plain Python.

Loaded by path (run_script.py), so it imports only the standard library.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, NoReturn

HARD_EXIT_GRACE_S = 10.0


def finish(outcome: BaseException | None, runtime: Any) -> NoReturn:
    """outcome: how to exit, as run_script.py gives it. runtime: elastic/step/runtime.py, if the script imported it."""
    code = _exit_code(outcome)
    exit_hard = False
    if runtime is not None:
        try:
            exit_hard = runtime.shutdown(code) is True
        except Exception as error:  # noqa: BLE001 - reported, and the exit code tells
            sys.excepthook(type(error), error, error.__traceback__)
            # What shutdown would have abandoned may block the interpreter's own end.
            outcome, code, exit_hard = outcome or SystemExit(1), code or 1, True
    if exit_hard:
        _exit_hard(outcome, code)
    if isinstance(outcome, KeyboardInterrupt):
        # The interpreter ends by SIGINT then (130 in a shell). The report has been printed.
        sys.excepthook = lambda *_: None
    _unfreeze_for_nanobind()
    raise outcome or SystemExit(0)


def _exit_code(outcome: BaseException | None) -> int:
    if outcome is None:
        return 0
    if isinstance(outcome, KeyboardInterrupt):
        return 130
    code = outcome.code if isinstance(outcome, SystemExit) else 1
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _unfreeze_for_nanobind() -> None:
    """Let the interpreter's last collection take what the warm parent froze, where extensions made with nanobind are
    loaded, as Triton is from 3.9 on: nanobind prints a hundred lines about objects that it finds alive after that.

    Only there, for the collection takes half a second of a processor.
    """
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.unfreeze()


def _exit_hard(outcome: BaseException | None, code: int) -> NoReturn:
    """End without destroying C++ objects, but with the script's threads and atexit functions done."""
    import atexit  # late: scripts see which modules are loaded before them
    import threading

    watchdog = threading.Timer(HARD_EXIT_GRACE_S, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()
    if isinstance(outcome, SystemExit) and not isinstance(outcome.code, int | None):
        sys.stderr.write(f"{outcome.code}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed by the script, or its reader is gone
    os._exit(code)
