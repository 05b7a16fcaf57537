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
    local_rank = WorkerEnvironment.decode(os.environ).local_rank
    written = directory / f"written-{local_rank}-{os.getpid()}"
    written.write_bytes(importlib.import_module("cloudpickle").dumps(result))
    written.replace(directory / f"result-{local_rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
