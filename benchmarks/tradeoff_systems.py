"""The systems of benchmarks.tradeoff: how each is started on the lab's hosts, and its aims.

Knows nothing of tables. Every system has the same hosts, model, batch and threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.algorithm_choices import HOOKED, IN_ROUNDS
from benchmarks.tradeoff_window import Enough, WindowError, check_whole_rounds
from benchmarks.tradeoff_worker import ALONE, POWER_SGD_START, SETTINGS
from benchmarks.worker_environment import worker_environment
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess

HOSTS = 4
RIVALS = ("ddp", "ddp_fp16", HOOKED)
BASELINE = "ddp"
WITHOUT_BAGUA = (ALONE, *RIVALS)
LINKS = ("100mbit", "1gbit", "10gbit")
_WARM_UP = 2
_ROUNDS_OF_ASYNC = 4
_UNEVEN_WINDOWS = 3  # times the even systems' window
_START_S = 60.0
_LOOK_EVERY_S = 0.05
_MASTER_PORT = 29800


@dataclass(frozen=True, slots=True)
class System:
    """warm_up: steps that do not count. is_uneven: some steps cost far more than others, so the mean over whole rounds
    counts. learns: its settings here are good for more than measuring what a step costs. cycle: steps of a round, of
    which a window contains whole ones. aims: times DDP's throughput on a link without delay. least_utilisation: of the
    throughput of the same workers without communication, there too."""

    name: str
    warm_up: int = _WARM_UP
    is_uneven: bool = False
    cycle: int = 1
    rounds: int = 0
    learns: bool = True
    aims: dict[str, float] = field(default_factory=dict)
    least_utilisation: dict[str, float] = field(default_factory=dict)

    @property
    def is_bagua(self) -> bool:
        return self.name not in WITHOUT_BAGUA

    def enough(self, asked: Enough) -> Enough:
        windows = _UNEVEN_WINDOWS if self.is_uneven else 1
        return replace(
            asked,
            warm_up=self.warm_up,
            window_s=asked.window_s * windows,
            most_s=asked.most_s * windows,
            cycle=self.cycle,
            rounds=self.rounds,
        )


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(ALONE, is_uneven=True, learns=False),
        System("ddp"),
        System("ddp_fp16"),
        System(HOOKED, warm_up=_WARM_UP + POWER_SGD_START),
        System("gradient_allreduce", aims=dict.fromkeys(LINKS, 1.0)),
        System("bytegrad", aims={"100mbit": 3.3, "1gbit": 2.0}),
        System("decentralized"),
        System("decentralized_shift_one"),
        System("low_precision_decentralized", aims={"100mbit": 2.8}),
        System("qadam_8bit", warm_up=_WARM_UP + SETTINGS.qadam_warmup_steps, learns=False),
        System(
            "qadam_1bit",
            warm_up=_WARM_UP + SETTINGS.qadam_warmup_steps,
            learns=False,
            aims={"100mbit": 12.0},
        ),
        System("power_sgd", warm_up=_WARM_UP + POWER_SGD_START),
        System("async", is_uneven=True, rounds=_ROUNDS_OF_ASYNC, aims={"100mbit": 15.0}),
        System("local_sgd", is_uneven=True, cycle=SETTINGS.sync_every),
        System("diloco_rounds_uint8", is_uneven=True, least_utilisation={"100mbit": 0.94}),
        System("diloco_rounds_int4", is_uneven=True, least_utilisation={"100mbit": 0.94}),
        System("streaming_diloco_int4", is_uneven=True, cycle=SETTINGS.diloco_every),
    )
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A state of the network. rate: of every link in each direction; delay_ms: each way."""

    rate: str
    delay_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate}, {self.delay_ms:g} ms each way" if self.delay_ms else self.rate


@dataclass(frozen=True, slots=True)
class Run:
    """One job's measurement. step_s: rank 0's steps that count. losses: mean of the workers, from the first step
    on, with the time since it began. sent_bytes: by a host for a global batch, the mean. rounds: see Enough.
    samples_per_s: of all workers, over the whole window."""

    system: str
    condition: Condition
    repeat: int
    parameters: int
    global_batch: int
    step_s: tuple[float, ...]
    losses: tuple[tuple[float, float], ...]
    sent_bytes: float
    rounds: int | None
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured. repeat: from 1."""

    system: System
    condition: Condition
    repeat: int


class RunFailed(RuntimeError):
    """A job of a measured system ended otherwise than it should."""


def measure(lab: Lab, endpoints: str, job: Job, asked: Enough, width: int, batch: int, number: int) -> Run:
    """One job on the first hosts of `lab`. batch: of a worker. number: no other job of this lab has it.

    Raises RunFailed.
    """
    enough = job.system.enough(asked)
    out = lab.directory / f"run-{number}"
    out.mkdir()
    script = ["-m", "benchmarks.tradeoff_worker", "--system", job.system.name, "--out", str(out)]
    script += ["--hosts", str(HOSTS), "--width", str(width), "--batch", str(batch)]
    script += ["--warm-up", str(enough.warm_up), "--steps", str(enough.steps)]
    script += ["--window-s", str(enough.window_s), "--most-s", str(enough.most_s)]
    script += ["--cycle", str(enough.cycle), "--rounds", str(enough.rounds)]
    processes: list[LabProcess] = []
    try:
        for rank, host in enumerate(lab.hosts[:HOSTS]):
            words, more = (
                _bagua(host, endpoints, number) if job.system.is_bagua else _by_itself(lab, rank, number)
            )
            env = worker_environment(GLOO_SOCKET_IFNAME="eth0", **more)
            output = out / f"output-{host.name}.log"
            processes.append(host.run([sys.executable, *words, *script], env=env, output=output))
        # slow steps before the window, the window, and what may come after: the average of the replicas
        await_all(processes, _START_S + 3 * enough.most_s)
    finally:
        for host in lab.hosts[:HOSTS]:
            host.kill_all()
    try:
        return read_run(job, out, batch)
    except WindowError as error:
        raise RunFailed(str(error)) from error


def _by_itself(lab: Lab, rank: int, number: int) -> tuple[list[str], dict[str, str]]:
    return [], {
        "RANK": str(rank),
        "WORLD_SIZE": str(HOSTS),
        "MASTER_ADDR": lab.hosts[0].address,
        "MASTER_PORT": str(_MASTER_PORT + number),
    }


def _bagua(host: Host, endpoints: str, number: int) -> tuple[list[str], dict[str, str]]:
    words = ["-m", "bagua_launch", "--nnodes", str(HOSTS), "--rdzv-endpoint", endpoints]
    return [*words, "--rdzv-id", f"tradeoff-{number}", "--local-addr", host.address], {}


def await_all(processes: Sequence[LabProcess], deadline_s: float) -> None:
    """Until all have ended well. Raises RunFailed as soon as one has not."""
    end_s = time.monotonic() + deadline_s
    while True:
        codes = [process.returncode for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code:
                raise RunFailed(f"{process} failed\n{process.tail()}")
        if not any(code is None for code in codes):
            return
        if time.monotonic() > end_s:
            slow = processes[codes.index(None)]
            raise RunFailed(f"{slow} still runs after {deadline_s:g} s\n{slow.tail()}")
        time.sleep(_LOOK_EVERY_S)


def read_run(job: Job, out: Path, batch: int) -> Run:
    """What the workers wrote into `out`. Raises WindowError."""
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(HOSTS)]
    first = found[0]
    global_batches = sum(worker["samples"] for worker in found) / (batch * HOSTS)
    in_rounds = job.system.name in IN_ROUNDS
    if not in_rounds:  # their window begins and ends behind the close of a round
        check_whole_rounds(job.system.name, len(first["step_s"]), job.system.cycle)
    began_s = min(worker["began_s"][0] for worker in found)
    ends_s = [end_s - began_s for end_s in first["began_s"][1:]]
    # in rounds and alone some workers take a few steps more than others
    same_steps = not in_rounds and job.system.name != ALONE
    of_steps = zip(*(w["losses"] for w in found), strict=same_steps)
    losses = [sum(of_step) / HOSTS for of_step in of_steps]
    return Run(
        system=job.system.name,
        condition=job.condition,
        repeat=job.repeat,
        parameters=first["parameters"],
        global_batch=batch * HOSTS,
        step_s=tuple(first["step_s"]),
        losses=tuple(zip(ends_s, losses, strict=same_steps)),
        sent_bytes=sum(worker["sent_bytes"] for worker in found) / HOSTS / global_batches,
        rounds=first["rounds"],
        samples_per_s=sum(worker["samples"] / sum(worker["step_s"]) for worker in found),
    )
