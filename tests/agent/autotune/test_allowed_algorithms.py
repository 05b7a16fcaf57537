"""The algorithm of a running job changes by what people pinned, and within the allowed list, in any history."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from bagua_agent.autotune.proposal import Workers
from bagua_agent.autotune.space import Facts, space_of
from bagua_agent.autotune.study import PINNED
from bagua_agent.autotune.study_records import Options, Phase, Study
from bagua_agent.membership.view import JobView
from bagua_contract.step_settings import AS_SCRIPTED, SWITCHABLE, StepSettings
from tests.agent.autotune.test_study import SimulatedJob

SEEDS = range(15)
REPORTS = 400
WORLDS = ("4 workers on 2 nodes", "3 workers on 2 nodes", "2 workers on 1 node")
ALLOWED: tuple[tuple[str, ...], ...] = ((), ("bytegrad",), ("bytegrad", "qadam"))


@dataclass
class History:
    """A job whose world, network, pinned settings and recalled settings change as a seed says. Algorithms other than
    the script's are faster, so that any part of the study that could choose one would."""

    seed: int
    allowed: tuple[str, ...]
    pinned: StepSettings = AS_SCRIPTED
    came: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed} {self.allowed}")
        self.network, self.world = 1.0, WORLDS[0]
        self.job = SimulatedJob(
            self._speed,
            options=Options(level=2, confidence_s=2.0, warmup_s=3.0, max_samples=12, algorithms=self.allowed),
            suggests=self._suggestion,
            workers=Workers(2, 4, "gradient_allreduce", SWITCHABLE),
        )
        self._apply()

    def _speed(self, settings: StepSettings, at_s: float) -> float:
        effective = self.effective(settings)
        return self.network * (60.0 if effective.algorithm not in ("", "gradient_allreduce") else 20.0)

    def _suggestion(self, study: Study) -> StepSettings | None:
        space = space_of(self.job.facts)
        return space.settings_at(tuple(self.chance.randrange(len(c)) for _, c in space.dimensions))

    def _apply(self) -> None:
        self.job.facts = Facts(1 << 22, crosses=True, algorithms=self.allowed, pinned=self.pinned)
        self.job.world = self.world + ("" if self.pinned.is_empty else f"{PINNED}{self.pinned}")

    def effective(self, tuned: StepSettings) -> StepSettings:
        """What a generation has, as the leader decides it."""
        return JobView(pinned_settings=self.pinned, tuned_settings=tuned).settings

    def happens(self) -> None:
        what = self.chance.choice(("world", "network", "pin", "unpin", "recall", "forget", "sampler fails"))
        self.came[what] += 1
        if what == "world":
            self.world = self.chance.choice(WORLDS)
        elif what == "network":
            self.network *= self.chance.choice((0.3, 0.6, 1.7, 3.0))
        elif what == "pin":
            size = self.chance.choice((0, 1 << 16))
            self.pinned = StepSettings(size, algorithm=self.chance.choice(("", *SWITCHABLE)))
        elif what == "unpin":
            self.pinned = AS_SCRIPTED
        elif what == "recall":  # by an earlier job, which was allowed more
            self.job.recalled = StepSettings(1 << 18, algorithm=self.chance.choice(SWITCHABLE))
        elif what == "forget":
            self.job.forgets += 1
        else:
            self.job.gave_up = self.chance.choice(("", "it has failed"))
        self._apply()


@pytest.mark.parametrize("allowed", ALLOWED)
def test_only_pinned_settings_and_the_allowed_list_change_the_algorithm(allowed: tuple[str, ...]) -> None:
    came, tuned, settled, proposed = Counter[str](), set[str](), 0, set[str]()
    for seed in SEEDS:
        history = History(seed, allowed)
        job = history.job
        for _ in range(REPORTS):
            job.report()
            if history.chance.random() < 0.04:
                history.happens()
            effective = history.effective(job.study.current).algorithm
            said = f"seed {seed}: {effective!r} with {history.pinned} pinned and {allowed} allowed"
            if history.pinned.algorithm:
                assert effective == history.pinned.algorithm, said
            else:
                assert effective in ("", *allowed), said
                tuned.add(effective)
            settled += job.study.phase is Phase.SETTLED
            if job.study.proposal is not None:
                proposed.add(job.study.proposal.algorithm)
        came += history.came
    assert len(came) == 7 and min(came.values()) >= 10, came
    assert tuned == {"", *allowed} and settled, "each of them was chosen"
    assert proposed, "an algorithm was proposed, also where none is allowed"
