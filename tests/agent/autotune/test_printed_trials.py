"""What docs/autotuning.md prints of studies is what studies with these rates say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bagua_agent.autotune.prediction import Link
from bagua_agent.autotune.proposal import Proposal
from bagua_agent.autotune.space import Facts
from bagua_agent.autotune.study_records import Options, Study
from bagua_contract.step_settings import StepSettings
from tests.agent.autotune.test_study import SimulatedJob
from tests.docs.page_blocks import ROOT
from tests.docs.printed import printed_text

BUCKETS = StepSettings(bucket_bytes=64 << 10)
HIERARCHICAL, FLAT = StepSettings(hierarchical=True), StepSettings(hierarchical=False)
WINDOW_S = 500.0  # every printed rate has whole steps in it, and in a fifth, after which a slow trial ends


def said_of_study(number: int, world: str, facts: Facts, rates: dict[StepSettings, float]) -> list[str]:
    """The lines of a study that tries the script's settings and these."""
    options = Options(level=1, confidence_s=WINDOW_S, warmup_s=WINDOW_S, max_samples=len(rates))
    job = SimulatedJob(
        lambda settings, at_s: rates[settings] + 1e-4,  # a sum of floats just below a whole step is no step
        options,
        facts,
        world,
        Study(number=number - 1),
    )
    job.settle()
    return [f"autotune: {event}" for event in job.events]


@pytest.fixture(autouse=True)
def _switches_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_agent.autotune.study_records.BUDGET", 1.0)
    monkeypatch.setattr("tests.agent.autotune.test_study.SWITCH_S", 0.0)


def test_the_job_on_one_machine() -> None:
    rates = {StepSettings(): 21.6, BUCKETS: 21.8}
    said = said_of_study(1, "2 workers on 1 node", Facts(gradient_bytes=64 << 10), rates)
    printed = printed_text("docs/autotuning.md", "study 1 begins").splitlines()
    generation = printed.pop(2)
    assert f"; other settings of steps: {BUCKETS}; " in generation
    assert [re.sub("^bagua [0-9:]+ vm [|] ", "", line) for line in printed] == said


def test_the_study_of_two_hosts() -> None:
    rates = {StepSettings(): 2.35, HIERARCHICAL: 3.71, FLAT: 2.43}
    said = said_of_study(2, "4 workers on 2 nodes", Facts(gradient_bytes=64 << 10, crosses=True), rates)
    assert printed_text("docs/autotuning.md", "study 2 begins").splitlines() == said


def test_the_proposal() -> None:
    found = Proposal("bytegrad", 0.111, "gradient_allreduce", 0.360, 0.349, 0.0635, Link(1.38e6, 0.0))
    assert printed_text("docs/autotuning.md", "bytegrad is proposed") == f"{found}; it is tried\n"
    measured = re.search(
        "predicted 111 ms and measured [0-9]+ ms a step", (ROOT / "docs/autotuning.md").read_text()
    )
    assert measured is not None and measured[0] in str(replace(found, measured_s=0.293))
