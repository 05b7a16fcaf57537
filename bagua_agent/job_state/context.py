"""Holds what the parts of an agent share once it has joined a job: its name, the job's state, and the ways to act."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.base.retrying_writes import DesiredWrites
from bagua_agent.base.timers import Timers
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.history.history_keeper import HistoryKeeper
from bagua_agent.job_state.change_lines import ChangeLines
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.job_state.job_state import LocalJobState


@dataclass(frozen=True, slots=True)
class JoinedJob:
    """The joined job as the agent's parts share it. store: only from the threads of `writes`, as the loop never waits
    for etcd."""

    agent_id: str
    node_name: str
    keys: JobKeys
    seen: LocalJobState
    store: Store
    leased: LeasedKeys
    writes: DesiredWrites
    timers: Timers
    terminal: JobTerminal
    history: HistoryKeeper
    change_lines: ChangeLines
