"""What a job's tuner found is in the store for the next job, which tries it first; and requests to forget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.autotune.study_records import Phase
from bagua_agent.autotune.tuned_records import PREFIX, Tuned, network_of
from bagua_agent.autotune.tuner import Suggested
from bagua_agent.base.errors import InfrastructureLost
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings
from tests.agent.autotune.simulated_tuner import FINGERPRINT, MemoryStore, SimulatedTuner


def route(settings: StepSettings) -> float:
    """Flat sums are the third trial of a study that knows nothing."""
    return 20.0 if settings.hierarchical is False else 10.0


def test_the_next_job_of_a_model_tries_first_what_the_last_one_found() -> None:
    store = MemoryStore()
    first = SimulatedTuner(store, route, "first")
    first.settle()
    (kept,) = store.get_prefix(PREFIX)[0]
    found = Tuned.decode(kept.value)
    assert found.settings == StepSettings(hierarchical=False) and found.job_id == "first"
    assert (found.place.model, found.place.world) == (
        "10 parameters; gradient_allreduce",
        "4 workers on 2 nodes",
    )
    assert found.place.network == network_of(1.5 * 5e6) and found.steps_per_s > found.scripted_steps_per_s > 0

    again = SimulatedTuner(store, route, "second", fingerprint={**FINGERPRINT, "seed": "2"})
    again.run(lambda: len(again.study.trials) == 2)
    assert [t.settings for t in again.study.trials] == [AS_SCRIPTED, found.settings]
    assert any("which job 'first' found" in text for text in again.events)
    again.tuner.stop()


def test_another_model_and_another_network_know_nothing_of_it() -> None:
    store = MemoryStore()
    SimulatedTuner(store, route, "first").settle()
    others = (
        SimulatedTuner(store, route, "model", fingerprint={**FINGERPRINT, "model": "11 parameters"}),
        SimulatedTuner(store, route, "network", buckets=((1 << 20, 0.002), (4 << 20, 0.008))),
    )
    for other in others:
        other.settle()
        assert not any("which job" in text for text in other.events)
    assert len(store.get_prefix(PREFIX)[0]) == 3


def test_an_odd_record_ends_nothing_and_is_named() -> None:
    store = MemoryStore()
    store.put(PREFIX + "m/w", b"\xff")
    job = SimulatedTuner(store, route)
    job.settle()
    assert any(PREFIX + "m/w" in line for line in job.told)
    assert job.study.current == StepSettings(hierarchical=False)


def test_a_store_that_cannot_be_read_delays_nothing() -> None:
    class Away(MemoryStore):
        def get_prefix(self, prefix: str) -> tuple[list[object], int]:  # type: ignore[override]
            raise InfrastructureLost("etcd is away")

    job = SimulatedTuner(Away(), route)
    job.run(lambda: len(job.study.trials) == 2)
    assert any("etcd is away" in line for line in job.told)
    job.tuner.stop()


def test_a_request_to_forget_is_followed_by_the_running_study() -> None:
    store = MemoryStore()
    job = SimulatedTuner(store, route)
    job.run(lambda: job.study.phase is Phase.SETTLED)
    number = job.study.number
    for key in [kv.key for kv in store.get_prefix(PREFIX)[0]]:
        store.delete(key)  # as `bagua-launch tune --forget` does first
    job.seen.view = replace(job.seen.view, forgets=1)
    job.run(lambda: job.study.number > number)
    assert job.study.current == AS_SCRIPTED and not job.study.trials
    job.settle()
    assert not any("which job" in text for text in job.events)


@pytest.mark.parametrize("algorithm", ["local_sgd(every 16, mean, none)", "hook(powerSGD)", "none"])
def test_an_algorithm_without_settings_is_not_tuned(algorithm: str) -> None:
    store = MemoryStore()
    job = SimulatedTuner(store, route, fingerprint={**FINGERPRINT, "algorithm": algorithm})
    for _ in range(50):
        job.report()
    job.tuner.stop()
    assert job.keys.study not in store.values and job.seen.generation.number == 2
    assert set(job.told) == {f"autotune: algorithm {algorithm} takes no settings; nothing is tuned"}


def test_of_two_models_one_that_takes_settings_is_enough() -> None:
    both = {**FINGERPRINT, "algorithm": "local_sgd(every 16, mean, none), bytegrad(hierarchical)"}
    job = SimulatedTuner(MemoryStore(), route, fingerprint=both)
    job.run(lambda: len(job.study.trials) >= 1)
    job.tuner.stop()


def test_what_a_sampler_said_ends_with_the_leadership() -> None:
    job = SimulatedTuner(MemoryStore(), route)
    job.run(lambda: len(job.study.trials) >= 1)
    job.tuner.suggested(Suggested(job.study.number, None), job.now_s, leads=True)
    assert job.tuner._gave_up == "all settings were tried"
    job.tuner.saw((), job.now_s, leads=False)
    assert not job.tuner._gave_up
    job.tuner.stop()


def test_the_next_leader_goes_on_with_the_record() -> None:
    store = MemoryStore()
    job = SimulatedTuner(store, route)
    job.run(lambda: len(job.study.trials) == 2)
    job.tuner.stop()
    trials = job.study.trials
    successor = SimulatedTuner(store, route)
    successor.settle()
    assert successor.study.trials[:2] == trials and successor.study.number == 1
