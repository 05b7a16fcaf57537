"""A tuner of a job whose speed is known, with a store in memory. Only etcd, workers and time are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from bagua_agent.autotune.records import decode_study
from bagua_agent.autotune.study_records import Phase, Study
from bagua_agent.autotune.tuner import Tuner
from bagua_agent.etcd.client import KeyValue
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.membership.view import JobView
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement
from bagua_contract.step_settings import StepSettings
from tests.lab.wait import eventually

FINGERPRINT = {"model": "10 parameters", "algorithm": "gradient_allreduce", "seed": "1"}
WORKERS = ("a0", "a1", "b0", "b1")
BUCKETS = ((1 << 20, 0.2), (4 << 20, 0.8))
REPORT_S = 1.0


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, KeyValue] = {}
        self._revision = 0

    def put(self, key: str, value: bytes) -> None:
        self._revision += 1
        self.values[key] = KeyValue(key, value, self._revision, self._revision)

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        found = [kv for key, kv in sorted(self.values.items()) if key.startswith(prefix)]
        return found, self._revision


class SimulatedTuner:
    """The tuner of the leader, which is also the agent of global rank 0. rate: steps a second by settings."""

    def __init__(
        self,
        store: MemoryStore,
        rate: Callable[[StepSettings], float],
        job_id: str = "demo",
        autotune: Mapping[str, Any] | None = None,
        fingerprint: Mapping[str, str] = FINGERPRINT,
        buckets: tuple[tuple[int, float], ...] = BUCKETS,
    ) -> None:
        asked = {"level": 1, "max_samples": 4, "confidence_s": 5.0, "warmup_s": 2.0, **(autotune or {})}
        self.store, self.rate, self.keys, self.events = store, rate, JobKeys(job_id), list[str]()
        self.inbox: list[object] = []
        self.told: list[str] = []
        self._fingerprint, self._buckets = fingerprint, buckets
        self.warms_up = False
        self.seen = SimpleNamespace(
            spec=pb.JobSpec(autotune=pb.Autotune(**asked)),
            view=JobView(),
            restarts=False,
            result=None,
            generation=self._generation(2, StepSettings()),
        )
        job = SimpleNamespace(
            seen=self.seen,
            keys=self.keys,
            store=store,
            writes=SimpleNamespace(until_done=lambda what, write: write()),
            terminal=SimpleNamespace(
                tell=self.told.append, tell_once=lambda key, text: self.told.append(text)
            ),
            history=SimpleNamespace(of_job=lambda event: self.events.append(event.text)),
        )
        self.tuner = Tuner(cast(Any, job), lambda v: store.put(self.keys.study, v), self.inbox.append, False)
        self.now_s = self.seconds = self.steps = 0.0

    def _generation(self, number: int, settings: StepSettings) -> Generation:
        places = tuple(
            Placement(w, w[0], w[0], 0, rank, int(w[0] == "b"), int(w[1]), "h:1", 1, 1, True)
            for rank, w in enumerate(WORKERS)
        )
        kind = GenerationKind.PLANNED
        return Generation(
            number, number - 1, kind, places, "n", fingerprint=self._fingerprint, settings=settings
        )

    @property
    def study(self) -> Study:
        return decode_study(self.store.values[self.keys.study].value)

    def report(self, worker_id: str = "a0") -> None:
        """A second of training passes, and a worker says so."""
        current = self.tuner.study.current if self.tuner.study is not None else StepSettings()
        current = self.seen.view.pinned_settings.over(current)
        if self.seen.generation.settings != current:
            self.seen.generation = self._generation(self.seen.generation.number + 1, current)
        self.now_s += REPORT_S
        self.seconds += REPORT_S
        self.steps += self.rate(current) * REPORT_S
        said = session_pb2.Progress(
            generation=self.seen.generation.number,
            step_counts=[int(self.steps)],
            step_sum_s=self.seconds,
            computing_s=self.seconds / 2,
            gradient_bytes=5 << 20,
            warms_up=self.warms_up,
            bucket_times=[session_pb2.BucketTime(bytes=b, seconds=s) for b, s in self._buckets],
        )
        self.tuner.said(worker_id, session_pb2.WorkerMessage(progress=said), self.now_s)
        self.look()

    def look(self) -> None:
        """What is in the store is seen, and answers of other threads arrive."""
        changes = [
            Change(key, kv.value, kv.create_revision, kv.mod_revision)
            for key in (self.keys.study, self.keys.measured)
            if (kv := self.store.values.get(key)) is not None
        ]
        self.tuner.saw(tuple(changes), self.now_s, leads=True)
        if self.tuner._is_reading:
            eventually(lambda: bool(self.inbox), 40.0, "what earlier jobs found is read", 0.005)
        for message in self.inbox[:]:
            self.inbox.remove(message)
            if type(message).__name__ == "Recalled":
                self.tuner.recalled(cast(Any, message), self.now_s, leads=True)

    def run(self, until: Callable[[], bool], most: int = 400) -> None:
        for _ in range(most):
            self.report()
            if until():
                return
        raise AssertionError(self.study)

    def settle(self) -> None:
        try:
            self.run(lambda: self.study.phase is Phase.SETTLED)
        finally:
            self.tuner.stop()
