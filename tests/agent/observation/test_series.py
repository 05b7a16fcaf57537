"""The course of a job from its facts: rates, means, sums, and a bounded past."""

from __future__ import annotations

import math

import pytest

from bagua_agent.dashboard.page_data import page_data
from bagua_agent.observation.series import JobSeries, speeds
from bagua_contract import membership_pb2 as pb
from tests.agent.observation.facts import NOW_S, agent, facts, worker


def test_rates_and_means_are_of_the_time_between_two_looks() -> None:
    series = JobSeries()
    series.take(
        facts(agents=(agent(0, worker(0, metrics={"loss": 1.0})), agent(1, worker(1, metrics={"loss": 3.0}))))
    )
    first = series.points[0]
    assert (first.step, first.metrics, first.computing_s) == (10, {"loss": 2.0}, {})
    later = (
        agent(0, worker(0, step=30, computing_s=3.0, step_samples=8)),
        agent(1, worker(1, step=30, computing_s=5.0)),
    )
    series.take(facts(NOW_S + 4, agents=later))
    point = series.points[1]
    assert series.computing_share() is None, "no worker has said how long its steps were"
    assert point.computing_s == {0: pytest.approx(0.1), 1: pytest.approx(0.2)}
    assert (series.step, series.step_since_unix_s) == (30, NOW_S + 4)


def test_a_worker_on_standby_is_in_no_mean_and_not_in_the_usual_step_time() -> None:
    """Its last report stays as it was while it waits."""
    series = JobSeries()
    for looks in (1, 2):
        trains = worker(0, step=10 * looks, metrics={"loss": 1.0}, step_sum_s=1.0 * looks)
        waits = worker(None, step=10, metrics={"loss": 9.0}, step_sum_s=50.0)
        series.take(facts(NOW_S + 5 * looks, agents=(agent(0, trains), agent(1, waits))))
    point = series.points[-1]
    assert (point.step, point.metrics) == (20, {"loss": 1.0})
    assert series.usual_step_s() == pytest.approx(0.1)


@pytest.mark.parametrize("one", [math.inf, 1e308], ids=str)
def test_a_diverged_loss_has_a_mean_that_is_no_number(one: float) -> None:
    for other, mean in ((one, math.inf), (-math.inf, -math.inf if math.isfinite(one) else math.nan)):
        series = JobSeries()
        losses = worker(0, metrics={"loss": one}), worker(1, metrics={"loss": other})
        series.take(facts(agents=(agent(0, losses[0]), agent(1, losses[1]))))
        assert str(series.points[0].metrics["loss"]) == str(mean)


def test_the_speed_of_long_steps_is_the_same_at_every_look() -> None:
    """Of 30 looks, one finds a new step."""
    series = JobSeries()
    for second in range(120):
        trains = worker(0, step=10 + second // 30, total_steps=20, step_samples=1024)
        seen = facts(NOW_S + second, agents=(agent(0, trains),))
        series.take(seen)
        page = page_data(seen, series, "")
        if second > 60:
            now = page["progress"]
            assert now["steps_per_s"] == pytest.approx(1 / 30, rel=0.2), second
            assert now["samples_per_s"] == pytest.approx(1024 / 30, rel=0.2), second
            assert now["eta_s"] == pytest.approx(30 * (10 - second // 30), rel=0.2), second
    drawn = [rate for rate in page["series"]["steps_per_s"] if rate is not None]
    assert drawn == pytest.approx([1 / 30] * 2)


def test_before_two_changes_of_the_step_the_speed_is_what_the_workers_report() -> None:
    series = JobSeries()
    series.take(facts(agents=(agent(0),)))
    assert series.recent_rate() is None
    for second in (1, 2):
        series.take(facts(NOW_S + second))
    assert series.recent_rate() == 2.0


def test_the_speed_falls_while_no_step_comes_and_begins_anew_from_a_checkpoint() -> None:
    series = JobSeries()
    for second in range(60):
        series.take(facts(NOW_S + second, agents=(agent(0, worker(0, step=10 + min(second, 10))),)))
        assert second < 3 or second > 12 or series.recent_rate() == pytest.approx(1.0)
    rate = series.recent_rate()
    assert rate is not None and rate < 0.05
    assert page_data(facts(NOW_S + 59), series, "")["series"]["steps_per_s"][-1] == 0.0
    for second in range(60, 63):
        series.take(facts(NOW_S + second, agents=(agent(0, worker(0, step=second - 55)),)))
    assert series.recent_rate() == pytest.approx(1.0)


def test_a_steady_speed_is_drawn_without_a_peak_where_the_points_become_denser() -> None:
    series = JobSeries()
    for look in range(3_000):
        at_s = 5 * look if look < 2_950 else 5 * 2_950 + look - 2_950  # a browser asks at last
        series.take(facts(NOW_S + at_s, agents=(agent(0, worker(0, step=10 + at_s // 3)),)))
    drawn = [rate for rate in speeds(series.points) if rate is not None]
    assert len(drawn) > 150
    assert drawn == pytest.approx([1 / 3] * len(drawn), rel=0.55)
    assert sum(drawn) / len(drawn) == pytest.approx(1 / 3, rel=0.05)


def test_what_a_long_step_sends_is_known_between_two_steps() -> None:
    series = JobSeries()
    for second in range(9):
        sends = worker(0, step=10 + second // 4, sent_bytes=100 * second)
        series.take(facts(NOW_S + second, agents=(agent(0, sends),)))
        assert second < 4 or series.sent["w0"].bytes_a_step == 400.0


def test_time_of_workers_that_ended_still_counts() -> None:
    series = JobSeries()
    spent = {"step": 5.0, "failover": 1.0}
    series.take(facts(agents=(agent(0, worker(0, spent_s=spent)), agent(1, worker(1, spent_s=spent)))))
    series.take(facts(NOW_S + 1, agents=(agent(0, worker(0, spent_s={"step": 6.0, "failover": 1.0})),)))
    assert series.spent_s() == {"step": 11.0, "failover": 2.0}


def test_the_share_of_computing_is_of_all_workers() -> None:
    series = JobSeries()
    series.take(
        facts(
            agents=(agent(0, worker(0, step_sum_s=4.0)), agent(1, worker(1, computing_s=2.0, step_sum_s=4.0)))
        )
    )
    assert series.computing_share() == pytest.approx(3 / 8)


def test_a_successor_in_the_slot_begins_anew() -> None:
    series = JobSeries()
    series.take(facts())
    new = worker(1, step=12, computing_s=0.1)
    new.worker_id = "w1-again"
    series.take(facts(NOW_S + 1, agents=(agent(0, worker(0, step=12, computing_s=1.2)), agent(1, new))))
    assert series.points[-1].computing_s == {0: pytest.approx(0.1)}


def test_the_next_job_of_the_same_name_has_a_course_of_its_own() -> None:
    series = JobSeries()
    of_a = agent(0, worker(0, step=500, spent_s={"step": 10.0, "failover": 1000.0}, step_sum_s=5000.0))
    series.take(facts(spec=pb.JobSpec(nonce="a"), agents=(of_a,)))
    new = worker(0, step=10, spent_s={"step": 10.0}, step_sum_s=10.0)
    new.worker_id = "w0-of-b"
    seen = facts(NOW_S + 1, spec=pb.JobSpec(nonce="b"), agents=(agent(0, new),))
    series.take(seen)
    page = page_data(seen, series, "")
    assert page["goodput"]["share"] == 1.0
    assert [point.step for point in series.points] == [10]
    assert series.usual_step_s() == 1.0
    series.take(facts(NOW_S + 2, agents=(agent(0, new),)))  # a record of the job that can't be read
    series.take(facts(NOW_S + 3, spec=pb.JobSpec(nonce="b"), agents=(agent(0, new),)))
    assert len(series.points) == 3, "it is the same job"
