"""Runs one training of benchmarks.fidelity on this machine and reads its result.

Four workers on this host, links unshaped: benchmarks.tradeoff measures the effect of the network on speed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.algorithm_choices import ALWAYS_ADAM, CHOICES
from benchmarks.fidelity_tasks import Task, load_pieces
from benchmarks.worker_environment import worker_environment
from tests.lab.process import LabProcess

WORKERS = 4
PLAIN_DDP = ("ddp_sgd", "ddp_adam")
_LEAST_DEADLINE_S = 300.0
_LONGEST_STEP_S = 0.25  # in the mean, on a machine that does something else too
_START_S = 60.0
_END_S = 15.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Trained:
    """One seed of one task under one system. curve: training loss of every step, the workers' mean.

    rounds: of background averaging that came in, for algorithms that have such. sent_bytes: by a worker in all steps,
    the mean.
    """

    task: str
    system: str
    seed: int
    train_loss: float
    held_out_loss: float
    curve: tuple[float, ...]
    rounds: int | None
    sent_bytes: float


class TrainingFailed(RuntimeError):
    """A job ended otherwise than it should."""


def baseline_of(system: str, task: Task) -> str:
    """DDP with the optimizer of `system`, and without a hook."""
    if system in PLAIN_DDP:
        return system
    return "ddp_adam" if system in ALWAYS_ADAM else f"ddp_{task.settings.optimizer}"


def train(task: Task, system: str, seeds: Sequence[int], epochs: int, data: Path, out: Path) -> list[Trained]:
    """One job for all seeds under DDP, one for each under Bagua. data: the task's saved pieces. out: a directory that
    there is not yet. Raises TrainingFailed."""
    out.mkdir()
    if system not in CHOICES:
        return _job(task, system, seeds, epochs, data, out)
    found = []
    for seed in seeds:
        of_seed = out / str(seed)
        of_seed.mkdir()
        found += _job(task, system, [seed], epochs, data, of_seed)
    return found


def _job(task: Task, system: str, seeds: Sequence[int], epochs: int, data: Path, out: Path) -> list[Trained]:
    words = ["-m", "benchmarks.fidelity_worker", "--task", task.name, "--system", system, "--out", str(out)]
    words += [
        "--data",
        str(data),
        "--seeds",
        ",".join(map(str, seeds)),
        "--epochs",
        str(epochs),
        "--workers",
        str(WORKERS),
    ]
    if system in CHOICES:
        launch = ["-m", "bagua_launch", "--standalone", "--nproc-per-node", str(WORKERS)]
        # a job begins with those that are there after two seconds, unless it is told to wait for all
        launch += ["--rdzv-conf", f"node_window={_START_S:g}"]
        commands = [([sys.executable, *launch, *words], worker_environment())]
    else:
        commands = [([sys.executable, *words], worker_environment(RANK=str(rank))) for rank in range(WORKERS)]
    steps = len(seeds) * epochs * len(load_pieces(data)[0]) // task.global_batch
    processes: list[LabProcess] = []
    try:
        for number, (command, env) in enumerate(commands):
            output = out / f"output-{number}.log"
            processes.append(LabProcess([], command, env=env, output=output, host_name="here"))
        _await_all(processes, deadline_s(steps))
    finally:
        for process in processes:
            _end(process)
    return [_read(task, system, seed, out) for seed in seeds]


def deadline_s(steps: int) -> float:
    """Of a job of so many steps in all."""
    return max(_LEAST_DEADLINE_S, _START_S + steps * _LONGEST_STEP_S)


def _await_all(processes: Sequence[LabProcess], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not all(process.returncode == 0 for process in processes):
        for process in processes:
            if process.returncode:
                raise TrainingFailed(f"{process} failed\n{process.tail()}")
            if time.monotonic() > end_s:
                raise TrainingFailed(f"{process} has not ended within {within_s:g} s\n{process.tail()}")
        time.sleep(_LOOK_EVERY_S)


def _end(process: LabProcess) -> None:
    """In order if it can be, for a launcher has workers of its own."""
    if not process.is_running:
        return
    process.send(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except AssertionError:
        process.kill()


def _read(task: Task, system: str, seed: int, out: Path) -> Trained:
    found = [json.loads((out / f"{seed}-{worker}.json").read_text()) for worker in range(WORKERS)]
    return Trained(
        task=task.name,
        system=system,
        seed=seed,
        train_loss=found[0]["train_loss"],
        held_out_loss=found[0]["held_out_loss"],
        # in rounds some workers take a few steps more than others
        curve=tuple(sum(losses) / WORKERS for losses in zip(*(w["curve"] for w in found), strict=False)),
        rounds=found[0]["rounds"],
        sent_bytes=sum(w["sent_bytes"] for w in found) / WORKERS,
    )
