"""Runs a short helper program and takes its output, bounded in time and size, under the account that fits it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_agent.base.readable import readable
from bagua_agent.workers.process.account import Account

MOST_OUTPUT_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BoundedRun:
    """The result of a helper program. returncode: -9 also for one that was killed because it printed more than
    MOST_OUTPUT_BYTES."""

    returncode: int
    output: str  # of stdout and stderr


def run_bounded(
    command: Sequence[str],
    within_s: float,
    account: Account | None = None,
    *,
    own_group: bool = False,
    variables: Mapping[str, str] | None = None,
) -> BoundedRun:
    """Runs the command to its end and returns its result. own_group: signals to this process's group, as of Ctrl-C,
    don't reach it. variables: of its environment, beside this process's own. Raises OSError if it can't be started,
    TimeoutError if it takes longer."""
    deadline_s = time.monotonic() + within_s
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={**os.environ, **(variables or {})},
        process_group=0 if own_group else None,
        **(account.process_arguments if account else {}),
    )
    assert process.stdout is not None
    output = bytearray()
    try:
        with process.stdout:
            while len(output) < MOST_OUTPUT_BYTES:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not readable([process.stdout], left_s):
                    raise TimeoutError(f"{command[0]} did not end within {within_s:g} s")
                data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                if not data:
                    break
                output += data
        if len(output) >= MOST_OUTPUT_BYTES:
            process.kill()
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end within {within_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    return BoundedRun(process.returncode, output.decode(errors="replace"))
