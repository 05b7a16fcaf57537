"""Writes the error file of the launcher itself, as torchrun does for the scheduler that started it.

A scheduler names the file in the launcher's own TORCHELASTIC_ERROR_FILE and reads it when the launcher has ended. It
holds the first failure of the job by cause, in the format of torch's `@record`, or the launcher's own error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import stat
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua_agent.base.errors import BaguaError
from bagua_agent.workers.process.foreign_files import read_ordinary

if TYPE_CHECKING:
    from bagua_contract import membership_pb2 as pb

log = logging.getLogger(__name__)

VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torch's; workers get one of their own
_READER_LIMIT_S = 5.0  # between two reads from a FIFO that is full
# a mount point such as Kubernetes' /dev/termination-log, or a directory where the launcher may make no file
_NOT_REPLACEABLE = (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS)


def write_result(
    environ: Mapping[str, str], result: pb.Result, own_file: Callable[[pb.Failure], Path | None]
) -> None:
    """Writes the error file of a job that failed: the failed worker's own file if it ran here and wrote one, else what
    its record says.

    own_file: returns the path of that file; None if the worker ran elsewhere.
    """
    path = environ.get(VARIABLE)
    if not path or result.outcome != result.FAILED:
        return
    failure = result.failure if result.HasField("failure") else None
    content = None
    if failure is not None and (path_here := own_file(failure)) is not None:
        content = _written_by_worker(path_here)
    if content is None:
        text, callstack = (result.reason, "") if failure is None else (failure.cause, failure.traceback_tail)
        content = _content(text, callstack)
    message = content["message"]
    if isinstance(message, dict):
        message["errorCode"] = failure.exit_code if failure is not None else result.exit_code
    _write(path, content)


def write_own_error(environ: Mapping[str, str], error: Exception) -> None:
    """Writes the error file of a launcher that can't go on. The error is reported elsewhere too."""
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
    """Replaces a file that is there in one step: a reader finds an old file or the whole new one.

    A device, a FIFO and the launcher's own output are written to, and stay; so is a file that can't be replaced.
    """
    text = json.dumps(content).encode()
    try:
        if _is_written_to(path):
            _write_to(path, text)
            return
        try:
            _replace(path, text)
        except OSError as problem:
            if problem.errno not in _NOT_REPLACEABLE or not os.path.isfile(path):
                raise
            _write_to(path, text, os.O_NOFOLLOW)
    except OSError as problem:
        log.warning("the error file %s can't be written: %s", path, problem.strerror)


def _is_written_to(path: str) -> bool:
    """Tells whether the file at `path` is written in place. A link to another ordinary file is not: as with torch the
    link is replaced, for another account may have made it."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return not stat.S_ISREG(found.st_mode) or _is_own_output(found)


def _is_own_output(found: os.stat_result) -> bool:
    """Tells whether the file is this process's stdout or stderr, as behind /dev/stderr."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return True
    return False


def _replace(path: str, text: bytes) -> None:
    unfinished = f"{path}.{os.getpid()}"
    # Made here, never found: in a directory that others may write to, a link there would lead elsewhere.
    with open(unfinished, "xb") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise


def _write_to(path: str, text: bytes, more_flags: int = 0) -> None:
    """Writes the text in place, with the end of the line that a terminal or log needs."""
    text += b"\n"
    # Without O_NONBLOCK a FIFO would wait for a reader.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | more_flags
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISBLK(found.st_mode):
            raise OSError(errno.EINVAL, "it is a block device")
        if stat.S_ISREG(found.st_mode):
            if _is_own_output(found):
                os.lseek(descriptor, 0, os.SEEK_END)
            else:
                os.ftruncate(descriptor, 0)
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while text:
            try:
                text = text[os.write(descriptor, text) :]
            except BlockingIOError:
                if not room.poll(_READER_LIMIT_S * 1000):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
    finally:
        os.close(descriptor)
