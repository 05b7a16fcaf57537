"""Implements `bagua-launch tune`: shows, pins and forgets the settings of a running job's steps.

Thin: parse, ask, print.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bagua_contract.step_settings import SWITCHABLE
from bagua_launch.errors import RequestError

if TYPE_CHECKING:
    from bagua_agent.etcd.client import Store

_SCRIPT = "script"  # as the script says
_SIZE = re.compile(r"([0-9]{1,12})\s*(B|KiB|MiB|GiB|K|M|G)?", re.IGNORECASE)
_FACTORS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SWITCH = {"on": True, "off": False, _SCRIPT: None}

HELP = f"""Show or change how a running job's steps communicate.

Without options: show what is in force and what is pinned. Options pin settings: the job has them from a step
boundary on, no process starts again, and joiners get them. The value {_SCRIPT!r} leaves one to the script again."""

OPTIONS = (
    click.Option(
        ["--bucket-size"], metavar="SIZE",
        help="Gradients travel together once they are so many bytes: 4MiB, 512KiB, or a number of bytes.",
    ),
    click.Option(
        ["--hierarchical"], type=click.Choice(tuple(_SWITCH)),
        help="Whether workers of a node sum among themselves first, and one of each node crosses the network.",
    ),
    click.Option(
        ["--algorithm"], type=click.Choice((*SWITCHABLE, _SCRIPT)),
        help="Sum gradients by this algorithm. Another algorithm is another arithmetic: read docs/algorithms.md first.",
    ),
    click.Option(
        ["--forget"], is_flag=True,
        help="Forget what was pinned before, and what trials found for this model, in earlier jobs too.",
    ),
    click.Option(
        ["--plot"], metavar="FILE",
        help="Draw the trials of the study, as .svg or .png. Needs matplotlib (extra plot).",
    ),
)  # fmt: skip


def asked_settings(
    bucket_size: str | None, hierarchical: str | None, algorithm: str | None
) -> dict[str, object]:
    """Returns the given fields of StepSettings. Raises RequestError."""
    asked: dict[str, object] = {}
    if bucket_size is not None:
        asked["bucket_bytes"] = 0 if bucket_size == _SCRIPT else size_bytes(bucket_size)
    if hierarchical is not None:
        asked["hierarchical"] = _SWITCH[hierarchical]
    if algorithm is not None:
        asked["algorithm"] = "" if algorithm == _SCRIPT else algorithm
    return asked


def size_bytes(text: str) -> int:
    """Parses a size in bytes. Raises RequestError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise RequestError(f"--bucket-size {text!r}: not a size; use 4MiB, 512KiB, or a number of bytes")
    return int(match[1]) * _FACTORS[(match[2] or "")[:1].lower()]


def plot(store: Store, job_id: str, path: Path) -> None:
    """Draws the trials of the job's study. Raises UserError."""
    from bagua_agent.cluster_client.tune import read_study
    from bagua_launch.trials_plot import plot_trials

    plot_trials(job_id, read_study(store, job_id), path)


def tune(store: Store, job_id: str, asked: dict[str, object], *, forgets: bool, as_json: bool) -> str:
    """Shows or changes the job's settings, and returns the text to print."""
    from bagua_agent.cluster_client import tune as client

    shown = (
        client.pin(store, job_id, asked, forgets=forgets) if asked or forgets else client.show(store, job_id)
    )
    return json.dumps(asdict(shown)) if as_json else str(shown)
