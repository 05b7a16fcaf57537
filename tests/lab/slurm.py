"""A real Slurm on the hosts of a lab: a controller on the first, and a node on each of the others.

Owns the daemons, their files and the commands of a person who submits jobs. Needs Debian's slurmctld, slurmd,
slurm-client and munge. Knows nothing of Bagua. No control groups, no accounting; root is the only account.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import HANG_S, eventually

_PATH = "/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")
_PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
_DEADLINE_S = 60.0
_POLL_S = 0.1
GPU_DEVICES = "/dev/null,/dev/zero"  # Slurm hands out any device as a GPU

_CONFIG = """
ClusterName=lab
JobFileAppend=1
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job starts when its credential has expired: by default after two minutes.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/%n.pid
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=usual Nodes=ALL Default=YES
PartitionName=spot Nodes=ALL PriorityTier=1
PartitionName=spot-with-notice Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def unavailable() -> str | None:
    """Why no Slurm can run here, or None. That a lab can be had is for its own fixture to say."""
    missing = [package for name, package in _PACKAGES.items() if shutil.which(name, path=_PATH) is None]
    return f"no Slurm here; install Debian's {', '.join(missing)}" if missing else None


class Slurm:
    """`start` it before use, and `close` it. Its processes end with the lab at the latest."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.controller, *self.nodes = lab.hosts
        # Not the lab's own: a path of a socket has 107 bytes, of which a test's folder takes most.
        self.directory = Path(tempfile.mkdtemp(prefix="bagua-slurm-"))
        self._daemons: list[LabProcess] = []
        self._environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self) -> None:
        """Returns when every node can get jobs."""
        self._write_files()
        folder = self.directory
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "seed", "pid", "log")]
        munged = self._daemon(
            self.controller, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files
        )
        eventually((folder / "munge.socket").exists, _DEADLINE_S, lambda: f"munged's socket\n{munged.text()}")
        self._daemon(self.controller, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        eventually(self._all_idle, _DEADLINE_S, lambda: f"all nodes are idle\n{self.log()}", _POLL_S)

    def run(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What a client says, run to its end on the controller's host. env: beside Slurm's own configuration."""
        done = subprocess.run(
            [*self.controller._entrance(), f"--wdns={cwd or Path.cwd()}", "--", *words],
            env={**self._environment, **(env or {})},
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, env: Mapping[str, str]) -> str:
        """`sbatch WORDS`; the id of the job. What it says is in slurm-ID.out of cwd."""
        said = self.run("sbatch", *words, cwd=cwd, env=env)
        match = re.fullmatch(r"Submitted batch job (\d+)", said)
        assert match is not None, said
        return match[1]

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's record of a job: JobState, ExitCode, Restarts and others."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def hosts_of(self, job_id: str) -> list[Host]:
        """The first is the one that the batch script runs on."""
        names = self.run("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]).split()
        return [host for name in names for host in self.nodes if host.name == name]

    def await_state(self, job_id: str, *states: str, deadline_s: float = _DEADLINE_S) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            record = self.job(job_id)
            return record if record["JobState"] in states else None

        why = lambda: f"job {job_id} is {states}: {self.job(job_id)}\n{self.log()}"  # noqa: E731
        return eventually(reached, deadline_s, why, _POLL_S)

    def await_only_daemons(self) -> None:
        """Until no process of a job is left on any node."""
        own = {daemon.pid for daemon in self._daemons}

        def left() -> list[int]:
            return [pid for node in self.nodes for pid in node.pids() if pid not in own]

        eventually(lambda: not left(), _DEADLINE_S, lambda: f"processes left: {left()}", _POLL_S)

    def lose(self, node: Host) -> None:
        """The node's power fails, and `scontrol` marks it DOWN: slurmctld does so only after SlurmdTimeout, 300 s."""
        node.power_off()
        self.run("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lost")

    def log(self) -> str:
        """What the daemons said last."""
        return "\n".join(f"---- {daemon}\n{daemon.tail()}" for daemon in self._daemons)

    def close(self) -> None:
        """Ends every process on the lab's hosts, for those of a job are not the daemons' to end at once."""
        try:
            for host in self.lab.hosts:
                host.kill_all()
        finally:
            shutil.rmtree(self.directory)

    def _daemon(self, host: Host, name: str, *words: str) -> LabProcess:
        program = shutil.which(name, path=_PATH)
        assert program is not None, unavailable()
        output = self.directory / f"{name}-{host.name}.log"
        process = host.run([program, *words], env=self._environment, cwd=self.directory, output=output)
        self._daemons.append(process)
        return process

    def _write_files(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.directory / "state").mkdir()
        for node in self.nodes:
            (self.directory / node.name).mkdir()
        nodes = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs=2 Gres=gpu:2" for node in self.nodes
        )
        text = _CONFIG.format(controller=self.controller, directory=self.directory, nodes=nodes)
        (self.directory / "slurm.conf").write_text(text)
        (self.directory / "gres.conf").write_text(f"Name=gpu File={GPU_DEVICES}\n")
        # slurmd loads such a plugin in any case; only the one of version 1 needs no tree of groups for that
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _all_idle(self) -> bool:
        assert all(daemon.is_running for daemon in self._daemons), self.log()
        words = ["sinfo", "--noheader", "--partition=usual", "--Format=StateLong,Nodes"]
        done = subprocess.run(
            [*self.controller._entrance(), "--", *words],
            env=self._environment, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        return done.stdout.split() == ["idle", str(len(self.nodes))]  # it fails until the controller answers
