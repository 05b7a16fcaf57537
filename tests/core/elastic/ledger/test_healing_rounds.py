"""The samples of a round are known while its lines of the ledger may be missing, through any number of heals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bagua_core.algorithms import LocalSGD
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.ledger.ledger import LedgerLine
from bagua_core.elastic.state.commit_history import History
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.elastic.state.trainings import through_the_wire

HEALING = 20
SAMPLES = TensorDataset(torch.arange(240.0).view(-1, 1))


class Job:
    """A world of one with rounds of one step."""

    def __init__(self) -> None:
        self.engine = Engine(None)
        self.lines: list[LedgerLine] = []
        writer: Any = self
        self.engine._lines._writer = writer
        net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        algorithm = LocalSGD(sync_every=1, unit="round")
        self.model = DistributedDataParallel(net, [self.optimizer], algorithm, engine=self.engine)
        self.loader = ElasticDataLoader(SAMPLES, 4, engine=self.engine)
        self.drawn: dict[int, list[int]] = {}  # by the step that the round makes

    def write(self, line: LedgerLine) -> None:
        self.lines.append(line)

    def train(self, until: int, healing: bool) -> None:
        """Rounds until `until` are committed. healing: a worker copies the state in each of them."""
        for (x,) in self.loader:
            step = self.engine.state.name.step
            self.drawn.setdefault(step + 1, []).extend(x.flatten().long().tolist())
            if step == until:
                return
            self.model(x / 240).mean().backward()
            self.optimizer.step()
            if healing:
                self.engine.newcomers = frozenset({1})

    def written(self) -> dict[int, list[int]]:
        return {line.step: line.samples for line in self.lines}


def test_a_vote_without_a_heal_writes_the_lines_of_all_rounds_before_it() -> None:
    job = Job()
    job.train(HEALING, healing=True)
    assert not job.lines
    job.train(HEALING + 2, healing=False)
    assert job.written().keys() >= set(range(1, HEALING + 1))
    assert job.written() == {step: job.drawn[step] for step in job.written()}
    rounds = job.loader.rounds
    assert rounds is not None and len(rounds.state_dict()["kept"]) <= 3, (
        "those that are written are forgotten"
    )


@pytest.mark.parametrize("taken_in", [10, HEALING])
def test_a_checkpoint_of_such_a_time_is_continued(taken_in: int) -> None:
    job = Job()
    job.train(taken_in, healing=True)
    captured = through_the_wire(job.engine.registry.capture())
    later = Job()
    later.loader._attached_engine()
    later.engine.registry.restore(captured)
    history = History.decode(job.engine.state.history.encode()).resumed()
    later.engine._lines.write(history.entered("", ()))
    assert later.written() == {step: job.drawn[step] for step in range(1, taken_in + 1)}
