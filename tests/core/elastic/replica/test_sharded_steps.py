"""Sharded replicas in steps, over real workers and a leader that the test plays: as one process, losses, joins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.elastic.replica import sharded_training
from tests.core.elastic.replica.leader import Leader

EPOCHS = 6  # enough for a joiner to come in, where each step rests as long as REST_S
REST_S = 1.0  # costs no processor time, as more steps would

Start = Callable[..., Leader]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Leader] = []

    def act(replicas: int, size: int, **training: Any) -> Leader:
        (tmp_path / "ledger").mkdir()
        started.append(Leader(tmp_path, replicas, size, **training))
        return started[-1]

    yield act
    for leader in started:
        leader.close()


def hurry(leader: Leader) -> None:
    (leader.out / "hurry").touch()


def ledger(out: Path) -> list[dict[str, Any]]:
    """Each committed line once: the newest of each step and rank."""
    lines = [json.loads(line) for f in (out / "ledger").iterdir() for line in f.read_text().splitlines()]
    return list({(line["step"], line["global_rank"], line["generation"]): line for line in lines}.values())


def check_ledger(out: Path, epochs: int) -> None:
    """Every sample once in each epoch, with one line for each replica."""
    lines = ledger(out)
    for epoch in range(epochs):
        used = [s for line in lines if line["epoch"] == epoch for s in line["samples"]]
        assert sorted(used) == list(range(sharded_training.SAMPLES)), (epoch, sorted(used))


def alone(out: Path, epochs: int, parallel: bool = False) -> list[torch.Tensor]:
    """The parameters after the same steps in one process without shards, by plain torch. Samples come from the ledger:
    the mean gradient of a step does not depend on who computed which of them."""
    module = sharded_training.model(parallel)
    optimizer = torch.optim.SGD(module.parameters(), lr=sharded_training.LEARNING_RATE, momentum=0.9)
    samples = sharded_training.Samples()
    by_step: dict[int, list[int]] = {}
    for line in ledger(out):
        by_step.setdefault(line["step"], []).extend(line["samples"])
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    for step in sorted(by_step):
        optimizer.zero_grad()
        chosen = torch.tensor(by_step[step])
        nn.functional.mse_loss(module(samples.x[chosen]), samples.y[chosen]).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def whole(ends: list[dict[str, Any]], replica: int, parallel: bool = False) -> list[torch.Tensor]:
    shards = [end["parameters"] for end in ends if end["place"][0] == replica]
    shapes = [p.shape for p in sharded_training.model(parallel).parameters()]
    return [
        parts[0] if parts[0].shape == shape else torch.cat(parts)
        for parts, shape in zip(zip(*shards, strict=True), shapes, strict=True)
    ]


def check_equal_shards(ends: list[dict[str, Any]]) -> None:
    replicas, size = ends[0]["place"][2:]
    assert [tuple(end["place"]) for end in ends] == [
        (r, s, replicas, size) for r in range(replicas) for s in range(size)
    ]
    for end in ends:
        first = ends[end["place"][1]]
        for name in ("parameters", "momentum"):
            assert all(torch.equal(a, b) for a, b in zip(end[name], first[name], strict=True)), end["place"]


@pytest.mark.parametrize(
    ("accumulate", "root", "batch"),
    [(False, False, 12), (True, True, 12), pytest.param(False, True, 11, id="uneven parts in a replica")],
)
def test_replicas_train_as_one_process_without_shards(
    start: Start, accumulate: bool, root: bool, batch: int
) -> None:
    leader = start(2, 2, epochs=1, step_s=0.0, accumulate=accumulate, root=root, batch=batch)
    ends = leader.await_ends()
    steps = -(-sharded_training.SAMPLES // batch)
    assert {end["reductions"] for end in ends} == {steps}, "one reduction a step"
    check_equal_shards(ends)
    check_ledger(leader.out, 1)
    for mine, expected in zip(whole(ends, 0), alone(leader.out, 1), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_partial_gradient_is_summed_in_the_replica(start: Start) -> None:
    """That of the norm: each worker of a replica has it for its own part of the samples."""
    leader = start(2, 2, epochs=1, step_s=0.0, accumulate=True, root=False, parallel=True)
    ends = leader.await_ends()
    check_equal_shards(ends)
    for mine, mates in zip(*(end["parameters"][2:4] for end in ends[:2]), strict=True):
        assert torch.equal(mine, mates), "the norm has the same weights in a replica"
    for mine, expected in zip(whole(ends, 0, True), alone(leader.out, 1, True), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_samples_of_their_own_are_refused_to_workers_that_compute_one_forward(start: Start) -> None:
    """Tensor parallelism alone does not average the gradients of a replica's workers."""
    leader = start(1, 2, epochs=1, step_s=0.0, parallel=True)
    leader.await_true(
        lambda: (
            all("NotForReplicas: parameter 0.weight" in log.read_text() for log in leader.out.glob("log-*"))
            and len(list(leader.out.glob("log-*"))) == 2
        ),
        "both workers refuse it",
    )


def test_the_end_of_a_shard_is_reported_while_its_mate_computes(start: Start) -> None:
    """The steps last an hour, so no collective meets the loss."""
    leader = start(1, 2, epochs=1, step_s=3600.0)
    ((first, second),) = leader.await_replicas()
    leader.await_true(
        lambda: all((leader.out / f"computes-{w}").exists() for w in (first, second)),
        "no collective is under way",
    )
    leader.kill_alone(second)
    detail = f"shard 1 of its replica, {second} on node-{second}, is gone"
    leader.await_true(lambda: (first, detail) in leader.suspicions, "the mate's report")


def test_a_replica_is_lost_and_another_joins(start: Start) -> None:
    leader = start(3, 2, epochs=EPOCHS, step_s=REST_S)
    leader.await_true(
        lambda: (
            len(leader.generations) > 1 and all(leader.step_of(w) >= 2 for r in leader.replicas for w in r)
        ),
        "all workers are in their third step",
    )
    before = max(leader.step_of(w) for r in leader.replicas for w in r)
    leader.kill(leader.replicas[1][1])
    leader.await_true(
        lambda: all(leader.step_of(w) > before for r in leader.replicas for w in r),
        "the survivors have committed without it: an agent plans a join no earlier",
    )
    leader.start_replica()
    leader.await_true(lambda: len(leader.generations) > 3, "the joiner is at its first step")
    (joiner,) = [r for r in leader.replicas if r not in leader._listed(leader.generations[2])]
    leader.await_true(lambda: all(leader.step_of(w) >= 1 for w in joiner), "it has committed a step")
    hurry(leader)
    ends = leader.await_ends()
    assert ends[0]["place"][2:] == (3, 2)
    check_equal_shards(ends)
    check_ledger(leader.out, EPOCHS)
    for end in ends[4:]:  # of the joiner
        sent_bytes = [(holder, size) for holders, holder, size in end["stripes"] if holders == 2]
        assert sorted(holder for holder, _ in sent_bytes) == [0, 1], end["stripes"]
        assert min(size for _, size in sent_bytes) > 0.25 * sum(size for _, size in sent_bytes), end[
            "stripes"
        ]
    for mine, expected in zip(whole(ends, 2), alone(leader.out, EPOCHS), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
