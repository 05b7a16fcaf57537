"""What a worker's reports say of its committed steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import TensorDataset

from bagua_agent.dashboard.page_loop import LOOK_S
from bagua_contract import session_pb2
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.membership import agent_reports
from bagua_core.elastic.membership.agent_reports import AgentReports
from tests.core.data.fake_job import FakeEngine


def test_samples_of_a_short_last_batch_are_those_that_it_has() -> None:
    told: list[session_pb2.Progress] = []
    session, stalls = SimpleNamespace(progress=told.append), SimpleNamespace(usual_step_s=0.0)
    rendezvous = SimpleNamespace(address="127.0.0.1:1")
    member = SimpleNamespace(session=session, stalls=stalls, rendezvous=rendezvous, number=1)
    reports = AgentReports(cast("Any", member))
    loader = ElasticDataLoader(TensorDataset(torch.arange(10)), 4, engine=cast("Any", FakeEngine()))
    position = loader.position()
    for _ in range(2 * 3):
        reports.step_committed(0.1, 0.0, loader.sample_count(position))
        position = loader.after(position)
    reports.progress(6, position["epoch"], {}, loader)
    assert position == {"epoch": 2, "batch": 0}
    assert (told[0].samples, told[0].step_samples) == (20, 4)


def test_a_pause_between_two_steps_is_no_part_of_the_usual_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is looked for after ten usual steps. Were the pause one, it would go unseen for ten times the pause."""
    now_s = 100.0
    monkeypatch.setattr(agent_reports, "time", SimpleNamespace(monotonic=lambda: now_s))
    stalls, rendezvous = SimpleNamespace(usual_step_s=0.0), SimpleNamespace(address="127.0.0.1:1")
    reports = AgentReports(cast("Any", SimpleNamespace(stalls=stalls, rendezvous=rendezvous)))

    def step() -> None:
        nonlocal now_s
        now_s += 1.0
        reports.step_committed(1.0, 0.0, 4)
        reports.is_progress_due()

    step()
    assert stalls.usual_step_s == 0.0, "the first step is no measure: kernels are built in it"
    for _ in range(3):
        step()
    assert stalls.usual_step_s == 1.0
    now_s += 3600.0  # a failover that waits for a node
    step()
    assert stalls.usual_step_s < 5.0


def test_a_report_is_new_at_each_look_of_a_page_and_no_more_often_than_that_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(agent_reports, "time", SimpleNamespace(monotonic=lambda: now_s))
    rendezvous = SimpleNamespace(address="127.0.0.1:1")
    reports = AgentReports(cast("Any", SimpleNamespace(rendezvous=rendezvous)))
    looks = 20
    due = 0
    for _ in range(round(looks * LOOK_S / 0.01)):
        now_s += 0.01
        due += reports.is_progress_due()
    assert looks < due <= 2 * looks
