"""Measures membership changes of a stock DDP script: bagua-launch's restart mode beside torchrun.

examples/stock_ddp.py runs unchanged under both; rank 0 prints a line an epoch, and its processes' number is in it.
Times are of the first line with another number, so they are late by up to one epoch (a tenth of a second or two).
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_victims import NoLeaderError, leading_host, pick
from benchmarks.result_file import ROOT
from benchmarks.rivals.systems import LEAST_HOSTS, MOST_HOSTS, System
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess

SCRIPT = ROOT / "examples" / "stock_ddp.py"
START_DEADLINE_S = 40.0
CHANGE_DEADLINE_S = 120.0
QUIET_EPOCHS = 5
LOOK_EVERY_S = 0.01
_EPOCH = re.compile(r"epoch \d+ loss \S+ with (\d+) processes")


@dataclass(slots=True)
class StockTrial:
    """In seconds; None: not measured, `note` says why. kill_s: of a host that does not lead; kill_leader_s: of the one
    that does, of Bagua."""

    system: str
    join_s: float | None = None
    kill_s: float | None = None
    kill_leader_s: float | None = None
    note: str = ""


class Stock(System):
    """`words` of the launcher; the script and its arguments are the same for all."""

    @abstractmethod
    def words(self, host: Host) -> Sequence[str]: ...

    def leader(self) -> Host | None:
        """The host that leads the job; None where none does, or none yet."""
        return None

    def start(self, host: Host) -> LabProcess:
        script = [str(SCRIPT), "--epochs", "1000000", "--pause", "0.05"]
        script += ["--checkpoint", str(self._directory / "spiral.pt")]
        return self._run(host, [*self.words(host), *script], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class StockBagua(Stock):
    name = "bagua"
    job_id = "stock"

    def prepare(self) -> None:
        self._etcd = self._lab.etcd(self._lab.hosts[MOST_HOSTS])

    def words(self, host: Host) -> Sequence[str]:
        found = [sys.executable, "-m", "bagua_launch", "--nnodes", f"{LEAST_HOSTS}:{MOST_HOSTS}"]
        found += ["--rdzv-endpoint", self._etcd.endpoints, "--rdzv-id", self.job_id]
        return [*found, "--local-addr", host.address, "--nproc-per-node", "1"]

    def leader(self) -> Host | None:
        return leading_host(self._etcd, self.job_id, self._lab.hosts[:MOST_HOSTS])


class StockTorchrun(Stock):
    name = "torchrun"

    def words(self, host: Host) -> Sequence[str]:
        found = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{LEAST_HOSTS}:{MOST_HOSTS}"]
        found += ["--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d"]
        found += ["--rdzv-endpoint", f"{self._lab.hosts[0].address}:29400", "--rdzv-id", "stock"]
        return [*found, "--local-addr", host.address]


STOCK: dict[str, type[Stock]] = {s.name: s for s in (StockBagua, StockTorchrun)}


class _NotThere(RuntimeError):
    """An epoch that was waited for did not come."""


def stock_trial(name: str, keep_logs: Path | None) -> StockTrial:
    """Two hosts train, a third joins; one that does not lead is killed and joins again; then the leader's is killed."""
    trial = StockTrial(name)
    directory = Path(tempfile.mkdtemp(prefix=f"bagua-stock-{name}-"))
    try:
        with Lab(MOST_HOSTS + 1, directory) as lab:
            system = STOCK[name](lab)
            system.prepare()
            nodes = [system.start(host) for host in lab.hosts[:LEAST_HOSTS]]
            try:
                _await_epochs(nodes, LEAST_HOSTS, QUIET_EPOCHS, START_DEADLINE_S)
            except _NotThere as error:
                trial.note = "restart mode not available: " + str(error) if name == "bagua" else str(error)
                return trial
            try:
                last = lab.hosts[MOST_HOSTS - 1]
                begin_s = time.monotonic()
                nodes.append(system.start(last))
                trial.join_s = _await_epochs(nodes, MOST_HOSTS, 1, CHANGE_DEADLINE_S) - begin_s
                _await_more(nodes, MOST_HOSTS, QUIET_EPOCHS)
                other = pick(lab.hosts[:MOST_HOSTS], system.leader(), of_leader=False)
                trial.kill_s = _kill(nodes, other)
                if system.leader() is not None:
                    nodes.append(system.start(other))
                    _await_more(nodes, MOST_HOSTS, QUIET_EPOCHS)
                    leader = pick(lab.hosts[:MOST_HOSTS], system.leader(), of_leader=True)
                    trial.kill_leader_s = _kill(nodes, leader)
            except (_NotThere, NoLeaderError) as error:
                trial.note = str(error)
            if keep_logs is not None:
                shutil.copytree(
                    directory, keep_logs / directory.name, ignore=shutil.ignore_patterns("etcd-*")
                )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return trial


def _kill(nodes: Sequence[LabProcess], host: Host) -> float:
    """From the end of `host` to the next epoch of the others."""
    begin_s = time.monotonic()
    host.kill_all()
    return _await_more(nodes, LEAST_HOSTS, 1) - begin_s


def _await_more(nodes: Sequence[LabProcess], processes: int, count: int) -> float:
    """When `count` more such epochs had been printed. Raises _NotThere."""
    return _await_epochs(nodes, processes, _epochs(nodes, processes) + count, CHANGE_DEADLINE_S)


def _epochs(nodes: Sequence[LabProcess], processes: int) -> int:
    """Epochs printed so far by so many processes."""
    return sum(int(m[1]) == processes for node in nodes for m in _EPOCH.finditer(node.text()))


def _await_epochs(nodes: Sequence[LabProcess], processes: int, count: int, deadline_s: float) -> float:
    """When `count` such epochs had been printed, on the monotonic clock. Raises _NotThere."""
    end_s = time.monotonic() + deadline_s
    while _epochs(nodes, processes) < count:
        if time.monotonic() >= end_s:
            raise _NotThere(f"{count} epochs with {processes} processes: not within {deadline_s:g} s")
        if not any(node.is_running for node in nodes):
            raise _NotThere(f"all nodes have ended: {nodes[0].tail(1)}")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic()
