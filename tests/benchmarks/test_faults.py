"""Two rows of the table of faults, measured on a real job."""

from __future__ import annotations

import pytest

from benchmarks.fault_rows import SCRIPT_RAISES, WORKER_KILLED
from benchmarks.fault_trials import one_trial
from tests.lab import namespaces


def test_rows_are_measured_on_a_real_job() -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    trial = one_trial("bagua", (WORKER_KILLED.name, SCRIPT_RAISES.name), None)
    assert trial.notes == []
    assert [m.row for m in trial.measured] == [WORKER_KILLED.name, SCRIPT_RAISES.name]
    for measured in trial.measured:
        print(f"measured: {measured.row}: {measured.value_s:.2f} s")
        assert 0 < measured.value_s < 10  # the benchmark says how fast; here it only must be measured
