"""A proposal names an algorithm with its predicted and, once it was in force, its measured time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.autotune.proposal import Proposal, Workers, propose
from bagua_agent.autotune.study_records import Phase
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import StepSettings, frozen_note
from tests.agent.autotune.simulated_tuner import FINGERPRINT, MemoryStore, SimulatedTuner

# 4 MiB of gradients in a ring of four workers at 7.5 MB/s
SLOW = ((1 << 20, 0.2), (3 << 20, 0.6))
FOUR = Workers(4, 4, "gradient_allreduce")


def test_a_slow_network_calls_for_compression() -> None:
    found, about = propose(FOUR, "gradient_allreduce", 0.9, 0.1, SLOW)
    assert found is not None and found.is_worth_it
    assert found.algorithm == "bytegrad" and found.predicted_s < 0.4 < found.instead_of_predicted_s < 0.9
    assert (
        about.startswith("bytegrad is proposed: predicted 301 ms a step")
        and "measured 900 ms; by 7.86 MB/s" in about
    )
    assert Proposal.from_proto(found.to_proto()) == found


def test_a_fast_network_does_not() -> None:
    found, about = propose(FOUR, "gradient_allreduce", 0.105, 0.1, ((1 << 20, 0.001), (3 << 20, 0.003)))
    assert found is not None and not found.is_worth_it
    assert about.startswith("bytegrad is not proposed: predicted 10")


@pytest.mark.parametrize(
    "world, algorithm, buckets, why",
    [
        (FOUR, "local_sgd", SLOW, "instead of local_sgd"),
        (Workers(4, 4, "bytegrad", ("bytegrad",)), "bytegrad", SLOW, "none but bytegrad is allowed"),
        (Workers(1, 4, "bytegrad"), "bytegrad", SLOW, "one node sends nothing"),
        (FOUR, "gradient_allreduce", (), "no times of plain sums"),
    ],
)
def test_without_a_measurement_there_is_none(
    world: Workers, algorithm: str, buckets: tuple[tuple[int, float], ...], why: str
) -> None:
    found, about = propose(world, algorithm, 0.9, 0.1, buckets)
    assert found is None and why in about


def test_an_odd_record_is_refused() -> None:
    good, _ = propose(FOUR, "gradient_allreduce", 0.9, 0.1, SLOW)
    assert good is not None
    for change in ({"measured_s": float("nan")}, {"compute_s": -1.0}, {"algorithm": "unheard-of"}):
        odd = pb.Proposal()
        odd.CopyFrom(good.to_proto())
        for name, value in change.items():
            setattr(odd, name, value)
        with pytest.raises(ValueError, match=r"no numbers|it proposes"):
            Proposal.from_proto(odd)


def speed(settings: StepSettings) -> float:
    return 30.0 if settings.algorithm == "bytegrad" else 10.0


def job(**autotune: object) -> SimulatedTuner:
    asked = {"level": 2, "max_samples": 2, **autotune}
    return SimulatedTuner(MemoryStore(), speed, autotune=asked, buckets=((1 << 20, 0.016), (4 << 20, 0.064)))


def test_level_2_proposes_and_changes_no_algorithm_by_itself() -> None:
    one = job(max_samples=4)
    one.settle()
    found = one.study.proposal
    assert found is not None and found.is_worth_it and found.measured_s == 0
    assert all(not t.settings.algorithm for t in one.study.trials)
    assert any(
        "bytegrad is proposed" in text and "`bagua-launch tune JOB --algorithm bytegrad` sets it" in text
        for text in one.events
    )


def test_an_allowed_algorithm_is_tried_and_its_measurement_stands_beside_the_prediction() -> None:
    one = job(algorithms=["bytegrad"], max_samples=4)
    one.settle()
    found = one.study.proposal
    assert found is not None and found.measured_s == pytest.approx(1 / 30, rel=0.1)
    assert one.study.current.algorithm == "bytegrad"
    proposed = next(text for text in one.events if "is proposed" in text)
    assert proposed.endswith("it is tried")
    measured = next(text for text in one.events if "and measured 33" in text)
    assert "bytegrad is proposed: predicted" in measured


def test_what_people_pin_is_measured_against_the_prediction_too() -> None:
    one = job()
    one.run(lambda: one.study.proposal is not None)
    pinned = StepSettings(algorithm="bytegrad")
    one.seen.view = replace(one.seen.view, pinned_settings=pinned)
    one.rate = lambda settings: 30.0
    one.run(lambda: one.study.proposal is not None and one.study.proposal.measured_s > 0)
    assert one.study.world.endswith("pinned: algorithm bytegrad")
    one.tuner.stop()


def test_level_1_predicts_nothing() -> None:
    one = job(level=1)
    one.settle()
    assert one.study.phase is Phase.SETTLED and one.study.proposal is None


def test_qadam_is_tried_once_its_warm_up_is_over_and_left_out_without_its_optimizer() -> None:
    def fastest(settings: StepSettings) -> float:
        return 40.0 if settings.algorithm == "qadam" else speed(settings)

    asked = {"level": 2, "max_samples": 5, "algorithms": ["bytegrad", "qadam"]}
    with_it = {**FINGERPRINT, "optimizers": "QAdamOptimizer"}
    one = SimulatedTuner(MemoryStore(), fastest, autotune=asked, fingerprint=with_it)
    one.warms_up = True
    for _ in range(20):
        one.report()
    assert one.study.phase is Phase.WARMING and not one.study.trials
    one.warms_up = False
    one.settle()
    assert one.study.current.algorithm == "qadam" and not any("left out" in line for line in one.told)

    other = SimulatedTuner(
        MemoryStore(), fastest, autotune=asked, fingerprint={**FINGERPRINT, "optimizers": "SGD"}
    )
    other.warms_up = True  # nothing waits for what is not tried
    other.settle()
    assert other.study.current.algorithm == "bytegrad"
    (said,) = {line for line in other.told if "left out" in line}
    assert said.startswith(
        "autotune: qadam is left out: the script's optimizer is SGD, and qadam needs bagua."
    )

    frozen = {**with_it, "algorithm": "gradient_allreduce" + frozen_note(4, 6, "1a2b3c4d")}
    third = SimulatedTuner(MemoryStore(), fastest, autotune=asked, fingerprint=frozen)
    third.settle()
    assert third.study.current.algorithm == "bytegrad"
    (said,) = {line for line in third.told if "left out" in line}
    assert said.startswith("autotune: qadam is left out: some parameters were frozen when")
    assert third.study.proposal is not None and third.study.proposal.instead_of == "gradient_allreduce"
