"""What a worker's reports say of its committed steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils.data import TensorDataset

from bagua_contract import session_pb2
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.membership.agent_reports import AgentReports
from tests.core.data.fake_job import FakeEngine


def test_samples_of_a_short_last_batch_are_those_that_it_has() -> None:
    told: list[session_pb2.Progress] = []
    session = SimpleNamespace(progress=told.append)
    rendezvous = SimpleNamespace(address="127.0.0.1:1")
    reports = AgentReports(cast("Any", SimpleNamespace(session=session, rendezvous=rendezvous, number=1)))
    loader = ElasticDataLoader(TensorDataset(torch.arange(10)), 4, engine=cast("Any", FakeEngine()))
    position = loader.position()
    for _ in range(2 * 3):
        reports.step_committed(0.1, 0.0, loader.sample_count(position))
        position = loader.after(position)
    reports.progress(6, position["epoch"], {}, loader)
    assert position == {"epoch": 2, "batch": 0}
    assert (told[0].samples, told[0].step_samples) == (20, 4)
