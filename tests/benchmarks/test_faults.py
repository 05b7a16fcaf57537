"""A row of the table of faults, measured on a real job: on a host that does not lead and on the leader's."""

from __future__ import annotations

import pytest

from benchmarks.fault_endings import ENDINGS, endings_trial
from benchmarks.fault_rows import SCRIPT_RAISES, Row
from benchmarks.fault_trials import one_trial
from tests.lab import namespaces


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_a_row_is_measured_on_a_real_job() -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    trial = one_trial("bagua", (SCRIPT_RAISES.name,), None)
    assert trial.notes == []
    assert [(m.row, m.of_leader) for m in trial.measured] == [(SCRIPT_RAISES.name, b) for b in (False, True)]
    for measured in trial.measured:
        print(f"measured: {measured.row}, of leader {measured.of_leader}: {measured.value_s:.2f} s")
        assert 0 < measured.value_s < 10  # the benchmark says how fast; here it only must be measured


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("row", ENDINGS, ids=lambda row: str(row.name))
def test_a_fault_that_ends_the_job_or_starts_it_anew_is_measured(row: Row) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    trial = endings_trial((row.name,), None)
    assert trial.notes == []
    assert [m.of_leader for m in trial.measured] == ([False, True] if row.of_host else [False])
    assert all(m.row == row.name and 0 < m.value_s < 40 for m in trial.measured)
