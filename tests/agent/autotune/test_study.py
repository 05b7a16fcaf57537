"""A study tries settings within its budget, keeps the fastest, and begins anew when its world or network changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from bagua_agent.autotune.proposal import NO_WORKERS, Workers
from bagua_agent.autotune.records import decode_study, encode_study
from bagua_agent.autotune.space import Facts, space_of
from bagua_agent.autotune.study import DRIFTS, NETWORK_STEPS, UNSPENT_S, Situation, step
from bagua_agent.autotune.study_records import BUDGET, Measured, Options, Phase, Study
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

OPTIONS = Options(level=1, confidence_s=5.0, warmup_s=30.0)
FACTS = Facts(gradient_bytes=16 << 20, crosses=True)
BUCKETS = ((1 << 20, 0.2), (4 << 20, 0.8))
REPORT_S = 0.5
SWITCH_S = 0.1
Speed = Callable[[StepSettings, float], float]


@dataclass
class SimulatedJob:
    """A job whose speed is known: steps a second by settings and time. It takes new settings in a generation each."""

    speed: Speed
    options: Options = OPTIONS
    facts: Facts = FACTS
    world: str = "4 workers on 2 nodes"
    study: Study = field(default_factory=Study)
    generation: int = 2
    in_force: StepSettings = AS_SCRIPTED
    steps: float = 0.0
    seconds: float = 0.0
    clock_s: float = 0.0
    done: float = 0.0
    suggests: Callable[[Study], StepSettings | None] = lambda study: None
    gave_up: str = ""
    recalled: StepSettings | None = None
    forgets: int = 0
    workers: Workers = NO_WORKERS
    tail_s: float = 0.0
    first_s: float = 0.0

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.asked = False
        self.settled = 0
        self.before = (0, 0.0)

    def _train(self, seconds: float) -> float:
        """Returns the steps."""
        steps = self.speed(self.in_force, self.clock_s) * seconds
        self.clock_s += seconds
        self.done += steps
        return steps

    def report(self) -> None:
        if self.in_force != self.study.current:
            self._train(self.tail_s)
            self.generation, self.in_force = self.generation + 1, self.study.current
            self.clock_s += SWITCH_S
            self._train(self.first_s)
            self.steps = self.seconds = 0.0
            self.before = (int(self.done), self.clock_s)
        self.steps += self._train(REPORT_S)
        self.seconds += REPORT_S
        measured = Measured(
            self.generation,
            int(self.steps),
            self.seconds,
            SWITCH_S,
            FACTS.gradient_bytes,
            before_steps=self.before[0],
            before_s=self.before[1],
            computing_s=self.seconds / 2,
            buckets=BUCKETS,
        )
        suggested = self.suggests(self.study) if self.asked else None
        result = step(
            self.study,
            Situation(
                self.world,
                space_of(self.facts),
                self.options,
                measured,
                True,
                suggested,
                self.gave_up,
                self.recalled,
                "first",
                self.forgets,
                self.workers,
            ),
        )
        self.settled += result.settles
        self.study, self.asked = result.study, result.asks
        if result.event:
            self.events.append(result.event)

    def run(self, until: Callable[[], bool], most_s: float = 3000.0) -> None:
        end_s = self.clock_s + most_s
        while not until():
            self.report()
            assert self.clock_s < end_s, (self.study.phase, self.study.trials)

    def settle(self) -> None:
        self.run(lambda: self.study.phase is Phase.SETTLED)


def peak_at(exponent: int, base: float = 20.0) -> Speed:
    def speed(settings: StepSettings, at_s: float) -> float:
        size = settings.bucket_bytes or 25 << 20
        route = 1.2 if settings.hierarchical else 1.0
        return base * route / (1.0 + 0.15 * abs(size.bit_length() - 1 - exponent))

    return speed


def untried(study: Study) -> StepSettings | None:
    """In place of the sampler: the nearest to the best."""
    space, best = space_of(FACTS), study.best
    assert best is not None
    here = space.point_of(best.settings)
    assert here is not None
    points = sorted(space.points(), key=lambda p: sum(abs(a - b) for a, b in zip(p, here, strict=True)))
    return next((x for x in map(space.settings_at, points) if x not in study.tried), None)


def test_a_job_of_slow_steps_measures_its_network_before_its_first_trial_ends() -> None:
    job = SimulatedJob(lambda settings, at_s: 0.1)
    job.run(lambda: bool(job.study.trials))
    assert job.steps >= NETWORK_STEPS


def test_it_finds_the_fastest_and_stops() -> None:
    job = SimulatedJob(peak_at(18), suggests=untried)
    job.settle()
    speed = job.speed
    best = max(speed(space_of(FACTS).settings_at(p), 0.0) for p in space_of(FACTS).points())
    assert speed(job.study.current, 0.0) >= 0.95 * best
    assert len(job.study.trials) <= OPTIONS.max_samples
    assert "settles on" in job.events[-1] and "against the script's settings" in job.events[-1]
    settled = job.study.trials
    for _ in range(200):
        job.report()
    assert job.study.trials == settled, "nothing more is tried"


@pytest.mark.parametrize("unmeasured_s", [0.0, 1.0])
def test_trying_costs_no_more_than_the_budget(unmeasured_s: float) -> None:
    """Whatever the settings cost: here each other one is three times slower. unmeasured_s: of training, after the
    decision on settings until they are in force, and again until the first report with them."""
    job = SimulatedJob(
        lambda s, _: 20.0 if s.is_empty else 7.0, suggests=untried, tail_s=unmeasured_s, first_s=unmeasured_s
    )
    for _ in range(4000):
        job.report()
        lost_s = job.clock_s - job.done / 20.0
        assert lost_s <= BUDGET * job.clock_s + 2 * (REPORT_S + SWITCH_S), job.study
    assert len(job.study.trials) > 5, "it tried all the same"
    assert job.study.lost_s == pytest.approx(lost_s, rel=0.02), "the account has all that trying cost"
    assert job.study.phase is not Phase.TRYING or job.study.current != AS_SCRIPTED


def test_steps_before_another_rank_0_cost_nothing_but_the_switch() -> None:
    """So it is with an agent of a version that does not count steps before a measurement: it says 0 of them."""
    job = SimulatedJob(lambda s, _: 20.0 if s.is_empty else 7.0, first_s=1.0)
    job.run(lambda: len(job.study.trials) == 1 and job.study.current != job.in_force)
    study, fresh = job.study, Measured(job.generation + 1, 10, 0.5, SWITCH_S)
    found = step(study, Situation(job.world, space_of(FACTS), OPTIONS, fresh, in_force=True)).study
    assert found.trained_s == pytest.approx(study.trained_s + 0.5 + SWITCH_S)
    assert found.change_s == SWITCH_S and found.lost_s == pytest.approx(study.lost_s + SWITCH_S)


def test_the_scripts_settings_are_kept_where_nothing_is_better() -> None:
    job = SimulatedJob(lambda s, _: 20.0 if s.is_empty else 20.1, suggests=untried)
    job.settle()
    assert job.study.current == AS_SCRIPTED, "half a percent may be noise"


def test_the_scripts_settings_are_measured_again_before_others_are_kept() -> None:
    """Their first trial is the first of the job, which is slow here for another reason."""

    def speed(settings: StepSettings, at_s: float) -> float:
        begins = 0.8 if at_s < OPTIONS.warmup_s + OPTIONS.confidence_s + 2.0 else 1.0
        return begins * (10.0 if settings.is_empty else 9.8 if settings.bucket_bytes == 1 << 20 else 9.0)

    job = SimulatedJob(speed, suggests=untried)
    job.settle()
    assert job.study.current == AS_SCRIPTED
    assert [t.settings for t in job.study.trials].count(AS_SCRIPTED) == 2
    assert any("trying as the script says again" in event for event in job.events)


def test_what_is_kept_was_measured_twice_and_once_if_there_is_no_trial_left() -> None:
    job = SimulatedJob(peak_at(18), suggests=untried)
    job.settle()
    tried = [t.settings for t in job.study.trials]
    assert tried.count(job.study.current) == tried.count(AS_SCRIPTED) == 2
    last = SimulatedJob(peak_at(18), suggests=untried, options=replace(OPTIONS, max_samples=4))
    last.settle()
    tried = [t.settings for t in last.study.trials]
    assert len(tried) == len(set(tried)) == 4


def test_nothing_is_tried_before_the_warm_up() -> None:
    job = SimulatedJob(peak_at(20))
    while job.study.trained_s < OPTIONS.warmup_s - REPORT_S:
        job.report()
        assert (job.study.phase, job.study.current) == (Phase.WARMING, AS_SCRIPTED)


def test_another_world_is_another_study_and_one_that_comes_back_is_remembered() -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.settle()
    found, number = job.study.current, job.study.number
    assert found != AS_SCRIPTED
    job.world = "3 workers on 2 nodes"
    job.report()
    assert (job.study.number, job.study.phase, job.study.current) == (number + 1, Phase.WARMING, found)
    job.speed = lambda s, _: 20.0 if s.is_empty else 10.0
    job.settle()
    assert job.study.current == AS_SCRIPTED, "another world, another best"
    job.world = "4 workers on 2 nodes"
    job.report()
    assert job.study.current == found


def test_a_change_of_the_world_within_a_trial_goes_back_to_the_best() -> None:
    job = SimulatedJob(peak_at(24))
    job.run(lambda: job.study.phase is Phase.TRYING and len(job.study.trials) >= 2)
    best = job.study.best
    assert best is not None and job.study.current != best.settings
    job.world = "3 workers on 2 nodes"
    job.report()
    assert job.study.current == best.settings


def test_a_drop_of_the_network_begins_a_new_study_without_warm_up() -> None:
    drop_s = float("inf")

    def speed(settings: StepSettings, at_s: float) -> float:
        return peak_at(20)(settings, at_s) if at_s < drop_s else peak_at(26, base=8.0)(settings, at_s)

    job = SimulatedJob(speed, suggests=untried)
    job.settle()
    before, number = job.study.current, job.study.number
    drop_s = job.clock_s
    job.run(lambda: job.study.number > number, most_s=6 * OPTIONS.confidence_s)
    assert "the throughput went from" in job.events[-1] and job.study.phase is Phase.TRYING
    job.settle()
    assert speed(job.study.current, job.clock_s) > 1.1 * speed(before, job.clock_s)


@pytest.mark.parametrize("settled_s", [0.0, 60.0, 1e6])
def test_a_study_after_a_drop_may_use_what_the_one_before_it_has_not_spent(settled_s: float) -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.settle()
    job.study = replace(job.study, trained_s=job.study.lost_s / BUDGET + settled_s)
    number, job.speed = job.study.number, peak_at(20, base=8.0)
    job.run(lambda: job.study.number > number)
    until_seen_s = DRIFTS * OPTIONS.confidence_s
    assert job.study.unspent_s == pytest.approx(min(UNSPENT_S, settled_s + until_seen_s), abs=REPORT_S)
    assert decode_study(encode_study(job.study)).unspent_s == job.study.unspent_s
    job.run(lambda: job.study.phase is Phase.RESTING)
    assert job.study.lost_s <= job.study.budget_s + REPORT_S + SWITCH_S


def test_a_pause_of_the_script_in_a_change_holds_up_no_later_trial() -> None:
    """As an evaluation. It is counted as lost, and expected of no other change."""
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.settle()
    job.study = replace(job.study, change_s=60.0, trained_s=job.study.lost_s / BUDGET + UNSPENT_S)
    number, job.speed = job.study.number, peak_at(20, base=8.0)
    job.run(lambda: job.study.number > number)
    job.run(lambda: len(job.study.trials) >= 2, most_s=60.0)


def test_a_busy_host_whose_rates_swing_begins_no_new_study() -> None:
    swings = [0.3, 1.0, 2.5, 0.2, 0.6, 1.4, 3.0, 0.5]

    def speed(settings: StepSettings, at_s: float) -> float:
        swing = 1.0 if job.study.phase is not Phase.SETTLED else swings[int(at_s / OPTIONS.confidence_s) % 8]
        return peak_at(20)(settings, at_s) * swing

    job = SimulatedJob(peak_at(20), suggests=untried)
    job.speed = speed
    job.settle()
    number = job.study.number
    for _ in range(1000):
        job.report()
    assert job.study.number == number


def test_a_clearly_slower_trial_ends_early() -> None:
    job = SimulatedJob(lambda s, _: 20.0 if s.is_empty else 1.0)
    job.run(lambda: len(job.study.trials) >= 2)
    assert job.study.trials[1].seconds < OPTIONS.confidence_s


def test_without_a_sampler_it_settles_on_what_it_has() -> None:
    job = SimulatedJob(peak_at(20), gave_up="the sampler failed 3 times in a row (no optuna)")
    job.settle()
    first = {space_of(FACTS).settings_at(p) for p in space_of(FACTS).first_points()}
    assert job.study.tried >= first and len(job.study.tried) == len(first) + 1, (
        "and the best choices together"
    )
    assert "no optuna" in job.events[-1]


def test_at_most_as_many_trials_as_were_asked_for() -> None:
    job = SimulatedJob(peak_at(20), options=replace(OPTIONS, max_samples=4), suggests=untried)
    job.settle()
    assert len(job.study.trials) == 4


def test_a_measurement_of_other_settings_counts_for_nothing() -> None:
    job = SimulatedJob(peak_at(20))
    job.run(lambda: job.study.phase is Phase.TRYING)
    stale = Situation(job.world, space_of(FACTS), OPTIONS, Measured(99, 1000, 1.0), in_force=False)
    assert step(job.study, stale).study == job.study


def test_level_0_does_nothing() -> None:
    result = step(Study(), Situation("w", space_of(FACTS), Options()))
    assert result.study == Study()


def test_the_next_leader_goes_on_with_the_record() -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.run(lambda: len(job.study.trials) >= 3)
    job.study = decode_study(encode_study(job.study))
    trials = job.study.trials
    job.settle()
    assert job.study.trials[: len(trials)] == trials and job.study.number == 1


def test_a_study_of_an_older_leader_counts_nothing_before_the_next_measurement() -> None:
    """It does not say what had been trained by its last one: all of it would be counted again."""
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.run(lambda: len(job.study.trials) >= 3)
    record = pb.Study.FromString(encode_study(job.study))
    record.ClearField("before_steps")
    record.ClearField("before_s")
    study = decode_study(record.SerializeToString())
    assert encode_study(study) == record.SerializeToString(deterministic=True), "nor do those that follow it"
    later = Measured(study.generation + 1, 10, 0.5, 0.1, before_steps=90_000, before_s=10_800.0)
    found = step(study, Situation(job.world, space_of(FACTS), OPTIONS, later, True)).study
    assert found.trained_s == pytest.approx(study.trained_s + 0.6)
    assert found.lost_s <= study.lost_s + 0.6 and found.before_s == 10_800.0


@pytest.mark.parametrize("algorithms", [(), ("bytegrad",)])
def test_an_algorithm_is_tried_only_where_it_is_allowed(algorithms: tuple[str, ...]) -> None:
    facts = replace(FACTS, algorithms=algorithms)
    job = SimulatedJob(lambda s, _: 40.0 if s.algorithm else 20.0, facts=facts)
    job.gave_up = "none"
    job.settle()
    assert {t.settings.algorithm for t in job.study.trials} == {"", *algorithms}
    assert job.study.current.algorithm == ("bytegrad" if algorithms else "")


def test_what_an_earlier_job_found_is_tried_first() -> None:
    found = StepSettings(1 << 24, True)
    job = SimulatedJob(peak_at(24), suggests=untried, recalled=found)
    job.run(lambda: len(job.study.trials) >= 2)
    assert [t.settings for t in job.study.trials] == [AS_SCRIPTED, found]
    assert "which job 'first' found for this model, world and network" in job.events[1]
    assert job.study.best is not None and job.study.best.settings == found


def test_what_an_earlier_job_found_is_kept_only_where_it_is_measured_faster() -> None:
    job = SimulatedJob(lambda s, _: 20.0 if s.is_empty else 5.0, recalled=StepSettings(1 << 24, True))
    job.gave_up = "none"
    job.settle()
    assert job.study.current == AS_SCRIPTED and len(job.study.trials) > 2


def test_of_what_an_earlier_job_found_only_what_may_be_tried_is() -> None:
    """Here no node has several workers, the order is another one, and nothing but gradient_allreduce is allowed."""
    facts = Facts(gradient_bytes=16 << 20, order=(1, 2, 0))
    nearest = space_of(facts).nearest(StepSettings(1 << 20, True, "bytegrad", (0, 2, 1)))
    assert nearest == StepSettings(1 << 20, None, "", (1, 2, 0))
    pinned = replace(facts, pinned=StepSettings(bucket_bytes=4096))
    assert space_of(pinned).nearest(StepSettings(1 << 20)) == AS_SCRIPTED


def test_a_study_says_once_that_it_has_settled() -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.settle()
    for _ in range(50):
        job.report()
    assert job.settled == 1


def test_a_request_to_forget_begins_a_study_with_the_scripts_settings() -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.settle()
    assert job.study.current != AS_SCRIPTED
    number, job.forgets = job.study.number, 1
    job.report()
    study = job.study
    assert (study.number, study.current, study.trials, study.known) == (number + 1, AS_SCRIPTED, (), {})
    assert "what was found before is forgotten" in job.events[-1]
    job.study = decode_study(encode_study(job.study))
    job.settle()
    assert job.study.number == number + 1, "it is forgotten once"


def test_a_request_to_forget_does_not_end_the_warm_up() -> None:
    job = SimulatedJob(peak_at(20), suggests=untried)
    job.run(lambda: job.study.trained_s >= OPTIONS.warmup_s / 2)
    number, job.forgets = job.study.number, 1
    job.report()
    assert (job.study.number, job.study.phase) == (number + 1, Phase.WARMING)
    job.settle()


def test_a_request_from_before_the_first_study_is_no_reason_for_a_second() -> None:
    job = SimulatedJob(peak_at(20), forgets=3)
    job.run(lambda: len(job.study.trials) >= 1)
    assert (job.study.number, job.study.forgets) == (1, 3)
