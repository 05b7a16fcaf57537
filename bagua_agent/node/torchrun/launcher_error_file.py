"""Writes the error file of the launcher itself, as torchrun does for the scheduler that started it.

A scheduler names the file in the launcher's own TORCHELASTIC_ERROR_FILE and reads it when the launcher has ended. It
holds the first failure of the job by cause, in the format of torch's `@record`, or the launcher's own error.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua_agent.base.errors import BaguaError
from bagua_agent.workers.process.foreign_files import read_ordinary
from bagua_contract import membership_pb2 as pb

log = logging.getLogger(__name__)

VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torch's; workers get one of their own


def write_result(environ: Mapping[str, str], result: pb.Result, own_agent_id: str) -> None:
    """Of a job that failed: the failed worker's error file if it ran here and wrote one, else what its record says."""
    path = environ.get(VARIABLE)
    if not path or result.outcome != pb.Result.FAILED:
        return
    failure = result.failure if result.HasField("failure") else None
    content = None
    if failure is not None and failure.agent_id == own_agent_id and failure.log_path:
        content = _written_by_worker(Path(failure.log_path) / "error.json")
    if content is None:
        text, callstack = (result.reason, "") if failure is None else (failure.cause, failure.traceback_tail)
        content = _content(text, callstack)
    message = content["message"]
    if isinstance(message, dict):
        message["errorCode"] = failure.exit_code if failure is not None else result.exit_code
    _write(path, content)


def write_own_error(environ: Mapping[str, str], error: Exception) -> None:
    """Of a launcher that can't go on. The error is reported elsewhere too."""
    if path := environ.get(VARIABLE):
        callstack = "" if isinstance(error, BaguaError) else "".join(traceback.format_exception(error))
        _write(path, _content(f"{type(error).__name__}: {error}", callstack))


def _content(text: str, callstack: str) -> dict[str, Any]:
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    return {"message": {"message": text, "extraInfo": extra}}


def _written_by_worker(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_ordinary(path))
    except FileNotFoundError:
        return None  # a worker that was killed leaves none
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used for the launcher's error file: %s", path, error)
        return None
    return content if isinstance(content, dict) and "message" in content else None


def _write(path: str, content: Mapping[str, Any]) -> None:
    """In place of what is there: in one step, so that a reader finds an old file or the whole new one."""
    unfinished = f"{path}.{os.getpid()}"
    try:
        # Made here, never found: in a directory that others may write to, a link there would lead elsewhere.
        with open(unfinished, "x") as file:
            file.write(json.dumps(content))
        os.replace(unfinished, path)
    except OSError as problem:
        log.warning("the error file %s can't be written: %s", path, problem.strerror)
