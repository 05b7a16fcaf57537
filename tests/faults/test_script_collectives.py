"""A worker dies in the middle of each public collective, and the others get the documented result or error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeJob

SCRIPT = Path(__file__).with_name("asking_peers.py")
ROOT = 1


def outcomes(job: MakeJob, out: Path, scenarios: list[str]) -> list[dict[int, dict[str, Any]]]:
    """Play all of them; of each, what every survivor wrote, by the rank that it had."""
    out = out / "peers"
    out.mkdir()
    one = job(program=[str(SCRIPT), "--out", str(out), *scenarios])
    node = one.start(slots=3)
    assert node.process.wait(60.0 + 25.0 * len(scenarios)) == 0
    struck = sorted(int(path.name) for path in (out / "struck").iterdir())
    assert struck == list(range(len(scenarios))), "every victim died of its own hand"
    assert node.says("ended: killed by SIGKILL; starting another", times=len(scenarios))
    assert not (out / "wrong").exists(), (out / "wrong").read_text()
    ends = [path.read_text() for path in (out / "ends").iterdir()]
    assert len(ends) == 3 and len(set(ends)) == 1, "all workers end with the same weights"
    one.check_nothing_left()
    found: list[dict[int, dict[str, Any]]] = [{} for _ in scenarios]
    for path in (out / "records").iterdir():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[record["scenario"]][record["rank"]] = record
    return found


def survivors(victim: int) -> set[int]:
    return {0, 1, 2} - {victim}


def test_what_can_be_done_without_the_lost_is_done_again(job: MakeJob, tmp_path: Path) -> None:
    """Ranks 0 and 1, or 1 and 2, are left; the root is 1."""
    names = ["allreduce", "broadcast_object", "allgather", "gather", "reduce"]
    victims = [2, 0, 2, 0, 2]
    for name, victim, records in zip(
        names,
        victims,
        outcomes(job, tmp_path, [f"{n} {v} before" for n, v in zip(names, victims, strict=True)]),
        strict=True,
    ):
        assert set(records) == survivors(victim) and all(r["left"] == 2.0 for r in records.values())
        for rank, record in records.items():
            result = record["result"]
            if name in ("allgather", "gather") and result is not None:
                result = sorted(result)  # rows are by the ranks of now, which may be in another order
            assert (
                result
                == {
                    "allreduce": [sum(survivors(victim))],
                    "broadcast_object": ROOT,
                    "allgather": [[r] for r in sorted(survivors(victim))],
                    "gather": [[r] for r in sorted(survivors(victim))] if rank == ROOT else None,
                    "reduce": [sum(survivors(victim))] if rank == ROOT else None,
                }[name]
            ), (name, record)


def test_what_cannot_is_said_on_every_survivor(job: MakeJob, tmp_path: Path) -> None:
    """The root is lost, or a part was for the lost rank. A third's message may have arrived or not."""
    scenarios = ["broadcast 1", "gather 1", "scatter 2", "reduce_scatter 2", "alltoall 0", "alltoall_v 1"]
    scenarios += ["message 1", "group-allreduce 2"]
    for scenario, records in zip(
        scenarios, outcomes(job, tmp_path, [f"{s} before" for s in scenarios]), strict=True
    ):
        victim = int(scenario.split()[1])
        assert set(records) == survivors(victim) and all(r["left"] == 2.0 for r in records.values())
        assert all(r["lost"] == [victim] for r in records.values()), (scenario, records)


@pytest.mark.long
def test_who_has_returned_and_who_has_not_agree(job: MakeJob, tmp_path: Path) -> None:
    """The victim had its result, so no worker may report that there is none; a worker that missed it gets it."""
    names = [
        "allreduce",
        "broadcast",
        "gather",
        "reduce",
        "scatter",
        "reduce_scatter",
        "alltoall",
        "alltoall_v",
    ]
    for name, records in zip(names, outcomes(job, tmp_path, [f"{n} 2 after" for n in names]), strict=True):
        assert set(records) == {0, 1} and all(r["left"] == 2.0 for r in records.values())
        for rank, record in records.items():
            assert (
                record["result"]
                == {
                    "allreduce": [3],
                    "broadcast": [ROOT],
                    "gather": [[0], [1], [2]] if rank == ROOT else None,
                    "reduce": [3] if rank == ROOT else None,
                    "scatter": [rank],
                    "reduce_scatter": 3 * rank + 3,
                    "alltoall": [10 * r + rank for r in range(3)],
                    "alltoall_v": [[r for r in range(3) for _ in range(r)], [0, 1, 2]],
                }[name]
            ), (name, record)
