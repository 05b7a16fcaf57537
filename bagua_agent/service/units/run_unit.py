"""Implements the program of a unit: the job agent that a person's `bagua-launch` would be, started by a daemon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.service.units.unit_process import record_process
from bagua_agent.service.units.units import METRICS, PATH, REASON, read_request
from bagua_agent.workers.process.account import find_account
from bagua_agent.workers.start.enter_directory import enter_as

log = logging.getLogger(__name__)

# PYTHONPATH: of a daemon that runs from a directory of its sources.
KEPT = frozenset({"PATH", "LANG", "TZ", "PYTHONPATH"})
EXIT_CODE = "exit-code"
RECORD_PROCESS = "--record-process"


def main(folder: Path, *, record: bool = False) -> int:
    """Runs the agent and returns its exit code, which is also left in `folder`: its reader may not be our parent.

    Beside it lie the error that ended the agent, if one did, and where it serves metrics. record: write down there that
    the unit is this process, before anything else.
    """
    if record:
        record_process(folder)
    code = _run(folder)
    _leave(folder, EXIT_CODE, str(code))
    return code


def agent_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the agent's own environment, of what it inherited from systemd or the daemon; pure. Nothing of a job is
    in it: variables steer libraries, and the agent may be root."""
    kept = {name: value for name, value in inherited.items() if name in KEPT or name.startswith("LC_")}
    return {"PATH": PATH, "LANG": "C.UTF-8", **kept}


def _leave(folder: Path, name: str, text: str) -> None:
    """Leaves a text for the daemon in the unit's folder. A full disk ends no job and changes no exit code: the log of
    the unit says what is lost."""
    unfinished = folder / f"{name}.new"
    try:
        unfinished.write_text(text)
        unfinished.rename(folder / name)
    except OSError as error:
        said = f"{folder / name} can't be written ({error.strerror or error}), so the daemon does not know: {text}"
        print(f"bagua-agent: {said}", file=sys.stderr, flush=True)


def _run(folder: Path) -> int:
    try:
        request = read_request(folder)
        account = find_account(request.config.run_as) if request.config.run_as else None
        if account is None:
            os.chdir(request.directory)
        else:
            enter_as(request.directory, account)
    except UserError as error:
        print(f"bagua-agent: {error}", file=sys.stderr, flush=True)
        _leave(folder, REASON, str(error))
        return error.exit_code
    except OSError as error:
        said = f"job {request.config.job_id!r} starts in {request.directory!r}: {error.strerror or error}"
        said += (
            "; make it on this node, or submit from one that all nodes have and the job's account may enter"
        )
        print(f"bagua-agent: {said}", file=sys.stderr, flush=True)
        _leave(folder, REASON, said)
        return UserError.exit_code
    own = agent_environment(os.environ)
    os.environ.clear()
    os.environ.update(own)

    try:
        from bagua_agent.job.run import run_job

        return run_job(
            request.config,
            lambda reason: _leave(folder, REASON, reason),
            request.environment,
            lambda address: _leave(folder, METRICS, address),
        )
    except Exception as error:  # our bug, or an installation that lacks something
        log.exception("bug: the agent of job %s raised", request.config.job_id)
        _leave(folder, REASON, f"{type(error).__name__}: {error}; the unit's log has the traceback")
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), record=RECORD_PROCESS in sys.argv[2:]))
