"""Starts the workers of a script that was started by plain `python`: the process becomes `bagua-launch`.

As Lightning's users expect of `devices=4`. The part of the script before `trainer.fit()` has then run once in a process
that is no worker; each worker runs the script from its beginning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from bagua_core.integrations.loader_settings import UnsupportedInElasticJob


class BaguaLauncher(_Launcher):
    def __init__(self, workers: int, nodes: int) -> None:
        self._workers = workers
        self._nodes = nodes

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces this process by `bagua-launch`; does not return.

        Raises UnsupportedInElasticJob for several nodes.
        """
        if self._nodes > 1:
            raise UnsupportedInElasticJob(
                f"num_nodes={self._nodes}: start the script on each node by bagua-launch --nnodes {self._nodes}"
            )
        words = launch_command(self._workers, sys.argv, sys.modules["__main__"])
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(words[0], words)

    def kill(self, signum: Any) -> None:
        """Does nothing: there is no child. `bagua-launch` takes this process's place and ends its workers by itself."""


def launch_command(workers: int, argv: list[str], main: Any) -> list[str]:
    """Returns the command that runs the script `main`, started with `argv`, in `workers` processes of this node."""
    command = [sys.executable, "-m", "bagua_launch", "--standalone", "--nproc-per-node", str(workers)]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return [*command, "-m", name, *argv[1:]]
    return [*command, os.path.abspath(argv[0]), *argv[1:]]
