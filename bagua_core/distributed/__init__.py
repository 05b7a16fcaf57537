"""The original Bagua's launchers, under their original names: `python -m bagua_core.distributed.launch` and `.run`.

They replace this process by the launcher, which the core does not import.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def replace_process(name: str) -> NoReturn:
    """Replaces this process by the original launcher `name`: launch or run. Their flags are the original's."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "bagua_launch.original_main", name, *sys.argv[1:]]
    os.execv(sys.executable, command)
