"""What a page knows of a job while etcd does not answer: the agents' own answers, and the rest as it was."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from typing import Any, cast

from bagua_agent.job.own_answers import is_stopped
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_facts import facts_without_store
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict import verdict
from tests.agent.observation.facts import NOW_S, agent, facts, worker
from tests.lab.wait import eventually


class Answering:
    """Agents whose workers have made more steps since the last look."""

    def ask_again(self, agents: tuple[AgentSeen, ...]) -> tuple[AgentSeen, ...]:
        return tuple(
            replace(one, node=agent(rank, worker(rank, step=90)).node) for rank, one in enumerate(agents)
        )


def test_steps_are_new_while_etcd_is_away() -> None:
    last, series = facts(), JobSeries()
    series.take(last)
    later = facts_without_store(last, cast(Any, Answering()), "connection refused", lambda: NOW_S + 20)
    series.take(later)
    assert series.step == 90 and later.generation == last.generation and later.events == last.events
    said = verdict(later, series)
    assert said.what == "etcd does not answer this page." and "Training goes on" in said.why


def test_a_process_that_a_signal_has_stopped() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: is_stopped(process.pid), 60, "the process is stopped")
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: not is_stopped(process.pid), 60, "the process goes on")
        finally:
            process.kill()
    assert not is_stopped(process.pid), "it is gone"
