"""Asks the sampler's process for the next settings, bounded in time, and checks its answer."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from bagua_agent.autotune.space import Space, trials_of
from bagua_agent.autotune.study_records import Study
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.workers.process.bounded_run import run_bounded
from bagua_contract.step_settings import StepSettings

WITHIN_S = 60.0
EXTRA = "pip install 'bagua-elastic[autotune]'"


class SamplerFailed(InfrastructureLost):
    """Raised if the sampler's process gave no settings."""


def check_installed() -> None:
    """Checks that Optuna is installed, without importing it. Raises UserError where it is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(f"--autotune-level: Optuna is not installed on this node; {EXTRA}, or use level 0")


def suggest(study: Study, space: Space, within_s: float = WITHIN_S) -> StepSettings | None:
    """Returns the next settings to try; None if all were tried. Waits for the process. Raises SamplerFailed."""
    rates = {trial.settings: trial.rate for trial in study.trials}
    taken = {p for s in (*rates, study.current) if (p := space.point_of(s)) is not None}
    request = {
        "sizes": [len(choices) for _, choices in space.dimensions],
        "ordered": [name == "bucket_bytes" for name, _ in space.dimensions],
        "trials": [[list(point), rate] for point, rate in trials_of(space, rates)],
        "tried": [list(point) for point in sorted(taken)],
        "seed": len(study.trials),
    }
    # -P: the folder of the program is no place for imports
    command = [sys.executable, "-P", str(Path(__file__).with_name("sampler.py")), json.dumps(request)]
    try:
        ended = run_bounded(command, within_s)
    except (OSError, TimeoutError) as error:
        raise SamplerFailed(f"the sampler's process: {error}") from error
    last = ended.output.strip().rpartition("\n")[2]
    if ended.returncode != 0:
        raise SamplerFailed(f"the sampler's process ended with {ended.returncode}: {last[:200]}")
    try:
        answer = json.loads(last)
        return None if answer.get("exhausted") else space.settings_at(tuple(answer["point"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SamplerFailed(f"the sampler's process answered {last[:200]!r} ({error})") from error
