"""Trainers with a loop of their own refuse a deterministic job, with one clear error."""

from __future__ import annotations

import pytest

from bagua_contract.environment import WorkerEnvironment
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, algorithm_of_steps


def test_a_trainer_in_a_deterministic_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = WorkerEnvironment("job", "worker", "agent", "/socket", "127.0.0.1", 0, 1, virtual_shards=8)
    for name, value in made.encode().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UnsupportedInElasticJob, match=r"--deterministic needs a loop over bagua.ElasticDataLoader"
    ):
        algorithm_of_steps("gradient_allreduce")
    monkeypatch.setenv("BAGUA_VIRTUAL_SHARDS", "0")
    assert algorithm_of_steps("gradient_allreduce").name == "gradient_allreduce"
