"""Injects the faults that end a job of Bagua or start it anew, each in a job of its own.

Measured is the time from the fault to the return of the last host's command; where the state is lost, to the first
step of the new start from the checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from benchmarks.fault_rows import RANKS_DISAGREE, ROWS, SCRIPT_RAISES_BEYOND, STATE_LOST, Measured
from benchmarks.fault_trials import DEADLINES_S, END_DEADLINE_S, Faults, Trial, failures_noted, prepared
from benchmarks.fault_victims import pick
from tests.lab.network import Host, Lab

ENDINGS = (SCRIPT_RAISES_BEYOND, RANKS_DISAGREE, STATE_LOST)
CHECKPOINT_EVERY_STEPS = 50


class Endings(Faults):
    """One fault on one running job. Methods raise NotWithin, or AssertionError where the job ends in another way."""

    def script_raises_beyond(self, host: Host) -> Measured:
        return Measured(
            SCRIPT_RAISES_BEYOND.name, self._end_s(self._triggered("raise", host), "told to fail")
        )

    def ranks_disagree(self) -> Measured:
        host = pick(self._hosts, self._leader(), of_leader=False)
        return Measured(RANKS_DISAGREE.name, self._end_s(self._triggered("disagree", host), "ranks disagree"))

    def _end_s(self, fault_s: float, reason: str) -> float:
        """From `fault_s` until the command of each host has returned. Each must say `reason`."""
        codes = [process.wait(END_DEADLINE_S) for process in self._nodes.values()]
        value_s = time.time() - fault_s
        assert set(codes) == {1}, f"the commands ended with {codes}"
        silent = [host.name for host, process in self._nodes.items() if reason not in process.text()]
        assert not silent, f"{silent} do not say {reason!r}"
        return value_s

    def state_lost(self) -> Measured:
        storage = LocalStorage(checkpoints(self._lab))

        def written() -> float | None:
            return 0.0 if any(found.is_complete for found in catalogue.find(storage)) else None

        self._run.await_time("a checkpoint", self._deadline_s, written)
        before, workers = self._newest(), [self._worker(host) for host in self._hosts]
        fault_s = time.time()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        value_s = self._next_step(STATE_LOST.title, fault_s, before)
        said = [process.text() for process in self._nodes.values()]
        assert any("goes on from the checkpoint of step" in text for text in said), "no checkpoint was read"
        return Measured(STATE_LOST.name, value_s)


def checkpoints(lab: Lab) -> Path:
    """A directory that all hosts share."""
    return lab.directory / "checkpoints"


def endings_trial(rows: tuple[str, ...], keep_logs: Path | None) -> Trial:
    """Each of `rows` that ends a job or starts it anew, of a host that does not lead and of the leader's."""
    trial = Trial("bagua")
    for row in (row for row in ENDINGS if row.name in rows):
        for of_leader in (False, True) if row.of_host else (False,):
            with prepared("bagua", keep_logs) as (lab, system), failures_noted(trial):
                system.options = ()  # the defaults, which allow no script to raise
                if row is STATE_LOST:
                    directory, every = str(checkpoints(lab)), str(CHECKPOINT_EVERY_STEPS)
                    system.options = ("--checkpoint-dir", directory, "--checkpoint-every", every)
                faults = Endings(lab, system, DEADLINES_S["bagua"])
                faults.start()
                trial.measured.append(faults.strike(row, of_leader=of_leader))
    return trial


assert set(ENDINGS) <= set(ROWS)
