"""Booted machines with the daemon on them, and a job that reports every step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab import ledger
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import eventually

DEADLINE_S = 90.0
PROGRAM = Path(sys.executable).with_name("bagua-agent")
PYTHONPATH = f"{ROOT}:{ROOT / 'protos'}"

# The tests' interpreter may lie under /tmp.
DROP_IN = "[Service]\nPrivateTmp=no\n"

TRAIN = """
import os, sys, time
import torch
import bagua_core as bagua
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(int(sys.argv[1]), 2))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
    if not os.path.exists("/tmp/hurry"):
        time.sleep(0.5)
"""
POLL_S = 0.3  # each look into a machine starts processes there
COMMAND_POLL_S = 1.0  # each look starts a command
SAMPLES = 1600  # steps for 200 s, unless hurried
LEDGERS = "/home/trainer"
SENT_ALONG = ("--env", "PYTHONPATH,OMP_NUM_THREADS")


class Site:
    """terminal: the machine from which people ask. credentials: variables that say who they are."""

    def __init__(
        self,
        machines: Sequence[Machine],
        terminal: Machine,
        etcd: str,
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        self.machines = list(machines)
        self.terminal = terminal
        self.etcd = etcd
        self.credentials = dict(credentials or {})

    def install(self, one: Machine, words: Sequence[str]) -> None:
        """words: of `bagua-agent install`, from the program on."""
        one.write("/etc/systemd/system/bagua-agent.service.d/lab.conf", DROP_IN)
        one.write("/srv/train.py", TRAIN)
        said = one.run([*words, "--slots", "1", "--user", "trainer"])
        assert [line.split()[0] for line in said.stdout.splitlines()] == [
            "wrote",
            "made",
            "wrote",
            "wrote",
            "started",
        ]
        eventually(
            lambda: (
                one.run(["systemctl", "is-active", "bagua-agent"], check=False).stdout.strip() == "active"
            ),
            DEADLINE_S,
            lambda: f"{one}: ready\n{one.journal('bagua-agent')}",
            POLL_S,
        )
        assert one.run([PROGRAM, "install"]).stdout == "all is there already\n"

    def told(self, *words: str, code: int = 0, credentials: Mapping[str, str] | None = None) -> str:
        """What a command says in the terminal: its output, or its error if it is to end with `code`."""
        done = self._run(*words, credentials=credentials, check=code == 0)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def _run(
        self, *words: str, credentials: Mapping[str, str] | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "BAGUA_ETCD": self.etcd}
        env |= self.credentials if credentials is None else credentials
        line = ["sh", "-c", 'cd /srv && exec "$@"', "sh", sys.executable, "-m", "bagua_launch", *words]
        return self.terminal.run(line, env=env, check=check)

    def submit(self, job_id: str, nnodes: str, samples: int, *options: str) -> None:
        words = (
            "--nnodes",
            nnodes,
            "--name",
            job_id,
            "--ledger",
            f"{LEDGERS}/{job_id}",
            *SENT_ALONG,
            *options,
        )
        self.told("submit", *words, "train.py", str(samples))

    def status(self, job_id: str) -> dict[str, object]:
        (found,) = json.loads(self.told("status", job_id, "--json"))
        return dict(found)

    def logs(self, *job_ids: str) -> str:
        """Diagnostics of an event that did not happen: the commands' output, and journals with times."""
        units = ("bagua-agent", *(f"bagua-job-{job_id}" for job_id in job_ids))
        up = [m for m in self.machines if m.is_up]
        journals = (f"---- {m.name} {u}\n{m.journal(u, 'short-precise')}" for m in up for u in units)
        asked = (self._asked("nodes"), *(self._asked("status", job_id) for job_id in job_ids))
        return "\n".join((*asked, *journals))

    def _asked(self, *words: str) -> str:
        said = self._run(*words)
        return f"---- {' '.join(words)}\n{said.stdout}{said.stderr}"

    def steps(self, job_id: str, directory: Path) -> ledger.Ledger:
        """What the job's workers wrote, gathered from all machines into `directory`."""
        directory.mkdir(exist_ok=True)
        for one in (m for m in self.machines if m.is_up):
            for file in one.seen(f"{LEDGERS}/{job_id}").glob("*"):
                (directory / f"{one.name}-{file.name}").write_text(file.read_text())
        return ledger.read(directory)

    def await_world(self, job_id: str, size: int, directory: Path, after_step: int = 0) -> int:
        """A step by so many workers, later than `after_step`."""

        def found() -> int:
            lines = self.steps(job_id, directory).lines
            return next((x.step for x in lines if x.step > after_step and x.world_size == size), 0)

        why = f"{job_id}: a step by {size} after step {after_step}"
        return eventually(found, DEADLINE_S, lambda: f"{why}\n{self.logs(job_id)}", POLL_S)

    def hurry(self) -> None:
        for one in self.machines:
            one.run(["touch", "/tmp/hurry"])

    def await_end(self, job_id: str) -> None:
        def ended() -> bool:
            return self.status(job_id)["state"] == "ended"

        eventually(ended, DEADLINE_S, lambda: f"{job_id} ends\n{self.logs(job_id)}", COMMAND_POLL_S)
        assert self.status(job_id)["exit_code"] == 0

    def await_empty(self) -> None:
        """No process of any job in any control group."""
        for one in self.machines:
            eventually(
                lambda m=one: m.processes("bagua.slice") == [],  # type: ignore[misc]
                20,
                lambda m=one: f"nothing in bagua.slice of {m.name}: {m.processes('bagua.slice')}",  # type: ignore[misc]
                POLL_S,
            )
