"""One test for each defect of the original Bagua's autotuner, named for it."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from bagua_agent.autotune.measuring import Measuring
from bagua_agent.autotune.records import encode_study
from bagua_agent.autotune.study import Situation, step
from bagua_agent.autotune.study_records import Measured, Options, Phase, Study
from bagua_contract import session_pb2
from bagua_contract.step_settings import StepSettings
from bagua_core.algorithms import Attachment
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.algorithms.tuned import tuned
from bagua_core.communication.reduction.arrivals import WATCHED
from bagua_core.communication.reduction.reducer import Reducer
from tests.agent.autotune.simulated_tuner import WORKERS, MemoryStore, SimulatedTuner
from tests.core.communication.worlds import FakeEngine


def flat_is_slow(settings: StepSettings) -> float:
    return 20.0 if settings.hierarchical else 10.0


def test_hierarchical_was_tuned_and_never_consumed() -> None:
    """What the study settles on is the operation that the model uses."""
    job = SimulatedTuner(MemoryStore(), flat_is_slow)
    job.settle()
    assert job.study.current.hierarchical is True
    used = tuned(GradientAllreduce(hierarchical=False), job.study.current)
    assert used is not None and used.hierarchical
    attachment = Attachment((), (), FakeEngine(), 1 << 20)
    names = [
        type(tuned(GradientAllreduce(), StepSettings(hierarchical=route)).operation(attachment)).__name__  # type: ignore[union-attr]
        for route in (True, False)
    ]
    assert names == ["HierarchicalSum", "Sum"]


def test_it_was_keyed_by_the_models_address_in_memory() -> None:
    """Workers have copies of a model at other addresses, and name its tensors alike: by their places."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    orders = []
    for one in (model, copy.deepcopy(model)):
        reducer = Reducer(one.parameters(), FakeEngine(None))
        for _ in range(WATCHED):
            one(torch.ones(1, 2)).sum().backward()
        orders.append(reducer.readiness)
    assert orders[0] == orders[1] == (2, 1, 0)


def test_it_stalled_with_more_than_one_rank() -> None:
    """One rank's reports suffice, and reports of others neither count nor are waited for."""
    job = SimulatedTuner(MemoryStore(), flat_is_slow)
    for _ in range(60):
        for worker_id in WORKERS[1:]:
            job.report(worker_id)
        if len(job.store.values) and job.keys.measured in job.store.values:
            raise AssertionError("a measurement of another rank")
    job.settle()
    assert len(job.study.trials) == 4


def test_its_address_was_that_of_the_first_master() -> None:
    """The study is a record without an address: the next leader, on another node, goes on with it."""
    store = MemoryStore()
    first = SimulatedTuner(store, flat_is_slow)
    first.run(lambda: len(first.study.trials) == 2)
    first.tuner.stop()
    record, before = store.values[first.keys.study].value, first.study
    assert b"h:1" not in record and b"127.0.0.1" not in record
    successor = SimulatedTuner(store, flat_is_slow)
    successor.settle()
    assert successor.study.trials[:2] == before.trials and successor.study.number == before.number


def test_it_dropped_the_newest_record() -> None:
    """The report that ends a trial is part of it, and so is each before it."""
    job = SimulatedTuner(MemoryStore(), lambda settings: 10.0)
    job.run(lambda: len(job.study.trials) == 1)
    job.tuner.stop()
    (trial,) = job.study.trials
    space = job.tuner._space(job.seen.generation)
    trying = replace(Study(number=1, world="w", phase=Phase.TRYING), generation=2, steps=10, seconds=4.0)
    trying = replace(trying, window_steps=10, window_s=4.0)
    newest = Measured(generation=2, steps=40, seconds=5.5)
    ended = step(trying, Situation("w", space, Options(1, confidence_s=5.0), newest, in_force=True)).study
    assert [(t.steps, t.seconds) for t in ended.trials] == [(40, 5.5)]
    assert trial.steps == int(10 * trial.seconds)


def test_several_models_confused_it() -> None:
    """Two models of a script are one measurement: a step takes what both take, and settings hold for both."""
    measuring, job = Measuring(), SimulatedTuner(MemoryStore(), flat_is_slow)
    progress = session_pb2.Progress(
        generation=2, step_counts=[5], step_sum_s=1.0, gradient_bytes=12, order=[1, 0]
    )
    newest = job.seen.generation
    assert measuring.take("a0", progress, newest) is None
    progress.step_counts[0], progress.step_sum_s = 9, 3.0
    found = measuring.take("a0", progress, newest)
    assert found is not None and (found.steps, found.seconds, found.gradient_bytes) == (4, 2.0, 12)
    job.tuner.stop()


def test_a_record_has_a_bounded_size() -> None:
    """60 trials of a model whose order is passed on, the most tensors of one: what each new leader reads."""
    order = tuple(range(4096))
    job = SimulatedTuner(MemoryStore(), flat_is_slow)
    job.run(lambda: len(job.study.trials) == 1)
    job.tuner.stop()
    trial = replace(job.study.trials[0], settings=StepSettings(1 << 20, True, "bytegrad", order))
    assert len(encode_study(replace(job.study, trials=(trial,) * 60))) < 1 << 20
