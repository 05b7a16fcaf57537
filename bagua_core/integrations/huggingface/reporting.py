"""Lets the main worker of the moment report to the trackers of a trainer: TensorBoard, Weights & Biases and others.

The callbacks of transformers decide at the beginning of a training, on each worker, whether they report. A worker that
becomes the main one later has to begin with them anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.integrations import TensorBoardCallback

import bagua_core as bagua

_PACKAGE = "transformers.integrations"


def reports(callback: object) -> bool:
    """Tells whether `callback` is transformers' callback for a tracker, or derived from one."""
    return any(kind.__module__.startswith(_PACKAGE) for kind in type(callback).__mro__)


def share_folders(callbacks: Iterable[object]) -> None:
    """Gives every worker the folder that the first main worker chose, so that TensorBoard shows one run."""
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and hasattr(callback, "logging_dir"):
            callback.logging_dir = bagua.broadcast_object(callback.logging_dir)


def begin_as_main(callback: Any, trainer: Any) -> None:
    """Begins the training anew for a callback of a worker that has become the main one, and did not report before."""
    if hasattr(callback, "_initialized"):
        callback._initialized = False
    callback.on_train_begin(
        trainer.args,
        trainer.state,
        trainer.control,
        model=trainer.model,
        processing_class=trainer.processing_class,
    )
