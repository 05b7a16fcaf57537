"""The messages of the tuner's threads to the loop. An agent whose job is not tuned loads no more of autotuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua_agent.autotune.tuned_records import Tuned
    from bagua_contract.step_settings import StepSettings


@dataclass(frozen=True, slots=True)
class Suggested:
    """The event that the sampler's process has ended. settings None: it has nothing more to suggest, or failed for
    `why`."""

    study: int
    settings: StepSettings | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The event that what earlier jobs found was read, by key. forgets: of the study that asked. problems: lines for
    people."""

    records: Mapping[str, Tuned]
    forgets: int
    problems: tuple[str, ...] = ()
