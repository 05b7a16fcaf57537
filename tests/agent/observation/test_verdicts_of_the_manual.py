"""What docs/guide/what-happens.md says that the dashboard shows of each fault is what the verdict says then.

The situations are those of its job: four workers on two hosts, and the page of h1. A job of real processes shows the
same in tests/browser/test_faults_in_browser.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_facts import JobFacts, SuspicionSeen
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict import verdict
from bagua_contract import control_pb2
from bagua_contract.records import Generation
from tests.agent.observation import facts as small
from tests.docs.dashboard_table import rows

NOW_S = small.NOW_S
SPEED = re.compile(r" at [\d.e+]+ steps/s")  # in no sentence of the page
STILL_S = 12.0


def worker(rank: int, **progress: Any) -> control_pb2.WorkerNow:
    found = small.worker(rank, **progress)
    found.slot = rank % 2
    return found


def host(number: int, *workers: control_pb2.WorkerNow, answers: bool = True, store: bool = True) -> AgentSeen:
    """h1 has the ranks 0 and 1, h2 the others."""
    first = 2 * number - 2
    seen = small.agent(number, *(workers or (worker(first), worker(first + 1))), answers=answers)
    if seen.node is not None:
        seen.node.store_answers = store
    return seen


def generation(ranks: int = 4) -> Generation:
    members = tuple(
        replace(
            small.placement(rank), node_name=f"h{1 + rank // 2}", agent_id=f"a{1 + rank // 2}", slot=rank % 2
        )
        for rank in range(ranks)
    )
    return replace(small.generation(0), members=members)


def look(after_s: float = 0.0, *agents: AgentSeen, ranks: int = 4, **other: Any) -> JobFacts:
    return small.facts(
        NOW_S + after_s,
        agents=agents or (host(1), host(2)),
        generation=generation(ranks),
        members=ranks,
        **other,
    )


def stopped(rank: int) -> control_pb2.WorkerNow:
    found = worker(rank)
    found.stopped = True
    return found


KILLED = FailureView("w3", "h2", 9, True, False, "killed by SIGKILL", 5, slot=1, exit_code=-9, global_rank=3)
WORKER_LOST = JobEvent("ended-w3", EventKind.WORKER_LOST, "worker lost", "h2", NOW_S - 5, worker_id="w3")
NODE_LOST = JobEvent(
    "lost-a2-3", EventKind.NODE_LOST, "lost; generation 3 goes on without it", "h2", NOW_S - 5
)
FULL = {"checkpoint_step": 40, "checkpoint_trouble": "/shared/demo: [Errno 28] No space left on device"}
WAITS = tuple(SuspicionSeen(f"w{rank}", True, "allreduce has taken 12 s", STILL_S) for rank in (0, 1, 3))
AWAY = (host(1, store=False), host(2, store=False))

SITUATIONS: dict[str, list[list[JobFacts]]] = {
    "a worker is killed": [[look(ranks=3, events=(WORKER_LOST,), failures=(KILLED,))]],
    "a worker is stopped (`SIGSTOP`)": [[look(), look(STILL_S, host(1), host(2, stopped(2), worker(3)))]],
    "a rank hangs in the script": [[look(), look(STILL_S, suspicions=WAITS)]],
    "the link of h2 is cut, or all of h2 is frozen": [
        [look(), look(1.0, host(1, worker(0, step=11), worker(1, step=11)), host(2, answers=False))],
        [look(0.0, host(1), ranks=2, events=(NODE_LOST,))],
    ],
    "h1 and h2 do not reach each other, and both reach etcd": [
        [look(0.0, host(1), host(2, answers=False))],
        [
            look(after_s, host(1, worker(0, step=10 + int(after_s))), host(2, answers=False))
            for after_s in (0.0, 10.0, 16.0)
        ],
    ],
    "the link of h1, the page's own host, is cut": [
        [look(0.0, host(1, store=False), host(2, answers=False))]
    ],
    "etcd is away": [[look(0.0, *AWAY)]],
    "a worker is lost while etcd is away": [[look(), look(STILL_S, *AWAY)]],
    "the disk of the checkpoints is full": [
        [
            look(
                0.0,
                host(1, worker(0, **FULL), worker(1, **FULL)),
                host(2, worker(2, **FULL), worker(3, **FULL)),
            )
        ]
    ],
}


@pytest.mark.parametrize("fault", rows())
def test_the_page_prints_what_the_verdict_says(fault: str) -> None:
    assert set(SITUATIONS) == set(rows())
    for looks, sentences in zip(SITUATIONS[fault], rows()[fault], strict=True):
        series = JobSeries()
        for seen in looks:
            series.take(seen)
        said = verdict(looks[-1], series)
        words = SPEED.sub("", f"{said.what} {said.why}".lower())
        missing = [sentence for sentence in sentences if sentence not in words]
        assert not missing, f"{words}\nlacks {missing}"
