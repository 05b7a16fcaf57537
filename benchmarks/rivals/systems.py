"""Starts each system on the lab's hosts, with its settings.

One class a system. Settings are the system's defaults but for what `NOTES` says. Knows nothing of measuring.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.result_file import ROOT
from benchmarks.rivals.install_torchft import torchft_directory
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

SCRIPTS = ROOT / "benchmarks" / "rivals"
MOST_HOSTS = 3
LEAST_HOSTS = 2
GLOBAL_BATCH = 48
_INFRASTRUCTURE_DEADLINE_S = 20.0
_LIGHTHOUSE_PORT = 29510


class System(ABC):
    """One job of one system on the first three hosts of a lab; the fourth holds its infrastructure."""

    name: ClassVar[str]
    notes: ClassVar[str]
    fixed_global_batch: ClassVar[int | None] = None
    recovers_from_silence: ClassVar[bool] = True

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._directory = lab.directory
        self.steps_directory = lab.directory / "steps"
        self._started = 0

    def _run(self, host: Host, words: Sequence[str], **environment: str) -> LabProcess:
        self._started += 1
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_", "TORCH"))}
        paths = [environment.pop("PYTHONPATH", ""), str(ROOT), str(ROOT / "protos")]
        env = {
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        output = self._directory / f"output-{self._started}-{host.name}.log"
        return host.run(words, env=env, output=output)

    def prepare(self) -> None:  # noqa: B027  not every system needs any
        """What is there before the job: etcd, the Lighthouse. Not part of any measurement."""

    @abstractmethod
    def start(self, host: Host) -> LabProcess:
        """The command that a user would give on `host`."""


class Bagua(System):
    name = "bagua"
    notes = "etcd on a fourth host; default settings"
    fixed_global_batch = GLOBAL_BATCH
    job_id = "rescale"

    def prepare(self) -> None:
        self._etcd = self._lab.etcd(self._lab.hosts[MOST_HOSTS])

    def start(self, host: Host) -> LabProcess:
        words = [sys.executable, "-m", "bagua_launch", "--nnodes", f"{LEAST_HOSTS}:{MOST_HOSTS}"]
        words += ["--rdzv-endpoint", self._etcd.endpoints, "--rdzv-id", self.job_id]
        words += ["--local-addr", host.address, "--ledger", str(self.steps_directory)]
        return self._run(host, [*words, str(SCRIPTS / "train_bagua.py"), "--global-batch", str(GLOBAL_BATCH)])


class Torchrun(System):
    name = "torchrun"
    notes = (
        "c10d rendezvous on host 1 (never the one that is killed); default settings but for --max-restarts "
        "100 (with the default of 0 a loss ends the job) and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (with the "
        "shared store, the default, it never recovers); a checkpoint every 50 steps"
    )
    recovers_from_silence = False

    def start(self, host: Host) -> LabProcess:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{LEAST_HOSTS}:{MOST_HOSTS}"]
        words += ["--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"{self._lab.hosts[0].address}:29400", "--rdzv-id", "rescale"]
        words += ["--local-addr", host.address, str(SCRIPTS / "train_torchrun.py")]
        words += ["--steps", str(self.steps_directory), "--global-batch", str(GLOBAL_BATCH)]
        words += ["--checkpoint", str(self._directory / "checkpoint.pt")]
        return self._run(host, words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class Torchft(System):
    name = "torchft"
    notes = (
        "0.2.0; Lighthouse on a fourth host with a tick of 0.1 s and a heartbeat timeout of 1 s (default "
        "5 s, which would be slower); group timeout 5 s; one replica group a host, started without torchrun, "
        "which is faster; gradients reduced by manager.allreduce, as the hook of its DistributedDataParallel "
        "crashes over Gloo when a peer dies"
    )

    def prepare(self) -> None:
        self._packages = str(torchft_directory(ROOT))
        host = self._lab.hosts[MOST_HOSTS]
        self._lighthouse = f"{host.address}:{_LIGHTHOUSE_PORT}"
        program = Path(self._packages) / "bin" / "torchft_lighthouse"
        words = [sys.executable, str(program), "--bind", f"[::]:{_LIGHTHOUSE_PORT}"]
        words += ["--min_replicas", str(LEAST_HOSTS)]
        words += ["--quorum_tick_ms", "100", "--heartbeat_timeout_ms", "1000"]
        process = self._run(host, words, PYTHONPATH=self._packages)

        def listening() -> bool:
            assert process.is_running, f"the Lighthouse ended\n{process.tail()}"
            try:
                host.connect((host.address, _LIGHTHOUSE_PORT), 1.0).close()
            except OSError:
                return False  # not up yet
            return True

        eventually(listening, _INFRASTRUCTURE_DEADLINE_S, lambda: f"Lighthouse listening\n{process.tail()}")

    def start(self, host: Host) -> LabProcess:
        words = [sys.executable, str(SCRIPTS / "train_torchft.py"), "--steps", str(self.steps_directory)]
        words += ["--lighthouse", f"http://{self._lighthouse}", "--address", host.address]
        words += ["--replica", str(host.number - 1), "--replicas", str(MOST_HOSTS)]
        words += ["--global-batch", str(GLOBAL_BATCH)]
        return self._run(host, words, PYTHONPATH=self._packages)


ALL: dict[str, type[System]] = {s.name: s for s in (Bagua, Torchft, Torchrun)}
