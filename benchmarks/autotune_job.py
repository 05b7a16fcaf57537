"""A job of benchmarks.autotune on lab hosts: pinned by its record in etcd, and measured by its log of steps."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bagua_agent.autotune.records import decode_measured, decode_study
from bagua_agent.autotune.study_records import Measured, Phase, Study
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.step_settings import StepSettings
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Lab

ROOT = Path(__file__).parents[1]
STARTS_WITHIN_S = 180.0
ENTERS_WITHIN_S = 120.0
LEAST_STEPS = 5  # of settings, before and in a measurement
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of `layers` square layers of `width`; wide: few large gradients, deep: many small ones. bucket_bytes: of
    the buckets that the script asks for; None: the runtime's default."""

    layers: int
    width: int
    bucket_bytes: int | None = None

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.layers * self.width**2

    @property
    def worker_options(self) -> list[str]:
        """Of autotune_worker.py."""
        words = ["--layers", str(self.layers), "--width", str(self.width)]
        return words if self.bucket_bytes is None else [*words, "--bucket-bytes", str(self.bucket_bytes)]


# Below 1 M parameters, for links of 100 Mbit/s. deep_16kib: a script whose buckets are wrong on purpose, one for each
# of the small gradients.
MODELS = {"wide": Shape(4, 480), "deep": Shape(120, 88), "deep_16kib": Shape(120, 88, 16 * 1024)}


class NotWithin(RuntimeError):
    """Something that was to be measured did not happen before its deadline."""


class TunedJob:
    """options: of bagua-launch; worker: of autotune_worker.py, beside the model's."""

    def __init__(
        self, lab: Lab, directory: Path, model: str, options: tuple[str, ...], worker: tuple[str, ...] = ()
    ) -> None:
        self.model = model
        self._lab, self._options, self._worker = lab, options, worker
        self._steps = directory / "steps.log"
        self._etcd = lab.etcd(lab.hosts[0])
        self._keys = JobKeys("tuned")

    def __enter__(self) -> TunedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._lab.hosts[1:]:
            host.kill_all()

    def start(self) -> None:
        """Returns when all hosts train."""
        hosts, shape = self._lab.hosts[1:], MODELS[self.model]
        for host in hosts:
            words = [
                sys.executable,
                "-m",
                "bagua_launch",
                "--nnodes",
                str(len(hosts)),
                "--nproc-per-node",
                "1",
            ]
            words += ["--rdzv-endpoint", self._etcd.endpoints, "--rdzv-id", self._keys.job_id]
            words += ["--local-addr", host.address, *self._options]
            words += [str(Path(__file__).with_name("autotune_worker.py")), "--log", str(self._steps)]
            host.run(
                [*words, *shape.worker_options, *self._worker],
                cwd=ROOT,
                env=worker_environment(),
            )
        self._await("the first steps", STARTS_WITHIN_S, lambda: len(self._times()) > LEAST_STEPS)

    def pin(self, settings: StepSettings) -> None:
        """Returns when a generation with them is the newest and some steps have followed."""
        value = pb.PinnedSettings(settings=settings.to_proto()).SerializeToString()
        key = base64.b64encode(self._keys.settings.encode()).decode()
        self._etcd.leader.call("kv/put", key=key, value=base64.b64encode(value).decode())
        self._await(f"a generation with {settings}", ENTERS_WITHIN_S, lambda: self._in_force() == settings)
        steps = len(self._times())
        self._await("its first steps", ENTERS_WITHIN_S, lambda: len(self._times()) > steps + LEAST_STEPS)

    def _in_force(self) -> StepSettings | None:
        found = self._etcd.standing(self._keys.generation).get(self._keys.generation)
        return None if found is None else Generation.decode(found.value).settings

    def rate(self, window_s: float) -> float:
        """Steps a second from now on: over window_s, and some steps at least."""
        before, begun_s = len(self._times()), time.monotonic()
        self._await(
            "steps to measure",
            ENTERS_WITHIN_S,
            lambda: time.monotonic() - begun_s >= window_s and len(self._times()) > before + LEAST_STEPS,
        )
        times = self._times()[before:]
        return (len(times) - 1) / (times[-1] - times[0])

    def study(self) -> Study:
        found = self._etcd.standing(self._keys.study).get(self._keys.study)
        return Study() if found is None else decode_study(found.value)

    def settled_or_last(self, within_s: float) -> Study:
        """The study once it settles, or as it is after within_s."""
        return self.study_once(lambda study: study.phase is Phase.SETTLED, within_s)

    def study_once(self, claim: Callable[[Study], bool], within_s: float) -> Study:
        """The first of which the claim is true, or as it is after within_s."""
        deadline_s = time.monotonic() + within_s
        while not claim(study := self.study()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        return study

    def measured(self) -> Measured | None:
        """By the agent of rank 0, so far."""
        found = self._etcd.standing(self._keys.measured).get(self._keys.measured)
        return None if found is None else decode_measured(found.value)

    def _times(self) -> list[float]:
        """Of the steps of rank 0, by the monotonic clock of this machine. The last line may not be whole yet."""
        if not self._steps.exists():
            return []
        return [float(line) for line in self._steps.read_text().split("\n")[:-1]]

    def _await(self, what: str, within_s: float, claim: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + within_s
        while not claim():
            if time.monotonic() > deadline_s:
                said = "\n".join(p.tail() for host in self._lab.hosts[1:] for p in host.processes)
                raise NotWithin(f"{what}: not within {within_s:g} s\n{said}")
            time.sleep(LOOK_EVERY_S)
