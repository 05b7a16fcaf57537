"""Notices a script that counts its own draws with enumerate(loader).

Python's enumerate counts what this process drew. That is not the job's position once a step is done again, or in a
worker that joined, and a script that decides by it (`if (i + 1) % 4 == 0: optimizer.step()`) then trains wrongly.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any


def may_enumerate(code: CodeType) -> bool:
    """Tells whether the code that draws mentions enumerate at all."""
    return "enumerate" in code.co_names


def is_enumerated(iterator: Iterator[Any]) -> bool:
    """Tells whether an enumerate object draws from `iterator`. Walks all objects of the process: up to a second."""
    return any(type(referrer) is enumerate for referrer in gc.get_referrers(iterator))


def warn_if_enumerated(code: CodeType, iterator: Iterator[Any] | None, counted: int, position: int) -> None:
    """Prints `warning` to stderr if `code`, which draws from `iterator`, counts its draws with enumerate.

    counted, position: see `warning`.
    """
    if iterator is not None and may_enumerate(code) and is_enumerated(iterator):
        print(f"bagua: {warning(counted, position)}", file=sys.stderr, flush=True)


def warning(counted: int, position: int) -> str:
    """Returns the text of the warning.

    counted: the index that enumerate gives to the next draw; position: the job's, within the epoch.
    """
    return (
        f"warning: enumerate(loader) gives index {counted} to what is step {position} of the job's epoch, because a "
        "step was done again or this worker joined later. A script that decides by this index trains otherwise than "
        "one process would: use `for i, batch in loader.enumerate()`, or loader.step"
    )
