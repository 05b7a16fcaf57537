"""A worker ends itself once, by SIGKILL, where its test says so; otherwise nothing happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def here(out: Path, rank: int, place: int) -> None:
    """The worker of `rank` has saved what `place` steps or epochs gave. The file `end-at` in out names a place."""
    wish, done = out / "end-at", out / "has-ended"
    if rank != 1 or not wish.exists() or done.exists() or int(wish.read_text()) != place:
        return
    done.touch()
    os.kill(os.getpid(), signal.SIGKILL)
