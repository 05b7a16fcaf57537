"""torchrun's own agents with `--rdzv-backend bagua-etcd`: one is killed with its workers, another joins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_torchrun.settings import parse
from tests.docs.printed import printed
from tests.lab.wait import eventually

# A worker says where it is, and ends when the file `end` appears. `gloo` also makes it meet the others by torch.
WORKER = """
import json, os, pathlib, sys, time
said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
here = pathlib.Path(__file__).parent
if "gloo" in sys.argv:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    said["sum"] = total.item()
with open(here / f"said-{sys.argv[1]}", "a") as file:
    print(json.dumps({**said, "pid": os.getpid()}), file=file, flush=True)
while not (here / "end").exists():
    if "gloo" in sys.argv:
        dist.all_reduce(total)  # fails at once when a peer is gone
    time.sleep(0.02)
"""
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
OUTAGE_S = 5.0  # longer than the agents' heartbeats last
START_S, CHANGE_S = 60, 90


class Agent:
    """One torchrun, and what its workers said, one dictionary for each start of a worker."""

    def __init__(
        self, home: Path, name: str, etcd: EmbeddedEtcd, *arguments: str, nodes: str = "2:4"
    ) -> None:
        (home / "worker.py").write_text(WORKER)
        self.said_file, self.log = home / f"said-{name}", home / f"log-{name}"
        given = {
            "8": "1",
            "2:4": nodes,
            "etcd-1:2379,etcd-2:2379,etcd-3:2379": str(etcd.endpoint),
            "train.py": str(home / "worker.py"),
        }
        *words, script = printed("docs/torchrun-rendezvous.md", "--rdzv-backend bagua-etcd", given)
        words += ["--monitor-interval", "0.2", "--rdzv-conf", QUICK, "--local-addr", "127.0.0.1"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    *words,
                    script,
                    name,
                    *arguments,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))},
            )

    def said(self) -> list[dict[str, str]]:
        return (
            [json.loads(line) for line in self.said_file.read_text().splitlines()]
            if self.said_file.exists()
            else []
        )

    def await_said(self, times: int, deadline_s: float) -> dict[str, str]:
        eventually(
            lambda: len(self.said()) >= times,
            deadline_s,
            lambda: f"worker {times} of {self.said_file.name}\n{self.log.read_text()[-3000:]}",
            0.05,
        )
        return self.said()[times - 1]

    def await_world(self, size: int, deadline_s: float) -> None:
        """Until its newest worker is one of so many."""
        eventually(
            lambda: [one["WORLD_SIZE"] for one in self.said()[-1:]] == [str(size)],
            deadline_s,
            lambda: f"{self.said_file.name} of {size}: {self.said()}\n{self.log.read_text()[-3000:]}",
            0.05,
        )

    def kill_all(self) -> None:
        """The agent and its workers, as when their host is lost."""
        self.process.kill()
        self.process.wait(10)
        for one in self.said():
            try:
                os.kill(int(one["pid"]), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for one in started:
        one.kill_all()


# Rank 1: with the store that torch shares between rounds, the third agent waits for an address that is never written.
@pytest.mark.parametrize(
    ("lost_rank", "arguments"), [("1", ()), pytest.param("0", ("gloo",), marks=pytest.mark.long)]
)
def test_a_new_agent_takes_the_place_of_a_killed_one(
    tmp_path: Path, etcd: EmbeddedEtcd, agents: list[Agent], lost_rank: str, arguments: tuple[str, ...]
) -> None:
    first, second = (Agent(tmp_path, name, etcd, *arguments) for name in ("first", "second"))
    agents += [first, second]
    started = [one.await_said(1, START_S) for one in (first, second)]
    assert sorted(one["RANK"] for one in started) == ["0", "1"]
    assert len({one["MASTER_PORT"] for one in started}) == 1
    lost, survivor = (first, second) if started[0]["RANK"] == lost_rank else (second, first)
    lost.kill_all()
    assert lost.process.returncode == -signal.SIGKILL

    third = Agent(tmp_path, "third", etcd, *arguments)
    agents.append(third)
    ended = [third.await_said(1, CHANGE_S), survivor.await_said(2, CHANGE_S)]
    assert sorted(one["RANK"] for one in ended) == ["0", "1"]
    assert {one["MASTER_PORT"] for one in ended} != {started[0]["MASTER_PORT"]}
    assert len({one["MASTER_PORT"] for one in ended}) == 1
    if arguments:
        assert {one["sum"] for one in ended} == {2.0}

    (tmp_path / "end").touch()
    for one in (survivor, third):
        assert one.process.wait(CHANGE_S) == 0, one.log.read_text()[-3000:]
    settings = parse(str(etcd.endpoint), "demo", {})
    store = Store(settings.store)
    try:
        keys, _ = store.get_prefix(settings.prefix)
    finally:
        store.close()
    assert settings.state_key in {key.key for key in keys}
    assert all(key.lease_id for key in keys)  # nothing of the run stays for ever


@pytest.mark.long
def test_the_workers_of_the_others_start_again_when_a_host_is_lost(
    tmp_path: Path, etcd: EmbeddedEtcd, agents: list[Agent]
) -> None:
    """They do so without an error of their own: these workers do not talk to each other."""
    agents += [Agent(tmp_path, name, etcd, nodes="1:2") for name in ("survivor", "lost")]
    for one in agents:
        one.await_world(2, START_S)
    survivor, lost = agents
    lost.kill_all()
    survivor.await_world(1, CHANGE_S)
    (tmp_path / "end").touch()
    assert survivor.process.wait(CHANGE_S) == 0, survivor.log.read_text()[-3000:]


@pytest.mark.long
def test_a_new_agent_joins_those_that_an_outage_of_etcd_has_silenced(
    tmp_path: Path, etcd: EmbeddedEtcd, agents: list[Agent]
) -> None:
    agents += [Agent(tmp_path, name, etcd, nodes="1:3") for name in ("first", "second")]
    for one in agents:
        one.await_world(2, START_S)
    before = [len(one.said()) for one in agents]
    os.kill(etcd.pid, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_S)  # the outage itself
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    assert before == [len(one.said()) for one in agents], "workers ended in the outage"
    agents.append(Agent(tmp_path, "third", etcd, nodes="1:3"))
    for one in agents:
        one.await_world(3, CHANGE_S)
    assert sorted(one.said()[-1]["RANK"] for one in agents) == ["0", "1", "2"]
    (tmp_path / "end").touch()
    for one in agents:
        assert one.process.wait(CHANGE_S) == 0, one.log.read_text()[-3000:]
