"""The bounded past of a job: the newest complete, the older ones at equal distances."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bagua_agent.observation.series import MOST_POINTS, JobSeries
from bagua_agent.observation.thinned import Thinned
from tests.agent.observation.facts import NOW_S, agent, facts


@pytest.mark.parametrize("count", [0, 1, 200, 201, 400, 401, 1_200, 20_000])
def test_the_newest_are_complete_and_the_older_ones_reach_back_to_the_first(count: int) -> None:
    past = Thinned[int](400)
    for number in range(count):
        past.append(number)
    kept = past.items()
    assert len(kept) <= 400 and kept == sorted(kept)
    assert kept[:1] == [*range(count)][:1] and kept[-200:] == [*range(count)][-200:]
    gaps = [after - before for before, after in pairwise(kept)]
    assert max(gaps, default=0) <= max(1, count / 50)
    assert past.newest == (count - 1 if count else None)


def test_the_points_of_a_job_are_bounded() -> None:
    series = JobSeries()
    for second in range(3 * MOST_POINTS):
        series.take(facts(NOW_S + second, agents=(agent(0),)))
    times = [p.at_unix_s - NOW_S for p in series.points]
    assert len(times) <= MOST_POINTS
    assert (times[0], times[-1]) == (0, 3 * MOST_POINTS - 1)
