"""Jobs whose script is a Lightning trainer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import Job

SCRIPT = Path(__file__).with_name("train_lightning.py")


class LightningJob(Job):
    """As Job, with a trainer's counters among the promises."""

    def __init__(
        self, directory: Path, *script: str, samples: int = 480, epochs: int = 2, options: Sequence[str] = ()
    ) -> None:
        super().__init__(
            directory,
            samples=samples,
            epochs=epochs,
            options=options,
            program=[str(SCRIPT)],
            imports="lightning",
        )
        self._program = [
            *(str(SCRIPT), "--out", str(self.out), "--samples", str(samples), "--epochs", str(epochs)),
            *script,
        ]

    def check_trainers(
        self,
        *,
        finished: int,
        accumulated: int = 1,
        has_scheduler: bool = True,
        has_equal_states: bool = True,
    ) -> list[dict[str, Any]]:
        """Every sample once, `finished` workers end with the same state, and their trainers count the job's steps."""
        found = self.ledger
        assert found.check(self.samples, self.epochs) == []
        ends = self.ends()
        assert len(ends) == finished, f"{[e['worker'] for e in ends]} reached the end"
        # where replicas differ by nature their parameters are averaged at the end, optimizers stay apart
        for what in ("parameters", "scheduler", "validated", *(["optimizer"] if has_equal_states else [])):
            assert len({e[what] for e in ends}) == 1, f"{what} differ: {ends}"
        updates = self.epochs * -(-found.steps // self.epochs // accumulated)
        for end in ends:
            assert end["batches"] == end["batches_ended"] == end["batches_of_batch_norm"] == found.steps, end
            assert end["epochs"] == self.epochs and end["in_order"], end
            if has_scheduler:
                assert end["global_step"] == end["steps_of_scheduler"] == updates, end
        self.check_nothing_left()
        return ends


@pytest.fixture
def lightning_job(tmp_path: Path) -> Iterator[Any]:
    """lightning_job(*words for the script, samples=, epochs=, options=): what still runs after the test is killed."""
    found = importlib.util.find_spec("lightning") is not None
    assert found, "lightning is not installed: pip install -e '.[lightning]', as scripts/test does"
    made: list[LightningJob] = []

    def make(*script: str, **keywords: Any) -> LightningJob:
        directory = tmp_path / f"job-{len(made)}"
        directory.mkdir()
        made.append(LightningJob(directory, *script, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.end()
