"""Holds what a study of autotuning remembers: its options, the measurements that workers report, and its trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from bagua_agent.autotune.proposal import Proposal
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

BUDGET = 0.05  # of the time of training
BETTER_BY = 1.02  # what counts as an improvement; less may be noise


class Phase(Enum):
    WARMING = pb.Study.WARMING  # the settings in force, until training runs evenly
    TRYING = pb.Study.TRYING  # a trial is in force, or on its way
    RESTING = pb.Study.RESTING  # the best settings are in force until the budget allows another trial
    SETTLED = pb.Study.SETTLED  # nothing more is tried while the throughput stays


@dataclass(frozen=True, slots=True)
class Options:
    """The options as the user gave them. algorithms: that may be tried; others never are."""

    level: int = 0
    max_samples: int = 60
    confidence_s: float = 5.0
    warmup_s: float = 30.0
    algorithms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of global rank 0 in a generation: steps, without its first ones, and their time together.

    switch_s: what entering the generation took. gradient_bytes, order: see space.Facts. computing_s: of `seconds`
    without waits for other workers. buckets: bytes and seconds of each bucket's plain sum over all workers, in the
    order of launch, of this generation or the last one in which they were measured; empty: never. warms_up: an
    optimizer of QAdam's is in its warm-up, in which QAdam compresses nothing. before_steps, before_s: steps of the
    worker before these, since it became global rank 0, and their time with that of the switches between them.
    """

    generation: int
    steps: int
    seconds: float
    switch_s: float = 0.0
    gradient_bytes: int = 0
    order: tuple[int, ...] = ()
    computing_s: float = 0.0
    buckets: tuple[tuple[int, float], ...] = ()
    warms_up: bool = False
    before_steps: int = 0
    before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurement of some settings. ended_s: trained_s of the study at its end."""

    settings: StepSettings
    steps: int
    seconds: float
    ended_s: float = 0.0

    @property
    def rate(self) -> float:
        """The rate in steps a second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Study:
    number: int = 0  # grows with each study of the job
    world: str = ""
    phase: Phase = Phase.WARMING
    current: StepSettings = AS_SCRIPTED  # that the job should have now
    trials: tuple[Trial, ...] = ()
    trained_s: float = 0.0  # time of training that was measured in this study
    lost_s: float = 0.0  # of it: what slower trials and changes of settings cost
    change_s: float = 0.0  # what the last change of settings cost
    unspent_s: float = 0.0  # time of training before this study, whose budget it may use too
    # of the last measurement that was counted
    generation: int = 0
    steps: int = 0
    seconds: float = 0.0
    before_steps: int = 0
    before_s: float | None = 0.0  # None: an older agent has written the study
    # with the current settings, since they came into force or since the last look at drift
    window_steps: int = 0
    window_s: float = 0.0
    drifts: tuple[
        float, ...
    ] = ()  # rates of the last windows, while they are all above or below the best trial's
    known: Mapping[str, StepSettings] = field(default_factory=dict)  # what studies of other worlds settled on
    forgets: int = 0  # requests to forget that it knows
    proposal: Proposal | None = None  # of another algorithm, for these workers

    @property
    def budget_s(self) -> float:
        """What trying may cost in all."""
        return BUDGET * (self.trained_s + self.unspent_s)

    @property
    def results(self) -> dict[StepSettings, Trial]:
        """The newest trial of each settings."""
        return {trial.settings: trial for trial in self.trials}

    @property
    def best(self) -> Trial | None:
        """The fastest trial; one that is hardly faster than the script's own gives way to it."""
        if not self.trials:
            return None
        results = self.results.values()
        found = max(results, key=lambda trial: trial.rate)
        scripted = next((t for t in results if t.settings.is_empty), None)
        if scripted is not None and found.rate < scripted.rate * BETTER_BY:
            return scripted
        return found

    @property
    def scripted_rate(self) -> float:
        """The rate with the script's settings; 0: not measured."""
        return next((t.rate for t in self.results.values() if t.settings.is_empty), 0.0)

    @property
    def tried(self) -> frozenset[StepSettings]:
        return frozenset(trial.settings for trial in self.trials)

    @property
    def since_better(self) -> int:
        """The number of trials since the last one that was an improvement."""
        best, since = 0.0, 0
        for trial in self.trials:
            since = 0 if trial.rate > best * BETTER_BY else since + 1
            best = max(best, trial.rate)
        return since
