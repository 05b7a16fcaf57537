"""The steps that a job has saved."""

from __future__ import annotations

from pathlib import Path

from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage


def newest_step(saved: Path) -> int:
    """Of the newest complete checkpoint in the directory; 0 if there is none."""
    return next((f.place.name.step for f in catalogue.find(LocalStorage(saved)) if f.is_complete), 0)
