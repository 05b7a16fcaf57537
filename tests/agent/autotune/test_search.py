"""The sampler of Optuna's finds fast settings in spaces that a study can't try whole, and again after a drop of the
network."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from bagua_agent.autotune import sampler, sampling
from bagua_agent.autotune.prediction import Link, Load, step_s
from bagua_agent.autotune.space import Facts, space_of
from bagua_agent.autotune.study_records import BUDGET, Options, Phase, Study, Trial
from bagua_agent.workers.process.bounded_run import BoundedRun
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings
from tests.agent.autotune.test_study import REPORT_S, SWITCH_S, SimulatedJob

MIB = 1 << 20
GRADIENT_BYTES = 64 * MIB
FACTS = Facts(gradient_bytes=GRADIENT_BYTES, crosses=True, algorithms=("bytegrad", "qadam"))
SPACE = space_of(FACTS)
OPTIONS = Options(level=2, max_samples=30, confidence_s=5.0, warmup_s=30.0, algorithms=FACTS.algorithms)
NODES, WORKERS = 4, 8
NOISE = 0.015  # standard deviation of a trial's measured rate
REPORTED_STEPS = 40.0  # steps a second of a simulated report, so that whole steps hide no difference
NEW_BEST_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a step by its settings: the tuner's own prediction (checked against the simulator of steps), and what
    it leaves out: a constant cost of each bucket, and the stages of hierarchical sums inside a node."""

    link: Link
    compute_s: float
    tensor_bytes: int = 64 << 10  # no bucket is smaller
    scripted_bytes: int = 25 * MIB
    bucket_s: float = 200e-6
    inner_bytes_per_s: float = 5e9

    def rate(self, settings: StepSettings) -> float:
        """Returns steps a second."""
        bucket = min(GRADIENT_BYTES, max(settings.bucket_bytes or self.scripted_bytes, self.tensor_bytes))
        whole, rest = divmod(GRADIENT_BYTES, bucket)
        buckets = (bucket,) * whole + ((rest,) if rest else ())
        algorithm = settings.algorithm or "gradient_allreduce"
        # the defaults of the algorithms
        hierarchical = (
            algorithm != "gradient_allreduce" if settings.hierarchical is None else settings.hierarchical
        )
        ranks = NODES if hierarchical else WORKERS
        seconds = step_s(algorithm, Load(self.compute_s, buckets, ranks, ranks), self.link)
        if hierarchical:
            seconds += GRADIENT_BYTES / self.inner_bytes_per_s + len(buckets) * self.bucket_s / 2
        return 1.0 / (seconds + len(buckets) * self.bucket_s)


LATENT = Cost(Link(1.2e9, 2e-3), compute_s=0.1, tensor_bytes=256 << 10, scripted_bytes=MIB)
TINY_BUCKETS = Cost(Link(1.2e9, 1e-4), compute_s=0.1, tensor_bytes=16 << 10, scripted_bytes=16 << 10)
SLOW_LINK = Cost(Link(125e6, 1e-4), compute_s=0.25)
FAST_LINK = Cost(Link(2.4e9, 5e-5), compute_s=0.1)


def best_rate(cost: Cost) -> float:
    return max(cost.rate(SPACE.settings_at(point)) for point in SPACE.points())


@cache
def suggested(request: str) -> BoundedRun:
    """The answer depends on the request alone, and a study that waits repeats it."""
    point = sampler.suggest(json.loads(request))
    return BoundedRun(0, json.dumps({"exhausted": True} if point is None else {"point": point}))


def in_this_process(command: Sequence[str], within_s: float) -> BoundedRun:
    """The sampler's program without the start of a process, which takes longer than a study of these."""
    return suggested(command[-1])


@pytest.fixture
def _sampler_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(sampling, "run_bounded", in_this_process)


def tuned_job(cost_now: Callable[[], Cost], seed: int) -> SimulatedJob:
    """A job whose trials are measured with noise, and whose suggestions are the sampler's."""
    draws, noise = random.Random(seed), dict[int, float]()

    def speed(settings: StepSettings, at_s: float) -> float:
        if job.generation not in noise:
            noise[job.generation] = draws.lognormvariate(0.0, NOISE)
        return cost_now().rate(settings) * noise[job.generation] * REPORTED_STEPS

    job = SimulatedJob(speed, options=OPTIONS, facts=FACTS)
    job.suggests = lambda study: sampling.suggest(study, SPACE)
    return job


@pytest.mark.usefixtures("_sampler_in_this_process")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("cost", "most_that_are_fast"),
    [(LATENT, 4), (TINY_BUCKETS, 3), (SLOW_LINK, 7)],
    ids=["latent", "tiny", "slow"],
)
def test_a_few_trials_find_95_percent_of_the_best_of_a_large_space(
    cost: Cost, most_that_are_fast: int, seed: int
) -> None:
    best = best_rate(cost)
    fast = [p for p in SPACE.points() if cost.rate(SPACE.settings_at(p)) >= 0.95 * best]
    assert SPACE.size == 126 and len(fast) <= most_that_are_fast, "chance would seldom find one"
    job = tuned_job(lambda: cost, seed)
    job.run(lambda: job.study.phase is Phase.SETTLED, most_s=20_000.0)
    assert len(job.study.trials) <= OPTIONS.max_samples
    assert cost.rate(job.study.current) >= 0.95 * best, job.study.trials


@pytest.mark.usefixtures("_sampler_in_this_process")
def test_the_fixed_trials_alone_do_not_find_it() -> None:
    """So the sampler's suggestions do."""
    job = tuned_job(lambda: LATENT, 0)
    job.gave_up = "no suggestions"
    job.run(lambda: job.study.phase is Phase.SETTLED, most_s=20_000.0)
    assert LATENT.rate(job.study.current) < 0.95 * best_rate(LATENT)


def test_the_process_suggests_what_the_sampler_does_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    points = list(SPACE.points())[::9]
    trials = tuple(
        Trial(SPACE.settings_at(p), int(1000 * LATENT.rate(SPACE.settings_at(p))), 1000.0) for p in points
    )
    study = Study(1, "w", Phase.TRYING, AS_SCRIPTED, trials)
    by_process = sampling.suggest(study, SPACE)
    monkeypatch.setattr(sampling, "run_bounded", in_this_process)
    assert by_process is not None and by_process == sampling.suggest(study, SPACE)


@pytest.mark.usefixtures("_sampler_in_this_process")
@pytest.mark.parametrize("seed", [0, 2])
def test_a_settled_study_finds_the_new_best_after_a_drop_of_the_link(seed: int) -> None:
    """The settings that it has kept for a minute have less than 0.9 of the new best rate."""
    now = FAST_LINK
    job = tuned_job(lambda: now, seed)
    job.run(lambda: job.study.phase is Phase.SETTLED, most_s=20_000.0)
    before, number, settled_s = job.study.current, job.study.number, job.clock_s
    assert FAST_LINK.rate(before) >= 0.95 * best_rate(FAST_LINK)
    job.run(lambda: job.clock_s >= settled_s + 60.0)
    assert job.study.number == number

    now, best = SLOW_LINK, best_rate(SLOW_LINK)
    assert now.rate(before) < 0.9 * best, "it is no longer the best"
    lost_s, trained_s = job.study.lost_s, job.study.trained_s
    job.run(lambda: SLOW_LINK.rate(job.in_force) >= 0.9 * best, most_s=NEW_BEST_WITHIN_S)
    job.run(lambda: job.study.phase is Phase.SETTLED, most_s=20_000.0)
    study = job.study
    assert study.number == number + 1 and any("the throughput went from" in event for event in job.events)
    assert SLOW_LINK.rate(study.current) >= 0.95 * best
    assert len(study.trials) <= OPTIONS.max_samples
    lost_s, trained_s = lost_s + study.lost_s, trained_s + study.trained_s
    assert lost_s <= BUDGET * trained_s + 2 * (REPORT_S + SWITCH_S), "both studies together"
