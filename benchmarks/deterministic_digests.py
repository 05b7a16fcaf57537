"""The digests of benchmarks.deterministic: each model by 1 to 4 workers, and by a job with faults."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.job import Job

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "faults" / "train_deterministic.py"
MODELS = ("norm", "digits", "characters")
WORLDS = (1, 2, 3, 4)
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Digests:
    """by_workers: of the jobs with 1, 2, ... workers. faults: what the last job met, in order."""

    model: str
    steps: int
    by_workers: tuple[str, ...]
    with_faults: str
    faults: str

    @property
    def are_equal(self) -> bool:
        return len({*self.by_workers, self.with_faults}) == 1


def digests_of(model: str, directory: Path) -> Digests:
    """Raises AssertionError where a job or a fault does not go as it should."""
    whole = [_undisturbed(model, directory, workers) for workers in WORLDS]
    faulty, faults = _with_faults(model, directory)
    return Digests(model, whole[0][1], tuple(digest for digest, _ in whole), faulty, faults)


def _made(model: str, directory: Path, endpoints: str | None = None, nodes: str = "1") -> Job:
    own = directory / f"{model}-{len(list(directory.iterdir()))}"
    own.mkdir()
    options = ("--deterministic",)
    return Job(own, endpoints=endpoints, nodes=nodes, options=options, script=["--model", model], file=SCRIPT)


def _undisturbed(model: str, directory: Path, workers: int) -> tuple[str, int]:
    """The digest, and the number of steps."""
    job = _made(model, directory)
    job.hurry()
    job.start(slots=workers)
    job.finish(deadline_s=DEADLINE_S)
    assert {line.world_size for line in job.ledger.lines} == {workers}, "a fault in the run to compare with"
    job.check(finished=workers)
    return str(job.ends()[0]["parameters"]), job.step


def _with_faults(model: str, directory: Path) -> tuple[str, str]:
    etcd = EmbeddedEtcd.start()
    job = _made(model, directory, etcd.endpoint, "1:3")
    try:
        first = job.start(slots=2)
        job.await_step(5)
        second = job.start(slots=1)
        three = job.await_world(3)
        first.workers[0].kill()
        first.await_line("worker in slot 0 ended: killed by SIGKILL")
        again = job.await_world(3, after_step=job.await_world(2, after_step=three))
        second.send(signal.SIGINT)
        two = job.await_world(2, after_step=again)
        third = job.start(slots=2)
        job.await_world(4, after_step=two)
        third.kill_agent()
        job.await_world(2, after_step=job.last_world(4))
        job.hurry()
        assert first.process.wait(DEADLINE_S) == 0, first.log
        job.check(finished=2)
        return str(
            job.ends()[0]["parameters"]
        ), "join, killed worker, its successor, leave, join, killed node"
    finally:
        job.end()
        etcd.stop()
