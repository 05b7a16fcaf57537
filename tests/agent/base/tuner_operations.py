"""The tuner's background operations, each driven until its one event has come (test_background_operations.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from bagua_agent.autotune import tuner
from bagua_agent.autotune.space import Space
from bagua_agent.autotune.study_records import Study
from bagua_contract import membership_pb2
from tests.agent.base.operation_place import Place


def asking_a_sampler(place: Place) -> None:
    place.patch(tuner.sampling, "suggest", place.fail)
    job = SimpleNamespace(seen=SimpleNamespace(spec=membership_pb2.JobSpec()))
    made = tuner.Tuner(cast(Any, job), place.fail, place.events.put, verbose=False)
    made._ask(Study(), Space(()))
    place.one_event()
    made.stop()


def reading_what_was_tuned(place: Place) -> None:
    place.patch(tuner, "read_tuned", place.fail)
    job = SimpleNamespace(seen=SimpleNamespace(spec=membership_pb2.JobSpec()), store=None)
    made = tuner.Tuner(cast(Any, job), place.fail, place.events.put, verbose=False)
    made._recall(0)
    place.one_event()
    made.stop()
