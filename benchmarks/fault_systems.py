"""Starts the systems of the rescale benchmark with triggers for every fault.

Adds to each the scripts' directory with the workload that raises, hangs or disagrees on request; to Bagua an etcd of
three members, a budget of script failures, and the hang timeout if this version has one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.fault_victims import leading_host
from benchmarks.result_file import ROOT
from benchmarks.rivals.systems import MOST_HOSTS, SCRIPTS, Bagua, System, Torchft, Torchrun
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess

HANG_TIMEOUT_S = 5.0
_HELP_TIMEOUT_S = 60.0


@cache
def hang_options() -> tuple[str, ...] | None:
    """What makes Bagua replace a worker that hangs for HANG_TIMEOUT_S; None if this version can't."""
    words = [sys.executable, "-m", "bagua_launch", "run", "--help"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=_own_environment(),
        capture_output=True,
        text=True,
        timeout=_HELP_TIMEOUT_S,
        check=True,
    )
    if "--hang-timeout" in done.stdout:
        return ("--hang-timeout", f"{HANG_TIMEOUT_S:g}")
    if "hang_timeout" in done.stdout:
        return ("--rdzv-conf", f"hang_timeout={HANG_TIMEOUT_S:g}")
    return None


def _own_environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}


class WithTriggers(System):
    """Runs copies of the scripts, whose workload looks for triggers in `triggers`."""

    options: tuple[str, ...] = ()  # for bagua-launch

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.triggers = lab.directory / "triggers"
        self.triggers.mkdir()
        self._scripts = lab.directory / "scripts"
        shutil.copytree(SCRIPTS, self._scripts, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "benchmarks" / "fault_workload.py", self._scripts / "workload.py")

    def _run(self, host: Host, words: Sequence[str], **environment: str) -> LabProcess:
        own = [word.replace(f"{SCRIPTS}/", f"{self._scripts}/") for word in words]
        if "bagua_launch" in own:
            place = own.index("bagua_launch") + 1
            own[place:place] = self.options
        return super()._run(host, own, FAULT_DIRECTORY=str(self.triggers), **environment)

    def trigger(self, what: str, host: Host) -> Path:
        """Ask the worker on `host` to "raise", "hang" or "disagree"; the file that will say when it did."""
        said = self.triggers / f"{what}-{host.name}.at"
        said.unlink(missing_ok=True)
        (self.triggers / f"{what}-{host.name}").touch()
        return said


class TriggeredBagua(WithTriggers, Bagua):
    notes = (
        f"etcd of three members on a fourth host; default settings but for --max-restarts 10 (with the default of 0 a "
        f"script that raises ends the job) and a hang timeout of {HANG_TIMEOUT_S:g} s where there is one; "
        "jobs that their fault ends or starts anew have the defaults, with a checkpoint every 50 steps where the state "
        "is lost"
    )

    def prepare(self) -> None:
        self.cluster: EtcdCluster = self._lab.etcd(self._lab.hosts[MOST_HOSTS], members=3)
        self._etcd = self.cluster
        self.options = ("--max-restarts", "10", *(hang_options() or ()))

    def leading_host(self, hosts: Sequence[Host]) -> Host | None:
        return leading_host(self.cluster, self.job_id, hosts)


class TriggeredTorchft(WithTriggers, Torchft):
    pass


class TriggeredTorchrun(WithTriggers, Torchrun):
    pass


SYSTEMS: dict[str, type[WithTriggers]] = {
    s.name: s for s in (TriggeredBagua, TriggeredTorchft, TriggeredTorchrun)
}
