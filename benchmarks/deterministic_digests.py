"""The digests of benchmarks.deterministic: each model by 1 to 4 workers, and by a job with drawn faults."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults import drawn_faults
from tests.faults.job import Job

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "faults" / "train_deterministic.py"
MODELS = ("norm", "digits", "characters")
WORLDS = (1, 2, 3, 4)
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Digests:
    """by_workers: of the jobs with 1, 2, ... workers. faults: of the last job, with the seed that draws them."""

    model: str
    steps: int
    by_workers: tuple[str, ...]
    with_faults: str
    faults: str

    @property
    def are_equal(self) -> bool:
        return len({*self.by_workers, self.with_faults}) == 1


def digests_of(model: str, directory: Path, seed: int) -> Digests:
    """seed: of the faults. Raises AssertionError where a job or a fault does not go as it should."""
    whole = [_undisturbed(model, directory, workers) for workers in WORLDS]
    faults = drawn_faults.draw(seed)
    words = drawn_faults.in_words(seed, faults)
    print(f"{model}: {words}", file=sys.stderr, flush=True)
    faulty = _with_faults(model, directory, faults)
    return Digests(model, whole[0][1], tuple(digest for digest, _ in whole), faulty, words)


def _made(
    model: str, directory: Path, endpoints: str | None = None, nodes: str = "1", more: Sequence[str] = ()
) -> Job:
    own = directory / f"{model}-{len(list(directory.iterdir()))}"
    own.mkdir()
    options = ("--deterministic", *more)
    return Job(
        own,
        endpoints=endpoints,
        nodes=nodes,
        options=options,
        script=["--model", model],
        file=SCRIPT,
        samples=drawn_faults.SAMPLES,
    )


def _undisturbed(model: str, directory: Path, workers: int) -> tuple[str, int]:
    """The digest, and the number of steps."""
    job = _made(model, directory)
    job.hurry()
    job.start(slots=workers)
    job.finish(deadline_s=DEADLINE_S)
    assert {line.world_size for line in job.ledger.lines} == {workers}, "a fault in the run to compare with"
    job.check(finished=workers)
    return str(job.ends()[0]["parameters"]), job.step


def _with_faults(model: str, directory: Path, faults: Sequence[drawn_faults.Fault]) -> str:
    etcd = EmbeddedEtcd.start()
    job = _made(model, directory, etcd.endpoint, drawn_faults.NODES, drawn_faults.HANG_OPTIONS)
    try:
        drawn_faults.perform(job, faults, etcd, DEADLINE_S)
        return str(job.ends()[0]["parameters"])
    finally:
        job.end()
        etcd.stop()
