"""Only global rank 0's steps of the newest generation are measured, without the first ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.autotune.measuring import Measuring
from bagua_agent.autotune.records import decode_measured, encode_measured
from bagua_agent.autotune.study_records import Measured
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement


def generation(number: int, *workers: str) -> Generation:
    places = tuple(
        Placement(w, w[0], w[0], 0, rank, rank, 0, "h:1", 1, 1, True) for rank, w in enumerate(workers)
    )
    return Generation(number, number - 1, GenerationKind.PLANNED, places)


def report(
    number: int, steps: int, seconds: float, switched_s: float = 0.0, **more: object
) -> session_pb2.Progress:
    return session_pb2.Progress(
        generation=number, step_counts=[steps, 0], step_sum_s=seconds, spent_s={"switch": switched_s}, **more
    )  # type: ignore[arg-type]


def test_the_first_report_of_a_generation_begins_its_measurement() -> None:
    measuring, newest = Measuring(), generation(2, "a0", "b0")
    assert measuring.take("a0", report(2, 5, 9.0), newest) is None
    assert measuring.take("a0", report(2, 5, 9.0), newest) is None, "no step since"
    assert measuring.take("a0", report(2, 9, 11.0), newest) == Measured(2, 4, 2.0)
    assert measuring.take("b0", report(2, 9, 11.0), newest) is None, "not global rank 0"


def test_a_switch_is_measured_with_the_generation_it_led_to() -> None:
    measuring = Measuring()
    measuring.take("a0", report(2, 5, 9.0, 1.0), generation(2, "a0"))
    measuring.take("a0", report(2, 9, 11.0, 1.0), generation(2, "a0"))
    assert measuring.take("a0", report(2, 9, 11.0, 1.0), generation(3, "a0")) is None, "it is pending"
    assert measuring.take("a0", report(3, 10, 12.0, 1.25), generation(3, "a0")) is None
    found = measuring.take("a0", report(3, 12, 13.0, 1.25), generation(3, "a0"))
    assert found is not None and (found.generation, found.steps, found.switch_s) == (3, 2, 0.25)


def test_what_no_generation_measures_is_before_the_next_ones_measurement() -> None:
    """Steps behind the last report of a generation, steps before the first report of the next, and the switch."""
    measuring = Measuring()
    measuring.take("a0", report(2, 5, 9.0, 1.0), generation(2, "a0"))
    first = measuring.take("a0", report(2, 9, 11.0, 1.0), generation(2, "a0"))
    assert first == Measured(2, 4, 2.0)
    measuring.take("a0", report(3, 12, 14.0, 1.25), generation(3, "a0"))
    second = measuring.take("a0", report(3, 14, 15.0, 1.25), generation(3, "a0"))
    assert second == Measured(3, 2, 1.0, 0.25, before_steps=7, before_s=5.25)
    measuring.take("a0", report(4, 15, 16.0, 1.5), generation(4, "a0"))  # reports once
    measuring.take("a0", report(5, 16, 17.0, 1.75), generation(5, "a0"))
    fourth = measuring.take("a0", report(5, 17, 18.0, 1.75), generation(5, "a0"))
    assert fourth == Measured(5, 1, 1.0, 0.25, before_steps=11, before_s=8.75)
    assert decode_measured(encode_measured(fourth)) == fourth


def test_another_worker_counts_from_its_own_beginning() -> None:
    measuring = Measuring()
    measuring.take("a0", report(2, 500, 90.0, 7.0), generation(2, "a0", "b0"))
    assert measuring.take("b0", report(3, 400, 80.0, 6.0), generation(3, "b0")) is None
    assert measuring.take("b0", report(3, 402, 81.0, 6.0), generation(3, "b0")) == Measured(3, 2, 1.0)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_worker_that_is_global_rank_0_again_counts_from_then(is_seen: bool) -> None:
    """Another agent has measured what was trained meanwhile, and this one what was before."""
    measuring = Measuring()
    measuring.take("a0", report(2, 500, 90.0, 7.0), generation(2, "a0", "b0"))
    measuring.take("a0", report(2, 600, 95.0, 7.0), generation(2, "a0", "b0"))
    if is_seen:  # it is no member, or has another rank
        measuring.take("a0", report(3, 700, 99.0, 8.0), generation(3, "b0", "a0"))
    again = generation(4, "a0", "b0")
    if not is_seen:
        again = replace(again, members=tuple(replace(p, since_generation=4) for p in again.members))
    assert measuring.take("a0", report(4, 800, 120.0, 9.0), again) is None
    assert measuring.take("a0", report(4, 803, 121.0, 9.0), again) == Measured(4, 3, 1.0)


def test_the_measured_order_is_passed_on_and_kept() -> None:
    measuring = Measuring()
    measuring.take("a0", report(2, 5, 9.0, order=[1, 0]), generation(2, "a0"))
    found = measuring.take("a0", report(2, 6, 10.0, gradient_bytes=64), generation(2, "a0"))
    assert found == Measured(2, 1, 1.0, 0.0, 64, (1, 0))
    assert decode_measured(encode_measured(found)) == found


def test_computing_and_times_of_buckets_are_passed_on() -> None:
    measuring, times = Measuring(), [session_pb2.BucketTime(bytes=64, seconds=0.5)]
    measuring.take("a0", report(2, 5, 9.0, computing_s=4.0, bucket_times=times), generation(2, "a0"))
    found = measuring.take("a0", report(2, 6, 10.0, computing_s=4.25), generation(2, "a0"))
    assert found == Measured(2, 1, 1.0, computing_s=0.25, buckets=((64, 0.5),))
    assert decode_measured(encode_measured(found)) == found


def test_times_of_buckets_are_of_the_world_they_were_measured_in() -> None:
    measuring, times = Measuring(), [session_pb2.BucketTime(bytes=64, seconds=0.5)]
    alone, both = generation(2, "a0"), generation(3, "a0", "b0")
    measuring.take("a0", report(2, 5, 9.0, bucket_times=times), alone)
    measuring.take("a0", report(2, 6, 9.5, bucket_times=times), both)  # late
    measuring.take("a0", report(3, 7, 10.0), both)
    found = measuring.take("a0", report(3, 8, 11.0), both)
    assert found is not None and found.buckets == ()
    found = measuring.take("a0", report(3, 9, 12.0, bucket_times=times), both)
    assert found is not None and found.buckets == ((64, 0.5),)


def test_a_measurement_with_odd_buckets_is_refused() -> None:
    uneven = pb.MeasuredSteps(generation=1, bucket_bytes=[1, 2], bucket_s=[0.1])
    no_number = pb.MeasuredSteps(generation=1, bucket_bytes=[1], bucket_s=[float("nan")])
    for odd in (uneven, no_number):
        with pytest.raises(ValueError, match=r"it has 2 buckets|its duration nan s"):
            decode_measured(odd.SerializeToString())
