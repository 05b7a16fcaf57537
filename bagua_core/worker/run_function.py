"""Runs the function of `bagua.launch` in a worker: `python -m bagua_core.worker.run_function DIRECTORY`."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path

from bagua_contract.environment import WorkerEnvironment


def main(directory: Path) -> None:
    # the caller's order: a module's name means the same file here as there
    theirs = json.loads((directory / "sys_path").read_text())
    sys.path[:] = [*theirs, *(entry for entry in sys.path if entry not in theirs)]
    function, args, kwargs = pickle.loads((directory / "call").read_bytes())
    result = function(*args, **kwargs)
    # not the local rank: with --virtual-local-rank every worker's is 0
    slot = WorkerEnvironment.decode(os.environ).slot
    written = directory / f"written-{slot}-{os.getpid()}"
    written.write_bytes(importlib.import_module("cloudpickle").dumps(result))
    written.replace(directory / f"result-{slot}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
