"""What a page knows of a job while etcd does not answer: the agents' own answers, and the rest as it was."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.observation.agent_calls import AgentSeen
from bagua_agent.observation.job_facts import facts_without_store, read_facts
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict import verdict
from bagua_agent.workers.process.process_status import is_stopped
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


def test_a_silent_agent_delays_the_facts_and_not_the_time_that_they_are_of() -> None:
    """Else the next look would come at once, with the steps of seconds: thousands of steps per second."""
    now_s = [NOW_S]

    def ask(found: object) -> object:
        now_s[0] += 2.0  # a call that runs out
        return found

    spec = SimpleNamespace(key=JobKeys("demo").spec, value=b"", create_revision=1)
    store = SimpleNamespace(get_prefix=lambda prefix: ([spec], 1))
    agents = SimpleNamespace(look=lambda records: ask(()), ask_again=ask)
    first = read_facts(cast(Any, store), cast(Any, agents), "demo", lambda: now_s[0])
    assert first is not None and first.at_unix_s == NOW_S
    assert facts_without_store(first, cast(Any, agents), "away", lambda: now_s[0]).at_unix_s == NOW_S + 2.0
