"""Runs scenarios on real ranks of torch's Gloo groups, started once for a test module.

A module of scenarios has functions `check_...(rank: int)` that raise if they fail. Every rank runs them in the order of
the file, so that their collectives match; a test asserts what became of one of them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tests.lab import zygote

LIMIT_S = 180.0
_COLLECTIVE_LIMIT = timedelta(seconds=60)


def names_in(module: str) -> list[str]:
    """The module's scenarios, in their order, without importing it: it may need ranks."""
    text = Path(*module.split(".")).with_suffix(".py").read_text()
    return [line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def check_")]


def run(module: str, world_size: int, folder: Path) -> dict[str, str]:
    """For each scenario of `module` an empty text, or the tracebacks of the ranks on which it failed."""
    argv = [sys.executable, "-m", __name__, module, str(world_size), str(folder)]
    environment = {**zygote._environment(), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        zygote.start([*argv, str(rank)], environment, folder / f"output-{rank}", str(Path.cwd()), None)
        for rank in range(world_size)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(30.0)
    found: dict[str, str] = {}
    for rank, code in enumerate(codes):
        result = folder / f"result-{rank}.json"
        said = (folder / f"output-{rank}").read_text()
        assert code == 0 and result.exists(), f"rank {rank} ended with {code}:\n{said}"
        for name, text in json.loads(result.read_text()).items():
            found[name] = found.get(name, "") + (f"rank {rank}: {text}\n" if text else "")
    return found


def main(module: str, world_size: int, folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_LIMIT)
    os.environ["BAGUA_TEST_FOLDER"] = str(folder)
    scenarios = importlib.import_module(module)
    found: dict[str, str] = {}
    for name in names_in(module):
        check: Callable[[int], None] = getattr(scenarios, name)
        try:
            check(rank)
            found[name] = ""
        except Exception:  # noqa: BLE001 (the test that asserts this scenario shows it)
            found[name] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    (folder / f"result-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
