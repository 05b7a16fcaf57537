"""Workers before their loops get answers from a holder that comes back, if those who gave them are gone."""

from __future__ import annotations

from simulated_job import SimulatedJob


def test_a_holder_that_comes_back_answers_later_workers() -> None:
    job = SimulatedJob(3, 3, asks=True)
    for _ in range(3):
        job.add_node(1)
    job.elect(job.nodes["a0"], fresh=False)
    for _ in range(10):
        job.settle()
    assert job.committed > 0
    leaving, away = job.nodes["a1"], job.nodes["a2"]
    away.silent = away.storeless = True
    leaving.leaving = True
    job.expire(away)
    job.put_node(leaving)
    for _ in range(10):
        job.settle()
    record = job.generation
    assert record is not None and not record.members and record.answers_at == ("a0:2",), record

    job.end(job.workers["w0"], well=False)
    for _ in range(10):
        job.settle()
    away.silent = away.storeless = False
    job.add_node(1)
    for _ in range(60):
        job.settle()
    record = job.generation
    assert record is not None and record.node_count == 3, record
    assert job.result is None
