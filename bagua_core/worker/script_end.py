"""Ends a worker's process after its script: notifies the runtime and leaves with the exit code of plain Python.

Loaded by path (run_script.py), so it imports only the standard library.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# Then a line says what is waited for, and a script that failed is waited for no longer.
HARD_EXIT_GRACE_S = 10.0
LINE_S = 1.0  # for writing a line before the process ends


def finish(outcome: BaseException | None, runtime: Any) -> NoReturn:
    """Ends the process. outcome: how to exit, as run_script.py gives it. runtime: elastic/step/runtime.py, if the
    script imported it."""
    exit_hard = False
    if runtime is not None:
        outcome, exit_hard = _shut_down(outcome, runtime)
    if exit_hard:
        # The agent ends a worker that has left, at the shutdown timeout.
        has_left = isinstance(outcome, KeyboardInterrupt) and _has_left(outcome, runtime)
        _exit_hard(outcome, _exit_code(outcome), has_left)
    if isinstance(outcome, KeyboardInterrupt):
        # The interpreter ends by SIGINT then (130 in a shell). The report has been printed.
        sys.excepthook = lambda *_: None
    _unfreeze_for_nanobind()
    raise outcome or SystemExit(0)


def _shut_down(outcome: BaseException | None, runtime: Any) -> tuple[BaseException | None, bool]:
    """Shuts the runtime down. Returns how to exit, and whether by os._exit."""
    for _ in range(2):
        code = _exit_code(outcome)
        try:
            return outcome, runtime.shutdown(code) is True
        except Exception as error:  # noqa: BLE001 - reported, and the exit code tells
            _report(error)
            outcome = outcome if code else SystemExit(1)
            break
        except (SystemExit, KeyboardInterrupt) as ending:
            # The worker left the job at its training's end, or was interrupted there: once more, which only closes.
            if isinstance(ending, KeyboardInterrupt) and not _has_left(ending, runtime):
                _report(ending)
            outcome = outcome if code else ending
    # What shutdown would have abandoned may block the interpreter's own end.
    return outcome, True


def _report(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def _has_left(interrupt: KeyboardInterrupt, runtime: Any) -> bool:
    return getattr(interrupt, "bagua_is_orderly", False) or runtime.has_left()


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
    """Lets the interpreter's last collection take what the warm parent froze, where extensions made with nanobind are
    loaded, as Triton is from 3.9 on: nanobind prints a hundred lines about objects that it finds alive after that.

    Only there, for the collection takes half a second of a processor.
    """
    if any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.unfreeze()


def _exit_hard(outcome: BaseException | None, code: int, has_left: bool) -> NoReturn:
    """Ends the process without destroying C++ objects, but with the script's threads and atexit functions done. A
    script that succeeded, or left the job, is waited for without a limit, as by the interpreter, since they may write
    its last file."""
    import atexit  # late: scripts see which modules are loaded before them
    import contextlib
    import threading

    failed = 0 if has_left else code
    _after(HARD_EXIT_GRACE_S, _say_what_is_waited_for, failed)
    if failed:
        # by another thread: the line may block, as where the pipe of stderr is full
        _after(HARD_EXIT_GRACE_S + LINE_S, os._exit, failed)
    if isinstance(outcome, SystemExit) and not isinstance(outcome.code, int | None):
        sys.stderr.write(f"{outcome.code}\n")
    with contextlib.suppress(KeyboardInterrupt):  # it ends this wait and nothing else, as in the interpreter
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed by the script, or its reader is gone
    os._exit(code)


def _after(delay_s: float, action: Callable[[int], object], code: int) -> None:
    import threading

    timer = threading.Timer(delay_s, action, (code,))
    timer.daemon = True
    timer.start()


def _say_what_is_waited_for(failed: int) -> None:
    """Prints what the process waits for. failed: the exit code of a script that is waited for no longer, or 0."""
    import threading

    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
    what = f"threads {', '.join(threads)}" if threads else "atexit functions"
    if failed:
        line = f"the process ends with exit code {failed} and does not wait longer for its {what}"
    else:
        line = f"the script has ended; its process waits for its {what}"
    try:
        sys.stderr.write(f"bagua: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return  # closed by the script, or its reader is gone
